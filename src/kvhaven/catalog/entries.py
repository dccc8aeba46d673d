# SPDX-License-Identifier: Apache-2.0
"""Records of the catalog for tenants, namespaces, and chunks in the arena."""

import enum
from typing import Any, Generic

from kvhaven.catalog.actions import MemberId, SessionId
from kvhaven.catalog.allocation import S
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.tiers.base import Namespace
from kvhaven.types import PAGE_BYTES, Checksum, ChunkKey, Extent, TenantId, align_up

SaveId = tuple[SessionId, int]
"""One save of one engine on all its ranks: the session, and the save's number in it."""


class State(enum.Enum):
    """Life cycle of a chunk in the arena."""

    RESERVED = "reserved"
    """Ranks write its shards; not visible."""
    PROMOTING = "promoting"
    """A read from a tier fills it; not visible."""
    RESIDENT = "resident"
    """Complete and verified: it can be leased."""
    RETIRED = "retired"
    """Permanently invisible; its space is freed once it has no pins."""


def stored_bytes(payload_bytes: int) -> int:
    """Return the size of a shard in a tier: a 4096-byte header, and whole pages."""
    return PAGE_BYTES + align_up(payload_bytes)


class Listed(enum.IntEnum):
    """Eviction policies that contain a chunk, and so may evict it."""

    NOT = 0
    CLASS = 1
    """The policy of its size class."""
    TENANT = 2
    """The policy of its size class, and that of its tenant."""


class Tenant:
    """Usage of the arena by one tenant, and its quotas in the arena and in each local tier.

    `orders` are the tenant's eviction policies by `Entry.order`, which apply when it has a quota.
    It is None before the first quota.
    """

    __slots__ = ("__weakref__", "disk_quota", "id", "memory_bytes", "memory_quota", "orders")

    def __init__(self, tenant: TenantId, memory_quota: int | None, disk_quota: int | None) -> None:
        self.id = tenant
        self.memory_quota = memory_quota
        self.disk_quota = disk_quota
        self.memory_bytes = 0  # of all extents allocated for its chunks
        self.orders: dict[int, EvictionPolicy] | None = None if memory_quota is None else {}


class Shelf:
    """Usage of a place by a namespace: complete chunks, their bytes, and all entries."""

    __slots__ = ("bytes", "chunks", "cleared", "entries")

    def __init__(self) -> None:
        self.chunks = 0
        self.bytes = 0
        self.entries = 0  # including incomplete ones
        self.cleared = False


class Holding:
    """A tenant's part of a shelf. After a clear of that tenant alone it has a separate shelf."""

    __slots__ = ("bytes", "chunks", "entries", "shelf")

    def __init__(self, shelf: Shelf) -> None:
        self.chunks = 0
        self.bytes = 0
        self.entries = 0
        self.shelf = shelf

    @property
    def cleared(self) -> bool:
        """Whether its chunks were cleared: they are invisible and will be dropped."""
        return self.shelf.cleared


class NamespaceState:
    """A tenant's part of a namespace, with the values that are needed often.

    `holdings` is its usage of the arena and of tiers, by the name of the place (see `Place`).
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
    """Slab with its entries by generation, and the number of the event that last used one."""

    __slots__ = ("entries", "id", "length", "stamp")

    def __init__(self, id_: S, length: int) -> None:
        self.id = id_
        self.length = length
        self.entries: dict[int, Entry] = {}
        self.stamp = 0


class Entry:
    """One chunk in the arena. It refers to no other entry and to no session or lease.

    There may be a million entries while the cyclic garbage collector is off. So they have slots,
    and once they are dropped they are in no cycle; until then their slab refers to them.
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
        "origin",
        "owner",
        "parent",
        "reading",
        "retained",
        "reused",
        "slab",
        "stamp",
        "state",
        "tail",
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
        slab: SlabUse[Any],  # the allocator's slab type does not matter here
        state: State,
        tail: int = 0,
    ) -> None:
        self.namespace = namespace
        self.holding = holding
        self.key = key
        self.parent = parent
        self.extent = extent
        self.slab = slab
        self.state = state
        self.tail = tail  # stored tokens of an incomplete chunk at a prompt's end; 0: a full chunk
        self.retained = int(tail > 0)  # uses that a tail waits for, aging as a full chunk meanwhile
        self.bitmap = 0  # written shards; complete when resident
        self.checksums: list[Checksum | None] | tuple[Checksum, ...] = ()
        self.leases = 0
        self.writes = 0  # tiers that write from it, or wait to (write-through)
        self.reading = False  # a tier read fills it
        self.reused = False  # used again since it was computed, or read from a tier
        self.fresh = False  # promoted and not leased since: its first lease counts as a tier hit
        self.origin = 0  # number of the tier that it was read from, from 1 on; 0: computed here
        self.writers: dict[MemberId, int] | None = None  # shards by member that may write
        self.owner: SaveId | None = None  # save that reserved it
        self.awaited = 0  # bitmap of the owner's ranks that have not committed
        self.listed = Listed.NOT  # eviction policies that contain it
        self.children = 0  # visible entries with this one as parent
        self.stamp = 0  # number of the event that last used it
        self.corrupt = False  # its bytes failed verification while it was leased

    def take_source(self) -> int:
        """Return the number of the tier that a resident chunk was in when it was requested.

        0 is memory. A tier is reported only once.
        """
        if self.fresh:
            self.fresh = False
            return self.origin
        return 0

    @property
    def order(self) -> int:
        """The eviction order that it belongs to: one for each extent length, and one for tails."""
        return -self.extent.length if self.tail and not self.retained else self.extent.length

    @property
    def pinned(self) -> bool:
        """Whether anything may still read or write the memory."""
        return bool(self.leases or self.writes or self.reading or self.writers)
