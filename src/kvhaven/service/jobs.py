# SPDX-License-Identifier: Apache-2.0
"""Jobs: requests of operators that take long, and their results."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Final, Literal

import msgspec

from kvhaven.errors import KVHavenError
from kvhaven.service.runtime_settings import ConflictError

MOST_KEPT: Final = 256
"""Number of jobs that are kept; the oldest that have ended are forgotten first."""
MOST_RUNNING: Final = 16

logger = logging.getLogger(__name__)
Result = dict[str, int]


class JobRow(msgspec.Struct, frozen=True):
    """A job. `result` has its figures once it is done; `error` says why it failed.

    Times are in seconds since 1970; `ended` is None while it runs.
    """

    id: str
    kind: str
    state: Literal["running", "done", "failed"]
    started: float
    ended: float | None
    result: dict[str, int]
    error: str


class JobPlan(msgspec.Struct, frozen=True):
    """The dry run of a job: the figures of its work that are known before.

    They are those of its `result`; `waiting_writes` are chunks that are not written to a tier yet.
    `error` says why the job would fail now.
    """

    kind: str
    expected: dict[str, int]
    error: str
    dry_run: bool = True


class Jobs:
    """Running and recent jobs. `spawn` runs a coroutine as a task of the service."""

    def __init__(self, spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]) -> None:
        self._spawn = spawn
        self._numbers = itertools.count(1)
        self._rows: dict[str, JobRow] = {}

    def start(self, kind: str, work: Coroutine[None, None, Result]) -> JobRow:
        """Start a job. Raises `ConflictError` if too many run."""
        try:
            self.require_room()
        except ConflictError:
            work.close()
            raise
        while len(self._rows) >= MOST_KEPT:
            del self._rows[next(id_ for id_, r in self._rows.items() if r.state != "running")]
        row = JobRow(f"{next(self._numbers):016d}", kind, "running", time.time(), None, {}, "")
        self._rows[row.id] = row
        self._spawn(self._run(row, work))
        return row

    def require_room(self) -> None:
        """Raise `ConflictError` if too many jobs run for another one."""
        if sum(row.state == "running" for row in self._rows.values()) >= MOST_RUNNING:
            raise ConflictError(f"jobs: {MOST_RUNNING} are running; wait for one", 503)

    def rows(self) -> list[JobRow]:
        """Return all jobs, in ascending order of their ids."""
        return list(self._rows.values())

    def get(self, id_: str) -> JobRow | None:
        """Return a job, or None."""
        return self._rows.get(id_)

    async def _run(self, row: JobRow, work: Coroutine[None, None, Result]) -> None:
        state: Literal["done", "failed"] = "failed"
        result: Result = {}
        error = ""
        try:
            result = await work
            state = "done"
        except KVHavenError as problem:
            error = str(problem)
        except Exception:  # the service continues, and the operator learns of it
            logger.exception("job %s (%s) failed", row.id, row.kind)
            error = "internal error; the log of the service has the details"
        self._rows[row.id] = msgspec.structs.replace(
            row, state=state, ended=time.time(), result=result, error=error
        )
