# SPDX-License-Identifier: Apache-2.0
"""Trying again, without making an outage worse."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kvhaven.tiers.shared.store import StoreFailedError

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class PassingError(StoreFailedError):
    """A failure of the store that may be gone in a moment: a reset connection, a status of 503."""


class Retries:
    """Tries a call up to `attempts` times while it raises `PassingError`, within a budget.

    Each call earns a tenth of a retry, of which at most `most` are saved up: a store that fails
    for all gets a tenth more requests, not several times as many. Before each retry comes a
    random pause below a limit that doubles, so that nodes do not come back in step. Used in
    one thread.
    """

    def __init__(self, attempts: int = 3, earned: float = 0.1, most: float = 10.0) -> None:
        self._attempts = attempts
        self._earned = earned
        self._most = most
        self._budget = most
        self._random = random.Random()  # noqa: S311 - it spreads load

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work()` returns. Raises what the last attempt raised."""
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
