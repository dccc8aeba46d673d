# SPDX-License-Identifier: Apache-2.0
"""NIXL transfers that hang, helpers that die: memory is not reused before nothing can write it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from examples.demo.processes import free_port
from kvhaven.client.control import connect
from kvhaven.errors import TierError
from kvhaven.peers.nixl import NixlChannel
from kvhaven.peers.nixl_process import HelperProcess
from kvhaven.peers.tier import PeerTier
from kvhaven.service.arena import SEGMENT
from kvhaven.testing.tiers import until
from kvhaven.tiers.base import StoredShard
from kvhaven.types import Checksum, ChunkKey, Extent, NamespaceDigest, ShardId
from tests.commands import kvhaven
from tests.crash.engine import Engine, prompt
from tests.crash.forking_helper import CHILD
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.test_peers import announced, connected, node_of, pair
from tests.other_node import Pair, agreed, pair_of, skip_without_nixl, uses

pytestmark = pytest.mark.crash

PAGE = 4096
SIZE = 96 << 20
ARENA = 128 << 20
SHARD = StoredShard(
    NamespaceDigest(b"n" * 32), ChunkKey(b"k" * 32), ShardId(0, (0, 1), (0, 1)), SIZE
)
THEIRS = 0x11
"""What the next owner of the memory writes there."""
KEYS = prompt("p", 12)


@contextlib.asynccontextmanager
async def reading(pair: Pair) -> AsyncIterator[tuple[PeerTier, StoredShard, memoryview]]:
    """Yield a tier that reads over NIXL, a large shard that the other node has, and a buffer."""
    from tests.other_node import as_chunk

    payload = memoryview(bytearray(os.urandom(1 << 20) * (SIZE >> 20)))
    pair.node.put(SHARD, payload, Checksum(xxhash.xxh3_128_digest(payload)))
    tier = pair.peers(deadline_s=0.3)
    await tier.start()
    try:
        await agreed(tier, pair.channel)
        into = pair.arena.memory(Extent(SEGMENT, 0, SIZE, 0))
        yield tier, as_chunk(SHARD), into
        into.release()
    finally:
        await tier.close(5)


async def stopped_midway(
    pair: Pair, tier: PeerTier, shard: StoredShard, into: memoryview
) -> "asyncio.Task[Checksum]":
    """Begin a read, and stop the helper that sends when a part of the bytes has arrived."""
    assert isinstance(pair.node.channel, NixlChannel)
    sender = pair.node.channel.pids[0]
    for _ in range(20):
        into[:] = bytes(SIZE)
        read = asyncio.create_task(tier.read(shard, into))
        await until(lambda: sum(map(any, samples(into))) >= 3)
        os.kill(sender, signal.SIGSTOP)
        if not all(map(any, samples(into))) and not read.done():
            return read
        os.kill(sender, signal.SIGCONT)
        await read
    pytest.fail("the transfer could not be stopped midway")


def samples(into: memoryview) -> Iterator[memoryview]:
    """Yield a few bytes of each 64th part of a buffer."""
    return (into[at : at + 8] for at in range(SIZE // 64 - 8, SIZE, SIZE // 64))


def overwritten(into: memoryview) -> int:
    """Return how many pages are not as their owner wrote them."""
    page = bytes([THEIRS]) * PAGE
    return sum(into[at : at + PAGE] != page for at in range(0, SIZE, PAGE))


async def given_up(pair: Pair) -> int:
    """Stop the other node's helper in a transfer, give the memory away, and let it go on.

    Return how many pages were overwritten.
    """
    assert isinstance(pair.node.channel, NixlChannel)
    async with reading(pair) as (tier, shard, into):
        sender = pair.node.channel.pids[0]
        read = await stopped_midway(pair, tier, shard, into)
        try:
            async with asyncio.timeout(30):
                await read  # over TCP, after NIXL was given up
            assert xxhash.xxh3_128_digest(into) == await read
            assert uses(tier) == "tcp"
            into[:] = bytes([THEIRS]) * SIZE
            assert overwritten(into) == 0
        finally:
            os.kill(sender, signal.SIGCONT)
        # The stopped helper has gone on when it answers again: a test read from it has passed.
        with contextlib.suppress(TimeoutError):
            await until(lambda: uses(tier) == "nixl" or overwritten(into) > 0)
        return overwritten(into)


@pytest.mark.timeout(180)
async def test_a_transfer_that_was_given_up_writes_nothing_later() -> None:
    with pair_of("nixl", ARENA, retry_s=0.2) as pair:
        assert await given_up(pair) == 0
        assert not pair.node.open_loans


async def test_without_the_kill_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant believes that the memory is free."""
    with pair_of("nixl", ARENA, retry_s=0.2) as pair, monkeypatch.context() as patch:
        patch.setattr(HelperProcess, "kill", lambda _: True)
        patch.setattr(HelperProcess, "gone", True)
        assert await given_up(pair) > 0
        patch.undo()
        pair.channel.close()


def always(_: HelperProcess) -> bool:
    return True


def reaped(helper: HelperProcess) -> bool:
    return helper._process.poll() is not None


async def outlived(pair: Pair, child: Path) -> int:
    """Like `given_up`, but a child of the killed helper still has the memory, and writes it."""
    assert isinstance(pair.node.channel, NixlChannel)
    async with reading(pair) as (tier, shard, into):
        sender = pair.node.channel.pids[0]
        zombie = int(child.read_text())  # noqa: ASYNC240  nothing else runs
        read = await stopped_midway(pair, tier, shard, into)
        (peer,) = tier._peers.values()
        try:
            await until(lambda: not peer._data.running)  # the thread has given up
            await asyncio.sleep(0.2)
            reused = read.done()
            if reused:
                into[:] = bytes([THEIRS]) * SIZE
            os.kill(zombie, signal.SIGUSR1)
            with pair.arena.memory(Extent(SEGMENT, ARENA - PAGE, PAGE, 0)) as last:
                await until(lambda: any(last))  # it has written all
            result = overwritten(into) if reused else 0
        finally:
            os.kill(zombie, signal.SIGKILL)
            os.kill(sender, signal.SIGCONT)
        with contextlib.suppress(TierError):
            async with asyncio.timeout(30):
                await read
        if not reused:
            into[:] = bytes([THEIRS]) * SIZE
            result += overwritten(into)
        return result


@contextlib.contextmanager
def forking(child: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Yield two nodes whose receiving helpers leave a child behind."""
    monkeypatch.setenv(CHILD, str(child))
    program = (sys.executable, str(Path(__file__).with_name("forking_helper.py")))
    with pair_of("nixl", ARENA, retry_s=60, program=program) as pair:
        yield pair


@pytest.mark.timeout(180)
async def test_memory_is_not_reused_while_a_child_of_the_helper_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    with forking(child, monkeypatch) as pair:
        assert await outlived(pair, child) == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("gone", [always, reaped])
async def test_without_the_quarantine_the_child_writes_what_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: Callable[[HelperProcess], bool]
) -> None:
    child = tmp_path / "child"
    with forking(child, monkeypatch) as pair:
        monkeypatch.setattr(HelperProcess, "gone", property(gone))
        assert await outlived(pair, child) > 0


# Services


@contextlib.contextmanager
def services(short_dir: Path, **settings: object) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two services with NIXL; `b` reads from `a` over it."""
    skip_without_nixl()
    with pair(short_dir, transfer_channel="nixl", **settings) as (a, b):
        eventually(lambda: channel_of(b) == "nixl", 60)
        yield a, b


def channel_of(node: NodeProcess) -> str:
    (peer,) = status_of(node.address).peers
    return peer.channel


def reason_of(node: NodeProcess) -> str:
    (peer,) = status_of(node.address).peers
    return peer.channel_reason


def helpers(node: NodeProcess, role: str) -> list[int]:
    """Return the pids of a service's helpers."""
    found, service = [], status_of(node.address).pid
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = entry.joinpath("cmdline").read_bytes()
            if parent == service and b'"role":"%s"' % role.encode() in command:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_node_loads_what_is_in_anothers_memory_over_nixl(
    short_dir: Path, world_size: int
) -> None:
    with services(short_dir) as (a, b):
        with Engine(a.address, world_size) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address, world_size) as engine:
            assert engine.load([*KEYS, *prompt("unknown", 4)]) == len(KEYS)
        peer = status_of(b.address).tiers["peer"]
        assert (peer.reads, peer.rejected, peer.errors) == (len(KEYS) * world_size, 0, 0)
        assert channel_of(b) == "nixl"
        assert "nixl" in kvhaven("peers", "--socket", b.address)
        for node in (a, b):
            settled(node.address, members=0)
            left = helpers(node, "send") + helpers(node, "receive")
            assert len(left) == 2
            node.stop()
            eventually(lambda left=left: not any(map(alive, left)))  # type: ignore[misc]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_service_that_is_killed_takes_its_helpers_along(short_dir: Path) -> None:
    with services(short_dir) as (a, b):
        left = helpers(a, "send") + helpers(a, "receive")
        a.kill()
        eventually(lambda: not any(map(alive, left)))
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == 0
        a.start()
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            eventually(lambda: engine.load(KEYS) == len(KEYS), 60)


def test_a_helper_that_hangs_costs_a_transfer_and_then_tcp_is_used(short_dir: Path) -> None:
    with services(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        (sender,), (receiver,) = helpers(a, "send"), helpers(b, "receive")
        os.kill(sender, signal.SIGSTOP)
        try:
            with Engine(b.address) as engine:
                assert engine.load(KEYS) == len(KEYS)
            assert channel_of(b) == "tcp"
            assert "no answer within" in reason_of(b)
            assert not alive(receiver)
            assert "read over TCP" in b.log.read_text()
        finally:
            os.kill(sender, signal.SIGCONT)
        assert status_of(b.address).tiers["peer"].rejected == 0
        for node in (a, b):
            settled(node.address, members=0)


def test_a_helper_that_dies_is_started_again(short_dir: Path) -> None:
    with services(short_dir) as (a, b):
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        for node, role in ((a, "send"), (b, "receive")):
            (pid,) = helpers(node, role)
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: set(helpers(node, role)) - {pid}, 60)  # noqa: B023
            with connect(b.address) as control:
                control.clear()
            with Engine(b.address) as engine:
                assert engine.load(KEYS) == len(KEYS)
            eventually(lambda: channel_of(b) == "nixl", 60)
        settled(b.address, members=0)


def test_one_node_with_tcp_alone_is_read_over_tcp_and_says_why(short_dir: Path) -> None:
    skip_without_nixl()
    one, two = free_port(), free_port()
    with (
        node_of(short_dir, "a", one, two, transfer_channel="tcp") as a,
        node_of(short_dir, "b", two, one, transfer_channel="nixl") as b,
    ):
        connected(b)
        eventually(lambda: "the peer says" in reason_of(b), 60)
        assert "transfer_channel is tcp" in reason_of(b)
        with Engine(a.address) as engine:
            assert engine.save(KEYS) == len(KEYS)
        announced(b, len(KEYS))
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == len(KEYS)
        assert "TCP is used: the peer says" in kvhaven("peers", "--socket", b.address)


def test_a_self_test_that_fails_leaves_tcp_and_says_why(short_dir: Path) -> None:
    """A transport that is not here, as with `rc` on a machine without RDMA."""
    skip_without_nixl()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "rc,self")
        with pair(short_dir, transfer_channel="nixl") as (a, b):
            eventually(lambda: "failed its self-test" in reason_of(b), 60)
            with Engine(a.address) as engine:
                assert engine.save(KEYS) == len(KEYS)
            announced(b, len(KEYS))
            with Engine(b.address) as engine:
                assert engine.load(KEYS) == len(KEYS)
            assert "no RDMA device is active" in b.log.read_text()
            settled(b.address, members=0)
