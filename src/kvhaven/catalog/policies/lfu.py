# SPDX-License-Identifier: Apache-2.0
"""Least frequently used first."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap, StripedDict
from kvhaven.types import ChunkKey

MOST = 63
"""Maximum count of uses. Among chunks with this count the older one is evicted first."""


class LFU:
    """One queue per number of uses. Among equals, the least recently used chunk is evicted first.

    Uses never expire: a chunk that was popular once stays for a long time.
    """

    __slots__ = ("_queues", "_uses")
    name = "lfu"

    def __init__(self) -> None:
        self._uses = StripedDict[ChunkKey, int]()
        self._queues: list[OrderedMap[ChunkKey, None]] = []  # by uses, grown as needed

    def fresh(self) -> "LFU":
        """Return an empty LFU."""
        return LFU()

    def added(self, key: ChunkKey) -> None:
        """Add a chunk without uses."""
        self._uses[key] = 0
        self._queue(0).append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each chunk."""
        for key in keys:
            count = self._uses[key]
            self._queues[count].pop(key)
            if count < MOST:
                self._uses[key] = count = count + 1
            self._queue(count).append(key, None)

    passed = touched
    """A chunk that is pinned is in use."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk behind its equals, in the order given."""
        for key in keys:
            self._queues[self._uses[key]].to_end((key,))

    def evicted(self, key: ChunkKey) -> None:
        """Remove a chunk and its count."""
        self._queues[self._uses[key]].pop(key)
        del self._uses[key]

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield chunks by number of uses, the fewest first."""
        for queue in self._queues:
            yield from queue

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the chunks of `candidates`, page by page."""
        for queue in tuple(self._queues):
            for page in queue.walk():
                yield [key for key, _ in page]

    def _queue(self, uses: int) -> OrderedMap[ChunkKey, None]:
        if uses == len(self._queues):
            self._queues.append(OrderedMap())
        return self._queues[uses]
