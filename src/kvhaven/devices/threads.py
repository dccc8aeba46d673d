# SPDX-License-Identifier: Apache-2.0
"""Threads of a device: a pool that shares the pieces of a job, and one that runs calls in order."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger(__name__)


class HostThreads:
    """Threads, including the caller's, that share the pieces of a job.

    The others run on `cores`. Thread-safe.
    """

    def __init__(self, threads: int, cores: frozenset[int]) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            threads, "kvhaven-copy", initializer=_run_on, initargs=(cores,)
        )

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call `work` with 0 to `count - 1` on up to all threads, and wait for all calls to end.

        Each thread takes the next piece when it is free, because cores are not equally fast (the
        engine's own threads run on some). After a call has raised, no further call begins; the
        first exception is raised when no call runs any more.
        """
        self._begin(work, count, min(self._threads, count) - 1)()

    def begin(self, work: Callable[[int], None], count: int) -> Callable[[], None]:
        """Begin the calls of `run` on the other threads; return a function that does the rest.

        It must be called: all calls have ended only when it returns.
        """
        return self._begin(work, count, min(self._threads, count))

    def _begin(self, work: Callable[[int], None], count: int, helping: int) -> Callable[[], None]:
        left: Iterator[int] = iter(range(count))
        errors: list[BaseException] = []

        def take() -> None:
            for index in left:  # `next` on a range iterator is atomic under the GIL
                if errors:
                    return
                try:
                    work(index)
                except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
                    errors.append(error)

        helpers = self._submit(take, helping)

        def finish() -> None:
            try:
                take()
            finally:
                # A helper that has not begun is cancelled: it may be queued behind another job.
                wait([helper for helper in helpers if not helper.cancel()])
            if errors:
                raise errors[0]

        return finish

    def close(self) -> None:
        """End the threads; later jobs run on the caller's thread alone."""
        self._pool.shutdown()

    def _submit(self, call: Callable[[], None], times: int) -> list[Future[None]]:
        found: list[Future[None]] = []
        try:
            for _ in range(times):
                found.append(self._pool.submit(call))  # noqa: PERF401 - the next one may raise
        except RuntimeError as error:  # no thread can be started: use the existing ones
            logger.debug("%d copy threads instead of %d: %s", len(found), times, error)
        return found


class SerialThread:
    """A thread that makes calls one after the other, in the order of `put`."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call. It must not raise."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread after all queued calls."""
        self._calls.put(None)
        self._thread.join()

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
