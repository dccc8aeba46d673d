# SPDX-License-Identifier: Apache-2.0
"""The client's connection: lost, remade, refused. Nobody waits for long, nothing leaks."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.client.link import Link
from kvhaven.client.scheduler import Outcome
from kvhaven.errors import KVHavenError, ServiceUnavailableError
from kvhaven.protocol import (
    Attached,
    AttachRank,
    AttachScheduler,
    Granted,
    Message,
    Reserve,
    ServiceMessage,
)
from tests.crash.engine import EXTENT_BYTES, Engine, Rank, Scheduler, prompt
from tests.crash.node import NodeThread, eventually, settled
from tests.crash.proxy import Proxy


@pytest.fixture
def engine(proxy: Proxy) -> Iterator[Engine]:
    with Engine(proxy.address) as engine:
        yield engine


def both_up(engine: Engine) -> bool:
    return engine.ranks[0].client.wait_ready(0.01) and engine.scheduler.client.responsive


def drop(proxy: Proxy, engine: Engine) -> None:
    """Drop both connections with all that was swallowed, and wait until they are remade."""
    proxy.drop()
    proxy.swallow = False
    eventually(lambda: proxy.connections == 2 and both_up(engine))


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


# --- lost and remade --------------------------------------------------------------------------


def test_a_lost_connection_is_remade_and_the_cache_is_still_there(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    keys = prompt("p", 5)
    engine.save(keys)
    for _ in range(3):
        assert eventually(lambda: engine.load(keys)) == 5
        drop(proxy, engine)
    assert engine.load(keys) == 5
    settled(node.address, members=2)


def test_an_acknowledgement_that_got_lost_is_said_again(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    keys = prompt("p", 3)
    engine.save(keys)
    lease = eventually(lambda: engine.scheduler.acquire(keys))
    engine.scheduler.client.dispatched(lease.lease_id)
    proxy.swallow = True
    engine.ranks[0].load(lease, keys)
    time.sleep(0.05)
    assert node.status().catalog.leases == 1
    drop(proxy, engine)
    settled(node.address, members=2)


def test_a_lease_survives_the_loss_of_the_connection(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    keys = prompt("p", 3)
    engine.save(keys)
    lease = eventually(lambda: engine.scheduler.acquire(keys))
    drop(proxy, engine)
    assert node.status().catalog.leased_bytes == 3 * EXTENT_BYTES
    assert engine.scheduler.client.look_up(lease.lease_id) == lease
    engine.scheduler.client.dispatched(lease.lease_id)
    assert engine.ranks[0].load(lease, keys) == 3
    settled(node.address, members=2)


def test_a_question_whose_answer_got_lost_is_a_miss_and_holds_nothing(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    keys = prompt("p", 3)
    engine.save(keys)
    eventually(lambda: engine.load(keys))
    proxy.delay_s = 20  # the answer is still there when the connection is dropped
    lease_id = engine.scheduler.client.ask(keys)
    assert lease_id is not None
    eventually(lambda: node.status().catalog.leases)
    proxy.delay_s = 0
    drop(proxy, engine)
    assert engine.scheduler.client.look_up(lease_id) is Outcome.MISS
    settled(node.address, members=2)
    assert engine.load(keys) == 3


def test_a_grant_whose_answer_got_lost_is_given_back(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    proxy.delay_s = 0.3
    reservation = engine.ranks[0].client.reserve(None, prompt("p", 4), 1)
    assert reservation is not None
    eventually(lambda: node.status().catalog.reserved_bytes)
    proxy.delay_s = 0
    drop(proxy, engine)
    assert engine.ranks[0].client.grants(reservation, time.monotonic()) == [None] * 4
    settled(node.address, members=2)
    assert engine.save(prompt("p", 4)) == 4


@contextlib.contextmanager
def lost_before_the_next_message(link: Link, proxy: Proxy) -> Iterator[None]:
    """Lose a connection just before the next message, and give it a second to be remade."""
    post, before = link.post, link._socket

    def late(message: Message) -> bool:
        proxy.drop()
        with contextlib.suppress(AssertionError):
            eventually(lambda: link._socket not in {None, before}, 1)
        return post(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "post", late)
        yield


def test_a_request_at_the_moment_of_a_loss_leaves_no_grant(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    """The loss ends all requests. One that is sent after it must not count among these."""
    rank, keys = engine.ranks[0], prompt("p", 2)
    with lost_before_the_next_message(rank.client._link, proxy):
        rank.reserve(keys)
    eventually(lambda: both_up(engine))
    rank.client.abort(rank.reserve(prompt("q", 2)))  # the service has handled all before it
    settled(node.address, members=2)


def test_a_question_at_the_moment_of_a_loss_leaves_no_lease(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    keys, client = prompt("p", 2), engine.scheduler.client
    engine.save(keys)
    eventually(lambda: engine.load(keys))
    with lost_before_the_next_message(client._link, proxy):
        proxy.delay_s = 0.2  # of answers
        lease_id = client.ask(keys)
        eventually(lambda: lease_id is None or client.look_up(lease_id) is Outcome.MISS)
        proxy.delay_s = 0
    eventually(lambda: both_up(engine) and engine.load(keys))
    settled(node.address, members=2)


def test_what_was_granted_before_the_loss_is_discarded_when_it_is_committed(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    rank, keys = engine.ranks[0], prompt("p", 2)
    grants = rank.reserve(keys)
    drop(proxy, engine)
    status = node.status()
    assert status.catalog.retired_bytes == 2 * EXTENT_BYTES
    rank.client.commit([rank.write(grants[0])])
    rank.client.abort(grants[1:])
    settled(node.address, members=2)
    assert engine.load(keys) == 0
    assert engine.save(keys) == 2
    assert eventually(lambda: engine.load(keys)) == 2


def test_reconnects_leak_neither_descriptors_nor_threads(engine: Engine, proxy: Proxy) -> None:
    for _ in range(3):
        drop(proxy, engine)
    time.sleep(0.1)
    before = descriptors(), threading.active_count()
    for _ in range(25):
        drop(proxy, engine)
    eventually(lambda: threading.active_count() <= before[1])
    eventually(lambda: descriptors() <= before[0])


def test_clients_that_end_leave_no_descriptor_and_no_thread(node: NodeThread) -> None:
    with Engine(node.address):
        pass
    before = descriptors(), threading.active_count()
    for _ in range(5):
        with Engine(node.address, 2):
            pass
        settled(node.address, members=0)
    # What each round leaves adds up; what another test left may come and go meanwhile.
    eventually(lambda: threading.active_count() < before[1] + 5)
    eventually(lambda: descriptors() < before[0] + 5)


def test_who_was_taken_for_gone_maps_anew_under_the_new_lock(
    engine: Engine, proxy: Proxy, node: NodeThread
) -> None:
    """What proves that a process lives are the locks that the service knows of."""
    keys = prompt("p", 3)
    engine.save(keys)
    eventually(lambda: engine.load(keys))
    arena = node.arena
    is_mapped = arena.is_mapped
    arena.is_mapped = lambda lock_byte: False  # type: ignore[method-assign]
    proxy.swallow = True
    node.cut()
    eventually(lambda: not node.call(lambda: len(node.service.sessions)))
    arena.is_mapped = is_mapped  # type: ignore[method-assign]
    drop(proxy, engine)
    sessions = node.call(
        lambda: [m.lock_byte for s in node.service.sessions for m in s.processes.values()]
    )
    assert len(sessions) == 2
    assert all(arena.is_mapped(byte) for byte in sessions)
    assert engine.load(keys) == 3
    assert engine.save(prompt("q", 3)) == 3


# --- another service --------------------------------------------------------------------------


def test_what_was_said_to_an_old_service_is_void_for_a_new_one(short_dir: Path) -> None:
    address = short_dir / "s.sock"
    keys = prompt("p", 4)
    with contextlib.ExitStack() as stack:
        with NodeThread(address) as old:
            engine = stack.enter_context(Engine(old.address))
            rank = engine.ranks[0]
            engine.save(keys)
            lease = eventually(lambda: engine.scheduler.acquire(keys))
            grants = rank.reserve(prompt("q", 2))
        eventually(lambda: not rank.client.up)
        rank.client.commit([rank.write(grants[0])])
        new = stack.enter_context(NodeThread(address))
        eventually(lambda: both_up(engine))
        rank.client.commit([rank.write(grants[1])])
        # The old arena is mapped as long as a lease lies in it.
        services = engine.scheduler.client.services_in_use
        assert services == {lease.service, engine.scheduler.client.service}
        rank.client.keep_arenas(services)
        engine.scheduler.client.dispatched(lease.lease_id)
        assert rank.load(lease, keys) == 4
        rank.client.keep_arenas(engine.scheduler.client.services_in_use)
        assert rank.client.arena(lease.service) is None
        assert engine.load(keys) == 0
        assert engine.save(keys) == 4
        assert eventually(lambda: engine.load(keys)) == 4
        settled(new.address, members=2)
        status = new.status()
        assert status.catalog.refused_commits == 0
        assert status.catalog.commits == 4
        new.check()
        engine.scheduler.client.release([lease.lease_id])


def test_a_service_that_comes_later_is_found(short_dir: Path) -> None:
    address = short_dir / "s.sock"
    rank = Rank(str(address))
    with pytest.raises(ServiceUnavailableError, match=r"no node service answered .* within 0\.1 s"):
        rank.start(0.1)
    assert rank.client.reserve(None, prompt("p", 1), 1) is None
    with NodeThread(address):
        eventually(lambda: rank.client.up)
        assert rank.save(prompt("p", 2)) == 2
    rank.close()


def test_services_are_known_before_the_first_attach(short_dir: Path) -> None:
    scheduler = Scheduler(str(short_dir / "none.sock"))
    assert scheduler.client.services_in_use == {""}
    assert scheduler.client.ask(prompt("p", 1)) is None
    assert not scheduler.client.responsive
    scheduler.client.release([1])
    scheduler.close()


# --- refused ----------------------------------------------------------------------------------


def test_a_refused_start_says_why_and_ends_the_link(node: NodeThread) -> None:
    before = set(threading.enumerate())
    with contextlib.closing(Rank(node.address).start()):
        other = Rank(node.address)
        with pytest.raises(KVHavenError, match="is attached already"):
            other.start()
        assert not other.client.up
        other.close()
    links = {t for t in threading.enumerate() if t.name == "kvhaven-link"}
    assert not links - before, "threads of earlier tests may still be ending"


def test_a_service_that_cannot_be_started_is_a_refusal_with_its_reason(short_dir: Path) -> None:
    from kvhaven.client.embedded import EmbeddedService
    from kvhaven.config import Settings

    settings = Settings(
        runtime_dir=str(short_dir), max_local_cpu_size=1 << 50, arena_strict=True, log_level="ERROR"
    )
    address = str(short_dir / "engine-x.sock")
    rank = Rank(address, ensure_service=EmbeddedService(settings, address).ensure)
    with pytest.raises(KVHavenError, match="set max_local_cpu_size to at most"):
        rank.start(30)
    rank.close()
    assert list(short_dir.iterdir()) == []


class Clumsy:
    """A listener with a mistake in it."""

    def __init__(self, attach: AttachRank) -> None:
        self.attach = attach
        self.attached_times = 0
        self.heard: list[ServiceMessage] = []

    def greeting(self) -> AttachRank | AttachScheduler:
        return self.attach

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self.attached_times += 1

    def received(self, message: ServiceMessage) -> None:
        self.heard.append(message)
        if len(self.heard) == 1:
            raise ZeroDivisionError("a mistake")

    def detached(self) -> None:
        pass

    def forked(self) -> None:
        pass


def test_a_mistake_in_the_listener_costs_a_connection_and_not_the_thread(node: NodeThread) -> None:
    clumsy = Clumsy(Rank(node.address).attach)
    link = Link(node.address, clumsy)
    link.start(5)
    assert link.post(Reserve(1, b"", b"", 1))
    eventually(lambda: clumsy.attached_times == 2)
    eventually(lambda: link.up)
    assert link.post(Reserve(2, b"", b"", 1))
    eventually(lambda: clumsy.heard[1:] == [Granted(2, [])])
    assert link.close()
