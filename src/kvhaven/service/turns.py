# SPDX-License-Identifier: Apache-2.0
"""Turns: long work on the service's event loop, about a millisecond at a time.

Work that may take longer is a job: a generator that yields between short pieces. A job runs for one
turn, and continues in another turn after the other pending events: sockets, timers, finished
threads. This is the only place where work is divided by the clock; the job itself defines its
pieces (see also `kvhaven.catalog.work`).
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
    """Queue of unfinished jobs. `after` is called after each turn.

    The first part of a job, which runs in `start`, counts as a turn.
    """

    def __init__(self, after: Callable[[], None]) -> None:
        self.pieces = 0
        """Number of pieces executed so far."""
        self._after = after
        self._jobs: deque[Job] = deque()
        self._next: asyncio.Handle | None = None

    @property
    def idle(self) -> bool:
        """Whether no job is left."""
        return not self._jobs

    def start(self, job: Job) -> bool:
        """Run a job for one turn now, and the rest in later turns; return whether it is done."""
        end = time.perf_counter() + TURN_S
        done = True
        while done and self._goes_on(job):
            if time.perf_counter() >= end:
                self.add(job)
                done = False
        self._after()
        return done

    def add(self, job: Job) -> None:
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
            if time.perf_counter() >= end:
                break
        self._after()
        if self._jobs:
            self._wake()

    def _wake(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _goes_on(self, job: Job) -> bool:
        """Run one piece of a job; return whether more may follow."""
        self.pieces += 1
        try:
            next(job)
        except StopIteration:
            return False
        except Exception:  # no caller waits for this job; the others continue
            logger.exception("a job of the service failed")
            return False
        return True
