# SPDX-License-Identifier: Apache-2.0
"""Second-chance eviction: first in, first out, but used chunks are queued once more."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class SecondChance:
    """Eviction policy with a queue of unused chunks, proposed first, and one of used chunks.

    `OrderedMap` moves no other keys when one is added or removed, so every call is fast however
    many chunks there are.
    """

    name = "second-chance"

    def __init__(self) -> None:
        self._unused = OrderedMap[ChunkKey, None]()
        self._used = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "SecondChance":
        """Return an empty policy."""
        return SecondChance()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the end of the unused ones."""
        self._unused.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move chunks to the end of the used ones."""
        for key in keys:
            self._queue_of(key).pop(key)
            self._used.append(key, None)

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk to the end of its queue, in the order given."""
        for key in keys:
            self._queue_of(key).to_end([key])

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move chunks that cannot be evicted behind all others."""
        self.touched(keys)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        self._queue_of(key).pop(key)

    removed = evicted

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield the unused chunks, then the used ones, each oldest first."""
        yield from self._unused
        yield from self._used

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the same, page by page."""
        for queue in (self._unused, self._used):
            for page in queue.walk():
                yield [key for key, _ in page]

    def _queue_of(self, key: ChunkKey) -> OrderedMap[ChunkKey, None]:
        return self._used if key in self._used else self._unused
