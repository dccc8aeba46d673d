# SPDX-License-Identifier: Apache-2.0
"""Work that is too long for one event: done piece by piece, the first at once, others in between.

Whatever an event has to do to many chunks is a job: a generator that yields after each piece. Its
first piece belongs to the event itself, so what is small is done when the event is. The rest is
done by `Catalog.work`, a job's piece after another's, while other events happen. Jobs that nobody
waits for have their turns when there are no others. So a job takes
nothing for granted that was so before it yielded, and what an event promises (that a chunk is out
of sight, say) is promised by its first piece.

How long a piece is, is counted in chunks, not timed: a history replays exactly.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

Job = Iterator[None]
T = TypeVar("T")


class Pace(NamedTuple):
    """How many chunks a piece touches, so that it takes a millisecond or two.

    A chunk is looked at or released in 1 µs, leased in 1 to 5 (of a million, hardly any is in a
    processor's cache), dropped or evicted in 4, and promoted in 15.
    `lease_ids` is how many leases are told of something, each of which may have an answer made.
    """

    light: int = 1024
    leases: int = 512
    heavy: int = 64
    promotions: int = 32
    lease_ids: int = 16


class Work:
    """The jobs that are not done, in the order of their turns."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._jobs = OrderedDict[object, Job]()  # by what they are of
        self._idle = OrderedDict[object, Job]()  # those that nobody waits for

    @property
    def pending(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._jobs or self._idle)

    def start(self, job: Job, *, of: object = None, idle: bool = False) -> None:
        """Do the first piece of a job now; the others have their turns later.

        With `of`, the only job of something, until that is dropped. `idle`: nobody waits for it.
        """
        if _goes_on(job):
            (self._idle if idle else self._jobs)[job if of is None else of] = job

    def drop(self, of: object) -> None:
        """Do no more of the job of something, if there is one. It is not under way just now."""
        if self._jobs.pop(of, None) is None:
            self._idle.pop(of, None)

    def start_if_small(self, job: Job, chunks: int) -> None:
        """Do a job now if it concerns no more chunks than a piece does, else all of it later."""
        if chunks <= self.pace.heavy:
            self.start(job)
        else:
            self._jobs[job] = job

    def run(self, pieces: int) -> bool:
        """Do so many pieces, or all there are; return whether there is anything left to do.

        An error of a job is raised, and drops that job alone.
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
    """Yield what is there now, and hold on to nothing that was yielded.

    A job that drops many objects uses it: else all are freed at its end, in one piece.
    """
    left = deque(items)
    del items
    while left:
        yield left.popleft()


def _goes_on(job: Job) -> bool:
    """Do a piece of a job; return whether that was not the last."""
    try:
        next(job)
    except StopIteration:
        return False
    return True
