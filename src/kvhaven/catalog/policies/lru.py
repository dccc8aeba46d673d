# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvhaven.types import ChunkKey


class LRU:
    """One queue in the order of last use. As chains are touched tail first, tails go first."""

    __slots__ = ("_queue",)
    name = "lru"

    def __init__(self) -> None:
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()

    def fresh(self) -> "LRU":
        """Return an empty LRU."""
        return LRU()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the young end."""
        self._queue[key] = None

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the young end, in the order given."""
        move = self._queue.move_to_end
        for key in keys:
            move(key)

    arranged = touched
    """Who extends a chain has just used it."""

    passed = touched
    """Who holds a chunk uses it."""

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        del self._queue[key]

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield from the old end."""
        return iter(self._queue)
