# SPDX-License-Identifier: Apache-2.0
"""Retries within a budget, so that they do not worsen an outage."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kvhaven.tiers.shared.store import StoreFailedError

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class PassingError(StoreFailedError):
    """Transient failure of the store, such as a reset connection or HTTP status 503."""


class Retries:
    """Retry policy: repeats a call that raises `PassingError`, up to `attempts` attempts in all.

    Each call earns `earned` (a tenth) of a retry, and at most `most` retries accumulate. A store
    that fails every request thus receives a tenth more requests, not several times as many. A
    random pause below a doubling limit precedes each retry, so that nodes do not retry in step.
    Used in one thread.
    """

    def __init__(self, attempts: int = 3, earned: float = 0.1, most: float = 10.0) -> None:
        self._attempts = attempts
        self._earned = earned
        self._most = most
        self._budget = most
        self._random = random.Random()  # noqa: S311 - it spreads load

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work()`. Raises the exception of the last attempt."""
        self._budget = min(self._most, self._budget + self._earned)
        limit_s = _FIRST_PAUSE_S
        for _ in range(self._attempts - 1):
            try:
                return await work()
            except PassingError:
                if self._budget < 1:
                    raise
                self._budget -= 1
            await asyncio.sleep(self._random.random() * limit_s)
            limit_s = min(2 * limit_s, _LONGEST_PAUSE_S)
        return await work()
