# SPDX-License-Identifier: Apache-2.0
"""Setup of a service's tiers: their order, options, and descriptions for the catalog."""

import contextlib
import math
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvhaven.catalog import StoreOn, TierSpec, WriteMode
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.config import Settings
from kvhaven.errors import ConfigError
from kvhaven.peers.addresses import parse_address, parse_peers, read_token
from kvhaven.peers.certificates import read_certificates
from kvhaven.peers.tier import NodeRegistry, PeerTier
from kvhaven.tenants import quotas_of
from kvhaven.tiers.base import Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.health import START_WAIT_S
from kvhaven.tiers.local.lock import check_place
from kvhaven.tiers.local.tier import DiskTier
from kvhaven.tiers.optional import import_optional
from kvhaven.tiers.registry import TierOptions, open_tier
from kvhaven.tiers.shared.store import SharedStore


def make_tiers(settings: Settings) -> dict[TierName, Tier]:
    """Return the tiers of the settings, fastest first, not started yet.

    Raises `ConfigError` for a URL of an unknown kind, for missing packages, for a `local_disk`
    directory to which other users may write, and for invalid addresses or tokens of peers.
    """
    tiers: dict[TierName, Tier] = {}
    if settings.local_disk is not None:
        path = Path(settings.local_disk)
        _check_in_time(path)
        disk = DiskTier(
            path,
            settings.max_local_disk_size,
            executor=TierExecutor(),
            direct_io=settings.disk_direct_io,
            compress=settings.disk_compression == "zstd",
            retry_s=settings.breaker_pause_s,
        )
        tiers[TierName(disk.name)] = disk
    if settings.peers is not None:
        addresses, registries = parse_peers(settings.peers)
        tiers[TierName(PeerTier.name)] = PeerTier(
            addresses,
            token=read_token(settings.peer_token_file),
            deadline_s=settings.peer_deadline_ms / 1000,
            streams=settings.peer_streams,
            certificates=read_certificates(settings),
            tenants=settings.peer_tenants,
            registries=[_registry(url, settings) for url in registries],
        )
    for url in (settings.remote_url or "").split():
        tier = open_tier(url, _options(settings))
        tiers[_free_name(tier.name, tiers)] = tier
    return tiers


_PEERS_TTL_S: Final = 0.5
"""Longest time for which lookup results of peers are cached, as peers announce their chunks."""


def specs_of(settings: Settings, tiers: dict[TierName, Tier]) -> list[TierSpec]:
    """Return the descriptions of these tiers for the catalog."""
    most = {name: _PEERS_TTL_S for name, tier in tiers.items() if isinstance(tier, PeerTier)}
    return [
        TierSpec(
            name,
            tier.health().capacity_bytes or 0,
            shared=tier.shared,
            lookup_ttl_s=min(settings.remote_lookup_ttl_s, most.get(name, math.inf)),
            most_lookup_ttl_s=most.get(name, math.inf),
            write=_write_mode(settings, tier),
            store_on=StoreOn(settings.remote_store_on if tier.shared else settings.disk_store_on),
        )
        for name, tier in tiers.items()
    ]


def _write_mode(settings: Settings, tier: Tier) -> WriteMode:
    if isinstance(tier, PeerTier):
        return WriteMode.OFF
    return WriteMode(settings.remote_write if tier.shared else settings.disk_write)


def _registry(url: str, settings: Settings) -> NodeRegistry:
    """Return the registry of nodes at `url`. A node that does not listen only reads it."""
    make = import_optional("redis.node_registry", "redis", "peers at redis://").RedisRegistry
    registry: NodeRegistry
    if settings.peer_listen is None:
        registry = make(url)
        return registry
    name = "peer_listen" if settings.peer_address is None else "peer_address"
    own = parse_address(settings.peer_address or settings.peer_listen, name)
    if not own.port or own.dynamic:
        raise ConfigError(
            f"{name}: {own} cannot be registered for other nodes; expected host:port with the port "
            "at which they reach this node (peer_address, if it is not that of peer_listen)"
        )
    registry = make(url, own.host, own.port)
    return registry


def store_at(url: str, settings: Settings) -> SharedStore:
    """Return the store at `url` for tools: it must exist, and its limits are not enforced.

    Raises `ConfigError` for a URL of an unknown kind.
    """
    return open_tier(url, replace(_options(settings), limits=None, known=True)).store


def _check_in_time(path: Path) -> None:
    """Check the disk tier's directory; skip that if it cannot be read or its disk hangs.

    The tier checks the directory again when it opens it. Raises `ConfigError` if other users may
    write there.
    """
    checked = Future[None]()

    def check() -> None:
        try:
            check_place(path)
            checked.set_result(None)
        except (ConfigError, OSError) as error:
            checked.set_exception(error)

    # Not a pool thread, because the interpreter waits for those when it exits.
    threading.Thread(target=check, name="kvhaven-check-place", daemon=True).start()
    with contextlib.suppress(OSError):  # includes TimeoutError
        checked.result(START_WAIT_S)


def _options(settings: Settings) -> TierOptions:
    """Return the options of shared tiers."""
    limits = Limits(
        settings.max_remote_size,
        settings.max_remote_namespace_size,
        settings.remote_ttl_s,
        quotas_of(settings.tenant_remote),
    )
    ttl_s = settings.remote_ttl_s
    return TierOptions(
        retry_s=settings.breaker_pause_s,
        compress=settings.remote_compression == "zstd",
        direct_io=settings.disk_direct_io,
        limits=limits if limits.any else None,
        ttl_s=None if ttl_s is None else math.ceil(ttl_s),
        endpoints=tuple((settings.s3_endpoint_url or "").split()),
    )


def _free_name(name: str, taken: dict[TierName, Tier]) -> TierName:
    """Return a unique name for a tier, with a number if its name is taken."""
    free, number = TierName(name), 1
    while free in taken or free == MEMORY:
        number += 1
        free = TierName(f"{name}-{number}")
    return free
