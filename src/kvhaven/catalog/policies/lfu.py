# SPDX-License-Identifier: Apache-2.0
"""Least frequently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap, StripedDict
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
        self._uses = StripedDict[ChunkKey, int]()
        self._queues: list[OrderedMap[ChunkKey, None]] = []  # as many as were needed yet

    def fresh(self) -> "LFU":
        """Return an empty LFU."""
        return LFU()

    def added(self, key: ChunkKey) -> None:
        """Take in a chunk without uses."""
        self._uses[key] = 0
        self._queue(0).append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each."""
        for key in keys:
            count = self._uses[key]
            self._queues[count].pop(key)
            if count < MOST:
                self._uses[key] = count = count + 1
            self._queue(count).append(key, None)

    passed = touched
    """Who holds a chunk uses it."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Put each behind its equals, in the order given."""
        for key in keys:
            self._queues[self._uses[key]].to_end((key,))

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk and its uses."""
        self._queues[self._uses[key]].pop(key)
        del self._uses[key]

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield those with the fewest uses first."""
        for queue in self._queues:
            yield from queue

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the same, page by page."""
        for queue in tuple(self._queues):
            for page in queue.walk():
                yield [key for key, _ in page]

    def _queue(self, uses: int) -> OrderedMap[ChunkKey, None]:
        if uses == len(self._queues):
            self._queues.append(OrderedMap())
        return self._queues[uses]
