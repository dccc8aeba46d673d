# SPDX-License-Identifier: Apache-2.0
"""`recompute.*`: time to the first token of a prompt of 9,000 tokens with KV in a slow tier.

Two vLLM engines share a node service with a tier whose reads are really delayed to a rate; one has
`load_or_recompute: auto`, the other one `always`. They alternate, prompt by prompt; memory is
emptied before each, and vLLM's own prefix cache is off. Values are medians, as multiples of another
one of the same run.

- `recompute.slow`: `auto` with the tier at 10 MB/s. The limit is 1.15 of the time of new prompts of
  the same length, which alternate with it.
- `recompute.slow.first`: the first such request, whose tier was fast until then; no limit.
- `recompute.fast`: `auto` with the tier unthrottled. The limit is 1.03 of `always`, which waits
  as long as versions without the comparison did.
"""

import os
import random
import shutil
import statistics
import string
from collections.abc import Callable
from pathlib import Path

from benchmarks.nodes import fresh_node
from benchmarks.results import BENCH, Result, at_most, plain
from benchmarks.turns import ask, warm_up
from examples.demo.demo import CHUNK, DOCUMENT_TOKENS, PATIENT, QUESTIONS
from examples.demo.model import make_model
from examples.demo.processes import Engine, NodeService, ProcessError, engine, kvhaven
from examples.demo.text import make_document, make_questions
from kvhaven.testing.throttled_tier import install, set_rate

_RATE = 10_000_000
_FAST_PASSES = 5
_SLOW_TURNS = 9
_TIER = "throttled"


def measure(say: Callable[[str], None]) -> list[Result]:
    """Send all prompts to both engines with a fast tier, then to one with a slow tier."""
    model = make_model(BENCH / "model")
    store, plugin = BENCH / "recompute-store", BENCH / "recompute-plugin"
    for folder in (store, plugin):
        shutil.rmtree(folder, ignore_errors=True)
    install(plugin)
    store.mkdir()
    set_rate(store, 0)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(plugin), before]))
    try:
        say("starting two vLLM engines")
        with fresh_node("recompute", remote_url=f"throttled://{store}") as service:
            common = {"service_address": str(service.socket), **PATIENT}
            with (
                engine(
                    model,
                    BENCH / "recompute-auto.log",
                    kv_transfer_config=kvhaven(**common, load_or_recompute="auto"),
                ) as auto,
                engine(
                    model,
                    BENCH / "recompute-always.log",
                    kv_transfer_config=kvhaven(**common, load_or_recompute="always"),
                ) as always,
            ):
                warm_up(auto, always)
                return _measure(auto, always, service, store, say)
    finally:
        os.environ["PYTHONPATH"] = before
        shutil.rmtree(store, ignore_errors=True)


def _measure(
    auto: Engine, always: Engine, service: NodeService, store: Path, say: Callable[[str], None]
) -> list[Result]:
    questions = make_questions(make_document(DOCUMENT_TOKENS), QUESTIONS)
    prompts = [question.prompt for question in questions]
    outputs = []
    for prompt in prompts:
        service.clear("memory")
        service.clear(_TIER)
        outputs.append(ask(auto, prompt).tokens)
        service.flush()
    times: dict[Engine, list[float]] = {auto: [], always: []}
    for turn in range(_FAST_PASSES * len(prompts)):
        at = turn % len(prompts)
        for one in (auto, always) if turn % 2 else (always, auto):
            service.clear("memory")
            answer = ask(one, prompts[at])
            if answer.tokens != outputs[at]:
                raise ProcessError("the output with KV from the tier differs from the cold one")
            if answer.prompt_tokens - answer.sources["computed"] < answer.prompt_tokens - CHUNK:
                raise ProcessError(f"with a fast tier, tokens came from {answer.sources}")
            times[one].append(answer.ttft)
    say(f"fast: {_shown(times[auto])}, always: {_shown(times[always])}")
    set_rate(store, _RATE)
    slow, cold = [], []
    for turn in range(_SLOW_TURNS):
        service.clear("memory")
        answer = ask(auto, prompts[turn % len(prompts)])
        if answer.tokens != outputs[turn % len(prompts)]:
            raise ProcessError("the output with a slow tier differs from the cold one")
        slow.append(answer.ttft)
        chance = random.Random(turn)
        new = "".join(chance.choices(string.ascii_lowercase, k=answer.prompt_tokens))
        cold.append(ask(auto, new).ttft)
        say(f"slow: {slow[-1]:.2f} s, from {answer.sources}; cold: {cold[-1]:.2f} s")
    once, loaded = statistics.median(cold), statistics.median(times[always])
    fast = statistics.median(times[auto])
    return [
        plain("recompute.cold", once, "s", len(cold)),
        at_most(
            "recompute.slow",
            statistics.median(slow),
            "s",
            once * 1.15,
            len(slow),
            "1.15 of recompute.cold",
        ),
        plain("recompute.slow.first", slow[0] / cold[0], "of cold", 1),
        at_most(
            "recompute.fast",
            fast,
            "s",
            loaded * 1.03,
            len(times[auto]),
            "1.03 of load_or_recompute: always",
        ),
    ]


def _shown(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
