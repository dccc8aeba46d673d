# SPDX-License-Identifier: Apache-2.0
"""Gathers the catalog's figures."""

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, NamespaceState
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.sessions import Member, Sessions
from kvhaven.catalog.space import Space
from kvhaven.catalog.stats import CatalogStats, NamespaceStats, TierStats, Usage
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.tierspec import TierState
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.types import NamespaceDigest


def collect(
    namespaces: dict[NamespaceDigest, NamespaceState],
    space: Space[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
) -> CatalogStats:
    """Return all figures; the cost grows with namespaces and leases, not with chunks."""
    usage = {name: index.figures().usage for name, index in tiers.own.items()}
    quarantine = {m.id: _quarantined(m, sessions) for m in sessions.lost()}
    held: dict[int, Entry] = {}
    for entries in quarantine.values():
        held.update(entries)
    return CatalogStats(
        namespaces={d: _namespace(n, usage) for d, n in namespaces.items()},
        tiers={name: _tier(tiers.indexes[name], w) for name, w in tiers.writes.items()},
        sessions=len(sessions.sessions),
        members=len(sessions.members),
        capacity_bytes=space.allocator.capacity_bytes,
        used_bytes=space.allocator.used_bytes,
        pin_limit_bytes=leases.pin_limit,
        resident_chunks=sum(n.resident for n in namespaces.values()),
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
    )


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


def _namespace(
    namespace: NamespaceState, usage: dict[TierName, dict[NamespaceDigest, tuple[int, int]]]
) -> NamespaceStats:
    digest = namespace.namespace.digest
    return NamespaceStats(
        fields=namespace.namespace.fields,
        memory=Usage(namespace.resident, namespace.resident * namespace.extent_bytes),
        tiers={name: Usage(*known.get(digest, (0, 0))) for name, known in usage.items()},
    )


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
