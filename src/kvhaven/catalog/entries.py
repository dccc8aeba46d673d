# SPDX-License-Identifier: Apache-2.0
"""What the catalog knows of one tenant, one namespace, and one chunk in the arena."""

import enum

from kvhaven.catalog.actions import MemberId, SessionId, Source
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.tiers.base import Namespace
from kvhaven.types import PAGE_BYTES, Checksum, ChunkKey, Extent, TenantId, align_up

SaveId = tuple[SessionId, int]
"""One save of one engine, on all its ranks: the session, and the save's number in it."""


class State(enum.Enum):
    """Where a chunk in the arena is in its life."""

    RESERVED = "reserved"
    """Ranks write their shards; not visible."""
    PROMOTING = "promoting"
    """A tier's read fills it; not visible."""
    RESIDENT = "resident"
    """Whole and verified: it can be leased."""
    DOOMED = "doomed"
    """Out of sight for good; its space is free once nothing pins it."""


def stored_bytes(payload_bytes: int) -> int:
    """Return what a shard takes in a tier: a 4096-byte header, and whole pages."""
    return PAGE_BYTES + align_up(payload_bytes)


class Tenant:
    """What a tenant has of the arena, and what it may have there and in each tier of our own.

    `orders` are policies of its own, by extent length: in which order its chunks go when it has
    a quota. Without one there are none.
    """

    __slots__ = ("__weakref__", "disk_quota", "id", "memory_bytes", "memory_quota", "orders")

    def __init__(self, tenant: TenantId, memory_quota: int | None, disk_quota: int | None) -> None:
        self.id = tenant
        self.memory_quota = memory_quota
        self.disk_quota = disk_quota
        self.memory_bytes = 0  # of all extents that are handed out for its chunks
        self.orders: dict[int, EvictionPolicy] | None = None if memory_quota is None else {}


class NamespaceState:
    """A tenant's part of a namespace, with the figures that are needed often."""

    __slots__ = (
        "__weakref__",
        "complete",
        "extent_bytes",
        "namespace",
        "resident",
        "shards",
        "stored_bytes",
        "tenant",
    )

    def __init__(self, namespace: Namespace, tenant: Tenant) -> None:
        table = namespace.table
        self.namespace = namespace
        self.tenant = tenant
        self.shards = len(table.shards)
        self.complete = table.complete
        self.extent_bytes = table.extent_bytes
        self.stored_bytes = sum(stored_bytes(s.payload_bytes) for s in table.shards)
        self.resident = 0  # chunks in the arena that are visible


class Entry:
    """One chunk in the arena. It refers to no other entry and to no session or lease.

    There may be a million of these while the cyclic garbage collector is off, so they have
    slots and are in no cycle.
    """

    __slots__ = (
        "awaited",
        "bitmap",
        "checksums",
        "corrupt",
        "extent",
        "fresh",
        "key",
        "leases",
        "listed",
        "namespace",
        "owner",
        "parent",
        "reading",
        "reused",
        "stamp",
        "state",
        "writers",
        "writes",
    )

    def __init__(
        self,
        namespace: NamespaceState,
        key: ChunkKey,
        parent: ChunkKey | None,
        extent: Extent,
        state: State,
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.parent = parent
        self.extent = extent
        self.state = state
        self.bitmap = 0  # shards that are written; complete when resident
        self.checksums: list[Checksum | None] | tuple[Checksum, ...] = ()
        self.leases = 0
        self.writes = 0  # tiers that are writing from it, or will (in the mode "through")
        self.reading = False  # a tier is reading into it
        self.reused = False  # used since it was computed, or was in a tier
        self.fresh = False  # promoted, and not leased since: its first lease comes from a tier
        self.writers: dict[MemberId, int] | None = None  # who may still write, and which shards
        self.owner: SaveId | None = None  # whose reservation it is
        self.awaited = 0  # bitmap of the owner's ranks that have not committed
        self.listed = False  # the eviction policy knows it
        self.stamp = 0  # number of the event that used it last
        self.corrupt = False  # its bytes failed verification after it was leased

    def take_source(self) -> Source:
        """Return where a chunk that is resident now was when it was wanted, once."""
        if self.fresh:
            self.fresh = False
            return Source.TIER
        return Source.MEMORY

    @property
    def pinned(self) -> bool:
        """Whether anyone may still read or write the memory."""
        return bool(self.leases or self.writes or self.reading or self.writers)
