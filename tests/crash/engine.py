# SPDX-License-Identifier: Apache-2.0
"""Engine-like clients that copy real bytes: what is in a chunk follows from its key and head.

So every byte of every load can be checked, whoever wrote it and whenever.
"""

import ctypes
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import xxhash

from kvhaven.client.rank import RankClient, RankGrant
from kvhaven.client.scheduler import Asking, LeasedChunks, Outcome, SchedulerClient
from kvhaven.keys import namespace_digest
from kvhaven.protocol import AttachRank, AttachScheduler
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, Shard, ShardId, TenantId, align_up

SHARD_BYTES = 10_000
"""Not a multiple of a page, so that there is padding."""
EXTENT_BYTES = align_up(SHARD_BYTES)
"""Of a chunk, for each head."""

CHUNK_SIZE = 10
"""Tokens of a chunk."""
MODEL = "model-of-the-tests"


def prompt(name: object, length: int) -> list[ChunkKey]:
    """Return the keys of a chain."""
    return [ChunkKey(hashlib.sha256(f"{name}/{at}".encode()).digest()) for at in range(length)]


def content(key: bytes, head: int, size: int = SHARD_BYTES) -> bytes:
    """Return the bytes that are computed for a chunk and a head."""
    return hashlib.shake_128(key + bytes([head])).digest(size)


def heads_of(rank: int, world_size: int, heads: int) -> range:
    """Return the heads of a rank; with fewer heads than ranks, several have the same one."""
    if heads < world_size:
        return range(rank * heads // world_size, rank * heads // world_size + 1)
    return range(rank * heads // world_size, (rank + 1) * heads // world_size)


class WrongBytesError(Exception):
    """A load got other bytes than were computed for its chunk."""


class Rank:
    """A rank that saves and loads; `pause_s` is how long it stops between pieces of a copy.

    `heads` is how many the model has: by default as many as there are ranks. Each is a shard.
    """

    def __init__(
        self,
        address: str,
        rank: int = 0,
        world_size: int = 1,
        *,
        engine: str = "engine",
        member: str = "",
        model: str = MODEL,
        shard_bytes: int = SHARD_BYTES,
        pause_s: float = 0.0,
        heads: int = 0,
        more_fields: Mapping[str, str] = {},
        **client: Any,
    ) -> None:
        heads = heads or world_size
        self.heads = heads_of(rank, world_size, heads)
        self.rank = rank
        self.shard_bytes = shard_bytes
        self.pause_s = pause_s
        fields = {"model": model, "heads": str(heads), "bytes": str(shard_bytes)}
        fields["chunk_size"] = str(CHUNK_SIZE)
        fields |= more_fields
        self.attach = AttachRank(
            id=1,
            session=engine,
            member=member or f"{engine}-rank{rank}-{time.monotonic_ns()}",
            rank=rank,
            world_size=world_size,
            namespace=namespace_digest(fields),
            fields=fields,
            shards=tuple(
                Shard(ShardId(0, (0, 4), (head, head + 1)), shard_bytes) for head in self.heads
            ),
            shared=heads < world_size,
        )
        self.client = RankClient(address, self.attach, **client)

    def start(self, timeout_s: float = 10.0) -> "Rank":
        """Attach, and wait until the service knows that this rank is ready for the arena."""
        self.client.start(timeout_s)
        assert self.client.wait_ready(timeout_s)
        return self

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None = None,
        wait_s: float = 5.0,
        save: int = 0,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> list[RankGrant]:
        """Return the grants there are; with `tail`, for tails of so many tokens."""
        reservation = self.client.reserve(parent, keys, save, tenant, tail)
        if reservation is None:
            return []
        grants = self.client.grants(reservation, time.monotonic() + wait_s)
        return [grant for grant in grants if grant is not None]

    def write(
        self, grant: RankGrant, between: Callable[[], None] = lambda: None, tail: int = 0
    ) -> tuple[RankGrant, list[Checksum]]:
        """Copy this rank's bytes of a chunk into the arena, in pieces, if they are its to write."""
        checksums = []
        for head, offset in zip(self.heads, self.client.shard_offsets, strict=True):
            if not grant.writes:
                break
            data = content(grant.key, head, self._size(tail))
            for at in range(0, len(data), 4096):
                piece = data[at : at + 4096]
                ctypes.memmove(grant.address + offset + at, piece, len(piece))
                between()
                if self.pause_s:
                    time.sleep(self.pause_s)
            checksums.append(Checksum(xxhash.xxh3_128_digest(data)))
        return grant, checksums

    def save(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None = None,
        wait_s: float = 5.0,
        save: int = 0,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> int:
        """Save chunks, or tails of so many tokens; return how many were granted."""
        grants = self.reserve(keys, parent, wait_s, save, tenant, tail)
        self.client.commit([self.write(grant, tail=tail) for grant in grants])
        return len(grants)

    def sync(self) -> None:
        """Wait until the service has handled what was said."""
        link = self.client._link
        end = time.monotonic() + 10
        while link._outbox and time.monotonic() < end:
            time.sleep(0.001)

    def load(self, lease: LeasedChunks, keys: Sequence[ChunkKey], tail: int = 0) -> int:
        """Copy a lease's chunks and compare every byte; return how many could be read.

        The last of `keys` is that of a tail of `tail` tokens if the lease has one.
        """
        arena = self.client.arena(lease.service)
        if arena is None:
            self.client.loaded([lease.lease_id], lease.service)
            return 0
        lengths = [self.shard_bytes] * len(lease.extents)
        if lease.tail:
            lengths[-1] = self._size(tail)
        for key, (segment, offset), size in zip(keys, lease.extents, lengths, strict=False):
            first = offset + lease.offsets[self.rank]
            address = arena.address_of(segment, first, self.client.span_bytes)
            for head, at in zip(self.heads, self.client.shard_offsets, strict=True):
                if self._read(address + at, size) != content(key, head, size):
                    raise WrongBytesError(
                        f"rank {self.rank}, head {head}: {key.hex()} at {segment}:{offset}"
                    )
        self.client.loaded([lease.lease_id], lease.service)
        return len(lease.extents)

    def _size(self, tail: int) -> int:
        """Return the bytes of a shard of a chunk, or of a tail of so many tokens."""
        return self.shard_bytes * tail // CHUNK_SIZE if tail else self.shard_bytes

    def _read(self, address: int, size: int) -> bytes:
        """Copy a shard out of the arena, in pieces."""
        pieces = []
        for begin in range(0, size, 4096):
            pieces.append(ctypes.string_at(address + begin, min(4096, size - begin)))
            if self.pause_s:
                time.sleep(self.pause_s)
        return b"".join(pieces)

    def close(self) -> None:
        self.client.close()


class Scheduler:
    """A scheduler that asks and hands leases to its ranks."""

    def __init__(
        self,
        address: str,
        world_size: int = 1,
        *,
        engine: str = "engine",
        wait_ms: int = 5000,
        lookup_s: float = 2.0,
        promote_s: float = 5.0,
        **client: Any,
    ) -> None:
        self.client = SchedulerClient(
            address,
            AttachScheduler(
                1, engine, f"{engine}-sched-{time.monotonic_ns()}", world_size, wait_ms
            ),
            lookup_deadline_s=lookup_s,
            promote_deadline_s=promote_s,
            **client,
        )

    def start(self, timeout_s: float = 10.0) -> "Scheduler":
        self.client.start(timeout_s)
        return self

    def acquire(
        self,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        about: Asking | None = None,
        tail: ChunkKey | None = None,
    ) -> LeasedChunks | None:
        """Ask, and wait for the final answer; by default as a request of just these chunks."""
        about = about or Asking(CHUNK_SIZE * len(keys), 0, "request")
        lease_id = self.client.ask(keys, tenant, tail, None, about)
        if lease_id is None:
            return None
        while True:
            answer = self.client.wait(lease_id, 0.05)
            if isinstance(answer, LeasedChunks):
                return answer
            if answer is Outcome.MISS:
                return None
            time.sleep(0.001)

    def load(
        self, keys: Sequence[ChunkKey], ranks: Sequence[Rank], tenant: TenantId = NO_TENANT
    ) -> int:
        """Acquire and have every rank load; return how many chunks were read and right."""
        lease = self.acquire(keys, tenant)
        if lease is None:
            return 0
        self.client.dispatched(lease.lease_id)
        return min(rank.load(lease, keys) for rank in ranks)

    def close(self) -> None:
        self.client.close()


class Engine:
    """A scheduler and its ranks in this process."""

    _saves = itertools.count(1)

    def __init__(self, address: str, world_size: int = 1, **options: Any) -> None:
        engine = options.pop("engine", "engine")
        self.ranks = [
            Rank(address, n, world_size, engine=engine, **options) for n in range(world_size)
        ]
        self.scheduler = Scheduler(address, world_size, engine=engine)

    def __enter__(self) -> Self:
        try:
            for rank in self.ranks:
                rank.start()
            self.scheduler.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        for rank in self.ranks:
            rank.close()

    def save(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None = None,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> int:
        """Have every rank save; return the least that one was granted, when all is committed."""
        number = next(self._saves)
        granted = min(
            rank.save(keys, parent, save=number, tenant=tenant, tail=tail) for rank in self.ranks
        )
        for rank in self.ranks:
            rank.sync()
        return granted

    def load(self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT) -> int:
        """Load; return how many chunks were read and right."""
        return self.scheduler.load(keys, self.ranks, tenant)
