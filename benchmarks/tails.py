# SPDX-License-Identifier: Apache-2.0
"""`tail.ttft`: seconds from a repeated prompt of 9,000 tokens to the first token, with its tail.

Two vLLM engines on one service, which has the prompts' KV in memory. One has `pd_tail`: it also
loads the tokens behind the last full chunk, and computes one. The other one is as in `ttft.memory`.
They alternate on the prompts of `ttft.memory`, which have 64 or so tokens behind the last full
chunk; vLLM's own prefix cache is emptied before each. The limit is half of the time without tails.
"""

import statistics
from collections.abc import Callable
from typing import Final

from benchmarks.nodes import fresh_node
from benchmarks.results import BENCH, Result, at_most, plain
from benchmarks.turns import ask, warm_up
from examples.demo.demo import CHUNK, DOCUMENT_TOKENS, PATIENT, QUESTIONS
from examples.demo.model import make_model
from examples.demo.processes import Engine, ProcessError, engine, kvhaven
from examples.demo.text import make_document, make_questions

_PASSES: Final = 7
_PART: Final = 0.5


def measure(say: Callable[[str], None]) -> list[Result]:
    """Compute the prompts once, then repeat them on both engines, alternating."""
    model = make_model(BENCH / "model")
    say("starting two vLLM engines")
    with fresh_node("tails") as service:
        common = {"service_address": str(service.socket), **PATIENT}
        with (
            engine(
                model, BENCH / "tails.log", kv_transfer_config=kvhaven(pd_tail=True, **common)
            ) as tails,
            engine(model, BENCH / "tails-none.log", kv_transfer_config=kvhaven(**common)) as none,
        ):
            warm_up(tails, none)
            return _repeat(tails, none, say)


def _repeat(tails: Engine, none: Engine, say: Callable[[str], None]) -> list[Result]:
    questions = make_questions(make_document(DOCUMENT_TOKENS), QUESTIONS)
    with_tails: list[float] = []
    without: list[float] = []
    for question in questions:
        first = ask(tails, question.prompt)
        left = first.prompt_tokens % CHUNK
        for _ in range(_PASSES):
            for one, times, computed in ((tails, with_tails, 1), (none, without, left)):
                answer = ask(one, question.prompt)
                if answer.tokens != first.tokens:
                    raise ProcessError("the output of a repeated prompt differs")
                if answer.sources["computed"] != computed:
                    raise ProcessError(f"not {computed} tokens were computed: {answer.sources}")
                times.append(answer.ttft)
        say(
            f"{left} tokens behind the last full chunk: {with_tails[-1]:.3f} s, {without[-1]:.3f} s"
        )
    value, plainly = statistics.median(with_tails), statistics.median(without)
    what = f"{_PART} of the time without tails"
    return [
        at_most("tail.ttft", value, "s", plainly * _PART, len(with_tails), what),
        plain("tail.ttft.without", plainly, "s", len(without)),
    ]
