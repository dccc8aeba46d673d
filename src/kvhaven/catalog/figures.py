# SPDX-License-Identifier: Apache-2.0
"""Gathers the catalog's figures."""

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, NamespaceState, Tenant
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
from kvhaven.types import NamespaceDigest, TenantId

_Parts = list[NamespaceState]
_UsageByTier = dict[TierName, dict[NamespaceState, tuple[int, int]]]


def collect(
    owners: Owners,
    space: Space[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
) -> CatalogStats:
    """Return all figures; the cost grows with namespaces, tenants and leases, not with chunks."""
    usage = {name: index.figures().usage for name, index in tiers.own.items()}
    quarantine = {m.id: _quarantined(m, sessions) for m in sessions.lost()}
    by_namespace: dict[NamespaceDigest, _Parts] = {}
    by_tenant: dict[Tenant, _Parts] = {tenant: [] for tenant in owners.tenants()}
    for part in owners.parts():
        by_namespace.setdefault(part.namespace.digest, []).append(part)
        if part.tenant in by_tenant:
            by_tenant[part.tenant].append(part)
    tenants, more_tenants = _tenants(by_tenant, usage)
    held: dict[int, Entry] = {}
    for entries in quarantine.values():
        held.update(entries)
    return CatalogStats(
        namespaces={d: _namespace(parts, usage) for d, parts in by_namespace.items()},
        tiers={name: _tier(tiers.indexes[name], w) for name, w in tiers.writes.items()},
        sessions=len(sessions.sessions),
        members=len(sessions.members),
        capacity_bytes=space.allocator.capacity_bytes,
        used_bytes=space.allocator.used_bytes,
        pin_limit_bytes=leases.pin_limit,
        resident_chunks=sum(p.resident for parts in by_namespace.values() for p in parts),
        leases=sum(len(s.leases) for s in sessions.sessions.values()),
        leased_bytes=space.leased_bytes,
        promoting_bytes=space.promoting_bytes,
        reserved_bytes=_bytes(space.reserved),
        doomed_bytes=space.doomed_bytes,
        quarantined_bytes=_bytes(held),
        quarantined_by={member: _bytes(entries) for member, entries in quarantine.items()},
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
        quota_evictions=space.quota_evictions,
        quota_refusals=space.quota_refusals,
        tenants=tenants,
        more_tenants=more_tenants,
    )


def of_tenant(owners: Owners, tiers: Tiers, tenant: TenantId) -> TenantStats:
    """Return the figures of one tenant, known or not."""
    usage = {name: index.figures().usage for name, index in tiers.own.items()}
    return _tenant(owners.tenant(tenant), list(owners.parts(tenant=tenant)), usage)


def _bytes(entries: dict[int, Entry]) -> int:
    return sum(e.extent.length for e in entries.values())


def _quarantined(member: Member, sessions: Sessions) -> dict[int, Entry]:
    """Return what a lost member may still touch: its reservations, and leases it has not acked."""
    held = dict(member.open)
    if member.rank is not None:
        for lease in sessions.sessions[member.session].leases.values():
            if not lease.acked >> member.rank & 1:
                held.update((e.extent.generation, e) for e in lease.slots if e.leases)
    return held


def _namespace(parts: _Parts, usage: _UsageByTier) -> NamespaceStats:
    resident = sum(part.resident for part in parts)
    return NamespaceStats(
        fields=parts[0].namespace.fields,
        memory=Usage(resident, resident * parts[0].extent_bytes),
        tiers=_in_tiers(parts, usage),
    )


def _tenants(
    by_tenant: dict[Tenant, _Parts], usage: _UsageByTier
) -> tuple[dict[TenantId, TenantStats], int]:
    """Return the figures of the tenants that have most, and how many others have anything."""
    found = {tenant.id: _tenant(tenant, parts, usage) for tenant, parts in by_tenant.items()}
    # The others were asked for, and have nothing.
    having = {tenant: bytes_ for tenant, known in found.items() if (bytes_ := _all_bytes(known))}
    most = sorted(having, key=lambda tenant: (-having[tenant], tenant))[:MOST_TENANTS]
    return {tenant: found[tenant] for tenant in most}, len(having) - len(most)


def _tenant(tenant: Tenant, parts: _Parts, usage: _UsageByTier) -> TenantStats:
    return TenantStats(
        memory=Usage(sum(part.resident for part in parts), tenant.memory_bytes),
        tiers=_in_tiers(parts, usage),
        memory_quota=tenant.memory_quota,
        disk_quota=tenant.disk_quota,
    )


def _all_bytes(stats: TenantStats) -> int:
    return stats.memory.bytes + sum(tier.bytes for tier in stats.tiers.values())


def _in_tiers(parts: _Parts, usage: _UsageByTier) -> dict[TierName, Usage]:
    """Return what parts of namespaces have in each tier of our own."""
    found = {}
    for name, known in usage.items():
        counted = [known.get(part, (0, 0)) for part in parts]
        found[name] = Usage(sum(c for c, _ in counted), sum(b for _, b in counted))
    return found


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
    )
