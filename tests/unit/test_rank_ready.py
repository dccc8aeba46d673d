# SPDX-License-Identifier: Apache-2.0
"""A rank whose device takes long to register the arena: nothing is asked of it until then."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvhaven.client.arena import HostMemory
from kvhaven.protocol import Ready
from tests.commands import kvhaven
from tests.crash.engine import Engine, Rank, Scheduler, prompt
from tests.crash.node import MIB, GrowingNode, NodeThread, eventually, settled
from tests.crash.proxy import Proxy

KEYS = prompt("p", 8)


class Registration:
    """What a device has registered; it takes as long as the test likes."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.held: list[tuple[int, int]] = []
        self.undone: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self.memory = HostMemory(self._register, self._unregister)

    def _register(self, address: int, size: int) -> None:
        self.begun.set()
        assert self.go_on.wait(120)
        if self.error is not None:
            raise self.error
        self.held.append((address, size))

    def _unregister(self, address: int, size: int) -> None:
        assert self.go_on.wait(120)
        self.undone.append((address, size))


@pytest.fixture
def first(node: NodeThread) -> Iterator[Engine]:
    """An engine that is ready, and has saved."""
    with Engine(node.address, 2, engine="first") as engine:
        assert engine.save(KEYS) == 8
        assert eventually(lambda: engine.load(KEYS)) == 8
        yield engine


class Slow:
    """An engine of two ranks, whose second one takes long to be ready."""

    def __init__(self, address: str) -> None:
        self.registration = Registration()
        self.quick = Rank(address, 0, 2, engine="slow")
        self.slow = Rank(address, 1, 2, engine="slow", memory=self.registration.memory)
        self.scheduler = Scheduler(address, 2, engine="slow")

    def __enter__(self) -> Self:
        self.quick.start()
        self.slow.client.start(5)
        self.scheduler.start()
        assert self.registration.begun.wait(120)
        return self

    def __exit__(self, *_: object) -> None:
        self.registration.go_on.set()
        self.scheduler.close()
        self.quick.close()
        self.slow.close()

    def load(self) -> int:
        return self.scheduler.load(KEYS, [self.quick, self.slow])


@pytest.fixture
def slow(node: NodeThread) -> Iterator[Slow]:
    with Slow(node.address) as engine:
        yield engine


def ready_bytes(node: NodeThread, engine: str) -> list[int]:
    members = [m for m in node.status().members if m.session.startswith(f"{engine}#")]
    return sorted(m.ready_bytes for m in members if m.role != "scheduler")


def test_nothing_is_offered_while_a_rank_registers_and_all_of_it_after_that(
    node: NodeThread, first: Engine, slow: Slow
) -> None:
    assert ready_bytes(node, "slow") == [0, 16 * MIB]
    assert slow.scheduler.acquire(KEYS) is None
    assert slow.load() == 0
    status = node.status()
    assert status.catalog.leases == 0
    assert status.catalog.unready == 2
    said = " ".join(kvhaven("status", "--socket", node.address).split())
    assert said.count("connected, ready for 0 B of the arena so far") == 1
    assert first.load(KEYS) == 8, "nobody else waits"
    slow.registration.go_on.set()
    eventually(lambda: ready_bytes(node, "slow") == [16 * MIB, 16 * MIB])
    assert slow.load() == 8


def test_nothing_is_granted_while_a_rank_registers(node: NodeThread, slow: Slow) -> None:
    """Not to the rank that is ready, either: all ranks write into the extent of a chunk."""
    keys = prompt("q", 3)
    assert slow.quick.save(keys, save=1) == 0
    assert slow.slow.save(keys, save=1) == 0
    assert node.status().catalog.used_bytes == 0
    slow.registration.go_on.set()
    eventually(lambda: ready_bytes(node, "slow") == [16 * MIB, 16 * MIB])
    assert [rank.save(keys, save=2) for rank in (slow.quick, slow.slow)] == [3, 3]
    slow.slow.sync()
    assert eventually(lambda: slow.scheduler.load(keys, [slow.quick, slow.slow])) == 3


def test_each_step_is_used_when_it_is_registered(short_dir: Path) -> None:
    """An arena that grows is registered as it comes, and unregistered piece by piece."""
    registration = Registration()
    registration.go_on.set()
    with GrowingNode(short_dir / "s.sock") as node:
        rank = Rank(node.address, memory=registration.memory).start()
        eventually(lambda: ready_bytes(node, "engine") == [16 * MIB])
        address = rank.client.arena(rank.client.service).address_of(0, 0, 1)  # type: ignore[union-attr]
        ends = [address, *(start + size for start, size in registration.held)]
        assert [start for start, _ in registration.held] == ends[:-1], "without gaps"
        assert ends[-1] == address + 16 * MIB
        rank.close()
    assert registration.undone == registration.held


def test_a_device_that_cannot_register_is_only_slower(
    node: NodeThread, first: Engine, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    slow.registration.error = RuntimeError("no more locked memory")
    slow.registration.go_on.set()
    assert eventually(slow.load) == 8
    assert "could not be registered" in caplog.text
    slow.slow.close()
    assert slow.registration.undone == []


def test_who_says_that_an_older_mapping_is_ready_is_not_believed(
    node: NodeThread, slow: Slow
) -> None:
    """The rank was taken for gone, and what it said before arrives after it is back."""
    link, service = slow.slow.client._link, slow.slow.client.service
    (lock_byte,) = slow.slow.client.arena(service).lock_bytes  # type: ignore[union-attr]
    for wrong in (lock_byte - 1, lock_byte + 1):
        link.post_reliable(
            lambda seq, wrong=wrong: Ready(seq, 0, wrong, 16 * MIB),  # type: ignore[misc]
            service,
        )
    slow.slow.sync()
    assert ready_bytes(node, "slow") == [0, 16 * MIB]


def test_a_rank_that_was_taken_for_gone_is_not_ready_by_what_it_was(
    node: NodeThread, short_dir: Path
) -> None:
    with Proxy(short_dir / "p.sock", node.address) as proxy, Slow(proxy.address) as slow:
        slow.registration.go_on.set()
        eventually(lambda: ready_bytes(node, "slow") == [16 * MIB, 16 * MIB])
        slow.registration.go_on.clear()
        slow.registration.begun.clear()
        is_mapped = node.arena.is_mapped
        node.arena.is_mapped = lambda lock_byte: False  # type: ignore[method-assign]
        proxy.swallow = True
        node.cut()
        eventually(lambda: not node.call(lambda: len(node.service.sessions)))
        node.arena.is_mapped = is_mapped  # type: ignore[method-assign]
        proxy.drop()
        proxy.swallow = False
        assert slow.registration.begun.wait(120)
        eventually(lambda: ready_bytes(node, "slow") == [0, 16 * MIB])
        assert slow.quick.save(KEYS) == 0
        slow.registration.go_on.set()
        eventually(lambda: ready_bytes(node, "slow") == [16 * MIB, 16 * MIB])
        assert [rank.save(KEYS, save=1) for rank in (slow.quick, slow.slow)] == [8, 8]


def test_unregistering_an_old_arena_holds_up_nobody(short_dir: Path) -> None:
    address = short_dir / "s.sock"
    with contextlib.ExitStack() as stack:
        registration = Registration()
        registration.go_on.set()
        with NodeThread(address) as old:
            rank = Rank(old.address, memory=registration.memory).start()
            service = rank.client.service
        node = stack.enter_context(NodeThread(address))
        eventually(lambda: ready_bytes(node, "engine") == [16 * MIB])
        registration.go_on.clear()
        rank.client.keep_arenas(frozenset())
        assert rank.client.arena(service) is None
        assert registration.undone == []
        assert rank.save(KEYS) == 8
        registration.go_on.set()
        eventually(lambda: registration.undone == registration.held[:1])
        rank.close()
        assert registration.undone == registration.held


def test_a_rank_that_ends_while_it_registers_leaves_nothing(node: NodeThread) -> None:
    with Slow(node.address) as slow:
        threading.Timer(0.05, slow.registration.go_on.set).start()
        slow.slow.close()
    assert slow.registration.undone == slow.registration.held
    settled(node.address, members=0)


def test_the_end_does_not_wait_for_a_device_that_hangs(
    node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.client.rank._UNMAP_S", 0.1)
    with Slow(node.address) as slow:
        arena = slow.slow.client.arena(slow.slow.client.service)
        assert arena is not None
        slow.slow.close()
        assert arena.close().is_alive(), "it has waited until the device gave up"
        assert node.status().members
    settled(node.address, members=0)
