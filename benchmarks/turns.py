# SPDX-License-Identifier: Apache-2.0
"""Alternating vLLM engines, with and without KVHaven, on prompts that are new to all of them.

A value is the time of the same prompts with KVHaven, as a multiple of the time without. Each round
replaces every prompt by another one of the same length, and the median over the rounds counts, so
that short disturbances have no effect. Engines are stopped (SIGSTOP) except while they serve,
because an idle engine polls and uses a core.
"""

import random
import statistics
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.results import Result, at_most
from examples.demo.demo import WARM_UP
from examples.demo.processes import Answer, Engine, ProcessError

PROMPTS = 20
_PROMPT_TOKENS = 2000
_OUTPUT_TOKENS = 8


def warm_up(*engines: Engine) -> None:
    """Send a first prompt to each engine, then stop it until its turn."""
    for engine in engines:
        engine.ask(WARM_UP, 2)
        engine.pause()


def ask(engine: Engine, prompt: str, tokens: int = _OUTPUT_TOKENS) -> Answer:
    """Send a prompt to a stopped engine, and stop it again."""
    engine.resume()
    try:
        return engine.ask(prompt, tokens)
    finally:
        engine.pause()


@dataclass(frozen=True)
class Baseline:
    """An engine without KVHaven, and the limit for KVHaven's time relative to it."""

    engine: Engine
    name: str
    """Suffix of the result's name, after the measurement's."""
    what: str
    """Description for the results."""
    allowed: float


@dataclass(frozen=True)
class Turns:
    """Engines with the same model, on the same cores."""

    baselines: Sequence[Baseline]
    with_kvhaven: Engine
    say: Callable[[str], None]

    def measure(self, name: str, rounds: int, *, seed: int, prompts: int = PROMPTS) -> list[Result]:
        """Return the time of all prompts with KVHaven, as a multiple of each baseline's.

        `seed` generates the prompts; every measurement with the same engines needs a different one.
        Raises `ProcessError` if outputs differ, or if a token came from a cache.
        """
        engines = [*(baseline.engine for baseline in self.baselines), self.with_kvhaven]
        times: list[list[list[float]]] = [[[] for _ in range(prompts)] for _ in engines]
        for turn in range(rounds * prompts):
            if turn % prompts == 0:
                self.say(f"{name}: round {turn // prompts + 1} of {rounds}")
            chance = random.Random(seed * 10_000 + turn)
            prompt = "".join(chance.choices(string.ascii_lowercase, k=_PROMPT_TOKENS))
            outputs = set()
            first = turn // prompts + turn  # engines alternate in being first, second, ...
            for which in [(first + step) % len(engines) for step in range(len(engines))]:
                answer = self._ask(engines[which], prompt)
                outputs.add(tuple(answer.tokens))
                times[which][turn % prompts].append(answer.total)
            if len(outputs) > 1:
                raise ProcessError(f"{name}: the output with KVHaven differs")
        *without, with_kvhaven = map(_total, times)
        results = []
        for baseline, limit in zip(self.baselines, without, strict=True):
            self.say(
                f"{name}{baseline.name}: {prompts} prompts take {limit:.2f} s {baseline.what}, "
                f"{with_kvhaven:.2f} s with KVHaven"
            )
            what = f"{baseline.allowed:.2f} times the time {baseline.what}"
            value = with_kvhaven / limit
            results.append(
                at_most(f"{name}{baseline.name}", value, "x", baseline.allowed, rounds, what)
            )
        return results

    @staticmethod
    def _ask(engine: Engine, prompt: str) -> Answer:
        answer = ask(engine, prompt)
        if answer.sources["computed"] != answer.prompt_tokens:
            raise ProcessError(f"a new prompt came from {answer.sources}, not from computation")
        return answer


def _total(times: list[list[float]]) -> float:
    return sum(statistics.median(of_prompt) for of_prompt in times)
