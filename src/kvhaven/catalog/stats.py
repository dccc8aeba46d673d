# SPDX-License-Identifier: Apache-2.0
"""Statistics of the catalog, for status and metrics."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from heapq import heappush, heappushpop

import msgspec

from kvhaven.catalog.actions import MemberId, SessionId, TierName
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState, Tenant
from kvhaven.catalog.histograms import Buckets
from kvhaven.catalog.holdings import Place, Scope
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Member, Sessions
from kvhaven.catalog.tier_spec import TierState
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.maps import StripedDict
from kvhaven.types import NO_TENANT, NamespaceDigest, TenantId

MOST_TENANTS = 1000
"""Maximum number of tenants in the statistics, which must fit into a message: there may be as many
tenants as users."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Number of chunks, and their bytes. In a tier, bytes include the shards' headers."""

    chunks: int = 0
    bytes: int = 0


class NamespaceStats(msgspec.Struct, frozen=True):
    """Known places of a namespace's chunks. A chunk may be in several places."""

    fields: dict[str, str]
    memory: Usage
    tiers: dict[TierName, Usage]


class TenantStats(msgspec.Struct, frozen=True):
    """Usage of a tenant, and its quotas in bytes (None: unlimited) in memory and in each tier.

    Bytes in memory include chunks being written or promoted, and retired ones still in use.
    """

    memory: Usage
    tiers: dict[TierName, Usage]
    memory_quota: int | None
    disk_quota: int | None


class TierStats(msgspec.Struct, frozen=True):
    """One tier. The content of a shared tier is unknown to the catalog and reported as zeros."""

    online: bool
    shared: bool
    capacity_bytes: int
    used_bytes: int
    chunks: int
    reads: int
    """Reads under way."""
    outstanding_writes: int
    outstanding_write_bytes: int
    queued_writes: int
    queued_write_bytes: int
    written: int
    """Chunks written since start."""
    dropped_writes: int
    """Chunks not written since start: overload, eviction before their turn, failure, offline
    tier."""
    evictions: int
    """Chunks evicted since start."""
    quota_evictions: int
    """Of `evictions`, those for a tenant's quota."""
    looking_up: int
    """Chunks in pending lookups of a shared tier."""
    looked_up: int
    """Chunks looked up in a shared tier since start."""
    found: int
    """Chunks of these that the tier reported as complete."""
    dropped: dict[str, int] = {}
    """`dropped_writes` by reason: overload (the queue was full), evicted (before their turn),
    failed, offline, off (switched off), room (no room within the capacity or a quota)."""
    promoted: int = 0
    """Chunks read into memory since start."""
    failed_promotions: int = 0
    writes: str = "behind"
    """Treatment of writes now: behind, through or off."""
    scanned: bool = True
    """Whether the content from before the start is known. A shared tier needs no scan."""


class CatalogTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of the catalog, in bytes and chunks; counters count chunks since start.

    They cost the same with any number of chunks, namespaces and tenants. `leased_bytes`,
    `promoting_bytes`, `reserved_bytes`, `idle_bytes`, `retired_idle_bytes` and the free bytes
    (`capacity_bytes` without `used_bytes`) are disjoint and sum to `capacity_bytes`.
    """

    tiers: dict[TierName, TierStats]
    sessions: int
    members: int
    lost_members: int
    """Members whose connection closed and that are not proven gone: their memory is quarantined."""
    capacity_bytes: int
    used_bytes: int
    pin_limit_bytes: int
    resident_chunks: int
    resident_bytes: int
    leases: int
    """Leases that hold chunks or wait for some."""
    leased_bytes: int
    promoting_bytes: int
    reserved_bytes: int
    """Reserved and not given up; given-up reservations are in `retired_bytes`."""
    retired_bytes: int
    """Invisible, but possibly still read or written."""
    retired_idle_bytes: int
    """Of `retired_bytes`, neither leased nor filled by a promotion."""
    idle_bytes: int
    """Visible or just cleared, and neither leased nor being filled."""
    evictions: int
    commits: int
    """Shards committed."""
    refused_commits: int
    queued_writes: int
    """Chunks that wait to be written to a tier, without those being written."""
    dropped_writes: int
    hit_chunks: int
    """Requested and resident."""
    awaited_chunks: int
    """Requested and being promoted, so that the request waits for them."""
    missed_chunks: int
    """Requested, and neither resident nor being promoted."""
    promoted_chunks: int
    """Promoted for a waiting request, or in advance: then a request may hit them later."""
    failed_promotions: int
    foreign: int = 0
    """Requests that ended before a chunk which exists for another namespace or tenant (a client's
    bug)."""
    unready: int = 0
    """Requests that ended before a chunk in memory that their engine's ranks are not ready for."""
    quota_evictions: int = 0
    """Of `evictions`, those that made room within the tenant's quota."""
    quota_refusals: int = 0
    """Chunks not saved or promoted because the tenant's quota had no room."""
    expired_tails: int = 0
    """Incomplete chunks that were dropped for their age."""
    cleared_chunks: int = 0
    """Chunks cleared from memory."""
    quarantined_idle_bytes: int = 0
    """Of `retired_idle_bytes`, reserved by processes that are lost and not proven gone."""
    waste_bytes: int = 0
    """Memory that no chunk can use, behind the last extent of each slab."""
    oldest_lease_s: float = 0.0
    """Age of the oldest lease; 0 without leases."""
    residence: dict[str, Buckets] = {}
    """Seconds in memory of evicted chunks, by reason."""
    reuse_age: Buckets | None = None
    """Seconds since the last use of leased chunks, one chunk for each piece of a lease."""
    tails: int = 0
    """Incomplete chunks at the ends of prompts, among the resident chunks."""

    @property
    def hit_rate(self) -> float:
        """Requested chunks that were resident or promoted, as a fraction; 0 without requests."""
        found = self.hit_chunks + self.awaited_chunks
        return found / (found + self.missed_chunks) if found else 0.0


class CatalogStats(CatalogTotals, frozen=True, kw_only=True):
    """All statistics: the totals, and those that take a walk over namespaces and tenants."""

    namespaces: dict[NamespaceDigest, NamespaceStats]
    quarantined_bytes: int
    """Held by members whose connection closed and that are not proven gone."""
    quarantined_by: dict[MemberId, int]
    """Quarantined bytes by member; bytes that several members hold count for each."""
    tenants: dict[TenantId, TenantStats] = {}
    """The `MOST_TENANTS` tenants with the most bytes."""
    more_tenants: int = 0
    """Number of other tenants with any bytes."""


_PIECE = 64
"""Namespaces, tenants, or chunks in quarantine that are visited in one piece."""

_Seen = StripedDict[bytes, None]
"""Set of chunks by their generation."""

_Places = Mapping[TierName, Place]
"""Places of the local tiers."""


def collect(
    owners: Owners,
    space: ResidentChunks[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
) -> Generator[None, None, CatalogStats]:
    """Return all statistics, in pieces that each take a millisecond at most.

    The cost grows with tenants and quarantined chunks, not with all chunks.
    """
    places = {name: index.place for name, index in tiers.own.items()}
    quarantined, seen, quarantine = 0, _Seen(), {}
    for member in tuple(sessions.lost()):
        quarantine[member.id], more = yield from _quarantined(member, sessions, seen)
        quarantined += more
    tenants, more_tenants = yield from _tenants(owners, space.place, places)
    yield
    namespaces = yield from _namespaces(owners, space.place, places)
    totals = totals_of(space, sessions, tiers, leases, reservations)
    return CatalogStats(
        **msgspec.structs.asdict(totals),
        namespaces=namespaces,
        quarantined_bytes=quarantined,
        quarantined_by=quarantine,
        tenants=tenants,
        more_tenants=more_tenants,
    )


def totals_of(
    space: ResidentChunks[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
) -> CatalogTotals:
    """Return the totals, without visiting chunks, namespaces or tenants."""
    used = space.allocator.used_bytes
    retired_idle = space.retired_bytes - space.retired_pinned_bytes
    in_use = space.leased_bytes + space.promoting_bytes + space.reserved_bytes + retired_idle
    return CatalogTotals(
        tiers={name: _tier(tiers.indexes[name], w) for name, w in tiers.writes.items()},
        sessions=sum(not session.own for session in sessions.sessions.values()),
        members=len(sessions.members),
        lost_members=sum(1 for _ in sessions.lost()),
        capacity_bytes=space.allocator.capacity_bytes,
        used_bytes=used,
        pin_limit_bytes=leases.pin_limit,
        resident_chunks=space.place.chunks,
        resident_bytes=space.place.bytes,
        tails=len(space.tails),
        leases=sum(len(s.leases) for s in sessions.sessions.values()),
        leased_bytes=space.leased_bytes,
        promoting_bytes=space.promoting_bytes,
        reserved_bytes=space.reserved_bytes,
        retired_bytes=space.retired_bytes,
        retired_idle_bytes=retired_idle,
        idle_bytes=used - in_use,
        evictions=space.evictions,
        commits=reservations.commits,
        refused_commits=reservations.refused,
        queued_writes=sum(len(w.queue) for w in tiers.writes.values()),
        dropped_writes=sum(w.dropped.total() for w in tiers.writes.values()),
        hit_chunks=leases.hits,
        awaited_chunks=leases.awaited,
        missed_chunks=leases.misses,
        promoted_chunks=leases.promoted,
        failed_promotions=leases.failed_promotions,
        foreign=leases.foreign,
        unready=leases.unready,
        quota_evictions=space.quota_evictions,
        quota_refusals=space.quota_refusals,
        expired_tails=space.expired,
        cleared_chunks=space.cleared,
        quarantined_idle_bytes=min(retired_idle, _quarantined_idle(sessions)),
        waste_bytes=space.allocator.waste_bytes,
        oldest_lease_s=_oldest_lease(sessions, space.now),
        residence={reason: ages.buckets() for reason, ages in space.residence.items()},
        reuse_age=space.reuse_age.buckets(),
    )


def _quarantined_idle(sessions: Sessions) -> int:
    """Return the bytes of reservations of lost members; ranks of a session share theirs."""
    most: dict[SessionId, int] = {}
    for member in sessions.lost():
        extent = next(iter(member.void.values()), None)
        held = 0 if extent is None else len(member.void) * extent.extent.length
        most[member.session] = max(held, most.get(member.session, 0))
    return sum(most.values())


def _oldest_lease(sessions: Sessions, now: float) -> float:
    """Return the age of the oldest lease: the first one of some session."""
    firsts = (next(iter(s.leases.values()), None) for s in sessions.sessions.values())
    return max((now - lease.since for lease in firsts if lease is not None), default=0.0)


def tenants_after(
    owners: Owners, space: ResidentChunks[S], tiers: Tiers, last: bytes
) -> Iterator[tuple[TenantId, TenantStats]]:
    """Yield the statistics of tenants with an id above `last`, in ascending order."""
    places = {name: index.place for name, index in tiers.own.items()}
    for tenant in owners.tenants_after(last):
        parts = owners.parts_of(Scope(None, tenant.id))
        yield tenant.id, _tenant(tenant, parts, space.place, places)


def namespaces_after(
    owners: Owners, space: ResidentChunks[S], tiers: Tiers, last: bytes
) -> Iterator[tuple[NamespaceDigest, NamespaceStats]]:
    """Yield the statistics of namespaces with a digest above `last`, in ascending order."""
    places = {name: index.place for name, index in tiers.own.items()}
    for part in owners.namespaces_after(last):
        yield part.namespace.digest, _namespace(part, space.place, places)


def of_tenant(
    owners: Owners, space: ResidentChunks[S], tiers: Tiers, tenant: TenantId
) -> TenantStats:
    """Return the statistics of one tenant, which may be unknown."""
    parts = owners.parts_of(Scope(None, tenant))
    places = {name: index.place for name, index in tiers.own.items()}
    return _tenant(owners.tenant(tenant), parts, space.place, places)


def _quarantined(
    member: Member, sessions: Sessions, seen: _Seen
) -> Generator[None, None, tuple[int, int]]:
    """Return the bytes that a lost member may still touch, and those among them not in `seen`.

    These are its reservations, and leases that it has not acknowledged. `seen` collects the chunks
    that were counted for other members.
    """
    home, rank = sessions.sessions.get(member.session), member.rank
    leases = () if home is None or rank is None else tuple(home.leases.values())
    unread = [lease.slots for lease in leases if not lease.acked >> (rank or 0) & 1]
    own, looked, own_bytes, more_bytes = _Seen(), 0, 0, 0
    for entries in (member.open.values(), member.void.values(), *unread):
        for entry in tuple(entries):
            generation = entry.extent.generation.to_bytes(8, "little")
            if (entry.leases or entry.writers) and generation not in own:
                own[generation] = None
                own_bytes += entry.extent.length
                if generation not in seen:
                    seen[generation] = None
                    more_bytes += entry.extent.length
            looked += 1
            if looked % _PIECE == 0:
                yield
    return own_bytes, more_bytes


def _namespaces(
    owners: Owners, arena: Place, tiers: _Places
) -> Generator[None, None, dict[NamespaceDigest, NamespaceStats]]:
    """Return the statistics of every namespace."""
    figures: dict[NamespaceDigest, NamespaceStats] = {}
    for part in tuple(owners.namespaces()):
        figures[part.namespace.digest] = _namespace(part, arena, tiers)
        if len(figures) % _PIECE == 0:
            yield
    return figures


def _namespace(part: NamespaceState, arena: Place, tiers: _Places) -> NamespaceStats:
    return NamespaceStats(
        fields=part.namespace.fields,
        memory=_on_shelf(arena, part),
        tiers={name: _on_shelf(place, part) for name, place in tiers.items()},
    )


def _tenants(
    owners: Owners, arena: Place, tiers: _Places
) -> Generator[None, None, tuple[dict[TenantId, TenantStats], int]]:
    """Return the statistics of the largest tenants, and the number of others with any bytes."""
    parts: dict[Tenant, list[NamespaceState]] = {}
    for looked, part in enumerate(owners.parts(), 1):
        if part.tenant.id != NO_TENANT:
            parts.setdefault(part.tenant, []).append(part)
        if looked % _PIECE == 0:
            yield
    most: list[tuple[int, int, TenantId, TenantStats]] = []
    others = 0
    for looked, (tenant, own) in enumerate(parts.items(), 1):
        stats = _tenant(tenant, own, arena, tiers)
        bytes_ = stats.memory.bytes + sum(tier.bytes for tier in stats.tiers.values())
        if bytes_:  # tenants without bytes exist only because they were queried
            ranked = bytes_, -int.from_bytes(tenant.id), tenant.id, stats
            if len(most) < MOST_TENANTS:
                heappush(most, ranked)
            else:
                heappushpop(most, ranked)
                others += 1
        if looked % _PIECE == 0:
            yield
    yield
    return {tenant: stats for _, _, tenant, stats in sorted(most, reverse=True)}, others


def _tenant(
    tenant: Tenant, parts: Sequence[NamespaceState], arena: Place, tiers: _Places
) -> TenantStats:
    return TenantStats(
        memory=Usage(_held(arena, parts).chunks, tenant.memory_bytes),
        tiers={name: _held(place, parts) for name, place in tiers.items()},
        memory_quota=tenant.memory_quota,
        disk_quota=tenant.disk_quota,
    )


def _held(place: Place, parts: Iterable[NamespaceState]) -> Usage:
    """Return the usage of a place by parts of namespaces."""
    found = [holding for part in parts if (holding := place.find(part)) is not None]
    return Usage(sum(h.chunks for h in found), sum(h.bytes for h in found))


def _on_shelf(place: Place, part: NamespaceState) -> Usage:
    """Return the usage of a place by a namespace."""
    shelf = place.shelves.get(part.namespace.digest)
    return Usage() if shelf is None else Usage(shelf.chunks, shelf.bytes)


def _tier(index: TierState, writes: WriteBehind) -> TierStats:
    figures = index.figures()
    return TierStats(
        online=index.online,
        shared=index.spec.shared,
        capacity_bytes=index.spec.capacity_bytes,
        used_bytes=figures.used_bytes,
        chunks=figures.chunks,
        reads=sum(index.reads.values()),
        outstanding_writes=len(writes.writing),
        outstanding_write_bytes=writes.outstanding_bytes,
        queued_writes=len(writes.queue),
        queued_write_bytes=writes.queued_bytes,
        written=writes.written,
        dropped_writes=writes.dropped.total(),
        dropped=dict(writes.dropped),
        promoted=index.promoted,
        failed_promotions=index.failed,
        writes=writes.mode.value,
        evictions=figures.evictions,
        quota_evictions=figures.quota_evictions,
        looking_up=figures.looking_up,
        looked_up=figures.looked_up,
        found=figures.found,
        scanned=figures.scanned,
    )
