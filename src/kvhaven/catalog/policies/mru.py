# SPDX-License-Identifier: Apache-2.0
"""Most recently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class MRU:
    """One queue in the order of last use, of which the young end goes first.

    Keeps a part of a set that is too large for the arena and is gone through again and again
    in the same order, of which LRU would keep nothing.
    """

    __slots__ = ("_queue",)
    name = "mru"

    def __init__(self) -> None:
        self._queue = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "MRU":
        """Return an empty MRU."""
        return MRU()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the young end."""
        self._queue.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move all to the young end, so that the tail goes first."""
        self._queue.to_end(reversed(tuple(keys)))

    arranged = touched

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move all to the old end, those proposed first the first to be reached again."""
        for key in keys:
            self._queue.to_front(key)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        self._queue.pop(key)

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield from the young end."""
        return reversed(self._queue)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the same, page by page."""
        for page in self._queue.walk_back():
            yield [key for key, _ in page]
