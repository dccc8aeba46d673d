# SPDX-License-Identifier: Apache-2.0
"""Description of a tier for the catalog, and the interface of the catalog's tier indexes."""

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.entries import NamespaceState
from kvhaven.catalog.holdings import Scope
from kvhaven.types import ChunkKey

MEMORY: Final = TierName("memory")
"""The arena's name where tier names are accepted."""


class WriteMode(enum.Enum):
    """Treatment of a chunk that waits to be written."""

    BEHIND = "behind"
    """It may be evicted before its turn, which drops the write."""
    THROUGH = "through"
    """It stays in memory until it is written, within the limit of the queue."""
    OFF = "off"
    """Nothing is written to this tier."""


class StoreOn(enum.Enum):
    """Event on which a computed chunk is written."""

    FIRST = "first"
    """When it becomes resident."""
    SECOND = "second"
    """When it is used again: leased by a request, or computed again."""


class TierSpec(msgspec.Struct, frozen=True):
    """Name, size and policies of a tier.

    A tier that is not `shared` is local: it belongs to this service. The catalog knows its content
    and keeps it to `capacity_bytes`; above that it evicts down to `watermark` times the capacity. A
    `shared` tier is written by other nodes too: its content is known only from lookups, whose
    results are cached for `lookup_ttl_s` seconds, and the catalog does not limit its size.
    """

    name: TierName
    capacity_bytes: int = 0
    watermark: float = 0.9
    shared: bool = False
    lookup_ttl_s: float = 5.0
    most_lookup_ttl_s: float = math.inf
    """Limit of `lookup_ttl_s`, for tiers whose lookups cost nearly nothing."""
    write: WriteMode = WriteMode.BEHIND
    store_on: StoreOn = StoreOn.FIRST


class TierState(Protocol):
    """State that reads and writes need of a tier, local or shared."""

    spec: TierSpec
    online: bool
    reads: dict[ChunkKey, int]
    """Reads under way, by chunk."""
    reading_bytes: int
    """Bytes of the arena that reads under way fill."""
    writing_bytes: int
    """Bytes of writes under way."""
    number: int
    """Position among all tiers, from 1 on; see `Prefix.sources`."""
    promoted: int
    """Chunks read from it into memory."""
    failed: int
    """Reads of chunks that failed."""

    def set_online(self, online: bool) -> None:
        """Set whether the tier is in use."""

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether every shard of the chunk is in the tier, as far as is known."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Record a use of each chunk that is in the tier; a chain is given from tail to head."""

    def forget(self, key: ChunkKey) -> int:
        """Record that a chunk is absent; return its bytes, as far as they were counted."""

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Count a read that fills `bytes_` of the arena."""

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read. Raises `KeyError` if there is none."""

    def has_room(self, namespace: NamespaceState) -> bool:
        """Return whether a chunk can be written at all, in addition to the writes under way."""

    def write_begins(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Make room for a chunk."""

    def write_ended(self, namespace: NamespaceState) -> None:
        """Remove a write from the bytes under way."""

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Record that a chunk was written completely and takes `bytes_`; None: as uncompressed."""

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Record that a write failed, after which some shards of the chunk may be present."""

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Request the deletion of a chunk, counted or not; return the bytes counted."""

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Delete all known chunks in a scope; return their number and bytes.

        `parts` are the tenant's parts of namespaces if the scope names a tenant.
        """

    def figures(self) -> "TierFigures":
        """Return the present statistics."""


class TierTransfers:
    """Reads and writes of a tier that are under way: the common part of all `TierState`s."""

    def __init__(self) -> None:
        self.online = True
        self.reads: dict[ChunkKey, int] = {}
        self.reading_bytes = 0
        self.writing_bytes = 0
        self.number = 1
        self.promoted = 0
        self.failed = 0

    def set_online(self, online: bool) -> None:
        """Set whether the tier is in use."""
        self.online = online

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Count a read that fills `bytes_` of the arena."""
        self.reading_bytes += bytes_
        self.reads[key] = self.reads.get(key, 0) + 1

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read. Raises `KeyError` if there is none."""
        left = self.reads[key] - 1
        self.reading_bytes -= bytes_
        if left:
            self.reads[key] = left
        else:
            del self.reads[key]

    def write_begins(self, key: ChunkKey, namespace: NamespaceState) -> None:  # noqa: ARG002
        """Add a write to the bytes under way."""
        self.writing_bytes += namespace.stored_bytes

    def write_ended(self, namespace: NamespaceState) -> None:
        """Remove a write from the bytes under way."""
        self.writing_bytes -= namespace.stored_bytes


class TierFigures(msgspec.Struct, frozen=True):
    """Statistics of a tier index."""

    used_bytes: int = 0
    chunks: int = 0
    evictions: int = 0
    quota_evictions: int = 0
    looking_up: int = 0
    looked_up: int = 0
    found: int = 0
    scanned: bool = True
