# SPDX-License-Identifier: Apache-2.0
"""The observer of a service: what a change waits for, and what a client that leaves spoils."""

import asyncio
import contextlib
import copy
import functools
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from kvhaven.catalog.actions import TierName
from kvhaven.errors import ServiceUnavailableError
from kvhaven.gateway import observer as observer_module
from kvhaven.gateway.observer import Observer
from kvhaven.service.reuse import decoded
from kvhaven.service.steering_messages import GetConfig
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeThread, eventually

NEVER = 3600.0
DISK = TierName("disk")


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with NodeThread(short_dir / "s.sock", local_disk=None, remote_url=None) as node:
        yield node


@contextlib.asynccontextmanager
async def observing(node: NodeThread) -> AsyncIterator[Observer]:
    """Yield an observer that has seen the service, and looks again only when it is told to."""
    observer = Observer(node.address, NEVER, sample=True)
    task = asyncio.create_task(observer.run())
    await observer.newer("")
    yield observer
    task.cancel()
    await asyncio.wait([task])


@contextlib.asynccontextmanager
async def stalled(node: NodeThread) -> AsyncIterator[None]:
    """Hold the service's event loop."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(60)

    stall = asyncio.create_task(asyncio.to_thread(node.call, hold))
    await asyncio.to_thread(held.wait)
    try:
        yield
    finally:
        go.set()
        await stall


def test_a_refresh_shows_what_was_answered_before_it(node: NodeThread) -> None:
    async def run() -> None:
        async with observing(node) as observer:
            for _ in range(3):
                before = observer.seen
                await observer.refresh()
                assert before is not None
                assert observer.seen is not None
                assert observer.seen.id != before.id

    asyncio.run(run())


def test_lookups_use_what_a_snapshot_shows_as_online(short_dir: Path) -> None:
    """The catalog hears of a tier's health once a second; whoever saw a snapshot need not wait."""

    async def run() -> None:
        with NodeThread(short_dir / "s.sock", local_disk=short_dir / "disk") as node:
            tier = node.service.tiers[DISK]
            known = tier.health()
            async with observing(node) as observer:
                for online in (False, True) * 10:
                    shown = msgspec.structs.replace(known, online=online)
                    tier.health = functools.partial(copy.copy, shown)  # type: ignore[method-assign]
                    await observer.refresh()
                    assert observer.seen is not None
                    snapshot = observer.seen.snapshot
                    assert snapshot.tiers["disk"].online is online
                    assert snapshot.catalog.tiers[DISK].online is online

    asyncio.run(run())


def test_a_refresh_does_not_wait_for_a_service_that_has_stopped(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer_module, "_ANSWER_S", NEVER)
    monkeypatch.setattr(observer_module, "_REFRESH_S", 0.05)

    async def run() -> None:
        async with observing(node) as observer, stalled(node):
            before = observer.seen
            await asyncio.gather(*(observer.refresh() for _ in range(5)))
            assert observer.seen is before

    asyncio.run(run())


def test_a_service_that_accepts_and_sends_nothing_is_left(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped service may never continue, and another one may listen at its address."""
    monkeypatch.setattr(observer_module, "_ANSWER_S", 0.2)
    address = short_dir / "s.sock"

    async def run() -> None:
        observer = Observer(str(address), NEVER)
        task = asyncio.create_task(observer.run())
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            address.unlink()
            monkeypatch.setattr(observer_module, "_ANSWER_S", 60.0)
            with NodeThread(address, local_disk=None, remote_url=None):
                async with asyncio.timeout(60):
                    seen = await observer.newer("")
                assert seen.snapshot is not None
                task.cancel()
                await asyncio.wait([task])

    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(address))
        silent.listen()
        asyncio.run(run())


def test_a_client_that_leaves_does_not_have_requests_counted_twice(node: NodeThread) -> None:
    chunks = prompt(1, 3)

    async def run() -> list[int]:
        samples: list[bytes] = []
        async with observing(node) as observer:
            observer.listeners.append(lambda seen: samples.append(seen.sample))
            with Engine(node.address) as engine:
                await asyncio.to_thread(engine.save, chunks)
                await asyncio.to_thread(engine.load, chunks)
            async with stalled(node):
                leaving = asyncio.create_task(observer.refresh())
                await asyncio.sleep(0)  # it has begun to wait
                staying = asyncio.create_task(observer.refresh())
                await asyncio.sleep(0.01)  # the service has the first question, on most machines
                leaving.cancel()
                await asyncio.sleep(0.01)
            await staying
            await observer.refresh()
        return [len(list(decoded(sample))) for sample in samples]

    assert sum(asyncio.run(run())) == 1


async def test_the_last_snapshot_arrives_also_if_a_request_crosses_it(short_dir: Path) -> None:
    with NodeThread(short_dir / "s.sock") as node:
        async with observing(node) as observer:
            seen = observer.seen
            assert seen is not None
            node._loop.call_soon_threadsafe(node._stop.set)
            # Wait without letting the observer run, as on a busy machine.
            eventually(lambda: all(one.closed for one in tuple(node.service._connections)))
            asking = asyncio.create_task(observer.steer(GetConfig()))
            async with asyncio.timeout(30):
                last = await observer.newer(seen.id)
            assert last.snapshot.stopping
            with pytest.raises(ServiceUnavailableError):
                await asking
