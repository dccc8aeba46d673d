# SPDX-License-Identifier: Apache-2.0
"""Threads of a device: some that share the pieces of a job, and one that does all in order."""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

logger = logging.getLogger(__name__)


class HostThreads:
    """Threads that share the pieces of a job; the caller's is one of them.

    The others run on `cores`. Thread-safe.
    """

    def __init__(self, threads: int, cores: frozenset[int]) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            max(1, threads - 1), "kvhaven-copy", initializer=_run_on, initargs=(cores,)
        )

    def run(self, work: Callable[[int], None], count: int) -> None:
        """Call `work` with 0 to `count - 1` on up to all threads, and wait until all calls ended.

        Threads take the next piece when they are free, since cores are not equally fast (the
        engine's own threads run on some). After a call raised no further one begins; what the
        first one raised is raised when none runs any more.
        """
        left: Iterator[int] = iter(range(count))
        errors: list[BaseException] = []

        def take() -> None:
            for index in left:  # `next` on a range iterator is one step under the GIL
                if errors:
                    return
                try:
                    work(index)
                except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
                    errors.append(error)

        helpers = self._submit(take, min(self._threads, count) - 1)
        try:
            take()
        finally:
            # One that has not begun is not waited for: it may be behind another caller's job.
            wait([helper for helper in helpers if not helper.cancel()])
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads; later jobs run on the caller's alone."""
        self._pool.shutdown()

    def _submit(self, call: Callable[[], None], times: int) -> list[Future[None]]:
        found: list[Future[None]] = []
        try:
            for _ in range(times):
                found.append(self._pool.submit(call))  # noqa: PERF401 - the next one may raise
        except RuntimeError as error:  # no thread can be started: do with those there are
            logger.debug("%d copy threads instead of %d: %s", len(found), times, error)
        return found


class SerialThread:
    """A thread that makes calls one after the other, in the order of `put`."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Have a call made. It must not raise."""
        self._calls.put(call)

    def close(self) -> None:
        """End the thread when it has made all calls that were put."""
        self._calls.put(None)
        self._thread.join()

    def _run(self, prepare: Callable[[], None]) -> None:
        try:
            prepare()
        except Exception:  # a driver may raise anything; the calls say better what they lack
            logger.exception("%s could not be prepared", self._thread.name)
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # the thread has to live for the calls after this one
                logger.exception("%s: a call failed", self._thread.name)
            del call  # and what it holds, while there is nothing to do


def _run_on(cores: frozenset[int]) -> None:
    """Let this thread run on `cores`, as far as the kernel allows it."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning(
            "copy thread %s stays on its cores: %s", threading.current_thread().name, error
        )
