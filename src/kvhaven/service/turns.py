# SPDX-License-Identifier: Apache-2.0
"""Turns: long work on the service's event loop, about a millisecond at a time.

Work that may take longer is a job: a generator that yields between short pieces. A job runs for one
turn, and continues in another turn after the other pending events: sockets, timers, finished
threads. Work for observers yields `OTHERS_FIRST`, which ends the turn. This is the only place where
work is divided by the clock; the job itself defines its pieces (see also `kvhaven.catalog.work`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

Job = Iterator[None]
AnyJob = Iterator[object]
"""A job, or one that may yield `OTHERS_FIRST`."""

TURN_S: Final = 0.0005
OTHERS_FIRST: Final = True
"""What a job yields to end its turn early, so that engines wait for less than a turn."""

logger = logging.getLogger(__name__)


class Turns:
    """Queue of unfinished jobs. `after` is called after each turn.

    The first part of a job, which runs in `start`, counts as a turn.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self.pieces = 0
        """Number of pieces executed so far."""
        self._yields = False
        """Whether the last piece asked for others to be first."""
        self._after = after
        self._jobs: deque[AnyJob] = deque()
        self._next: asyncio.Handle | None = None

    @property
    def idle(self) -> bool:
        """Whether no job is left."""
        return not self._jobs

    def start(self, job: AnyJob) -> bool:
        """Run a job for one turn now, and the rest in later turns; return whether it is done."""
        end = time.perf_counter() + TURN_S
        done = True
        while done and self._goes_on(job):
            if self._yields or time.perf_counter() >= end:
                self.add(job)
                done = False
        self._after()
        return done

    def add(self, job: AnyJob) -> None:
        """Run a job in later turns."""
        self._jobs.append(job)
        self._wake()

    def _turn(self) -> None:
        self._next = None
        end = time.perf_counter() + TURN_S
        while self._jobs:
            job = self._jobs.popleft()
            if self._goes_on(job):
                self._jobs.append(job)
            if self._yields or time.perf_counter() >= end:
                break
        self._after()
        if self._jobs:
            self._wake()

    def _wake(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _goes_on(self, job: AnyJob) -> bool:
        """Run one piece of a job; return whether more may follow."""
        self.pieces += 1
        self._yields = False
        try:
            self._yields = bool(next(job))
        except StopIteration:
            return False
        except Exception:  # no caller waits for this job; the others continue
            logger.exception("a job of the service failed")
            return False
        return True
