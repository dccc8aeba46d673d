# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class LRU:
    """One queue in the order of last use. As chains are touched tail first, tails go first."""

    __slots__ = ("_queue",)
    name = "lru"

    def __init__(self) -> None:
        self._queue = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "LRU":
        """Return an empty LRU."""
        return LRU()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the young end."""
        self._queue.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the young end, in the order given."""
        self._queue.to_end(keys)

    arranged = touched
    """Who extends a chain has just used it."""

    passed = touched
    """Who holds a chunk uses it."""

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        self._queue.pop(key)

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield from the old end."""
        return iter(self._queue)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the same, page by page."""
        for page in self._queue.walk():
            yield [key for key, _ in page]
