# SPDX-License-Identifier: Apache-2.0
"""Least frequently used first."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

from kvhaven.types import ChunkKey

MOST = 63
"""Uses are counted up to here. Chunks with more are alike, and the older one goes first."""


class LFU:
    """A queue for each number of uses. Among equals, the least recently used goes first.

    Uses are never forgotten: what was popular once stays long after.
    """

    __slots__ = ("_queues", "_uses")
    name = "lfu"

    def __init__(self) -> None:
        self._uses: dict[ChunkKey, int] = {}
        self._queues: tuple[OrderedDict[ChunkKey, None], ...] = tuple(
            OrderedDict() for _ in range(MOST + 1)
        )

    def fresh(self) -> "LFU":
        """Return an empty LFU."""
        return LFU()

    def added(self, key: ChunkKey) -> None:
        """Take in a chunk without uses."""
        self._uses[key] = 0
        self._queues[0][key] = None

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each."""
        queues, uses = self._queues, self._uses
        for key in keys:
            count = uses[key]
            del queues[count][key]
            if count < MOST:
                uses[key] = count = count + 1
            queues[count][key] = None

    passed = touched
    """Who holds a chunk uses it."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Put each behind its equals, in the order given."""
        queues, uses = self._queues, self._uses
        for key in keys:
            queues[uses[key]].move_to_end(key)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk and its uses."""
        del self._queues[self._uses.pop(key)][key]

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield those with the fewest uses first."""
        return chain.from_iterable(self._queues)
