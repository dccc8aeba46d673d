# SPDX-License-Identifier: Apache-2.0
"""Work that is too long for one event: done piece by piece, the first at once, others in between.

Whatever an event has to do to many chunks is a job: a generator that yields after each piece. Its
first piece belongs to the event itself, so what is small is done when the event is. The rest is
done by `Catalog.work`, a job's piece after another's, while other events happen. So a job takes
nothing for granted that was so before it yielded, and what an event promises (that a chunk is out
of sight, say) is promised by its first piece.

How long a piece is, is counted in chunks, not timed: a history replays exactly.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

Job = Iterator[None]
T = TypeVar("T")


class Pace(NamedTuple):
    """How many chunks a piece touches, so that it takes a millisecond or two.

    A chunk is looked at, leased or released in 1 µs, dropped or evicted in 4, and promoted in 15.
    """

    light: int = 1024
    heavy: int = 64
    promotions: int = 32


class Work:
    """The jobs that are not done, in the order of their turns."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._jobs: deque[Job] = deque()

    @property
    def pending(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._jobs)

    def start(self, job: Job) -> None:
        """Do the first piece of a job now; the others have their turns later."""
        if _goes_on(job):
            self._jobs.append(job)

    def start_if_small(self, job: Job, chunks: int) -> None:
        """Do a job now if it concerns no more chunks than a piece does, else all of it later."""
        if chunks <= self.pace.heavy:
            self.start(job)
        else:
            self._jobs.append(job)

    def run(self, pieces: int) -> bool:
        """Do so many pieces, or all there are; return whether there is anything left to do.

        An error of a job is raised, and drops that job alone.
        """
        for _ in range(pieces):
            if not self._jobs:
                break
            self.start(self._jobs.popleft())
        return self.pending


def consume(items: Iterable[T]) -> Iterator[T]:
    """Yield what is there now, and hold on to nothing that was yielded.

    A job that drops many objects uses it: else all are freed at its end, in one piece.
    """
    left = deque(items)
    while left:
        yield left.popleft()


def _goes_on(job: Job) -> bool:
    """Do a piece of a job; return whether that was not the last."""
    try:
        next(job)
    except StopIteration:
        return False
    return True
