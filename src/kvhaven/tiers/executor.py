# SPDX-License-Identifier: Apache-2.0
"""Thread pool for the blocking I/O of one tier; the event loop never waits for a disk."""

import asyncio
import contextlib
import enum
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

from kvhaven.errors import TierError
from kvhaven.niceness import lower_thread_priority

T = TypeVar("T")

_POLL_S: Final = 0.02
"""Seconds between two looks at threads that are to end."""
MOST_THREADS: Final = 8
"""Keeps enough 8 MiB requests in flight for the fastest local disks."""


class Lane(enum.IntEnum):
    """Kinds of work, by priority: a lane's jobs start only when the lanes before it are empty."""

    READ = 0
    WRITE = 1
    """Writes and deletes, in order of arrival."""
    BACKGROUND = 2
    """Scans, probes, audits."""


class _Progress(enum.Enum):
    QUEUED = 0
    RUNNING = 1
    SETTLED = 2


class _Job(Generic[T]):
    """One call: its work, the future for its outcome, and its progress (under the lock)."""

    __slots__ = ("future", "lane", "loop", "progress", "work")

    def __init__(self, lane: Lane, work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.lane = lane
        self.work: Callable[[], T] | None = work
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.progress = _Progress.QUEUED

    def renew(self) -> None:
        """Replace the caller's future if its cancellation cancelled it."""
        if self.future.cancelled():
            self.future = self.loop.create_future()

    def settle(self, result: Any, error: BaseException | None) -> None:
        """Set the outcome; called on the loop, perhaps before a cancelled caller has resumed."""
        self.renew()
        settle(self.future, result, error)


class TierExecutor:
    """Thread pool of one tier: runs blocking calls in `threads` own threads, at nice 10.

    `threads` is capped at `per_core` for each core that this process may use (default: one a
    core, at most 8; more threads only help where they wait for a network). Each lane holds at
    most `max_queued` waiting jobs. A thread that hangs in a system call cannot be stopped, so
    threads are daemons and `close` abandons a hanging one.
    """

    def __init__(
        self, threads: int | None = None, *, max_queued: int = 16384, per_core: int = 1
    ) -> None:
        most = len(os.sched_getaffinity(0)) * per_core
        self._max_queued = max_queued
        self._ready = threading.Condition()
        # `_ready`'s lock guards all fields below; counters may be read without it.
        self._lanes: tuple[OrderedDict[_Job[Any], None], ...] = tuple(OrderedDict() for _ in Lane)
        self._running: dict[_Job[Any], float] = {}  # start times
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvhaven-tier-{number}", daemon=True)
            for number in range(min(threads or MOST_THREADS, most))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        """Number of threads."""
        return len(self._threads)

    @property
    def running(self) -> int:
        """Number of jobs that a thread is executing now."""
        return len(self._running)

    def longest_running_s(self) -> float:
        """Return the seconds since the oldest running job began; 0 if no job runs."""
        with self._ready:
            since = min(self._running.values(), default=None)
        return 0.0 if since is None else time.monotonic() - since

    def queued(self, lane: Lane) -> int:
        """Return the number of jobs of `lane` that wait for a thread."""
        return len(self._lanes[lane])

    async def run(
        self, lane: Lane, work: Callable[[], T], then: Callable[[T], None] | None = None
    ) -> T:
        """Call `work` in a thread; return its result or raise its exception.

        `then` is called on the event loop with the result before `run` ends, also if the caller
        was cancelled: bookkeeping that must match the outcome belongs there. A cancelled call
        whose work has not begun is withdrawn. A cancelled call whose work has begun ends when
        the work ends, regardless of further cancellations.

        Raises `TierError` if the lane is full or the executor is closed.
        """
        job = _Job(lane, work, asyncio.get_running_loop())
        self._push(job)
        try:
            # Not shielded: that would cost another turn of the loop for each read.
            result = await job.future
        except asyncio.CancelledError:
            job.renew()
            if not self._take_back(job) and await outlast(job.future) and then is not None:
                then(job.future.result())
            raise
        finally:
            del job  # breaks the cycle job, exception, frame: the service runs no GC
        if then is not None:
            then(result)
        return result

    async def close(self, deadline_s: float) -> bool:
        """Refuse new jobs, finish pending ones within `deadline_s` seconds, end the threads.

        At the deadline, waiting jobs end with `TierError`, and so do running ones, although
        their threads go on (see `Tier` on buffers). Returns whether every thread has ended.
        """
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        ended = await asyncio.to_thread(self._join, deadline_s)
        with self._ready:
            left = [job for lane in self._lanes for job in lane]
            left += self._running
            for job in left:
                job.work = None
                job.progress = _Progress.SETTLED
            for lane in self._lanes:
                lane.clear()
            self._ready.notify_all()
        _give_up(left, f"not finished within {deadline_s} s of close")
        return ended

    async def end(self, reason: str) -> None:
        """Refuse new jobs, give up waiting ones, and wait until running ones have ended.

        However long they take: for a tier's part that ends while the process goes on, in which the
        memory that they use gets another owner. `reason` is the error of those given up.
        """
        with self._ready:
            self._closing = True
            left = [job for lane in self._lanes for job in lane]
            for job in left:
                job.progress = _Progress.SETTLED
            for lane in self._lanes:
                lane.clear()
            self._ready.notify_all()
        _give_up(left, reason)
        while any(thread.is_alive() for thread in self._threads):  # noqa: ASYNC110  none tells
            await asyncio.sleep(_POLL_S)

    def _join(self, deadline_s: float) -> bool:
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _push(self, job: _Job[Any]) -> None:
        with self._ready:
            if self._closing:
                raise TierError("the tier is closed")
            if self.queued(job.lane) >= self._max_queued:
                raise TierError(
                    f"the tier is busy: {self._max_queued} {job.lane.name.lower()} jobs are queued"
                )
            self._lanes[job.lane][job] = None
            self._ready.notify()

    def _take_back(self, job: _Job[Any]) -> bool:
        """Withdraw a job that is still queued; return whether it was. It then never runs."""
        with self._ready:
            if job.progress is not _Progress.QUEUED:
                return False
            job.progress = _Progress.SETTLED
            del self._lanes[job.lane][job]
            return True

    def _next(self) -> _Job[Any] | None:
        """Wait for the next job; return None when the executor is closing and no job is left."""
        with self._ready:
            while True:
                for lane in self._lanes:
                    if lane:
                        job, _ = lane.popitem(last=False)
                        job.progress = _Progress.RUNNING
                        self._running[job] = time.monotonic()
                        return job
                if self._closing:
                    return None
                self._ready.wait()

    def _work(self) -> None:
        lower_thread_priority()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run a job; return whether there may be more."""
        job = self._next()
        more = job is not None
        if job is not None:
            self._run(job)
        del job  # a failed job's error refers to this frame, as the caller of a frame that it holds
        return more

    def _run(self, job: _Job[Any]) -> None:
        work, job.work = job.work, None
        result: Any = None
        error: BaseException | None = None
        try:
            if work is not None:
                result = work()
        except BaseException as caught:  # noqa: BLE001 - raised in the caller of `run`
            error = caught
        if isinstance(error, StopIteration):  # which no future takes
            error = RuntimeError("a tier's work raised StopIteration")
        with self._ready:
            self._running.pop(job, None)
            job.progress = _Progress.SETTLED
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            job.loop.call_soon_threadsafe(job.settle, result, error)
        del job, error  # the error's traceback holds this frame: breaks the cycle


def _give_up(jobs: Iterable[_Job[Any]], reason: str) -> None:
    """Fail jobs that no thread makes, or that are abandoned; called on their loop."""
    for job in jobs:
        job.settle(None, TierError(reason))


def settle(future: "asyncio.Future[T]", result: T, error: BaseException | None) -> None:
    """Set a future's outcome, on its own loop, unless the future is done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # no "never retrieved" warning if the caller was cancelled


async def outlast(future: "asyncio.Future[Any]") -> bool:
    """Wait for `future` regardless of cancellations; return whether it has a result."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    return future.exception() is None
