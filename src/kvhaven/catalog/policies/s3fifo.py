# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: what is used only once passes through one queue, and pushes nothing out of the other.

After Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023), counted in
chunks. The queue for new chunks is larger than there: a tenth of the space is too little for
conversations, whose next turn comes late and then counts (docs/performance.md has the figures).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from kvhaven.types import ChunkKey

MOST = 3
"""Uses are counted up to here, as in the paper."""

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
        self._new: OrderedDict[ChunkKey, int] = OrderedDict()  # with uses
        self._main: OrderedDict[ChunkKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def fresh(self) -> "S3FIFO":
        """Return an empty S3-FIFO."""
        return S3FIFO()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the end of the new ones; a ghost at that of the main queue."""
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._new[key] = 0

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Count one use of each, where it is."""
        new, main = self._new, self._main
        for key in keys:
            queue = new if key in new else main
            if queue[key] < MOST:
                queue[key] += 1

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the end of its queue, in the order given."""
        new, main = self._new, self._main
        for key in keys:
            (new if key in new else main).move_to_end(key)

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the end of the main queue; who holds a chunk uses it."""
        for key in keys:
            uses = (self._new if key in self._new else self._main).pop(key)
            self._main[key] = min(uses + 1, MOST)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk; a new one leaves a ghost."""
        if self._new.pop(key, None) is None:
            del self._main[key]
        else:
            self._ghosts[key] = None
            while len(self._ghosts) > len(self._new) + len(self._main):
                self._ghosts.popitem(last=False)
        self._move_on()

    def removed(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        if self._new.pop(key, None) is None:
            del self._main[key]

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield what is unused: what the queue of new ones has too much, then the main queue's.

        What was used comes last. It is at no queue's front for long (see `_move_on`).
        """
        unused = (key for key, uses in self._new.items() if not uses)
        yield from islice(unused, max(0, self._excess()))
        yield from (key for key, uses in self._main.items() if not uses)
        yield from unused
        for queue in (self._new, self._main):
            yield from (key for key, uses in queue.items() if uses)

    def _excess(self) -> int:
        """Return how many chunks the queue of new ones holds beyond its share."""
        return len(self._new) - (len(self._new) + len(self._main)) // _PART

    def _move_on(self) -> None:
        """Bring what is unused to the front of the queue that the next victim comes from."""
        new, main = self._new, self._main
        while True:
            queue = new if self._excess() > 0 else main
            key = next(iter(queue), None)
            if key is None or not queue[key]:
                return
            uses = queue.pop(key)
            main[key] = 0 if queue is new else uses - 1
