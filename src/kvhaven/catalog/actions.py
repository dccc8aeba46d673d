# SPDX-License-Identifier: Apache-2.0
"""Output of the catalog: answers to its callers, and actions for the service to execute."""

import enum
from collections.abc import Iterator, Sequence
from typing import NewType, Protocol, overload

import msgspec

from kvhaven.tiers.base import Namespace
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, Extent, TenantId

SessionId = NewType("SessionId", str)
"""One engine instance: its scheduler and all its ranks."""

MemberId = NewType("MemberId", str)
"""One process of a session (its scheduler, or one rank), unique for the life of that process."""

LeaseId = NewType("LeaseId", int)
"""Name of a lease, chosen by the scheduler; unique within its session."""

TierName = NewType("TierName", str)


class Source(enum.IntEnum):
    """Place of a leased chunk at the time of the request."""

    MEMORY = 0
    TIER = 1


class Leased(msgspec.Struct, frozen=True, gc=False):
    """One chunk of a lease: pinned and verified until the lease ends."""

    key: ChunkKey
    extent: Extent
    source: Source
    tail: int = 0
    """Stored tokens, if it is a tail; 0 for a full chunk."""


class _Pinned(Protocol):
    """Chunk in the arena (see `entries.Entry`)."""

    key: ChunkKey
    extent: Extent
    tail: int


class Prefix(Sequence[Leased]):
    """First chunks of a lease; there may be thousands, so each is built when it is accessed.

    `sources` has one byte per chunk: 0 for memory, else the number of the tier, from 1 on.
    """

    __slots__ = ("_entries", "sources")

    def __init__(self, entries: Sequence[_Pinned] = (), sources: bytes = b"") -> None:
        self._entries = entries
        self.sources = sources

    def extents(self, first: int, end: int) -> list[Extent]:
        """Return the extents of the chunks from `first` to `end`."""
        return [entry.extent for entry in self._entries[first : min(end, len(self))]]

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, at: int) -> Leased: ...

    @overload
    def __getitem__(self, at: slice) -> "Prefix": ...

    def __getitem__(self, at: int | slice) -> "Leased | Prefix":
        if isinstance(at, slice):
            return Prefix(self._entries[: len(self)][at], self.sources[at])
        return _leased(self._entries[range(len(self))[at]], self.sources[at])

    def __iter__(self) -> Iterator[Leased]:
        return map(_leased, self._entries, self.sources)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _leased(entry: _Pinned, source: int) -> Leased:
    place = Source.TIER if source else Source.MEMORY
    return Leased(entry.key, entry.extent, place, entry.tail)


class Acquisition(msgspec.Struct, frozen=True):
    """State of a lease: `chunks` is the prefix leased so far.

    `promoting` counts the chunks behind that prefix whose promotion the lease waits for, plus one
    while it waits for lookup results of the next chunk, plus one while more of a long chain is
    being leased. 0 means that the answer is final. `skipped` counts chunks in tiers that are not
    read because that would take longer than to compute them.
    """

    lease_id: LeaseId
    chunks: Prefix
    promoting: int
    skipped: int = 0


class Grant(msgspec.Struct, frozen=True, gc=False):
    """Reserved space for one chunk, with the shards that the rank has to write (a bitmap).

    `shards` are all shards of the rank, or none. None means that another rank of the session writes
    the same shards, and this rank's commit only confirms that the computed KV may be kept.
    """

    key: ChunkKey
    extent: Extent
    shards: int


class CommitResult(enum.Enum):
    """Result of a commit."""

    RESIDENT = "resident"
    """It was the commit of the last rank: the chunk is visible now."""
    WAITING = "waiting"
    """Accepted; commits of other ranks are outstanding."""
    REFUSED = "refused"
    """Not reserved by this member with this generation: nothing changed. With a wrong number of
    checksums: the reservation is given up."""
    DISCARDED = "discarded"
    """The reservation was given up before; the space is freed when all writers have ended."""


class TierLookup(msgspec.Struct, frozen=True, gc=False):
    """Action: ask `tier` in one batch which shards of these chunks it has.

    The service answers with `tier_looked_up` exactly once, within a bounded time even if the tier
    hangs.
    """

    tier: TierName
    number: int
    namespace: Namespace
    keys: tuple[ChunkKey, ...]
    tenant: TenantId = NO_TENANT


class TierRead(msgspec.Struct, frozen=True, gc=False):
    """Action: read every shard of the chunk from `tier` into `extent`.

    With `tail`, it is a tail of which so many tokens are stored. The service answers with
    `tier_read_done` exactly once.
    """

    tier: TierName
    namespace: Namespace
    key: ChunkKey
    extent: Extent
    tenant: TenantId = NO_TENANT
    tail: int = 0


class TierWrite(msgspec.Struct, frozen=True, gc=False):
    """Action: write every shard of the chunk from `extent` to `tier`, with these checksums.

    The extent does not change until `tier_write_done`, which is called exactly once.
    """

    tier: TierName
    namespace: Namespace
    key: ChunkKey
    extent: Extent
    checksums: tuple[Checksum, ...]
    tenant: TenantId = NO_TENANT


class TierDelete(msgspec.Struct, frozen=True, gc=False):
    """Action: delete every shard of the chunk from `tier`. There is no answer."""

    tier: TierName
    namespace: Namespace
    key: ChunkKey
    tenant: TenantId = NO_TENANT


class Update(msgspec.Struct, frozen=True):
    """Action: send the session the final state of a lease that was waiting."""

    session: SessionId
    acquisition: Acquisition


Action = TierLookup | TierRead | TierWrite | TierDelete | Update
