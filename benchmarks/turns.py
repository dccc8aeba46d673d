# SPDX-License-Identifier: Apache-2.0
"""Two vLLM engines, with KVHaven and without, that take turns at prompts nobody has seen.

A figure is what the same prompts cost with KVHaven, as a multiple of what they cost without.
Every prompt is replaced by another of the same length in each round, and the median over the
rounds counts for it: what else a machine does for a moment falls out. The engine whose turn it
is not stands still (SIGSTOP), since an idle one polls and takes a core's time.
"""

import random
import statistics
import string
from collections.abc import Callable
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
class Turns:
    """Two engines with the same model, on the same cores."""

    without: Engine
    with_kvhaven: Engine
    say: Callable[[str], None]

    def measure(
        self, name: str, rounds: int, allowed: float, *, seed: int, prompts: int = PROMPTS
    ) -> Result:
        """Return the time of all prompts with KVHaven in times without; `allowed` is its limit.

        `seed` makes the prompts; other figures of the same engines need another one. Raises
        `ProcessError` when outputs differ, or when a token came from a cache.
        """
        without: list[list[float]] = [[] for _ in range(prompts)]
        with_kvhaven: list[list[float]] = [[] for _ in range(prompts)]
        for turn in range(rounds * prompts):
            chance = random.Random(seed * 10_000 + turn)
            prompt = "".join(chance.choices(string.ascii_lowercase, k=_PROMPT_TOKENS))
            if turn % 2:
                other = self._ask(self.with_kvhaven, prompt)
                control = self._ask(self.without, prompt)
            else:
                control = self._ask(self.without, prompt)
                other = self._ask(self.with_kvhaven, prompt)
            if other.tokens != control.tokens:
                raise ProcessError(f"{name}: the output with KVHaven is another one")
            without[turn % prompts].append(control.total)
            with_kvhaven[turn % prompts].append(other.total)
        limit, value = _total(without), _total(with_kvhaven)
        single = [
            ours / theirs
            for all_ours, all_theirs in zip(with_kvhaven, without, strict=True)
            for ours, theirs in zip(all_ours, all_theirs, strict=True)
        ]
        self.say(
            f"{name}: {prompts} prompts take {limit:.1f} s without, {value:.1f} s with KVHaven "
            f"(single ones {min(single):.2f} to {max(single):.2f} times as long)"
        )
        what = f"{allowed:.2f} times as long as without KVHaven"
        return at_most(name, value / limit, "x", allowed, rounds, what)

    @staticmethod
    def _ask(engine: Engine, prompt: str) -> Answer:
        answer = ask(engine, prompt)
        if answer.sources["computed"] != answer.prompt_tokens:
            raise ProcessError(f"a prompt that was never seen came from {answer.sources}")
        return answer


def _total(times: list[list[float]]) -> float:
    return sum(statistics.median(of_prompt) for of_prompt in times)
