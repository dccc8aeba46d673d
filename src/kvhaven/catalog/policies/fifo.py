# SPDX-License-Identifier: Apache-2.0
"""First in, first out."""

from collections.abc import Iterable, Iterator, Sequence

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey


class FIFO:
    """One queue in the order of arrival; uses do not count.

    A chain counts as arrived when it got its last tail: a parent can only be evicted after its
    children, so its arrival time has no effect.
    """

    __slots__ = ("_queue",)
    name = "fifo"

    def __init__(self) -> None:
        self._queue = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "FIFO":
        """Return an empty FIFO."""
        return FIFO()

    def added(self, key: ChunkKey) -> None:
        """Add a chunk at the young end."""
        self._queue.append(key, None)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Do nothing."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk to the young end, in the order given."""
        self._queue.to_end(keys)

    passed = arranged

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
