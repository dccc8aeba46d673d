# SPDX-License-Identifier: Apache-2.0
"""An arena that takes long to allocate: the service answers meanwhile, and uses what there is."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.arena.growth import next_step
from kvhaven.client.unix import listens
from tests.commands import kvhaven
from tests.crash.engine import EXTENT_BYTES, Engine, prompt
from tests.crash.node import MIB, GrowingNode, NodeThread, eventually
from tests.crash.proxy import Proxy

GIB = 1 << 30
KEYS = prompt("p", 300)
"""3.6 MB."""


class Gate:
    """Holds up the allocation of all but the beginning, until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allocate = os.posix_fallocate
        self._permits = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.broken: OSError | None = None
        self.pieces = 0
        monkeypatch.setattr(os, "posix_fallocate", self._pass)

    def let(self, pieces: int = 1) -> None:
        """Let so many more pieces be allocated."""
        self._permits.release(pieces)

    def open(self) -> None:
        """Hold up nothing any more."""
        self._permits.release(1 << 20)

    def _pass(self, fd: int, offset: int, length: int) -> None:
        if offset:
            self.waiting.set()
            self._permits.acquire()
            if self.broken is not None:
                raise self.broken
        self.pieces += 1
        self._allocate(fd, offset, length)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@contextlib.contextmanager
def serving(path: Path, gate: Gate, **settings: object) -> Iterator[NodeThread]:
    """Yield a service with an arena of 16 MiB, of which 1 MiB is there and no more comes yet."""
    with GrowingNode(path / "s.sock", **settings) as node:
        try:
            yield node
        finally:
            gate.open()


def ready_for(node: NodeThread, bytes_: int) -> bool:
    """Whether so much is allocated, and all ranks are ready for it."""
    status = node.status()
    ranks = [member for member in status.members if member.role != "scheduler"]
    return all(n == bytes_ for n in (status.arena_allocated_bytes, *(r.ready_bytes for r in ranks)))


def test_the_service_answers_and_serves_while_its_arena_is_allocated(
    short_dir: Path, gate: Gate
) -> None:
    """Of a real size: a service that allocates first never comes to listen here."""
    with NodeThread(short_dir / "s.sock", max_local_cpu_size=GIB) as node:
        try:
            assert gate.waiting.wait(120)
            with Engine(node.address, 2) as engine:
                assert engine.save(KEYS[:20]) == 20
                assert eventually(lambda: engine.load(KEYS[:20])) == 20
                status = node.status()
                assert status.arena_allocating
                assert status.arena_bytes == status.arena_allocated_bytes == GIB // 4
                assert status.arena_planned_bytes == GIB
        finally:
            gate.open()


def test_an_engine_uses_what_is_there_and_then_what_comes(short_dir: Path, gate: Gate) -> None:
    with serving(short_dir, gate) as node, Engine(node.address, 2) as engine:
        chunk = 2 * EXTENT_BYTES
        assert MIB // chunk - 2 <= engine.save(KEYS) <= MIB // chunk
        lease = eventually(lambda: engine.scheduler.acquire(KEYS))
        assert all(offset + chunk <= MIB for _, offset in lease.extents)
        engine.scheduler.client.release([lease.lease_id])
        gate.let(2)
        eventually(lambda: ready_for(node, 3 * MIB))
        assert 2 * MIB // chunk - 4 <= engine.save(KEYS) <= 2 * MIB // chunk
        gate.open()
        eventually(lambda: ready_for(node, 16 * MIB))
        engine.save(KEYS)
        assert eventually(lambda: engine.load(KEYS) == 300)
        status = node.status()
        assert status.arena_bytes == status.arena_planned_bytes == 16 * MIB
        assert status.catalog.pin_limit_bytes == 8 * MIB
        node.check()


def test_status_says_how_far_it_is(short_dir: Path, gate: Gate) -> None:
    with serving(short_dir, gate) as node:
        said = kvhaven("status", "--socket", node.address)
        assert "arena: 1 MiB of 16 MiB, allocating" in " ".join(said.split())
        gate.open()
        eventually(lambda: not node.status().arena_allocating)
        assert "of 16 MiB, " not in kvhaven("status", "--socket", node.address)


def test_who_attaches_later_gets_all_of_it(short_dir: Path, gate: Gate) -> None:
    with serving(short_dir, gate) as node:
        gate.open()
        with Engine(node.address) as first:
            eventually(lambda: ready_for(node, 16 * MIB))
            assert first.save(KEYS) == 300
            with Engine(node.address, engine="second") as second:
                assert eventually(lambda: second.load(KEYS) == 300)


def test_what_came_while_the_connection_was_lost_is_used_after_it(
    short_dir: Path, gate: Gate
) -> None:
    with (
        serving(short_dir, gate) as node,
        Proxy(short_dir / "p.sock", node.address) as proxy,
        Engine(proxy.address) as engine,
    ):
        proxy.swallow = True
        gate.open()
        eventually(lambda: not node.status().arena_allocating)
        assert not ready_for(node, 16 * MIB)
        proxy.drop()
        proxy.swallow = False
        eventually(lambda: ready_for(node, 16 * MIB))
        assert engine.save(KEYS) == 300


def test_a_service_that_is_stopped_allocates_no_more_than_a_piece(
    short_dir: Path, gate: Gate
) -> None:
    with serving(short_dir, gate) as node:
        assert gate.waiting.wait(120)
        before = gate.pieces
        node._loop.call_soon_threadsafe(node._stop.set)
        eventually(lambda: not listens(node.address))
    assert gate.pieces == before + 1


@pytest.mark.parametrize(("strict", "level"), [(False, "WARNING"), (True, "ERROR")])
def test_an_arena_whose_memory_runs_out_stays_as_it_is_and_says_why(
    short_dir: Path, gate: Gate, caplog: pytest.LogCaptureFixture, *, strict: bool, level: str
) -> None:
    caplog.set_level(logging.INFO)
    with (
        serving(short_dir, gate, arena_strict=strict) as node,
        Engine(node.address) as engine,
    ):
        gate.let(2)
        eventually(lambda: ready_for(node, 3 * MIB))
        gate.broken = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        gate.open()
        eventually(lambda: not node.status().arena_allocating)
        status = node.status()
        assert (status.arena_bytes, status.arena_planned_bytes) == (3 * MIB, 16 * MIB)
        (said,) = [r for r in caplog.records if "the arena stays at" in r.getMessage()]
        assert said.levelname == level
        assert "3 MiB of 16 MiB" in said.getMessage()
        assert "No space left on device" in said.getMessage()
        assert ("arena_strict" in said.getMessage()) is strict
        assert engine.save(KEYS[:200]) == 200
        assert eventually(lambda: engine.load(KEYS[:100]) == 100)
        table = " ".join(kvhaven("status", "--socket", node.address).split())
        assert "arena: 3 MiB of 16 MiB, memory ran out" in table
        node.check()


def test_steps_are_few_and_end_where_the_arena_does() -> None:
    for gib in (1, 5, 142, 2048):
        done, steps = GIB // 4, 0
        while done < gib * GIB:
            end = next_step(done, gib * GIB)
            assert end == gib * GIB or GIB <= end - done <= max(GIB, done // 4)
            done, steps = end, steps + 1
        assert done == gib * GIB
        assert steps <= 35
