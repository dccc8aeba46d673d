# SPDX-License-Identifier: Apache-2.0
"""vLLM engines, with KVHaven and without, that take turns at prompts nobody has seen.

A figure is what the same prompts cost with KVHaven, as a multiple of what they cost without.
Every prompt is replaced by another of the same length in each round, and the median over the
rounds counts for it: what else a machine does for a moment falls out. The engine whose turn it
is not stands still (SIGSTOP), since an idle one polls and takes a core's time.
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
    """Let each serve a first prompt, and stand still until it is its turn."""
    for engine in engines:
        engine.ask(WARM_UP, 2)
        engine.pause()


def ask(engine: Engine, prompt: str, tokens: int = _OUTPUT_TOKENS) -> Answer:
    """Ask an engine that stands still."""
    engine.resume()
    try:
        return engine.ask(prompt, tokens)
    finally:
        engine.pause()


@dataclass(frozen=True)
class Baseline:
    """An engine without KVHaven, and what KVHaven may cost against it."""

    engine: Engine
    name: str
    """Of the figure, after that of the measurement."""
    what: str
    """In words, for people."""
    allowed: float


@dataclass(frozen=True)
class Turns:
    """Engines with the same model, on the same cores."""

    baselines: Sequence[Baseline]
    with_kvhaven: Engine
    say: Callable[[str], None]

    def measure(self, name: str, rounds: int, *, seed: int, prompts: int = PROMPTS) -> list[Result]:
        """Return the time of all prompts with KVHaven, in times of each baseline's.

        `seed` makes the prompts; other figures of the same engines need another one. Raises
        `ProcessError` when outputs differ, or when a token came from a cache.
        """
        engines = [*(baseline.engine for baseline in self.baselines), self.with_kvhaven]
        times: list[list[list[float]]] = [[[] for _ in range(prompts)] for _ in engines]
        for turn in range(rounds * prompts):
            if turn % prompts == 0:
                self.say(f"{name}: round {turn // prompts + 1} of {rounds}")
            chance = random.Random(seed * 10_000 + turn)
            prompt = "".join(chance.choices(string.ascii_lowercase, k=_PROMPT_TOKENS))
            outputs = set()
            first = turn // prompts + turn  # each is first, second, ... at each prompt by turns
            for which in [(first + step) % len(engines) for step in range(len(engines))]:
                answer = self._ask(engines[which], prompt)
                outputs.add(tuple(answer.tokens))
                times[which][turn % prompts].append(answer.total)
            if len(outputs) > 1:
                raise ProcessError(f"{name}: the output with KVHaven is another one")
        *without, with_kvhaven = map(_total, times)
        results = []
        for baseline, limit in zip(self.baselines, without, strict=True):
            self.say(
                f"{name}{baseline.name}: {prompts} prompts take {limit:.2f} s {baseline.what}, "
                f"{with_kvhaven:.2f} s with KVHaven"
            )
            what = f"{baseline.allowed:.2f} times as long as {baseline.what}"
            value = with_kvhaven / limit
            results.append(
                at_most(f"{name}{baseline.name}", value, "x", baseline.allowed, rounds, what)
            )
        return results

    @staticmethod
    def _ask(engine: Engine, prompt: str) -> Answer:
        answer = ask(engine, prompt)
        if answer.sources["computed"] != answer.prompt_tokens:
            raise ProcessError(f"a prompt that was never seen came from {answer.sources}")
        return answer


def _total(times: list[list[float]]) -> float:
    return sum(statistics.median(of_prompt) for of_prompt in times)
