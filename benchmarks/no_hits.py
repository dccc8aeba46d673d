# SPDX-License-Identifier: Apache-2.0
"""`nohit.overhead`: what KVHaven costs when nothing hits.

Two vLLM engines, one without KVHaven and one with it and its default settings (embedded service),
serve the same 20 distinct prompts of 2,000 tokens, prompt by prompt; who goes first alternates.
The value is the total time with KVHaven, saves included, as a multiple of the total time without,
which is its limit; 1.03 is allowed. `nohit.overhead.median` is the median over the prompts.
"""

import statistics
import tempfile
from collections.abc import Callable

from benchmarks.results import BENCH, Result, at_most, plain
from examples.demo.demo import WARM_UP
from examples.demo.model import make_model
from examples.demo.processes import Engine, ProcessError, engine, kvhaven
from examples.demo.text import make_document

_PROMPTS = 20
_PROMPT_TOKENS = 2000
_OUTPUT_TOKENS = 8
_ALLOWED = 1.03


def measure(say: Callable[[str], None]) -> list[Result]:
    """Serve every prompt with and without KVHaven."""
    model = make_model(BENCH / "model")
    say("starting two vLLM engines")
    with (
        tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime,
        engine(model, BENCH / "nohit-off.log") as off,
        engine(
            model, BENCH / "nohit-on.log", kv_transfer_config=kvhaven(runtime_dir=runtime)
        ) as on,
    ):
        for one in (off, on):
            one.ask(WARM_UP, 2)
        totals_off, totals_on = [], []
        for number in range(_PROMPTS):
            prompt = make_document(_PROMPT_TOKENS, seed=1000 + number)
            if number % 2:
                totals_on.append(_total(on, prompt))
                totals_off.append(_total(off, prompt))
            else:
                totals_off.append(_total(off, prompt))
                totals_on.append(_total(on, prompt))
    ratios = [with_ / without for with_, without in zip(totals_on, totals_off, strict=True)]
    say(
        f"{_PROMPTS} prompts: {sum(totals_off):.1f} s without, {sum(totals_on):.1f} s with; "
        f"each {min(ratios):.2f} to {max(ratios):.2f} times as long"
    )
    return [
        at_most(
            "nohit.overhead",
            sum(totals_on) / sum(totals_off),
            "x",
            _ALLOWED,
            _PROMPTS,
            "1.03 times the time without KVHaven",
        ),
        plain("nohit.overhead.median", statistics.median(ratios), "x", _PROMPTS),
    ]


def _total(asked: Engine, prompt: str) -> float:
    answer = asked.ask(prompt, _OUTPUT_TOKENS)
    if answer.sources["computed"] != answer.prompt_tokens:
        raise ProcessError(f"a prompt that was never seen came from {answer.sources}")
    return answer.total
