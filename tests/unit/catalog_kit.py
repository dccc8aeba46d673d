# SPDX-License-Identifier: Apache-2.0
"""A small catalog with sessions, for tests that look at one behaviour each."""

import hashlib
from collections.abc import Sequence

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog, TierSpec
from kvhaven.catalog.actions import (
    Acquisition,
    Action,
    CommitResult,
    Grant,
    LeaseId,
    MemberId,
    SessionId,
    TierName,
    TierRead,
    TierWrite,
)
from kvhaven.catalog.policies import POLICIES
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.sessions import RankDescription, Session
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.tiers.format.header import stored_bytes
from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
    TenantId,
)

DISK = TierName("disk")
PAGE = 4096
BIG = 1 << 30
NO_QUOTAS = Quotas()
STORED = 2 * PAGE
"""Bytes that a chunk of one page takes in a tier."""


def namespace_of(name: str, shards: int = 1, payload_bytes: int = PAGE) -> Namespace:
    """Return a namespace whose chunks have `shards` equal shards."""
    table = ShardTable(
        tuple(Shard(ShardId(0, (0, 1), (n, n + 1)), payload_bytes) for n in range(shards))
    )
    return Namespace(NamespaceDigest(hashlib.sha256(name.encode()).digest()), {}, table)


def described(namespace: Namespace, split: Sequence[int], rank: int) -> RankDescription:
    """Return the description by a rank of an engine that divides the shards like this."""
    shards = tuple(s for bit, s in enumerate(namespace.table.shards) if split[rank] >> bit & 1)
    digest, shared = namespace.digest, len(set(split)) < len(split)
    return RankDescription(len(split), digest, namespace.fields, shards, shared)


def keys_of(name: str, count: int) -> list[ChunkKey]:
    """Return the keys of a chain."""
    return [ChunkKey(hashlib.sha256(f"{name}/{n}".encode()).digest()) for n in range(count)]


def checksums_of(key: ChunkKey, shards: int = 1) -> tuple[Checksum, ...]:
    """Return what the shards of a chunk are committed with."""
    return tuple(Checksum(hashlib.sha256(key + bytes([n])).digest()[:16]) for n in range(shards))


class Node:
    """A catalog over an arena of `pages` pages, with the session `s` of `world_size` ranks.

    `usable` is how many of the pages there are at first (default: all).

    Chunks of its namespace have one page a rank; or, with `split` (the shards that each rank
    of `s` holds, as bitmaps), one page a shard. Writes to tiers are left undone unless asked for.
    """

    def __init__(
        self,
        pages: int = 16,
        world_size: int = 1,
        tiers: Sequence[TierSpec] = (),
        pin_limit: int | None = None,
        write_queue: int | None = None,
        split: Sequence[int] = (),
        *,
        usable: int | None = None,
        ready: bool = True,
        policy: str | EvictionPolicy = "lru",
        fill_faster: bool = True,
        memory_quotas: Quotas = NO_QUOTAS,
        disk_quotas: Quotas = NO_QUOTAS,
    ) -> None:
        self.pages = pages
        there = {0: PAGE * (pages if usable is None else usable)}
        self.allocator = SlabAllocator({0: pages * PAGE}, slab_bytes=PAGE, usable=there)
        self.catalog = Catalog(
            self.allocator,
            POLICIES[policy]() if isinstance(policy, str) else policy,
            pin_limit_bytes=None if pin_limit is None else pin_limit * PAGE,
            tiers=tiers,
            write_queue_bytes=None if write_queue is None else write_queue * PAGE,
            fill_faster=fill_faster,
            memory_quotas=memory_quotas,
            disk_quotas=disk_quotas,
        )
        self.world_size = len(split) or world_size
        self.shards = max(split).bit_length() if split else world_size
        self.namespace = namespace_of("n", self.shards)
        self.sessions: dict[str, SessionId] = {}
        self.catalog.add_namespace(self.namespace)
        self.attach("s", split=split, ready=ready)
        self.session = self.sessions["s"]
        self._lease_id = 0

    def attach(
        self,
        session: str,
        namespace: Namespace | None = None,
        split: Sequence[int] = (),
        *,
        ready: bool = True,
    ) -> None:
        """Attach the ranks (`s/0`, ...) and the scheduler (`s/None`) of a session.

        Each rank holds a shard of its own, or those of `split`; it is ready for all of the arena
        that there is, unless told otherwise.
        """
        namespace = namespace or self.namespace
        split = split or [1 << bit for bit in range(len(namespace.table.shards))]
        for rank in range(len(split)):
            self.attach_rank(session, rank, namespace, split)
            if ready:
                self.catalog.ready(MemberId(f"{session}/{rank}"), 0, self.allocator.usable[0])
        self.catalog.attach_scheduler(session, MemberId(f"{session}/None"), len(split))

    def attach_rank(
        self, session: str, rank: int, namespace: Namespace, split: Sequence[int]
    ) -> Session:
        """Attach one rank of a session, for the first time or again."""
        member, description = MemberId(f"{session}/{rank}"), described(namespace, split, rank)
        attached = self.catalog.attach_rank(session, member, rank, description)
        self.sessions[session] = attached.id
        return attached

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        member: str = "s/0",
        parent: ChunkKey | None = None,
        save: int = 0,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> list[Grant | None]:
        """Reserve as a rank."""
        digest = self.namespace.digest
        return self.catalog.reserve(MemberId(member), digest, parent, keys, save, tenant, tail)

    def grant(self, key: ChunkKey, member: str = "s/0", save: int = 0) -> Grant:
        """Reserve one chunk, which must be granted."""
        grant = self.reserve([key], member, save=save)[0]
        assert grant is not None
        return grant

    def commit(self, grant: Grant, member: str = "s/0") -> CommitResult:
        """Commit a rank's part of a chunk."""
        checksums = [
            checksum
            for bit, checksum in enumerate(checksums_of(grant.key, self.shards))
            if grant.shards >> bit & 1
        ]
        return self.catalog.commit(MemberId(member), grant.key, grant.extent.generation, checksums)

    def save(
        self,
        keys: Sequence[ChunkKey],
        parent: ChunkKey | None = None,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> int:
        """Have all ranks of `s` save chunks; return how many are resident then."""
        ranks = [f"s/{rank}" for rank in range(self.world_size)]
        grants = [self.reserve(keys, rank, parent, tenant=tenant, tail=tail) for rank in ranks]
        for rank, granted in enumerate(grants):
            for grant in granted:
                if grant is not None:
                    self.commit(grant, f"s/{rank}")
        self.catalog.check()
        return self.resident(keys)

    def resident(self, keys: Sequence[ChunkKey]) -> int:
        """Count the chunks that are resident."""
        return sum(self.catalog.checksums(key) is not None for key in keys)

    def acquire(
        self,
        keys: Sequence[ChunkKey],
        session: str = "s",
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> Acquisition:
        """Acquire under a new ticket."""
        self._lease_id += 1
        lease_id, digest = LeaseId(self._lease_id), self.namespace.digest
        known = self.sessions.get(session, SessionId(session))
        return self.catalog.acquire(known, lease_id, digest, keys, tenant, tail)

    def store(
        self, keys: Sequence[ChunkKey], tier: TierName = DISK, tenant: TenantId = NO_TENANT
    ) -> None:
        """Have a tier hold chunks, as its scan would say."""
        for key in keys:  # what is found first counts as younger
            for bit, shard in enumerate(self.namespace.table.shards):
                size = stored_bytes(shard.payload_bytes)
                self.catalog.tier_found(tier, self.namespace.digest, key, bit, size, tenant)

    def reads(self) -> list[TierRead]:
        """Take all actions; return the reads."""
        return [a for a in self.catalog.take_actions() if isinstance(a, TierRead)]

    def writes(self) -> list[TierWrite]:
        """Take all actions; return the writes."""
        return [a for a in self.catalog.take_actions() if isinstance(a, TierWrite)]

    def finish(self, read: TierRead, *, ok: bool = True) -> None:
        """Answer a read."""
        checksums = checksums_of(read.key, self.shards) if ok else None
        self.catalog.tier_read_done(read.tier, read.key, read.extent, checksums)
        self.catalog.check()

    def of_type(self, kind: type[Action]) -> list[Action]:
        """Take all actions; return those of a kind."""
        return [a for a in self.catalog.take_actions() if isinstance(a, kind)]


def spec(name: TierName = DISK, chunks: int = 1 << 20, watermark: float = 0.9) -> TierSpec:
    """Return a tier that holds so many chunks of one page."""
    return TierSpec(name, chunks * STORED, watermark)
