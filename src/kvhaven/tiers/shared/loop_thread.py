# SPDX-License-Identifier: Apache-2.0
"""Event loop in a separate thread: clients of remote stores never delay the service's loop."""

import asyncio
import contextlib
import ctypes
import functools
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from kvhaven.errors import TierError
from kvhaven.niceness import lower_thread_priority
from kvhaven.tiers.executor import Lane, outlast, settle
from kvhaven.tiers.shared.store import StoreFailedError

T = TypeVar("T")

MOST_WAITING: Final = 4096

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_REUSED_BYTES: Final = 32 << 20
_KEPT_BYTES: Final = 128 << 20


class LoopThread:
    """Runner of coroutines in its own event loop and thread, at nice 10.

    Parsing and copying megabytes takes milliseconds; on the service's loop, every lookup would
    wait for that. `slots` limits the concurrent calls of each lane; at most 4096 more are queued.
    Every call ends within its deadline, and immediately when it is cancelled. The coroutines
    must therefore never block.
    """

    def __init__(self, name: str, slots: Mapping[Lane, int]) -> None:
        keep_freed_memory()
        self._loop = asyncio.new_event_loop()
        # Used in the thread only.
        self._slots = {lane: asyncio.Semaphore(number) for lane, number in slots.items()}
        self._tasks: set[asyncio.Task[Any]] = set()
        # Used on the caller's loop only.
        self._waiting: Counter[Lane] = Counter()
        self._calls: set[asyncio.Future[Any]] = set()
        self._closing = False
        # Written in the thread and read without a lock: only a statistic.
        self._begun: Counter[Lane] = Counter()
        self._thread = threading.Thread(target=self._work, name=f"kvhaven-{name}", daemon=True)
        self._thread.start()

    def queued(self, lane: Lane) -> int:
        """Return the number of queued calls of a lane."""
        return max(0, self._waiting[lane] - self._begun[lane])

    async def run(self, lane: Lane, work: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """Await `work()` in the thread; return its result or raise its exception.

        Raises `TierError` if the call was still queued at its deadline, the queue is full, or
        the thread is closed; `StoreFailedError` if the call had begun by its deadline.
        """
        if self._closing:
            raise TierError("the tier is closed")
        if self.queued(lane) >= MOST_WAITING:
            raise TierError(f"the tier is busy: {MOST_WAITING} {lane.name.lower()} calls wait")
        call = _Call(lane, work, deadline_s)
        self._waiting[lane] += 1
        self._calls.add(call.future)
        self._loop.call_soon_threadsafe(self._begin, call)
        try:
            return await asyncio.shield(call.future)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(call.cancel)
            await outlast(call.future)
            raise
        finally:
            self._waiting[lane] -= 1
            self._calls.discard(call.future)
            del call  # breaks the cycle call, exception, frame: the service runs no GC

    async def close(self, deadline_s: float, last: Callable[[], Awaitable[None]]) -> None:
        """Refuse new calls, finish or cancel pending ones, await `last()`, end the thread.

        Calls that are not finished within `deadline_s` seconds are cancelled.
        """
        if self._closing:
            return
        self._closing = True
        if self._calls:
            await asyncio.wait(self._calls, timeout=deadline_s)
        ended = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(deadline_s, 1.0)):
                await asyncio.wrap_future(ended)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, max(deadline_s, 1.0))

    async def _end(self, last: Callable[[], Awaitable[None]]) -> None:
        """Cancel running calls, then close the store."""
        for task in self._tasks:
            task.cancel("closed")
        if self._tasks:
            await asyncio.wait(self._tasks)
        await last()

    def _work(self) -> None:
        lower_thread_priority()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _begin(self, call: "_Call[Any]") -> None:
        call.task = self._loop.create_task(self._perform(call))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        call.task.add_done_callback(call.ended)

    async def _perform(self, call: "_Call[T]") -> T:
        slots = self._slots[call.lane]
        try:
            async with asyncio.timeout(call.end - time.monotonic()):
                await slots.acquire()
        except TimeoutError:
            raise TierError(f"the tier is busy: still queued after {call.deadline_s} s") from None
        self._begun[call.lane] += 1
        limit = asyncio.timeout(call.end - time.monotonic())
        try:
            async with limit:
                return await call.work()
        except TimeoutError as error:
            reason = f"no answer within {call.deadline_s} s" if limit.expired() else str(error)
            raise StoreFailedError(reason) from None
        finally:
            self._begun[call.lane] -= 1
            slots.release()


@functools.cache
def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MiB, 128 MiB in total, for later bodies.

    Outside the main thread, glibc returns such blocks to the kernel immediately. Populating new
    ones for each body took six times the CPU time of moving it through Redis. Other C libraries
    are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class _Call(Generic[T]):
    """One call: its work, its deadline, and the future for its outcome."""

    __slots__ = ("caller", "deadline_s", "end", "future", "lane", "task", "work")

    def __init__(self, lane: Lane, work: Callable[[], Awaitable[T]], deadline_s: float) -> None:
        self.lane = lane
        self.work = work
        self.deadline_s = deadline_s
        self.end = time.monotonic() + deadline_s
        self.caller = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.caller.create_future()
        self.task: asyncio.Task[T] | None = None

    def cancel(self) -> None:
        """Cancel the call; runs in the thread."""
        if self.task is not None:
            self.task.cancel()

    def ended(self, task: "asyncio.Task[T]") -> None:
        """Pass the outcome to the caller's loop; runs in the thread."""
        result: Any = None
        error: BaseException | None = TierError("the call was cancelled, or the tier was closed")
        if not task.cancelled():
            error = task.exception()
            result = None if error else task.result()
        self.task = None
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: no caller waits
            self.caller.call_soon_threadsafe(settle, self.future, result, error)
