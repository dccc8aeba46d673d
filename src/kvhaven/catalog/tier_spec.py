# SPDX-License-Identifier: Apache-2.0
"""What the catalog is told of a tier, and what it wants of a tier's bookkeeping."""

import enum
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.entries import NamespaceState
from kvhaven.catalog.holdings import Scope
from kvhaven.types import ChunkKey

MEMORY: Final = TierName("memory")
"""The arena's name where a tier can be named."""


class WriteMode(enum.Enum):
    """What happens to a chunk that waits to be written."""

    BEHIND = "behind"
    """It may be evicted before its turn: that write is dropped."""
    THROUGH = "through"
    """It stays in memory until it is written, as far as the bound of the queue allows."""
    OFF = "off"
    """Nothing is written to this tier."""


class StoreOn(enum.Enum):
    """When a chunk that was computed is written."""

    FIRST = "first"
    """When it is there."""
    SECOND = "second"
    """When it is used a second time: leased by a request, or computed again."""


class TierSpec(msgspec.Struct, frozen=True):
    """A tier's name and size, and what is done with it.

    A tier that is not `shared` is this service's own: the catalog knows what it holds, and keeps
    it to `capacity_bytes`, emptying it to `watermark` of that. To one that is `shared` others
    write too: what it holds is only known by asking, an answer is believed for `lookup_ttl_s`
    seconds, and its capacity is nobody's business here.
    """

    name: TierName
    capacity_bytes: int = 0
    watermark: float = 0.9
    shared: bool = False
    lookup_ttl_s: float = 5.0
    write: WriteMode = WriteMode.BEHIND
    store_on: StoreOn = StoreOn.FIRST


class TierState(Protocol):
    """What reads and writes need to know of a tier, whether it is the service's own or shared."""

    spec: TierSpec
    online: bool
    reads: dict[ChunkKey, int]
    """Reads under way."""
    reading_bytes: int
    """Of the arena, that reads under way fill."""
    writing_bytes: int
    """Of writes that are under way."""

    def set_online(self, online: bool) -> None:
        """Note whether the tier is in use."""

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Whether every shard of the chunk is believed to be there."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use of each chunk that is there; a chain is given from tail to head."""

    def forget(self, key: ChunkKey) -> int:
        """Note that a chunk is not there; return its bytes, as far as they were counted."""

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Count a read, which fills so many bytes of the arena."""

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read; raises KeyError when there is none."""

    def has_room(self, namespace: NamespaceState) -> bool:
        """Whether a chunk can be written at all, beside those under way."""

    def write_begins(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Make room for a chunk."""

    def write_ended(self, namespace: NamespaceState) -> None:
        """Count the bytes of a write no longer as under way."""

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Note that a chunk was written whole and takes `bytes_`; None: as uncompressed."""

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Note that a write failed, after which some of the chunk's shards may be there."""

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Have a chunk deleted, whether it is counted or not; return the bytes counted."""

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Have all chunks that a scope names deleted, as far as they are known; count them.

        `parts` are those of the tenant, if the scope names one.
        """

    def figures(self) -> "TierFigures":
        """Return the figures of this moment."""


class TierTransfers:
    """Reads and writes of a tier that are under way: the part of a `TierState` that all share."""

    def __init__(self) -> None:
        self.online = True
        self.reads: dict[ChunkKey, int] = {}
        self.reading_bytes = 0
        self.writing_bytes = 0

    def set_online(self, online: bool) -> None:
        """Note whether the tier is in use."""
        self.online = online

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Count a read, which fills so many bytes of the arena."""
        self.reading_bytes += bytes_
        self.reads[key] = self.reads.get(key, 0) + 1

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read; raises KeyError when there is none."""
        left = self.reads[key] - 1
        self.reading_bytes -= bytes_
        if left:
            self.reads[key] = left
        else:
            del self.reads[key]

    def write_begins(self, key: ChunkKey, namespace: NamespaceState) -> None:  # noqa: ARG002
        """Count the bytes of a write."""
        self.writing_bytes += namespace.stored_bytes

    def write_ended(self, namespace: NamespaceState) -> None:
        """Count them no longer."""
        self.writing_bytes -= namespace.stored_bytes


class TierFigures(msgspec.Struct, frozen=True):
    """What a tier's bookkeeping counts."""

    used_bytes: int = 0
    chunks: int = 0
    evictions: int = 0
    looking_up: int = 0
    looked_up: int = 0
    found: int = 0
    scanned: bool = True
