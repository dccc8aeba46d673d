# SPDX-License-Identifier: Apache-2.0
"""Another node in this process, whose memory tests fill, and a tier that reads it as a peer."""

import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import xxhash

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog.loans import Loan
from kvhaven.errors import TierMissError
from kvhaven.peers.addresses import Address
from kvhaven.peers.channels import INSTALL, PACKAGES, helper_environment
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.nixl import NixlChannel, TcpOnly
from kvhaven.peers.nixl_process import PROGRAM
from kvhaven.peers.tier import PeerTier
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.testing.memory_store import MemoryStore, memory_tier
from kvhaven.testing.tiers import Change, Kit, until
from kvhaven.tiers.base import Namespace, StoredShard, Tier, TierAudit, TierHealth
from kvhaven.tiers.format.header import HEADER_BYTES
from kvhaven.types import (
    Checksum,
    ChunkKey,
    Extent,
    NamespaceDigest,
    Shard,
    ShardTable,
    TenantId,
    align_up,
)
from tests.shelf import Unannounced

ARENA = 1 << 26
DEADLINE_S = 2.0

Name = tuple[NamespaceDigest, TenantId, ChunkKey]


def skip_without_nixl() -> None:
    """Skip the test if NIXL is not installed. Does not import it."""
    if not any(find_spec(name) for name in PACKAGES):
        pytest.skip(f"NIXL is not installed: {INSTALL}")


def new_arena(size: int = ARENA) -> Arena:
    return Arena(size, strict=True, first_bytes=size)


def new_channel(arena: Arena, retry_s: float = 60, program: Sequence[str] = PROGRAM) -> NixlChannel:
    environment = helper_environment([])
    return NixlChannel(arena, ["UCX"], environment, retry_s=retry_s, program=program)


def as_chunk(shard: StoredShard) -> StoredShard:
    """Return a shard's name as a chunk of one shard: peers look up chunks, the suite shards."""
    text = f"{shard.namespace.hex()} {shard.shard} {shard.payload_bytes}".encode()
    namespace = NamespaceDigest(hashlib.sha256(text).digest())
    return StoredShard(namespace, shard.key, shard.shard, shard.payload_bytes, shard.tenant)


@dataclass
class _Stored:
    namespace: Namespace
    extent: Extent
    checksum: Checksum
    loans: int = 0
    deleted: bool = False


class OtherNode(Unannounced):
    """A node's memory and listener: a `Lender` of what tests put there."""

    def __init__(self, arena: Arena, channel: NixlChannel | TcpOnly) -> None:
        self.arena = arena
        self.channel = channel
        self._allocator = SlabAllocator({SEGMENT: arena.size})
        self._lock = threading.Lock()
        self._stored: dict[Name, _Stored] = {}
        self._loans: dict[int, _Stored] = {}
        self._number = 0
        self.listener = PeerListener(Address("127.0.0.1", 0), "other", b"", self, channel=channel)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.listener.port)

    @property
    def open_loans(self) -> int:
        return len(self._loans)

    def put(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> None:
        """Store a shard, unless it is there."""
        chunk = as_chunk(shard)
        table = ShardTable((Shard(shard.shard, shard.payload_bytes),))
        with self._lock:
            if _name(chunk) in self._stored:
                return
            extent = self._allocator.allocate(align_up(shard.payload_bytes))
            assert extent is not None, "the other node is full"
            with self.arena.memory(extent) as memory:
                memory[: shard.payload_bytes] = payload[: shard.payload_bytes]
            namespace = Namespace(chunk.namespace, {}, table)
            self._stored[_name(chunk)] = _Stored(namespace, extent, checksum)

    def remove(self, shard: StoredShard) -> None:
        with self._lock:
            stored = self._stored.pop(_name(as_chunk(shard)), None)
            if stored is not None:
                stored.deleted = True
                self._free(stored)

    def clear(self) -> None:
        with self._lock:
            for stored in self._stored.values():
                stored.deleted = True
                self._free(stored)
            self._stored.clear()

    def change(self, shard: StoredShard, change: Change) -> None:
        """Change a shard's bytes; one that would have another length is removed."""
        stored = self._stored[_name(as_chunk(shard))]
        with self.arena.memory(stored.extent) as memory:
            raw = bytes(HEADER_BYTES) + bytes(memory)
            new = change(raw)
            if len(new) == len(raw):
                memory[:] = new[HEADER_BYTES:]
                return
        self.remove(shard)

    def check(self) -> TierAudit:
        """Verify all shards in memory."""
        problems: list[str] = []
        with self._lock:
            for (_, _, key), stored in self._stored.items():
                size = stored.namespace.table.shards[0].payload_bytes
                with self.arena.memory(stored.extent) as memory, memory[:size] as payload:
                    if xxhash.xxh3_128_digest(payload) != stored.checksum:
                        problems.append(f"{key.hex()} is damaged")
            return TierAudit(len(self._stored), 0, tuple(problems))

    def close(self) -> None:
        self.listener.close()

    # Lender

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        return [(namespace, tenant, key) in self._stored for key in keys]

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        with self._lock:
            stored = self._stored.get((namespace, tenant, key))
            if stored is None:
                return None
            stored.loans += 1
            self._number += 1
            self._loans[self._number] = stored
            return Loan(self._number, stored.namespace, stored.extent, (stored.checksum,))

    def memory(self, loan: Loan) -> memoryview:
        return self.arena.memory(loan.extent)

    def returned(self, loan: Loan) -> None:
        with self._lock:
            stored = self._loans.pop(loan.number)
            stored.loans -= 1
            self._free(stored)

    def namespaces(self) -> Sequence[Namespace]:
        return ()

    def _free(self, stored: _Stored) -> None:
        if stored.deleted and not stored.loans:
            self._allocator.free(stored.extent)


class Buffers:
    """Buffers in an arena, one after the other, and from the beginning again at its end."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._next = 0

    def __call__(self, size: int) -> memoryview:
        length = align_up(size)
        if self._next + length > self._arena.size:
            self._next = 0
        offset, self._next = self._next, self._next + length
        return self._arena.memory(Extent(SEGMENT, offset, length, 0))


class PeerStore:
    """Tier of which reads and lookups go to another node as to a peer.

    The rest is a tier over memory, which also fills the other node. A shard that arrived damaged is
    deleted: its node would find the damage, too.
    """

    name = "peer"
    shared = True

    def __init__(self, inner: Tier, peers: PeerTier, node: OtherNode) -> None:
        self.peers = peers
        self._inner = inner
        self._node = node
        self._damaged = 0

    async def start(self) -> None:
        await self._inner.start()
        await self.peers.start()

    async def close(self, deadline_s: float) -> None:
        await self._inner.close(deadline_s)
        await self.peers.close(deadline_s)

    async def add_namespace(self, namespace: Namespace) -> None:
        await self._inner.add_namespace(namespace)

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        async for found in self._inner.scan(tenant):
            yield found

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        return await self.peers.contains([as_chunk(shard) for shard in shards])

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        before = self.peers.health().rejected
        try:
            return await self.peers.read(as_chunk(shard), into)
        except TierMissError:
            if self.peers.health().rejected > before:
                await self.delete([shard])
            raise

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        size = await self._inner.write(shard, payload, checksum)
        self._node.put(shard, payload, checksum)
        return size

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        await self._inner.delete(shards)
        for shard in shards:
            self._node.remove(shard)

    def health(self) -> TierHealth:
        inner, peers = self._inner.health(), self.peers.health()
        return TierHealth(
            online=inner.online and peers.online,
            capacity_bytes=inner.capacity_bytes,
            used_bytes=inner.used_bytes,
            writable=inner.writable,
            epoch=inner.epoch,
            queued_reads=peers.queued_reads,
            queued_writes=inner.queued_writes,
            misses=peers.misses,
            errors=peers.errors,
            rejected=peers.rejected,
        )

    async def check(self) -> TierAudit:
        return self._node.check()


class Pair(NamedTuple):
    """Two nodes: one whose memory is read, and the arena and channel of one that reads."""

    node: OtherNode
    arena: Arena
    channel: NixlChannel | TcpOnly

    def peers(self, **options: float) -> PeerTier:
        """Return a tier that reads from the node."""
        deadline_s = options.pop("deadline_s", DEADLINE_S)
        return PeerTier([self.node.address], token=b"", deadline_s=deadline_s, channel=self.channel)

    def kit(self) -> Kit:
        """Return a kit over a new store; only one at a time is in use."""
        store = MemoryStore()
        self.node.clear()

        @contextlib.asynccontextmanager
        async def open_it() -> AsyncIterator[Tier]:
            tier = PeerStore(memory_tier(store, retry_s=0.05), self.peers(), self.node)
            await tier.start()
            try:
                await until(lambda: tier.health().online)
                await agreed(tier.peers, self.channel)
                yield tier
                assert not tier.health().online or uses(tier.peers) == kind_of(self.channel)
            finally:
                await tier.close(5)

        return Kit(open_it, self.node.change)


def kind_of(channel: NixlChannel | TcpOnly) -> str:
    return "nixl" if isinstance(channel, NixlChannel) else "tcp"


def uses(tier: PeerTier) -> str:
    """Return the channel by which a tier reads from its only peer."""
    (peer,) = tier.peers()
    return peer.channel


async def agreed(tier: PeerTier, channel: NixlChannel | TcpOnly) -> None:
    """Wait until the only peer is read over this channel."""
    await until(lambda: bool(tier.peers()) and uses(tier) == kind_of(channel), 60)


@contextlib.contextmanager
def pair_of(
    kind: str, size: int = ARENA, retry_s: float = 60, program: Sequence[str] = PROGRAM
) -> Iterator[Pair]:
    """Yield two nodes that are connected over `tcp` or `nixl`; skip without NIXL.

    `program` runs the helpers of the node that reads.
    """
    if kind == "nixl":
        skip_without_nixl()
    arenas = new_arena(size), new_arena(size)
    channels: list[NixlChannel | TcpOnly] = [
        new_channel(arena, retry_s, used) if kind == "nixl" else TcpOnly("a test")
        for arena, used in zip(arenas, (PROGRAM, program), strict=True)
    ]
    node = OtherNode(arenas[0], channels[0])
    for channel in channels:
        channel.start()
    try:
        yield Pair(node, arenas[1], channels[1])
    finally:
        node.close()
        for channel in channels:
            channel.close()
        for arena in arenas:
            arena.close()


def _name(chunk: StoredShard) -> Name:
    return chunk.namespace, chunk.tenant, chunk.key
