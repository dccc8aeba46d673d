# SPDX-License-Identifier: Apache-2.0
"""Turns: whatever the service does on its event loop takes about a millisecond at a time.

What may take longer is a job: a generator that yields between pieces, each of which is short. A
job has the loop for a turn, and goes on in another one after whatever else is waiting: sockets,
timers, threads that are done. This is the only place where work is cut by the clock; what a piece
is, the job knows (see `kvhaven.catalog.work`, too).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

Job = Iterator[None]

TURN_S: Final = 0.0005

logger = logging.getLogger(__name__)


class Turns:
    """The jobs that are not done. `after` is called after each turn in which some had a piece.

    The first turn of a job, in `start`, is one of them.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self.pieces = 0
        """How many were done since the start."""
        self._after = after
        self._jobs: deque[Job] = deque()
        self._next: asyncio.Handle | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._jobs

    def start(self, job: Job) -> bool:
        """Do a job now for as long as a turn, and the rest in later turns; return if it is done."""
        end = time.perf_counter() + TURN_S
        done = True
        while done and self._goes_on(job):
            if time.perf_counter() >= end:
                self.add(job)
                done = False
        self._after()
        return done

    def add(self, job: Job) -> None:
        """Do a job in later turns."""
        self._jobs.append(job)
        self._wake()

    def _turn(self) -> None:
        self._next = None
        end = time.perf_counter() + TURN_S
        while self._jobs:
            job = self._jobs.popleft()
            if self._goes_on(job):
                self._jobs.append(job)
            if time.perf_counter() >= end:
                break
        self._after()
        if self._jobs:
            self._wake()

    def _wake(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _goes_on(self, job: Job) -> bool:
        """Do a piece of a job; return whether that was not the last."""
        self.pieces += 1
        try:
            next(job)
        except StopIteration:
            return False
        except Exception:  # nobody waits for a job: the others go on
            logger.exception("a job of the service failed")
            return False
        return True
