# SPDX-License-Identifier: Apache-2.0
"""Reads from another node's memory over NIXL, against NIXL alone with the same descriptors.

Both move 256 MiB in shards of 4 MiB, four at a time, from the shared memory of one process to that
of another, by NIXL's READ with `UCX_TLS=tcp,self`. All reads are under way at the same time, as in
a service, so that a thread does not wait for the event loop after each shard; with `peer.nixl.few`,
only as many as the peer reads at a time. NIXL alone advances its transfers as our helpers do (no
progress thread, a pause of 0.1 ms), which was its fastest setting, and is measured with the
xxh3-128 of all bytes (`peer.nixl`), computed in two threads, and without (`peer.nixl.unverified`):
ours always verifies, which costs more where the cores are all busy. While one side is measured, the
processes of the other are stopped. `peer.nixl.tcp` is our own channel over TCP, in the same run.
"""

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, Final

import xxhash

from benchmarks.lender import NumberedShards
from benchmarks.results import Result, at_least
from examples.demo.processes import ProcessError
from kvhaven.peers.addresses import Address
from kvhaven.peers.channels import INSTALL, PACKAGES, helper_environment
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.nixl import NixlChannel
from kvhaven.peers.tier import PeerTier
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.types import (
    ChunkKey,
    Extent,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
)

_SHARD: Final = 4 << 20
_SHARDS: Final = 64
_BYTES: Final = _SHARD * _SHARDS
_AT_ONCE: Final = 2
_ROUNDS: Final = 30
_SAY: Final = 10
"""Rounds of which one is shown."""
_WANTED: Final = 0.90
_READY_S: Final = 60.0
_PAUSE_S: Final = 1e-4
_ID: Final = ShardId(0, (0, 1), (0, 1))
_SPACE: Final = Namespace(NamespaceDigest(b"n" * 32), {}, ShardTable((Shard(_ID, _SHARD),)))
_processes: Final = multiprocessing.get_context("spawn")


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure `peer.nixl` and what it is compared with: medians of rounds that alternate.

    Without NIXL, returns nothing.
    """
    if not any(find_spec(name) for name in PACKAGES):
        say(f"left out, NIXL is not installed: {INSTALL}")
        return []
    os.environ.update(helper_environment([]))
    programs = (_node, _bare_sender, _bare_receiver)
    pipes = [_processes.Pipe() for _ in programs]
    processes = [
        _processes.Process(target=program, args=(pipe[1],), daemon=True)
        for program, pipe in zip(programs, pipes, strict=True)
    ]
    arena = Arena(_BYTES, strict=True, first_bytes=_BYTES)
    channel = NixlChannel(arena, ["UCX"], helper_environment([]))
    try:
        for process in processes:
            process.start()
        node, sender, receiver = (pipe[0] for pipe in pipes)
        port = node.recv()
        receiver.send(sender.recv())
        bare = [process.pid or 0 for process in processes[1:]]
        rows = asyncio.run(_alternate(channel, arena, port, node, receiver, bare, say))
    finally:
        channel.close()
        arena.close()
        for process in processes:
            process.kill()
    ours, few, verified, bare_rates, tcp = rows
    value, limit = statistics.median(ours), statistics.median(bare_rates)
    what = "NIXL alone with xxh3, same descriptors"
    return [
        at_least("peer.nixl", ours, "GB/s", verified, _WANTED, what),
        Result(
            "peer.nixl.few",
            statistics.median(few),
            "GB/s",
            statistics.median(verified),
            len(few),
            what,
        ),
        Result("peer.nixl.unverified", value, "GB/s", limit, len(ours), "NIXL alone, without xxh3"),
        Result(
            "peer.nixl.tcp", value, "GB/s", statistics.median(tcp), len(tcp), "our TCP, as verified"
        ),
    ]


async def _alternate(
    channel: NixlChannel,
    arena: Arena,
    port: int,
    node: Connection,
    receiver: Connection,
    bare: Sequence[int],
    say: Callable[[str], None],
) -> tuple[list[float], ...]:
    channel.start()
    address = Address("127.0.0.1", port)
    over_nixl = PeerTier([address], token=b"", streams=2 * _AT_ONCE, channel=channel, deadline_s=5)
    over_tcp = PeerTier([address], token=b"", streams=2 * _AT_ONCE)
    ours: list[float] = []
    few: list[float] = []
    verified: list[float] = []
    limits: list[float] = []
    tcp: list[float] = []
    memory = arena.memory(Extent(SEGMENT, 0, _BYTES, 0))
    buffers = [memory[at * _SHARD : (at + 1) * _SHARD] for at in range(_SHARDS)]
    await over_nixl.start()
    await over_tcp.start()
    try:
        await _agreed(over_nixl)
        helpers = [*channel.pids, *_ask(node, "pids")]
        for number in range(_ROUNDS + 1):
            _signal(bare, signal.SIGSTOP)
            rate = await _read(over_nixl, buffers, _SHARDS)
            few_rate = await _read(over_nixl, buffers, 2 * _AT_ONCE)
            _signal(helpers, signal.SIGSTOP)
            plain_rate = await _read(over_tcp, buffers, _SHARDS)
            _signal(bare, signal.SIGCONT)
            limit = await asyncio.to_thread(_ask, receiver, False)
            limit_verified = await asyncio.to_thread(_ask, receiver, True)
            _signal(helpers, signal.SIGCONT)
            if number:  # the first round fills page tables
                ours.append(rate)
                few.append(few_rate)
                limits.append(limit)
                verified.append(limit_verified)
                tcp.append(plain_rate)
            if number % _SAY == 1:
                say(
                    f"peer {rate:.2f} GB/s; NIXL alone with xxh3 {limit_verified:.2f} (ratio "
                    f"{rate / limit_verified:.2f}), without {limit:.2f}; our TCP {plain_rate:.2f}"
                )
        (status,) = over_nixl.peers()
        if status.channel != "nixl":
            raise ProcessError(f"TCP was used: {status.channel_reason}")
    finally:
        await over_nixl.close(5)
        await over_tcp.close(5)
        for buffer in (*buffers, memory):
            buffer.release()
    return ours, few, verified, limits, tcp


async def _agreed(tier: PeerTier) -> None:
    """Wait until both nodes have agreed on NIXL."""
    end = time.monotonic() + _READY_S
    while not any(peer.channel == "nixl" for peer in tier.peers()):
        if time.monotonic() > end:
            raise ProcessError(f"no NIXL: {tier.peers()}")
        await asyncio.sleep(0.05)


async def _read(tier: PeerTier, buffers: Sequence[memoryview], at_once: int) -> float:
    """Read all shards, with `at_once` reads under way; return GB/s."""
    waiting = list(enumerate(buffers))

    async def worker() -> None:
        while waiting:
            number, buffer = waiting.pop()
            key = ChunkKey(number.to_bytes(32, "big"))
            await tier.read(StoredShard(_SPACE.digest, key, _ID, _SHARD), buffer)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return _BYTES / (time.perf_counter() - began) / 1e9


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _ask(
    process: Connection, question: str | bool
) -> Any:  # a process of ours knows what it answers
    process.send(question)
    return process.recv()


def _node(orders: Connection) -> None:
    """Be a node that holds all shards, until killed; tell the pids of its helpers."""
    arena = Arena(_BYTES, strict=True, first_bytes=_BYTES)
    channel = NixlChannel(arena, ["UCX"], helper_environment([]))
    held = NumberedShards(_SPACE, _SHARDS, arena.memory, SEGMENT)
    listener = PeerListener(Address("127.0.0.1", 0), "bench", b"", held, channel=channel)
    channel.start()
    orders.send(listener.port)
    while orders.recv():
        orders.send(channel.pids)


class _Bare:
    """A NIXL agent over shared memory."""

    def __init__(self, name: str) -> None:
        import nixl_cu12 as nixl  # noqa: PLC0415 - only these processes run NIXL

        os.nice(10)  # as our helpers
        file = os.memfd_create(name)
        os.ftruncate(file, _BYTES)
        self.map = mmap.mmap(file, _BYTES)
        self.map[:] = os.urandom(1 << 20) * (_BYTES >> 20)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = nixl.nixl_agent(name, config)
        self.agent.register_memory([(self.base, _BYTES, 0, "")], "DRAM")


def _bare_sender(orders: Connection) -> None:
    """Be read from, until killed."""
    bare = _Bare("sender")
    orders.send((bare.agent.get_agent_metadata(), bare.base))
    while True:
        bare.agent.get_new_notifs()
        time.sleep(_PAUSE_S)


def _bare_receiver(orders: Connection) -> None:
    """Read all shards, when told to verify them (True) or not, and answer with GB/s."""
    bare = _Bare("receiver")
    metadata, there = orders.recv()
    agent = bare.agent
    peer = agent.add_remote_agent(metadata)

    def begin(offset: int) -> Any:  # NIXL's handle
        here = agent.get_xfer_descs([(bare.base + offset, _SHARD, 0)], "DRAM")
        remote = agent.get_xfer_descs([(there + offset, _SHARD, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, remote, peer)
        agent.transfer(handle)
        return handle

    def verify(offset: int) -> bytes:
        with memoryview(bare.map) as whole, whole[offset : offset + _SHARD] as shard:
            return xxhash.xxh3_128_digest(shard)

    hashers = ThreadPoolExecutor(_AT_ONCE)
    while True:
        hashed, hashes = orders.recv(), []
        began = time.perf_counter()
        waiting = list(range(0, _BYTES, _SHARD))
        running: list[tuple[int, Any]] = []  # with NIXL's handles
        while waiting or running:
            while waiting and len(running) < 2 * _AT_ONCE:
                running.append((waiting[-1], begin(waiting.pop())))
            left = []
            for offset, handle in running:
                if agent.check_xfer_state(handle) == "DONE":
                    agent.release_xfer_handle(handle)
                    if hashed:
                        hashes.append(hashers.submit(verify, offset))
                else:
                    left.append((offset, handle))
            running = left
            time.sleep(_PAUSE_S)
        for one in hashes:
            one.result()
        orders.send(_BYTES / (time.perf_counter() - began) / 1e9)
