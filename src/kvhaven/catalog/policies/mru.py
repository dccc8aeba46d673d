# SPDX-License-Identifier: Apache-2.0
"""Most recently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class MRU:
    """One queue in the order of last use, evicted from the young end.

    Suits a working set that is larger than the arena and is read again and again in the same order:
    MRU keeps a part of it, LRU would keep none.
    """

    __slots__ = ("_queue",)
    name = "mru"

    def __init__(self) -> None:
        self._queue = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "MRU":
        """Return an empty MRU."""
        return MRU()

    def added(self, key: ChunkKey) -> None:
        """Add a chunk at the young end."""
        self._queue.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move all chunks to the young end, so that the tail is evicted first."""
        self._queue.to_end(reversed(tuple(keys)))

    arranged = touched

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move all chunks to the old end; those proposed first are reached first again."""
        for key in keys:
            self._queue.to_front(key)

    def evicted(self, key: ChunkKey) -> None:
        """Remove a chunk."""
        self._queue.pop(key)

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield chunks from the young end."""
        return reversed(self._queue)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the chunks of `candidates`, page by page."""
        for page in self._queue.walk_back():
            yield [key for key, _ in page]
