# SPDX-License-Identifier: Apache-2.0
"""Typed status of a service, as shown by `kvhaven status`."""

import os
from collections.abc import Generator, Mapping
from typing import Final, cast

import msgspec

from kvhaven import __version__
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.stats import CatalogStats, NamespaceStats, TenantStats
from kvhaven.errors import KVHavenError
from kvhaven.peers.listener import ListenerStatus
from kvhaven.peers.peer import PeerStatus
from kvhaven.peers.tier import PeerTier
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.service.engines import AttachedEngines
from kvhaven.service.verify import Verifier
from kvhaven.tiers.base import Tier, TierHealth
from kvhaven.types import NamespaceDigest

_PIECE: Final = 16
"""Namespaces, or tenants, that one piece of a job describes."""
_FIELDS_BYTES: Final = 1 << 19
"""Most JSON of namespaces with fields (a few KB each), because a status is one frame."""


class NamespaceStatus(msgspec.Struct, frozen=True):
    """A namespace's chunks and bytes in memory and in each tier.

    `fields` is empty except for the newest namespaces.
    """

    digest: str
    model: str
    fields: dict[str, str]
    chunks: dict[str, int]
    bytes: dict[str, int]


class TenantStatus(msgspec.Struct, frozen=True):
    """A tenant's chunks and bytes in memory and in each local tier.

    `quotas` are in bytes, for memory and each local tier; a place without a quota is left out.
    `tenant` has 16 hex digits, which stand for the cache salt.
    """

    tenant: str
    chunks: dict[str, int]
    bytes: dict[str, int]
    quotas: dict[str, int]


class MemberStatus(msgspec.Struct, frozen=True):
    """A process of an engine.

    `quarantined_bytes`: memory that the process may still access although it is lost.
    `ready_bytes`: the part of the arena that a rank can copy to and from; its engine is offered no
    other memory. 0 for a scheduler.
    """

    session: str
    role: str
    connected: bool
    quarantined_bytes: int
    ready_bytes: int = 0


class ChainStatus(msgspec.Struct, frozen=True):
    """Counters of chains: prompts that one node computes and another reads meanwhile.

    `offered` to peers and `refused` (by a peer, or not announced at all) are of this node's
    engines. `expected` from peers, `completed` by them, `stalled` (the peer fell silent) are of
    other nodes' engines. Of `expected`, this node asked for `pulled`, because no node offered them
    in time. `open` is the number of both kinds that have not ended.
    """

    open: int = 0
    offered: int = 0
    refused: int = 0
    expected: int = 0
    completed: int = 0
    stalled: int = 0
    pulled: int = 0


class ServiceStatus(msgspec.Struct, frozen=True):
    """Status of a node service. Sizes are in bytes; counters start with the service."""

    version: str
    service: str
    pid: int
    arena_bytes: int
    arena_used_bytes: int
    hit_rate: float
    """Chunks that were resident or promoted, divided by the chunks requested."""
    verified_chunks: int
    damaged_chunks: int
    namespaces: list[NamespaceStatus]
    members: list[MemberStatus]
    tiers: dict[str, TierHealth]
    catalog: CatalogStats
    arena_allocated_bytes: int = 0
    arena_planned_bytes: int = 0
    """Exceeds `arena_allocated_bytes` while `arena_allocating`, or if memory ran out meanwhile."""
    arena_allocating: bool = False
    tenants: list[TenantStatus] = []
    """The tenants with the most bytes; `catalog.more_tenants` is the number of the others."""
    peers: list[PeerStatus] = []
    """Other nodes whose memory is read."""
    chains: ChainStatus = ChainStatus()
    listener: ListenerStatus = ListenerStatus()


def decode_status(raw: bytes) -> ServiceStatus:
    """Return a service's status from JSON. Raises `KVHavenError` for one of another version."""
    try:
        return msgspec.json.decode(raw, type=ServiceStatus)
    except msgspec.MsgspecError as error:
        raise KVHavenError(
            f"the service's status cannot be read ({error}): the service has another version than "
            f"this command (got kvhaven {__version__} here). Use the command of its version, or "
            "restart the service"
        ) from error


def describe(
    service_id: str,
    catalog: Catalog,
    arena: Arena,
    verifier: Verifier,
    sessions: AttachedEngines,
    tiers: Mapping[TierName, Tier],
    chains: ChainStatus,
    listener: ListenerStatus,
) -> Generator[None, None, bytes]:
    """Return a service's `ServiceStatus` as JSON, in pieces of about a millisecond."""
    healths = {str(name): tier.health() for name, tier in tiers.items()}  # as the catalog's are now
    stats = yield from catalog.survey()
    yield
    tenants = []
    for tenant, known in stats.tenants.items():
        tenants.append(tenant_status(tenant.hex(), known))
        if len(tenants) % _PIECE == 0:
            yield
    yield
    namespaces = yield from _namespaces(stats.namespaces)
    yield
    status = ServiceStatus(
        version=__version__,
        service=service_id,
        pid=os.getpid(),
        arena_bytes=stats.capacity_bytes,
        arena_used_bytes=stats.used_bytes,
        arena_allocated_bytes=arena.usable,
        arena_planned_bytes=arena.size,
        arena_allocating=arena.allocating,
        hit_rate=stats.hit_rate,
        verified_chunks=verifier.checked,
        damaged_chunks=verifier.damaged,
        namespaces=namespaces,
        members=[
            MemberStatus(
                session=engine.session.id,
                role=process.member.role,
                connected=process.connection is not None,
                quarantined_bytes=stats.quarantined_by.get(process.id, 0),
                ready_bytes=process.member.ready.get(SEGMENT, 0),
            )
            for engine in sessions
            for process in engine.processes.values()
        ],
        tiers=healths,
        catalog=msgspec.structs.replace(stats, namespaces={}, tenants={}),
        tenants=tenants,
        peers=[p for tier in tiers.values() if isinstance(tier, PeerTier) for p in tier.peers()],
        chains=chains,
        listener=listener,
    )
    return msgspec.json.encode(status)


def tenant_status(tenant: str, stats: TenantStats) -> TenantStatus:
    """Return the status of the tenant with this id, in hex."""
    usage = {"memory": stats.memory} | {str(name): used for name, used in stats.tiers.items()}
    quotas = dict.fromkeys(usage, stats.disk_quota) | {"memory": stats.memory_quota}
    return TenantStatus(
        tenant=tenant,
        chunks={name: used.chunks for name, used in usage.items()},
        bytes={name: used.bytes for name, used in usage.items()},
        quotas={name: quota for name, quota in quotas.items() if quota is not None},
    )


def _namespaces(
    namespaces: dict[NamespaceDigest, NamespaceStats],
) -> Generator[None, None, list[NamespaceStatus]]:
    """Describe namespaces, oldest first, encoded one by one because all together take long."""
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
