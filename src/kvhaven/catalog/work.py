# SPDX-License-Identifier: Apache-2.0
"""Jobs: work that is too long for one event, done in pieces between other events.

Work that an event has to do on many chunks is a job: a generator that yields after each piece. The
first piece is part of the event itself, so small work is complete when the event is. `Catalog.work`
does the remaining pieces, alternating between jobs, while other events happen. Jobs for which no
request waits run only when there are no others. So a job must not rely on state from before a
`yield`, and guarantees of the event (for example that a chunk is invisible) have to be fulfilled by
the first piece.

The length of a piece is counted in chunks, not timed, so that a history replays exactly.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

Job = Iterator[None]
T = TypeVar("T")


class Pace(NamedTuple):
    """Number of chunks that a piece touches, chosen so that it takes a millisecond or two.

    A chunk takes 1 microsecond to inspect or release, 1 to 5 to lease (of a million chunks hardly
    any is in a processor cache), 4 to drop or evict, and 15 to promote. `lease_ids` is the number
    of leases notified in a piece; each of them may need an answer.
    """

    light: int = 1024
    leases: int = 512
    heavy: int = 64
    promotions: int = 32
    lease_ids: int = 16


class Work:
    """Unfinished jobs, in the order of their turns."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._jobs = OrderedDict[object, Job]()  # by the object that a job belongs to
        self._idle = OrderedDict[object, Job]()  # jobs for which no request waits

    @property
    def pending(self) -> bool:
        """Whether there is unfinished work."""
        return bool(self._jobs or self._idle)

    def start(self, job: Job, *, of: object = None, idle: bool = False) -> None:
        """Do the first piece of a job now, and queue the rest.

        With `of`, it is the only job of that object until the job is dropped. `idle` marks a job
        for which no request waits.
        """
        if _goes_on(job):
            (self._idle if idle else self._jobs)[job if of is None else of] = job

    def drop(self, of: object) -> None:
        """Drop the job of an object, if it has one. The job must not be running."""
        if self._jobs.pop(of, None) is None:
            self._idle.pop(of, None)

    def start_if_small(self, job: Job, chunks: int) -> None:
        """Do a job now if it has at most as many chunks as a piece; otherwise queue it."""
        if chunks <= self.pace.heavy:
            self.start(job)
        else:
            self._jobs[job] = job

    def run(self, pieces: int) -> bool:
        """Do up to `pieces` pieces; return whether there is unfinished work.

        An error in a job is raised, and drops only that job.
        """
        for _ in range(pieces):
            jobs = self._jobs or self._idle
            if not jobs:
                break
            of, job = jobs.popitem(last=False)
            if _goes_on(job):
                jobs[of] = job
        return self.pending


def consume(items: Iterable[T]) -> Iterator[T]:
    """Yield the present items, and keep no reference to an item that was yielded.

    For jobs that drop many objects: otherwise all of them would be freed at the end of the job, in
    one piece.
    """
    left = deque(items)
    del items
    while left:
        yield left.popleft()


def _goes_on(job: Job) -> bool:
    """Do a piece of a job; return whether more pieces may follow."""
    try:
        next(job)
    except StopIteration:
        return False
    return True
