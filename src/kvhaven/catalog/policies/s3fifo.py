# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: what is used only once passes through one queue, and pushes nothing out of the other.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), counted in
chunks. The queue for new chunks is larger than there: a tenth of the space is too little for
conversations, whose next turn comes late and then counts (docs/performance.md has the figures).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

MOST = 3
"""Uses are counted up to here, as in the paper."""

PATIENCE = 256
"""Used chunks that an eviction moves on, and that a search passes over in a queue, at most. Beyond,
a used one counts as unused: else the first eviction after a million uses would take seconds."""

_PART = 2
"""The queue of new chunks may hold one in so many; in the paper one in 10."""


class S3FIFO:
    """A queue for what is new, a main queue for what was used, and ghosts.

    What was used while it was in the queue of new ones goes on to the main queue, the rest is
    evicted. What was evicted so and soon comes again (a ghost) goes to the main queue at once.
    In the main queue each use buys another round.
    """

    __slots__ = ("_ghosts", "_main", "_new")
    name = "s3-fifo"

    def __init__(self) -> None:
        self._new = OrderedMap[ChunkKey, int]()  # with uses
        self._main = OrderedMap[ChunkKey, int]()
        self._ghosts = OrderedMap[ChunkKey, None]()

    def fresh(self) -> "S3FIFO":
        """Return an empty S3-FIFO."""
        return S3FIFO()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the end of the new ones; a ghost at that of the main queue."""
        if key in self._ghosts:
            self._ghosts.pop(key)
            self._main.append(key, 0)
        else:
            self._new.append(key, 0)

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each, where it is."""
        for key in keys:
            queue = self._queue_of(key)
            uses = queue[key]
            if uses < MOST:
                queue[key] = uses + 1

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the end of its queue, in the order given."""
        for key in keys:
            self._queue_of(key).to_end((key,))

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the end of the main queue; who holds a chunk uses it."""
        for key in keys:
            uses = self._queue_of(key).pop(key)
            self._main.append(key, min(uses + 1, MOST))

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk; a new one leaves a ghost."""
        if key in self._new:
            self._new.pop(key)
            self._ghosts.append(key, None)
        else:
            self._main.pop(key)
        self._drop_ghosts()
        self._move_on()

    def removed(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        self._queue_of(key).pop(key)
        self._drop_ghosts()

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield what is unused: what the queue of new ones has too much, then the main queue's.

        What was used comes last. It is at no queue's front for long (see `_move_on`).
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
        """Yield the queue of new ones, then the main queue, page by page, used or not."""
        for queue in (self._new, self._main):
            for page in queue.walk():
                yield [key for key, _ in page]

    def _queue_of(self, key: ChunkKey) -> OrderedMap[ChunkKey, int]:
        return self._new if key in self._new else self._main

    def _excess(self) -> int:
        """Return how many chunks the queue of new ones holds beyond its share."""
        return len(self._new) - (len(self._new) + len(self._main)) // _PART

    def _drop_ghosts(self) -> None:
        """Keep at most as many ghosts as there are chunks."""
        while len(self._ghosts) > len(self._new) + len(self._main):
            self._ghosts.pop(next(iter(self._ghosts)))

    def _move_on(self) -> None:
        """Bring what is unused to the front of the queue that the next victim comes from."""
        new, main = self._new, self._main
        for _ in range(PATIENCE):
            queue = new if self._excess() > 0 else main
            key = next(iter(queue), None)
            if key is None or not queue[key]:
                return
            uses = queue.pop(key)
            main.append(key, 0 if queue is new else uses - 1)


def _unused(queue: OrderedMap[ChunkKey, int], used: list[ChunkKey]) -> Iterator[ChunkKey]:
    """Yield a queue's chunks that are unused, and collect those that are used."""
    for key, uses in queue.items():
        if uses and len(used) < PATIENCE:
            used.append(key)
        else:
            yield key
