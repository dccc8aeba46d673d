# SPDX-License-Identifier: Apache-2.0
"""What the catalog knows of one tenant, one namespace, and one chunk in the arena."""

import enum
from typing import Any, Generic

from kvhaven.catalog.actions import MemberId, SessionId, Source
from kvhaven.catalog.allocation import S
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
    RETIRED = "doomed"
    """Out of sight for good; its space is free once nothing pins it."""


def stored_bytes(payload_bytes: int) -> int:
    """Return what a shard takes in a tier: a 4096-byte header, and whole pages."""
    return PAGE_BYTES + align_up(payload_bytes)


class Listed(enum.IntEnum):
    """Which eviction policies know a chunk: those that do may evict it."""

    NOT = 0
    CLASS = 1
    """That of its size class."""
    TENANT = 2
    """Its tenant's own, too."""


class Tenant:
    """What a tenant has of the arena, and what it may have there and in each tier of our own.

    `orders` are policies of its own, by extent length: in which order its chunks go when it has
    a quota. There are none before its first quota.
    """

    __slots__ = ("__weakref__", "disk_quota", "id", "memory_bytes", "memory_quota", "orders")

    def __init__(self, tenant: TenantId, memory_quota: int | None, disk_quota: int | None) -> None:
        self.id = tenant
        self.memory_quota = memory_quota
        self.disk_quota = disk_quota
        self.memory_bytes = 0  # of all extents that are handed out for its chunks
        self.orders: dict[int, EvictionPolicy] | None = None if memory_quota is None else {}


class Shelf:
    """What a namespace has in a place: whole chunks, their bytes, and all entries."""

    __slots__ = ("bytes", "chunks", "cleared", "entries")

    def __init__(self) -> None:
        self.chunks = 0
        self.bytes = 0
        self.entries = 0  # incomplete ones too
        self.cleared = False


class Holding:
    """A tenant's part of a shelf, or after a clear of that tenant alone, a shelf of its own."""

    __slots__ = ("bytes", "chunks", "entries", "shelf")

    def __init__(self, shelf: Shelf) -> None:
        self.chunks = 0
        self.bytes = 0
        self.entries = 0
        self.shelf = shelf

    @property
    def cleared(self) -> bool:
        """Whether its chunks are to go, and are not to be seen any more."""
        return self.shelf.cleared


class NamespaceState:
    """A tenant's part of a namespace, with the figures that are needed often.

    `holdings` is what it has in the arena and in tiers, by the place's name (see `Place`).
    """

    __slots__ = (
        "__weakref__",
        "complete",
        "extent_bytes",
        "holdings",
        "namespace",
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
        self.holdings: dict[str, Holding] = {}


class SlabUse(Generic[S]):
    """A slab: its entries by generation, and the number of the event that used one last."""

    __slots__ = ("entries", "id", "length", "stamp")

    def __init__(self, id_: S, length: int) -> None:
        self.id = id_
        self.length = length
        self.entries: dict[int, Entry] = {}
        self.stamp = 0


class Entry:
    """One chunk in the arena. It refers to no other entry and to no session or lease.

    There may be a million of these while the cyclic garbage collector is off, so they have
    slots, and are in no cycle once they are given up: until then their slab refers to them.
    """

    __slots__ = (
        "awaited",
        "bitmap",
        "checksums",
        "children",
        "corrupt",
        "extent",
        "fresh",
        "holding",
        "key",
        "leases",
        "listed",
        "namespace",
        "owner",
        "parent",
        "reading",
        "reused",
        "slab",
        "stamp",
        "state",
        "writers",
        "writes",
    )

    def __init__(
        self,
        namespace: NamespaceState,
        holding: Holding,
        key: ChunkKey,
        parent: ChunkKey | None,
        extent: Extent,
        slab: SlabUse[Any],  # the allocator's kind of slab is nobody's business here
        state: State,
    ) -> None:
        self.namespace = namespace
        self.holding = holding
        self.key = key
        self.parent = parent
        self.extent = extent
        self.slab = slab
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
        self.listed = Listed.NOT  # which eviction policies know it
        self.children = 0  # entries in sight whose parent it is
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
