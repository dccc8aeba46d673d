# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: chunks that are used only once pass through a queue without displacing others.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), counted in chunks.
The queue for new chunks is larger than in the paper: a tenth of the space is too little for
conversations, whose next turn comes late and only then counts as a use (docs/performance.md has the
measurements).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

MOST = 3
"""Maximum count of uses, as in the paper."""

PATIENCE = 256
"""Maximum number of used chunks that an eviction moves on, and that a search skips in a queue.
Beyond that a used chunk counts as unused; otherwise the first eviction after a million uses would
take seconds."""

_PART = 2
"""The queue of new chunks may hold one chunk in this many; in the paper one in 10."""


class S3FIFO:
    """Queue of new chunks, main queue of used chunks, and ghosts.

    A chunk that was used while in the queue of new chunks moves to the main queue; otherwise it is
    evicted and leaves a ghost. If it is added again while the ghost exists, it goes to the main
    queue directly. In the main queue each use saves the chunk from one eviction round.
    """

    __slots__ = ("_ghosts", "_main", "_new")
    name = "s3-fifo"

    def __init__(self) -> None:
        self._new = OrderedMap[ChunkKey, int]()  # number of uses by chunk
        self._main = OrderedMap[ChunkKey, int]()
        self._ghosts = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "S3FIFO":
        """Return an empty S3-FIFO."""
        return S3FIFO()

    def added(self, key: ChunkKey) -> None:
        """Add a chunk at the end of the new chunks, or of the main queue if it has a ghost."""
        if key in self._ghosts:
            self._ghosts.pop(key)
            self._main.append(key, 0)
        else:
            self._new.append(key, 0)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each chunk, in place."""
        for key in keys:
            queue = self._queue_of(key)
            uses = queue[key]
            if uses < MOST:
                queue[key] = uses + 1

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk to the end of its queue, in the order given."""
        for key in keys:
            self._queue_of(key).to_end((key,))

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move each chunk to the end of the main queue: a chunk that is pinned is in use."""
        for key in keys:
            uses = self._queue_of(key).pop(key)
            self._main.append(key, min(uses + 1, MOST))

    def evicted(self, key: ChunkKey) -> None:
        """Remove a chunk; a new chunk leaves a ghost."""
        if key in self._new:
            self._new.pop(key)
            self._ghosts.append(key, None)
        else:
            self._main.pop(key)
        self._drop_ghosts()
        self._move_on()

    def removed(self, key: ChunkKey) -> None:
        """Remove a chunk."""
        self._queue_of(key).pop(key)
        self._drop_ghosts()

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield unused chunks: the excess of the queue of new chunks, then the main queue.

        Used chunks come last. They do not stay at the front of a queue for long (see `_move_on`).
        """
        used_new: list[ChunkKey] = []
        used_main: list[ChunkKey] = []
        new = _unused(self._new, used_new)
        yield from islice(new, max(0, self._excess()))
        yield from _unused(self._main, used_main)
        yield from new
        yield from used_new
        yield from used_main

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield the queue of new chunks, then the main queue, page by page, used or not."""
        for queue in (self._new, self._main):
            for page in queue.walk():
                yield [key for key, _ in page]

    def _queue_of(self, key: ChunkKey) -> OrderedMap[ChunkKey, int]:
        return self._new if key in self._new else self._main

    def _excess(self) -> int:
        """Return the number of chunks that the queue of new chunks holds beyond its share."""
        return len(self._new) - (len(self._new) + len(self._main)) // _PART

    def _drop_ghosts(self) -> None:
        """Limit the number of ghosts to the number of chunks."""
        while len(self._ghosts) > len(self._new) + len(self._main):
            self._ghosts.pop(next(iter(self._ghosts)))

    def _move_on(self) -> None:
        """Bring an unused chunk to the front of the queue from which the next victim is taken."""
        new, main = self._new, self._main
        for _ in range(PATIENCE):
            queue = new if self._excess() > 0 else main
            key = next(iter(queue), None)
            if key is None or not queue[key]:
                return
            uses = queue.pop(key)
            main.append(key, 0 if queue is new else uses - 1)


def _unused(queue: OrderedMap[ChunkKey, int], used: list[ChunkKey]) -> Iterator[ChunkKey]:
    """Yield the unused chunks of a queue, and collect the used ones in `used`."""
    for key, uses in queue.items():
        if uses and len(used) < PATIENCE:
            used.append(key)
        else:
            yield key
