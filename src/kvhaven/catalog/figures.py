# SPDX-License-Identifier: Apache-2.0
"""Gathers the catalog's figures."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from heapq import heappush, heappushpop

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState, Tenant
from kvhaven.catalog.holdings import Place, Scope
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.sessions import Member, Sessions
from kvhaven.catalog.space import Space
from kvhaven.catalog.stats import (
    MOST_TENANTS,
    CatalogStats,
    NamespaceStats,
    TenantStats,
    TierStats,
    Usage,
)
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.tierspec import TierState
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.maps import StripedDict
from kvhaven.types import NO_TENANT, NamespaceDigest, TenantId

_PIECE = 64
"""Namespaces, tenants, or chunks in quarantine, that are looked at in one go."""

_Seen = StripedDict[bytes, None]
"""Chunks by their generation."""

_Places = Mapping[TierName, Place]
"""The tiers of our own."""


def collect(
    owners: Owners,
    space: Space[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
) -> Generator[None, None, CatalogStats]:
    """Return all figures, in pieces that each take a millisecond at most.

    The cost grows with tenants, and with what is in quarantine, not with chunks.
    """
    places = {name: index.place for name, index in tiers.own.items()}
    quarantined, seen, quarantine = 0, _Seen(), {}
    for member in tuple(sessions.lost()):
        quarantine[member.id], more = yield from _quarantined(member, sessions, seen)
        quarantined += more
    tenants, more_tenants = yield from _tenants(owners, space.place, places)
    yield
    namespaces = yield from _namespaces(owners, space.place, places)
    return CatalogStats(
        namespaces=namespaces,
        tiers={name: _tier(tiers.indexes[name], w) for name, w in tiers.writes.items()},
        sessions=len(sessions.sessions),
        members=len(sessions.members),
        capacity_bytes=space.allocator.capacity_bytes,
        used_bytes=space.allocator.used_bytes,
        pin_limit_bytes=leases.pin_limit,
        resident_chunks=sum(shelf.chunks for shelf in space.place.shelves.values()),
        leases=sum(len(s.leases) for s in sessions.sessions.values()),
        leased_bytes=space.leased_bytes,
        promoting_bytes=space.promoting_bytes,
        reserved_bytes=space.reserved_bytes,
        doomed_bytes=space.doomed_bytes,
        quarantined_bytes=quarantined,
        quarantined_by=quarantine,
        evictions=space.evictions,
        commits=reservations.commits,
        refused_commits=reservations.refused,
        queued_writes=sum(len(w.queue) for w in tiers.writes.values()),
        dropped_writes=sum(w.dropped for w in tiers.writes.values()),
        hit_chunks=leases.hits,
        missed_chunks=leases.misses,
        promoted_chunks=leases.promoted,
        failed_promotions=leases.failed_promotions,
        foreign=leases.foreign,
        unready=leases.unready,
        quota_evictions=space.quota_evictions,
        quota_refusals=space.quota_refusals,
        tenants=tenants,
        more_tenants=more_tenants,
    )


def of_tenant(owners: Owners, space: Space[S], tiers: Tiers, tenant: TenantId) -> TenantStats:
    """Return the figures of one tenant, known or not."""
    parts = owners.parts_of(Scope(None, tenant))
    places = {name: index.place for name, index in tiers.own.items()}
    return _tenant(owners.tenant(tenant), parts, space.place, places)


def _quarantined(
    member: Member, sessions: Sessions, seen: _Seen
) -> Generator[None, None, tuple[int, int]]:
    """Return the bytes that a lost member may still touch, and of how many no other one may.

    Its reservations, and leases that it has not acknowledged. `seen` are other members' chunks.
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
    """Return the figures of every namespace."""
    figures: dict[NamespaceDigest, NamespaceStats] = {}
    for part in tuple(owners.namespaces()):
        figures[part.namespace.digest] = NamespaceStats(
            fields=part.namespace.fields,
            memory=_on_shelf(arena, part),
            tiers={name: _on_shelf(place, part) for name, place in tiers.items()},
        )
        if len(figures) % _PIECE == 0:
            yield
    return figures


def _tenants(
    owners: Owners, arena: Place, tiers: _Places
) -> Generator[None, None, tuple[dict[TenantId, TenantStats], int]]:
    """Return the figures of the tenants that have most, and how many others have anything."""
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
        if bytes_:  # others were asked for, and have nothing
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
    """Return what parts of namespaces have in a place."""
    found = [holding for part in parts if (holding := place.find(part)) is not None]
    return Usage(sum(h.chunks for h in found), sum(h.bytes for h in found))


def _on_shelf(place: Place, part: NamespaceState) -> Usage:
    """Return what a namespace has in a place."""
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
        dropped_writes=writes.dropped,
        evictions=figures.evictions,
        looking_up=figures.looking_up,
        looked_up=figures.looked_up,
        found=figures.found,
        scanned=figures.scanned,
    )
