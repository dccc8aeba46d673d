# SPDX-License-Identifier: Apache-2.0
"""Chains that one node computes and another expects: read chunk by chunk, and never waited for."""

import contextlib
import functools
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from kvhaven.client.scheduler import LeasedChunks, Outcome
from kvhaven.keys import tenant_id
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.wire import FOLLOWING, Offer, Progress, Stream, greet
from kvhaven.service.offered_chains import BEAT_S
from kvhaven.types import NO_TENANT, ChunkKey, TenantId
from tests.commands import kvhaven
from tests.crash.engine import CHUNK_SIZE, Engine, prompt
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.test_peers import announced, connected, node_of, pair_at
from tests.unit.test_peers import Held

pytestmark = pytest.mark.crash

KEYS = prompt("p", 12)
(TAIL,) = prompt("tail", 1)
TAIL_TOKENS = 4
PATIENCE_S = 4 * BEAT_S
"""Of a node, for what ranks still write of a chain whose request has ended."""
_names = itertools.count(1)


class Fleet:
    """A prefill node, a decode node, and an engine at each."""

    def __init__(self, p: NodeProcess, d: NodeProcess, to: str) -> None:
        self.p, self.d, self.to = p, d, to

    def offer(
        self,
        engine: Engine,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> str:
        """Have P's engine announce a chain, and wait until D expects it.

        A node that has just started is refused until D has noticed.
        """
        before = status_of(self.d.address).chains.expected
        for _ in range(20):
            refused = status_of(self.p.address).chains.refused
            name = f"request-{next(_names)}"
            engine.scheduler.client.offer_chain(name, self.to, keys, tenant, tail)
            eventually(functools.partial(self._fate, before, refused))
            if status_of(self.d.address).chains.expected > before:
                return name
            time.sleep(0.2)
        raise AssertionError("D never expects a chain")

    def _fate(self, expected: int, refused: int) -> bool:
        """Return whether a chain was expected or refused since these counts."""
        chains = status_of(self.d.address).chains
        return chains.expected > expected or status_of(self.p.address).chains.refused > refused

    def await_resident(self, chunks: int) -> None:
        """Wait until D's memory has this many chunks."""

        def there() -> bool:
            found = sum(n.chunks["memory"] for n in status_of(self.d.address).namespaces)
            assert found <= chunks
            return found == chunks

        eventually(there)

    def quiet(self) -> None:
        """Wait until no chain is open and nothing is held on either node."""
        for node in (self.p, self.d):
            await_no_chains(node)
            settled(node.address)


def await_no_chains(node: NodeProcess) -> None:
    """Wait until a node neither offers nor expects a chain."""
    eventually(lambda: status_of(node.address).chains.open == 0)


def one_in_time(attempt: Callable[[int], bool]) -> bool:
    """Return whether one of some attempts was quick enough: a busy machine may hold up others."""
    return any(attempt(number) for number in range(10))


@contextlib.contextmanager
def fleet(short_dir: Path, **settings: object) -> Iterator[Fleet]:
    """A prefill node and a decode node, which are each other's peers."""
    port = free_port()
    with pair_at(short_dir, free_port(), port, **settings) as (p, d):
        yield Fleet(p, d, f"127.0.0.1:{port}")


class Asking(threading.Thread):
    """A decode engine's lookup of a chain, and its load; `loaded` is how many chunks were right."""

    def __init__(
        self,
        engine: Engine,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.keys, self.tenant, self.tail = engine, keys, tenant, tail
        self.loaded = -1
        self.answered = 0.0
        self.pending = threading.Event()

    def run(self) -> None:
        client = self.engine.scheduler.client
        lease_id = client.ask(self.keys, self.tenant, self.tail, promote_s=60.0)
        assert lease_id is not None
        answer = client.wait(lease_id, 10)
        while answer is Outcome.PENDING:
            self.pending.set()
            time.sleep(0.005)
            answer = client.look_up(lease_id)
        self.answered = time.monotonic()
        if isinstance(answer, LeasedChunks):
            client.dispatched(lease_id)
            behind = [*self.keys, self.tail] if self.tail is not None else self.keys
            self.loaded = min(rank.load(answer, behind, TAIL_TOKENS) for rank in self.engine.ranks)
        else:
            self.loaded = 0

    def result(self) -> int:
        """Wait for its end."""
        self.join(60)
        assert not self.is_alive(), "a lookup hangs"
        return self.loaded


@pytest.mark.parametrize("world_size", [1, 2])
def test_chunks_move_while_the_prompt_is_computed(short_dir: Path, world_size: int) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address, world_size) as p, Engine(nodes.d.address, world_size) as d:
            name = nodes.offer(p, KEYS)
            for at in range(0, len(KEYS), 3):
                assert p.save(KEYS[at : at + 3], KEYS[at - 1] if at else None) == 3
                nodes.await_resident(at + 3)  # and nobody has asked D for them
            p.scheduler.client.end_chain(name)
            assert d.load(KEYS) == len(KEYS)
            assert status_of(nodes.d.address).catalog.hit_chunks == len(KEYS)
        nodes.quiet()


def test_a_request_waits_for_chunks_that_are_being_computed(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            nodes.offer(p, KEYS)
            asking = Asking(d, KEYS)
            asking.start()
            assert asking.pending.wait(120)
            assert p.save(KEYS[:6]) == 6
            nodes.await_resident(6)
            assert asking.is_alive()
            assert p.save(KEYS[6:], KEYS[5]) == 6
            assert asking.result() == len(KEYS)
        nodes.quiet()


@pytest.mark.parametrize("chunks", [0, 5])
def test_a_request_waits_for_the_tail_behind_its_chunks(short_dir: Path, chunks: int) -> None:
    keys = KEYS[:chunks]
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address, 2) as p, Engine(nodes.d.address, 2) as d:
            nodes.offer(p, keys, tail=TAIL)
            asking = Asking(d, keys, tail=TAIL)
            asking.start()
            assert asking.pending.wait(120)
            if keys:
                assert p.save(keys) == chunks
                nodes.await_resident(chunks)
            assert asking.is_alive()
            assert p.save([TAIL], keys[-1] if keys else None, tail=TAIL_TOKENS) == 1
            assert asking.result() == chunks + 1
            assert status_of(nodes.d.address).catalog.tails == 1
            # And once more: now the tail was there before.
            nodes.offer(p, keys, tail=TAIL)
            again = Asking(d, keys, tail=TAIL)
            again.start()
            assert again.result() == chunks + 1
        nodes.quiet()


@pytest.mark.parametrize("how", ["ended", "engine", "service", "stopped"])
def test_a_tail_that_does_not_come_ends_the_wait(short_dir: Path, how: str) -> None:
    keys = KEYS[:5]
    with fleet(short_dir) as nodes, Engine(nodes.d.address) as d:
        p = Engine(nodes.p.address).__enter__()
        try:
            name = nodes.offer(p, keys, tail=TAIL)
            asking = Asking(d, keys, tail=TAIL)
            asking.start()
            assert asking.pending.wait(120)
            assert p.save(keys) == 5
            nodes.await_resident(5)
            with contextlib.ExitStack() as stopped:
                if how == "ended":
                    p.scheduler.client.end_chain(name)
                elif how == "engine":
                    p.__exit__()
                elif how == "service":
                    nodes.p.kill()
                else:
                    stopped.enter_context(nodes.p.frozen())
                assert asking.result() == 5
                await_no_chains(nodes.d)
        finally:
            p.__exit__()
        settled(nodes.d.address, members=None)


def test_chunks_that_were_there_before_move_as_well(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address):
            assert p.save(KEYS) == len(KEYS)
            nodes.offer(p, KEYS)
            nodes.await_resident(len(KEYS))
        nodes.quiet()


def test_what_is_not_saved_is_not_waited_for_once_the_request_has_ended(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            name = nodes.offer(p, KEYS)
            asking = Asking(d, KEYS)
            asking.start()
            assert asking.pending.wait(120)
            assert p.save(KEYS[:5]) == 5
            p.scheduler.client.end_chain(name)
            assert asking.result() == 5
        nodes.quiet()


@pytest.mark.parametrize("how", ["engine", "service", "stopped"])
def test_a_prefill_that_dies_midway_ends_the_wait(short_dir: Path, how: str) -> None:
    with fleet(short_dir) as nodes, Engine(nodes.d.address) as d:
        p = Engine(nodes.p.address).__enter__()
        try:
            nodes.offer(p, KEYS)
            asking = Asking(d, KEYS)
            asking.start()
            assert asking.pending.wait(120)
            assert p.save(KEYS[:5]) == 5
            nodes.await_resident(5)
            with contextlib.ExitStack() as stopped:
                if how == "engine":
                    p.__exit__()
                elif how == "service":
                    nodes.p.kill()
                else:
                    stopped.enter_context(nodes.p.frozen())
                assert asking.result() == 5
                await_no_chains(nodes.d)
        finally:
            p.__exit__()
        settled(nodes.d.address, members=None)


def test_a_chain_is_expected_by_its_tenant_only(short_dir: Path) -> None:
    ann, ben = tenant_id("ann"), tenant_id("ben")
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            nodes.offer(p, KEYS, ann)
            asking = Asking(d, KEYS, ben)
            asking.start()
            assert asking.result() == 0
            assert p.save(KEYS, tenant=ann) == len(KEYS)
            nodes.await_resident(len(KEYS))
            assert d.load(KEYS, tenant=ben) == 0
            assert d.load(KEYS, tenant=ann) == len(KEYS)
        nodes.quiet()


def test_a_chain_longer_than_the_arena_is_cut_and_nobody_is_stuck(short_dir: Path) -> None:
    long = prompt("long", 600)
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            name = nodes.offer(p, long)
            for at in range(0, 600, 20):
                p.save(long[at : at + 20], long[at - 1] if at else None)
            p.scheduler.client.end_chain(name)
            nodes.quiet()
            assert d.load(long) >= 0
        nodes.quiet()


@pytest.mark.parametrize(
    ("to", "complaint"),
    [
        ("127.0.0.1:1", "not a peer that this node can reach"),
        ("no.such.host.invalid:7420", "not a peer that this node can reach"),
        ("http://x", "invalid address"),
    ],
)
def test_a_chain_for_a_stranger_is_refused_with_the_reason(
    short_dir: Path, to: str, complaint: str
) -> None:
    with fleet(short_dir) as nodes, Engine(nodes.p.address) as p:
        p.scheduler.client.offer_chain("request", to, KEYS)
        eventually(lambda: complaint in nodes.p.log.read_text())
        assert status_of(nodes.p.address).chains.open == 0
        assert p.save(KEYS) == len(KEYS)


@pytest.mark.parametrize(
    ("peers_of_p", "to", "refused"),
    [
        ("localhost:{}", "localhost:{}", False),
        ("dns://localhost:{}", "127.0.0.1:{}", False),
        ("dns://localhost:{}", "localhost:{}", False),
        ("dns://localhost:{}", "ip6-localhost:{}", True),
    ],
)
def test_a_chain_goes_to_an_address_that_is_written_as_in_peers(
    short_dir: Path, peers_of_p: str, to: str, refused: bool
) -> None:
    """As in deploy/kubernetes: P has D by name, D has P behind a name that may change."""
    ports = free_port(), free_port()
    with (
        node_of(short_dir, "p", ports[0], peers=peers_of_p.format(ports[1])) as p,
        node_of(short_dir, "d", ports[1], peers=f"dns://localhost:{ports[0]}") as d,
    ):
        connected(p)
        connected(d)
        nodes = Fleet(p, d, to.format(ports[1]))
        with Engine(p.address) as prefill, Engine(d.address) as decode:
            if refused:
                prefill.scheduler.client.offer_chain("request", nodes.to, KEYS)
                eventually(lambda: "not a peer that this node can reach" in p.log.read_text())
            else:
                name = nodes.offer(prefill, KEYS)
                assert prefill.save(KEYS) == len(KEYS)
                nodes.await_resident(len(KEYS))
                prefill.scheduler.client.end_chain(name)
                assert decode.load(KEYS) == len(KEYS)


def test_a_node_without_that_namespace_refuses_a_chain(short_dir: Path) -> None:
    with fleet(short_dir) as nodes, Engine(nodes.p.address) as p:
        p.scheduler.client.offer_chain("request", nodes.to, KEYS)
        eventually(lambda: "kvhaven peers diff" in nodes.p.log.read_text())
        await_no_chains(nodes.p)


@pytest.mark.parametrize(
    ("tail", "said", "reason"),
    [
        (TAIL, {"arrived": [2]}, "chunks that were not offered"),
        (b"", {"arrived": [], "tail": TAIL_TOKENS}, "a tail that was not offered"),
        (TAIL, {"arrived": [], "tail": CHUNK_SIZE + 1}, "a tail that was not offered or cannot be"),
        (TAIL, {"arrived": [0, 1], "tail": TAIL_TOKENS, "ended": True}, ""),
    ],
)
def test_a_node_that_does_not_have_what_it_names_is_a_miss(
    short_dir: Path, tail: bytes, said: dict[str, Any], reason: str
) -> None:
    port, end = free_port(), time.monotonic() + 60
    rogue = PeerListener(Address("127.0.0.1", 0), "rogue", b"", Held())
    with (
        contextlib.closing(rogue),
        node_of(short_dir, "d", port, rogue.port) as node,
        Engine(node.address) as d,
    ):
        connected(node)
        sock = socket.create_connection(("127.0.0.1", port))
        with contextlib.closing(Stream(sock, "d")) as stream:
            greet(stream, "rogue", b"", end)
            namespace = d.ranks[0].attach.namespace
            stream.send(Offer("chain", namespace, b"".join(KEYS[:2]), b"", tail), end)
            assert stream.receive(FOLLOWING, end).yes
            asking = Asking(d, KEYS[:2], tail=ChunkKey(tail) if tail else None)
            asking.start()
            assert asking.pending.wait(120)
            stream.send(Progress("chain", **said), end)
            answer = stream.receive(FOLLOWING, end)
            assert (answer.yes, reason in answer.reason) == (not reason, True)
            assert asking.result() == 0
        await_no_chains(node)
        settled(node.address)


def test_chains_with_kills_of_the_prefill_node_never_hang_or_lie(short_dir: Path) -> None:
    rng = random.Random(7)
    with fleet(short_dir) as nodes, Engine(nodes.d.address) as d:
        for turn in range(6):
            keys = prompt(f"turn {turn}", 12)
            with contextlib.ExitStack() as stack:
                p = stack.enter_context(Engine(nodes.p.address))
                connected(nodes.d)
                connected(nodes.p)
                nodes.offer(p, keys)
                asking = Asking(d, keys)
                asking.start()
                many = rng.randrange(1, len(keys))
                assert p.save(keys[:many]) == many
                time.sleep(rng.random() * 0.02)
                nodes.p.kill()
                assert 0 <= asking.result() <= many
            nodes.p.start()
        settled(nodes.d.address)


def test_tools_measure_a_node_and_name_the_field_that_keeps_two_apart(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        assert "round trip" in kvhaven("peers", "test", nodes.to, "--size", "1")
        assert "cannot be reached" in kvhaven("peers", "test", "127.0.0.1:1", status=1)
        here = ("--socket", nodes.p.address)
        assert "attached here" in kvhaven("peers", "diff", nodes.to, *here, status=1, whole=True)
        with Engine(nodes.p.address), Engine(nodes.d.address, 2):
            found = kvhaven("peers", "diff", nodes.to, *here, status=1, whole=True)
            assert "not there" in found
            assert "heads" in found
            with Engine(nodes.d.address, engine="like"):
                assert "shared" in kvhaven("peers", "diff", nodes.to, *here)


def test_of_two_offers_of_one_prompt_the_one_that_goes_on_is_waited_for(short_dir: Path) -> None:
    """The first request is aborted: what its chain has not brought, the second's still may."""
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            first = nodes.offer(p, KEYS, tail=TAIL)
            second = nodes.offer(p, KEYS, tail=TAIL)
            asking = Asking(d, KEYS, tail=TAIL)
            asking.start()
            asking.pending.wait(60)
            p.scheduler.client.end_chain(first)
            eventually(lambda: status_of(nodes.d.address).chains.open == 1)
            assert p.save(KEYS) == len(KEYS)
            assert p.save([TAIL], KEYS[-1], tail=TAIL_TOKENS) == 1
            p.scheduler.client.end_chain(second)
            assert asking.result() == len(KEYS) + 1
        nodes.quiet()


def test_a_tail_that_is_not_saved_is_given_up_before_chunks_that_may_be(short_dir: Path) -> None:
    """When a request has ended, only what ranks are still writing is worth a wait."""
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:

            def attempt(number: int) -> bool:
                first, other = prompt(f"first {number}", 4), prompt(f"other {number}", 4)
                names = [nodes.offer(p, first, tail=TAIL), nodes.offer(p, other)]
                without_tail, without_chunk = Asking(d, first, tail=TAIL), Asking(d, other)
                for asking in (without_tail, without_chunk):
                    asking.start()
                    asking.pending.wait(60)
                p.save(first)
                p.save(other[:-1])
                nodes.await_resident(7 * (number + 1))
                ended = time.monotonic()
                for name in names:
                    p.scheduler.client.end_chain(name)
                assert without_tail.result() == 4
                assert without_chunk.result() == 3
                assert without_chunk.answered - ended >= PATIENCE_S
                return without_tail.answered - ended < PATIENCE_S

            assert one_in_time(attempt)
        nodes.quiet()


def name_of(node: NodeProcess) -> str:
    """Return the name by which other nodes know a node."""
    return status_of(node.address).service


class Pulling(Asking):
    """An `Asking` that first has another node send what it has of the chain."""

    def __init__(
        self, engine: Engine, source: str, keys: Sequence[ChunkKey], tail: ChunkKey = TAIL
    ) -> None:
        super().__init__(engine, keys, tail=tail)
        self.source = source

    def run(self) -> None:
        self.engine.scheduler.client.pull_chain(self.source, self.keys, tail=self.tail)
        super().run()


def test_a_chain_is_pulled_from_the_node_that_computed_it_with_its_tail(short_dir: Path) -> None:
    """Its last chunks may still be on their way when the decode request comes."""
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            assert p.save(KEYS[:8]) == 8
            late = p.ranks[0].reserve([*KEYS[8:]], KEYS[7], save=99)
            behind = p.ranks[0].reserve([TAIL], KEYS[-1], save=100, tail=TAIL_TOKENS)
            asking = Pulling(d, name_of(nodes.p), KEYS)
            asking.start()
            asking.pending.wait(60)
            rank = p.ranks[0]
            rank.client.commit([rank.write(grant) for grant in late])
            rank.client.commit([rank.write(grant, tail=TAIL_TOKENS) for grant in behind])
            assert asking.result() == len(KEYS) + 1
            chains = status_of(nodes.d.address).chains
            assert chains.pulled == chains.expected == 1
        nodes.quiet()


def test_a_chain_that_is_announced_or_here_is_not_pulled_as_well(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            nodes.offer(p, KEYS, tail=TAIL)
            asking = Pulling(d, name_of(nodes.p), KEYS)
            asking.start()
            assert asking.pending.wait(120)
            assert p.save(KEYS) == len(KEYS)
            assert p.save([TAIL], KEYS[-1], tail=TAIL_TOKENS) == 1
            assert asking.result() == len(KEYS) + 1
            again = Pulling(d, name_of(nodes.p), KEYS)
            again.start()
            assert again.result() == len(KEYS) + 1
            chains = status_of(nodes.d.address).chains
            assert (chains.expected, chains.pulled) == (1, 0)
        nodes.quiet()


def test_a_chain_that_is_announced_after_it_was_pulled_comes_all_the_same(short_dir: Path) -> None:
    """The decode request may overtake the announcement."""
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            rank = p.ranks[0]

            def attempt(number: int) -> bool:
                begun = time.monotonic()
                (tail,) = prompt(f"tail {number}", 1)
                late = rank.reserve([tail], None, save=number, tail=TAIL_TOKENS)
                asking = Pulling(d, name_of(nodes.p), [], tail)
                asking.start()
                assert asking.pending.wait(120)
                name = nodes.offer(p, [], tail=tail)
                p.scheduler.client.end_chain(name)
                rank.client.commit([rank.write(grant, tail=TAIL_TOKENS) for grant in late])
                in_time = time.monotonic() - begun < PATIENCE_S
                assert asking.result() == 1 or not in_time
                return in_time

            assert one_in_time(attempt)
        nodes.quiet()


def test_what_the_other_node_does_not_have_is_not_waited_for(short_dir: Path) -> None:
    with fleet(short_dir) as nodes:
        with Engine(nodes.p.address) as p, Engine(nodes.d.address) as d:
            assert p.save(KEYS[:8]) == 8
            asking = Pulling(d, name_of(nodes.p), KEYS)
            asking.start()
            assert asking.result() == 8
        nodes.quiet()


@pytest.mark.parametrize("source", ["nobody", "one that does not know the asker"])
def test_a_node_that_cannot_be_asked_for_a_chain_is_asked_for_chunks(
    short_dir: Path, source: str
) -> None:
    port = free_port()
    with (
        node_of(short_dir, "p", port) as there,
        node_of(short_dir, "d", free_port(), port) as here,
    ):
        with Engine(there.address) as p, Engine(here.address) as d:
            connected(here)
            assert p.save(KEYS) == len(KEYS)
            announced(here, len(KEYS))
            name = name_of(there) if source != "nobody" else source
            asking = Pulling(d, name, KEYS)
            asking.start()
            assert asking.result() == len(KEYS)
        for node in (there, here):
            await_no_chains(node)
            settled(node.address)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_node_that_dies_while_it_is_asked_for_a_chain_is_not_waited_for(
    short_dir: Path, end: str
) -> None:
    with (
        fleet(short_dir, pd_stall_ms=500) as nodes,
        Engine(nodes.p.address) as p,
        Engine(nodes.d.address) as d,
    ):
        assert p.save(KEYS[:8]) == 8
        late = p.ranks[0].reserve([KEYS[8]], KEYS[7], save=99)
        assert late
        asking = Pulling(d, name_of(nodes.p), KEYS)
        asking.start()
        asking.pending.wait(60)
        with nodes.p.frozen() if end == "stop" else contextlib.nullcontext():
            if end == "kill":
                nodes.p.kill()
            assert asking.result() <= 8
            await_no_chains(nodes.d)
            settled(nodes.d.address)
