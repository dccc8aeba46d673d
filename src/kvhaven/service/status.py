# SPDX-License-Identifier: Apache-2.0
"""What `kvhaven status` shows: everything the service knows about itself, typed."""

import os
from collections.abc import Generator, Mapping
from typing import Final, cast

import msgspec

from kvhaven import __version__
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.stats import CatalogStats, NamespaceStats, TenantStats
from kvhaven.service.arena import Arena
from kvhaven.service.engines import AttachedEngines
from kvhaven.service.verify import Verifier
from kvhaven.tiers.base import Tier, TierHealth
from kvhaven.types import NamespaceDigest, TenantId

_PIECE: Final = 16
"""Namespaces, or tenants, that are described in one go."""
_FIELDS_BYTES: Final = 1 << 19
"""JSON of namespaces with their fields, of a few KB each: a status is one frame."""


class NamespaceStatus(msgspec.Struct, frozen=True):
    """A namespace's chunks and bytes in memory and in each tier.

    `fields` are those of the newest namespaces alone; of others there is none.
    """

    digest: str
    model: str
    fields: dict[str, str]
    chunks: dict[str, int]
    bytes: dict[str, int]


class TenantStatus(msgspec.Struct, frozen=True):
    """A tenant's chunks and bytes in memory and in each tier of the node's own.

    `quotas` are in bytes, for memory and for such a tier, where there are any. `tenant` is 16 hex
    digits that stand for its cache salt.
    """

    tenant: str
    chunks: dict[str, int]
    bytes: dict[str, int]
    quotas: dict[str, int]


class MemberStatus(msgspec.Struct, frozen=True):
    """A process of an engine. `quarantined_bytes`: it is lost and may still touch these.

    `ready_bytes`: of a rank, how much of the arena it can copy to and from; its engine is offered
    no other. 0 for a scheduler.
    """

    session: str
    role: str
    connected: bool
    quarantined_bytes: int
    ready_bytes: int = 0


class ServiceStatus(msgspec.Struct, frozen=True):
    """One moment of a node service. Sizes are bytes; counters run since it started."""

    version: str
    service: str
    pid: int
    arena_bytes: int
    arena_used_bytes: int
    hit_rate: float
    """Chunks that were resident or promoted, of those asked for."""
    verified_chunks: int
    damaged_chunks: int
    namespaces: list[NamespaceStatus]
    members: list[MemberStatus]
    tiers: dict[str, TierHealth]
    catalog: CatalogStats
    arena_allocated_bytes: int = 0
    arena_planned_bytes: int = 0
    """More than what is allocated while `arena_allocating`, or if memory ran out meanwhile."""
    arena_allocating: bool = False
    tenants: list[TenantStatus] = []
    """Those that have most; `catalog.more_tenants` says how many others there are."""


def describe(
    service_id: str,
    catalog: Catalog,
    arena: Arena,
    verifier: Verifier,
    sessions: AttachedEngines,
    tiers: Mapping[TierName, Tier],
) -> Generator[None, None, bytes]:
    """Return a service's status as JSON of `ServiceStatus`, in pieces of a millisecond."""
    stats = yield from catalog.survey()
    yield
    tenants = []
    for tenant, known in stats.tenants.items():
        tenants.append(_tenant(tenant, known))
        if len(tenants) % _PIECE == 0:
            yield
    yield
    namespaces = yield from _namespaces(stats.namespaces)
    yield
    hits = stats.hit_chunks + stats.promoted_chunks
    asked = stats.hit_chunks + stats.promoted_chunks + stats.missed_chunks
    status = ServiceStatus(
        version=__version__,
        service=service_id,
        pid=os.getpid(),
        arena_bytes=stats.capacity_bytes,
        arena_used_bytes=stats.used_bytes,
        arena_allocated_bytes=arena.usable,
        arena_planned_bytes=arena.size,
        arena_allocating=arena.allocating,
        hit_rate=hits / asked if asked else 0.0,
        verified_chunks=verifier.checked,
        damaged_chunks=verifier.damaged,
        namespaces=namespaces,
        members=[
            MemberStatus(
                session=session.id,
                role=member.role,
                connected=member.connection is not None,
                quarantined_bytes=stats.quarantined_by.get(member.id, 0),
                ready_bytes=member.ready,
            )
            for session in sessions
            for member in session.members
        ],
        tiers={str(name): tier.health() for name, tier in tiers.items()},
        catalog=msgspec.structs.replace(stats, namespaces={}, tenants={}),
        tenants=tenants,
    )
    return msgspec.json.encode(status)


def _namespaces(
    namespaces: dict[NamespaceDigest, NamespaceStats],
) -> Generator[None, None, list[NamespaceStatus]]:
    """Describe namespaces, the oldest first. They are JSON already: all at once would take long."""
    described: list[msgspec.Raw] = []
    left = _FIELDS_BYTES
    for digest, known in reversed(namespaces.items()):
        usage = {"memory": known.memory} | {str(name): used for name, used in known.tiers.items()}
        status = NamespaceStatus(
            digest=digest.hex(),
            model=known.fields.get("model", ""),
            fields=known.fields if left > 0 else {},
            chunks={name: used.chunks for name, used in usage.items()},
            bytes={name: used.bytes for name, used in usage.items()},
        )
        described.append(msgspec.Raw(msgspec.json.encode(status)))
        left -= len(described[-1])
        if len(described) % _PIECE == 0:
            yield
    return cast(list[NamespaceStatus], described[::-1])


def _tenant(tenant: TenantId, stats: TenantStats) -> TenantStatus:
    usage = {"memory": stats.memory} | {str(name): used for name, used in stats.tiers.items()}
    quotas = dict.fromkeys(usage, stats.disk_quota) | {"memory": stats.memory_quota}
    return TenantStatus(
        tenant=tenant.hex(),
        chunks={name: used.chunks for name, used in usage.items()},
        bytes={name: used.bytes for name, used in usage.items()},
        quotas={name: quota for name, quota in quotas.items() if quota is not None},
    )
