# SPDX-License-Identifier: Apache-2.0
"""Reads from another node's memory over TCP, against bare sockets that carry the same bytes.

A process keeps the bytes in memory. Bare sockets move them over two connections, a peer over four,
and both compute the xxh3-128 of what arrives, in threads at nice 10. All needs 2 GiB of memory.

- `peer.tcp`: 512 MiB over loopback, in shards of 8 MiB: the protocol and the threads, not a
  network. Such a shard has 256 tokens of Llama 3.1 8B on each of four ranks. As many reads are
  under way as a service has at most, 64. `peer.tcp.few`: only as many as the peer has threads, so
  that each waits for the event loop after each shard. `peer.tcp.small`, `peer.tcp.large`: shards of
  4 and 16 MiB.
- `peer.tcp.1g`, `peer.tcp.4g`: between two network namespaces, over a link that `tbf` limits to 1
  and 4 Gbit (root only).
"""

import asyncio
import contextlib
import mmap
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import xxhash

from benchmarks.lender import NumberedShards
from benchmarks.networks import NoLinkError, link
from benchmarks.results import Result, at_least
from kvhaven.errors import KVHavenError
from kvhaven.niceness import lower_thread_priority
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import PeerTier
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.types import (
    ChunkKey,
    Extent,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
)

_MEMORY: Final = 512 << 20
_SMALL: Final = 4 << 20
_MEDIUM: Final = 8 << 20
_LARGE: Final = 16 << 20
_STREAMS: Final = 2
_AT_ONCE: Final = 64
"""Reads of a tier that a service has under way at most."""
_ID: Final = ShardId(0, (0, 1), (0, 1))
_SPACES: Final = {
    size: Namespace(NamespaceDigest(b"f" * 32), {}, ShardTable((Shard(_ID, size),)))
    for size in (_SMALL, _MEDIUM, _LARGE)
}


@dataclass(frozen=True)
class _Plan:
    """Size of a comparison, and its target: both read `size` bytes in shards of `shard` bytes."""

    size: int
    rounds: int
    wanted: float
    what: str
    at_once: int = _AT_ONCE
    shard: int = _MEDIUM


@dataclass(frozen=True)
class _Ports:
    """Ports of a sender: those of peers by the size of their shards, and that of bare sockets."""

    peers: dict[int, int]
    bare: int


_BARE: Final = "bare sockets with xxh3"
_LOOPBACK: Final = {
    "peer.tcp": _Plan(_MEMORY, 15, 0.85, _BARE),
    "peer.tcp.few": _Plan(_MEMORY, 15, 0.85, _BARE, at_once=2 * _STREAMS),
    "peer.tcp.small": _Plan(_MEMORY, 15, 0.85, _BARE, shard=_SMALL),
    "peer.tcp.large": _Plan(_MEMORY, 15, 0.85, _BARE, shard=_LARGE),
}
_THROUGH: Final = "bare sockets with xxh3 through the same link"
_LINKS: Final = {
    "peer.tcp.1g": ("1gbit", _Plan(_MEMORY // 8, 5, 0.95, _THROUGH)),
    "peer.tcp.4g": ("4gbit", _Plan(_MEMORY // 2, 5, 0.95, _THROUGH)),
}


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure all: medians of rounds that alternate."""
    with _sender("127.0.0.1") as ports:
        results = [
            _compare(name, "127.0.0.1", ports, plan, say) for name, plan in _LOOPBACK.items()
        ]
    try:
        with link() as ends, contextlib.ExitStack() as stack:
            with ends.far.inside():
                ports = stack.enter_context(_sender(ends.far.address))
            stack.enter_context(ends.near.inside())
            for name, (rate, plan) in _LINKS.items():
                ends.limit(rate)
                results.append(_compare(name, ends.far.address, ports, plan, say))
    except NoLinkError as reason:
        say(f"skipped: {', '.join(_LINKS)}: {reason}")
    return results


@contextlib.contextmanager
def _sender(host: str) -> Iterator[_Ports]:
    """Start a process that serves both protocols; yield its ports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(host, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()


def _compare(
    name: str, host: str, ports: _Ports, plan: _Plan, say: Callable[[str], None]
) -> Result:
    with (
        mmap.mmap(-1, plan.size) as memory,
        memoryview(memory) as whole,
        contextlib.ExitStack() as stack,
    ):
        starts = range(0, plan.size, plan.shard)
        buffers = [stack.enter_context(whole[at : at + plan.shard]) for at in starts]
        rates, limits = asyncio.run(_alternate(host, ports, buffers, plan, say))
    return at_least(name, rates, "GB/s", limits, plan.wanted, plan.what)


async def _alternate(
    host: str,
    ports: _Ports,
    buffers: Sequence[memoryview],
    plan: _Plan,
    say: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    tier = PeerTier([Address(host, ports.peers[plan.shard])], token=b"", streams=2 * _STREAMS)
    await tier.start()
    bare = [socket.create_connection((host, ports.bare)) for _ in range(_STREAMS)]
    rates, limits = [], []
    try:
        for number in range(plan.rounds + 1):
            limit = await asyncio.to_thread(_read_bare, bare, buffers)
            began = time.perf_counter()
            await _read_peer(tier, buffers, plan.at_once)
            rate = plan.size / (time.perf_counter() - began) / 1e9
            if number:  # the first round fills page tables
                rates.append(rate)
                limits.append(limit)
                say(f"peer {rate:.2f} GB/s, bare {limit:.2f} GB/s, ratio {rate / limit:.2f}")
    finally:
        for sock in bare:
            sock.close()
        await tier.close(5)
    return rates, limits


async def _read_peer(tier: PeerTier, buffers: Sequence[memoryview], at_once: int) -> None:
    """Read all shards, `at_once` at a time; the peer's four threads share them."""
    waiting = list(enumerate(buffers))

    async def worker() -> None:
        while waiting:
            number, buffer = waiting.pop()
            key = ChunkKey(number.to_bytes(32, "big"))
            space = _SPACES[len(buffer)]
            await tier.read(StoredShard(space.digest, key, _ID, len(buffer)), buffer)

    await asyncio.gather(*(worker() for _ in range(at_once)))


def _read_bare(socks: Sequence[socket.socket], buffers: Sequence[memoryview]) -> float:
    """Read the same bytes; return GB/s.

    Each connection asks for shards of its own: those that both send would be in the cache.
    """
    size = len(buffers[0])

    def read(sock: socket.socket, part: Sequence[tuple[int, memoryview]]) -> None:
        lower_thread_priority()
        for number, buffer in part:
            sock.sendall(bytes([number, size >> 20]))
            got, hashed = 0, xxhash.xxh3_128()
            while got < size:
                count = sock.recv_into(buffer[got : got + (1 << 20)])
                hashed.update(buffer[got : got + count])
                got += count
            hashed.digest()

    began = time.perf_counter()
    threads = [
        threading.Thread(target=read, args=(sock, [*enumerate(buffers)][at :: len(socks)]))
        for at, sock in enumerate(socks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(buffers) * size / (time.perf_counter() - began) / 1e9


def _serve(host: str, orders: Connection) -> None:
    """Serve both protocols until killed."""
    memories = {size: memoryview(mmap.mmap(-1, _MEMORY)) for size in _SPACES}
    try:
        listeners = {size: _listen(host, size, memory) for size, memory in memories.items()}
    except KVHavenError as error:
        raise SystemExit(str(error)) from error
    bare = socket.create_server((host, 0))
    ports = {size: listener.port for size, listener in listeners.items()}
    orders.send(_Ports(ports, bare.getsockname()[1]))

    def serve(sock: socket.socket) -> None:
        lower_thread_priority()
        while request := sock.recv(2, socket.MSG_WAITALL):
            number, size = request[0], request[1] << 20
            sock.sendall(memories[size][number * size : (number + 1) * size])

    while True:
        sock, _ = bare.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def _listen(host: str, size: int, memory: memoryview) -> PeerListener:
    """Serve `memory` in shards of `size` bytes. Raises `KVHavenError`."""

    def memory_of(extent: Extent) -> memoryview:
        return memory[extent.offset : extent.offset + extent.length]

    held = NumberedShards(_SPACES[size], len(memory) // size, memory_of)
    return PeerListener(Address(host, 0), "bench", b"", held)
