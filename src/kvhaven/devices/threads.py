# SPDX-License-Identifier: Apache-2.0
"""Threads of a device: a pool that shares the pieces of a job, and one that runs calls in order."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

logger = logging.getLogger(__name__)

_EXIT_S: Final = 10.0
"""Seconds that the end of the process waits for queued calls of all `SerialThread`s together."""


class HostThreads:
    """Threads that share the pieces of a job: up to `threads` of a pool on `cores`, and the caller.

    Thread-safe.
    """

    def __init__(self, threads: int, cores: frozenset[int]) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            threads, "kvhaven-copy", initializer=_run_on, initargs=(cores,)
        )

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call `work` with 0 to `count - 1`, and wait for all calls to end.

        Up to `threads` threads share the job, including the caller's. Each takes the next
        piece when it is free, because cores are not equally fast (the engine's own threads run on
        some). After a call has raised, no further call begins; the first exception is raised when
        no call runs any more.
        """
        self._begin(work, count, min(self._threads, count) - 1)()

    def begin(self, work: Callable[[int], None], count: int) -> Callable[[], None]:
        """Begin the calls of `run` on the other threads; return a function that does the rest.

        It must be called: all calls have ended only when it returns.
        """
        return self._begin(work, count, min(self._threads, count))

    def _begin(self, work: Callable[[int], None], count: int, helping: int) -> Callable[[], None]:
        job = _Shared(work, count)
        self._submit(job.help, helping)
        return job.finish

    def close(self) -> None:
        """End the threads; later jobs run on the caller's thread alone."""
        self._pool.shutdown()

    def _submit(self, call: Callable[[], None], times: int) -> None:
        """Queue calls. If a thread cannot be started, its call stays queued for the others."""
        try:
            for _ in range(times):
                self._pool.submit(call)
        except (RuntimeError, MemoryError) as error:
            logger.debug("fewer than %d copy threads: %s", times, error)


class _Shared:
    """The pieces of a job that several threads share.

    The job itself counts its helpers, because the pool's futures do not show all of them: if the
    pool cannot start a thread, `submit` raises, but another thread may still make the call.
    """

    def __init__(self, work: Callable[[int], None], count: int) -> None:
        self._work = work
        self._left: Iterator[int] = iter(range(count))
        self._errors: list[BaseException] = []
        self._changed = threading.Condition()
        self._helpers = 0
        """The number of helpers that take pieces now; guarded by `_changed`, as is the next."""
        self._finished = False

    def help(self) -> None:
        """Take pieces until none is left, or nothing if the job has ended."""
        with self._changed:
            if self._finished:
                return
            self._helpers += 1
        try:
            self._take()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Take pieces, too; return when no call runs any more. Raises the first exception."""
        try:
            self._take()
        finally:
            # A helper that has not begun is not waited for: it may be queued behind another job.
            with self._changed:
                self._finished = True
                self._changed.wait_for(lambda: not self._helpers)
        if self._errors:
            raise self._errors[0]

    def _take(self) -> None:
        for index in self._left:  # `next` on a range iterator is atomic under the GIL
            if self._errors:
                return
            try:
                self._work(index)
            except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
                self._errors.append(error)


class SerialThread:
    """A thread that makes calls one after the other, in the order of `put`.

    A process that ends while the thread runs waits for its queued calls, for up to `_EXIT_S`
    seconds: Python before 3.14 kills its daemon threads then, and the whole process aborts if one
    of them is in torch's C++ code.
    """

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()
        _open.append(self)

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call. It must not raise."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread after all queued calls."""
        self.end(None)

    def end(self, timeout_s: float | None) -> None:
        """Do as `close`, but wait for `timeout_s` seconds at most."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s: copies have not ended, and are given up", self._thread.name)
        with contextlib.suppress(ValueError):  # it was closed before
            _open.remove(self)

    def _run(self, prepare: Callable[[], None]) -> None:
        try:
            prepare()
        except Exception:  # a driver may raise anything; later calls report the problem in detail
            logger.exception("%s: the thread could not be prepared", self._thread.name)
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # the thread must survive for later calls
                logger.exception("%s: a call failed", self._thread.name)
            del call  # frees the objects that it holds while the thread waits


_open: list[SerialThread] = []
"""The threads that were not closed, oldest first: one that submits copies is before the one that
waits for them."""


@atexit.register
def _end_all() -> None:
    end = time.monotonic() + _EXIT_S
    for thread in _open.copy():  # each leaves it, also if another thread closes it
        thread.end(max(0.0, end - time.monotonic()))


def _run_on(cores: frozenset[int]) -> None:
    """Restrict this thread to `cores`, as far as the kernel allows it."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning(
            "copy thread %s: cannot be moved to other cores: %s",
            threading.current_thread().name,
            error,
        )
