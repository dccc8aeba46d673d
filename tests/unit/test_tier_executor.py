# SPDX-License-Identifier: Apache-2.0
"""The threads of a tier."""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator

import pytest

from kvhaven.errors import TierError
from kvhaven.tiers.executor import Lane, TierExecutor


@pytest.fixture
async def executor() -> AsyncIterator[TierExecutor]:
    """One thread, so that the order is known."""
    one = TierExecutor(1, max_queued=3)
    yield one
    await one.close(5)


class Blocked:
    """Work that goes on until it is let go."""

    def __init__(self, executor: TierExecutor, lane: Lane = Lane.READ) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.done: list[str] = []
        self.task = asyncio.create_task(executor.run(lane, self._work, self.done.append))

    def _work(self) -> str:
        self.begun.set()
        self.go_on.wait(30)
        self.ended.set()
        return "done"

    async def running(self) -> "Blocked":
        assert await asyncio.to_thread(self.begun.wait, 5)
        return self


async def test_results_and_errors_come_back(executor: TierExecutor) -> None:
    assert await executor.run(Lane.READ, lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await executor.run(Lane.WRITE, lambda: 1 // 0)
    assert executor.running == 0


async def test_work_that_raises_what_no_future_takes_ends_its_call(executor: TierExecutor) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.run(Lane.READ, lambda: next(iter(())))


async def test_threads_are_nice_and_the_caller_is_not(executor: TierExecutor) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert await executor.run(Lane.READ, niceness) == max(10, before)
    assert niceness() == before


async def test_there_are_at_most_as_many_threads_as_cores() -> None:
    executor = TierExecutor(1000)
    assert executor.threads == len(os.sched_getaffinity(0))
    assert await executor.close(5)


async def test_reads_go_before_writes_and_writes_before_the_rest(executor: TierExecutor) -> None:
    blocked = await Blocked(executor).running()
    order: list[str] = []
    jobs = [
        asyncio.create_task(executor.run(lane, lambda name=name: order.append(name)))  # type: ignore[misc]
        for lane, name in [
            (Lane.BACKGROUND, "scan"),
            (Lane.WRITE, "first write"),
            (Lane.WRITE, "second write"),
            (Lane.READ, "read"),
        ]
    ]
    await asyncio.sleep(0)
    assert [executor.queued(lane) for lane in Lane] == [1, 2, 1]
    blocked.go_on.set()
    await asyncio.gather(*jobs)
    assert order == ["read", "first write", "second write", "scan"]
    assert [executor.queued(lane) for lane in Lane] == [0, 0, 0]


async def test_a_full_lane_refuses_and_the_others_do_not(executor: TierExecutor) -> None:
    blocked = await Blocked(executor).running()
    waiting = [asyncio.create_task(executor.run(Lane.READ, int)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TierError, match="3 read jobs"):
        await executor.run(Lane.READ, int)
    write = asyncio.create_task(executor.run(Lane.WRITE, int))
    await asyncio.sleep(0)
    blocked.go_on.set()
    assert await asyncio.gather(*waiting, write) == [0, 0, 0, 0]


async def test_cancelled_work_that_has_not_begun_never_runs(executor: TierExecutor) -> None:
    blocked = await Blocked(executor).running()
    ran: list[int] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await executor.run(Lane.READ, lambda: ran.append(1))
    assert executor.queued(Lane.READ) == 0
    blocked.go_on.set()
    await executor.run(Lane.BACKGROUND, int)
    assert not ran


async def test_cancelled_work_that_has_begun_is_waited_for(executor: TierExecutor) -> None:
    blocked = await Blocked(executor).running()
    for _ in range(5):
        blocked.task.cancel()
        await asyncio.sleep(0.01)
        assert not blocked.task.done()
    blocked.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await blocked.task
    assert blocked.ended.is_set()
    assert blocked.done == ["done"]  # the book-keeping knows


async def test_a_failure_after_cancellation_is_no_complaint(executor: TierExecutor) -> None:
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        time.sleep(0.05)
        raise OSError("gone")

    task = asyncio.create_task(executor.run(Lane.READ, fail))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()  # "exception was never retrieved" would be an error here


async def test_how_long_work_runs_is_known(executor: TierExecutor) -> None:
    assert executor.longest_running_s() == 0
    blocked = await Blocked(executor).running()
    await asyncio.sleep(0.05)
    assert executor.longest_running_s() >= 0.05
    assert executor.running == 1
    blocked.go_on.set()
    await blocked.task
    assert executor.longest_running_s() == 0


async def test_closing_finishes_what_waits() -> None:
    executor = TierExecutor(1)
    jobs = [asyncio.create_task(executor.run(Lane.WRITE, lambda: 7)) for _ in range(100)]
    await asyncio.sleep(0)
    assert await executor.close(5)
    assert await asyncio.gather(*jobs) == [7] * 100
    with pytest.raises(TierError, match="closed"):
        await executor.run(Lane.READ, int)


async def test_closing_gives_up_at_its_deadline() -> None:
    executor = TierExecutor(1)
    blocked = await Blocked(executor).running()
    waiting = asyncio.create_task(executor.run(Lane.READ, int))
    await asyncio.sleep(0)
    assert not await executor.close(0.1)
    for task in (blocked.task, waiting):
        with pytest.raises(TierError, match="not finished within"):
            await task
    blocked.go_on.set()
    assert await executor.close(5)
    assert blocked.done == []


async def test_a_failure_leaves_no_cycle_behind(executor: TierExecutor) -> None:
    """The service runs without the cyclic collector; a failed read must not keep its buffer."""

    class Buffer:
        pass

    def fail(buffer: Buffer) -> None:
        raise OSError(f"{buffer}")

    async def call() -> weakref.ref[Buffer]:
        buffer = Buffer()
        with pytest.raises(OSError, match="Buffer"):
            await executor.run(Lane.READ, lambda: fail(buffer))
        return weakref.ref(buffer)

    gc.collect()
    gc.disable()
    try:
        left = await call()
        await executor.run(Lane.READ, int)
        await asyncio.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()


async def test_an_outcome_that_comes_before_a_cancelled_caller_runs_again_is_not_lost(
    executor: TierExecutor,
) -> None:
    blocked = await Blocked(executor).running()
    blocked.go_on.set()
    assert blocked.ended.wait(30)  # the loop stands still meanwhile
    time.sleep(0.1)  # noqa: ASYNC251  the outcome is now behind it
    blocked.task.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait([blocked.task])
    assert blocked.task.cancelled()
    assert blocked.done == ["done"]


async def test_a_job_is_given_up_before_its_cancelled_caller_runs_again() -> None:
    executor = TierExecutor(1)
    blocked = await Blocked(executor).running()
    waiting = asyncio.create_task(executor.run(Lane.READ, lambda: None))
    await asyncio.sleep(0)
    ending = asyncio.create_task(executor.end("it left"))
    waiting.cancel()
    await asyncio.sleep(0)  # `end` gives the job up, then its caller runs
    blocked.go_on.set()
    async with asyncio.timeout(30):
        await asyncio.gather(blocked.task, ending)
        await asyncio.wait([waiting])
    assert waiting.cancelled()
