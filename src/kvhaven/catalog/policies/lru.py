# SPDX-License-Identifier: Apache-2.0
"""Least recently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class LRU:
    """One queue in the order of last use. Chains are touched tail first, so tails go first."""

    __slots__ = ("_queue",)
    name = "lru"

    def __init__(self) -> None:
        self._queue = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "LRU":
        """Return an empty LRU."""
        return LRU()

    def added(self, key: ChunkKey) -> None:
        """Add a chunk at the young end."""
        self._queue.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk to the young end, in the order given."""
        self._queue.to_end(keys)

    arranged = touched
    """Extending a chain counts as a use of it."""

    passed = touched
    """A chunk that is pinned is in use."""

    def evicted(self, key: ChunkKey) -> None:
        """Remove a chunk."""
        self._queue.pop(key)

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield chunks from the old end."""
        return iter(self._queue)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the chunks of `candidates`, page by page."""
        for page in self._queue.walk():
            yield [key for key, _ in page]
