# SPDX-License-Identifier: Apache-2.0
"""Most recently used first."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvhaven.types import ChunkKey


class MRU:
    """One queue in the order of last use, of which the young end goes first.

    Keeps a part of a set that is too large for the arena and is gone through again and again
    in the same order, of which LRU would keep nothing.
    """

    __slots__ = ("_queue",)
    name = "mru"

    def __init__(self) -> None:
        self._queue: OrderedDict[ChunkKey, None] = OrderedDict()

    def fresh(self) -> "MRU":
        """Return an empty MRU."""
        return MRU()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the young end."""
        self._queue[key] = None

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move all to the young end, so that the tail goes first."""
        move = self._queue.move_to_end
        for key in reversed(tuple(keys)):
            move(key)

    arranged = touched

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move all to the old end, those proposed first the first to be reached again."""
        move = self._queue.move_to_end
        for key in keys:
            move(key, last=False)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        del self._queue[key]

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield from the young end."""
        return reversed(self._queue)
