# SPDX-License-Identifier: Apache-2.0
"""Snapshots for observers: totals once a second, and lists page by page."""

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import islice
from typing import Final

import msgspec

from kvhaven import __version__
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.histograms import SECONDS, Buckets, Histogram
from kvhaven.catalog.stats import CatalogTotals, NamespaceStats, TenantStats
from kvhaven.errors import KVHavenError
from kvhaven.peers.listener import ListenerStatus
from kvhaven.protocol import List, Listed, ListKind
from kvhaven.service.accounts import Accounts, LookupHistograms, TokenCounts
from kvhaven.service.arena import Arena
from kvhaven.service.engines import AttachedEngine, AttachedEngines, chunk_tokens_of, tokens_in
from kvhaven.service.jobs import Jobs
from kvhaven.service.pins import Pins
from kvhaven.service.runtime_settings import RuntimeSettings
from kvhaven.service.status import ChainStatus, tenant_status
from kvhaven.service.tier_runner import TierRunner, TierSwitch, TierTraffic
from kvhaven.service.turns import OTHERS_FIRST
from kvhaven.service.verify import Verifier
from kvhaven.tiers.base import Tier, TierHealth

_MEMORY: Final = "memory"
_LAG_S: Final = 0.1
_ROWS_OF_A_TURN: Final = 8
_MOST_FIELD: Final = 256
"""Most characters of a namespace's field in a row: some fields are long lists of settings."""


class ServiceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a service. Sizes are in bytes; counters start with the service."""

    version: str
    service: str
    pid: int
    started: float
    """Seconds since 1970."""
    stopping: bool
    arena_allocated_bytes: int
    arena_planned_bytes: int
    arena_allocating: bool
    engines: int
    verified_chunks: int
    damaged_chunks: int
    pinned_bytes: int
    """Of `catalog.leased_bytes`, pinned through the API."""
    pins: int
    draining: bool
    protocol_errors: int = 0
    """Connections that were closed for a malformed, unexpected or overdue message."""
    config_generation: int
    switched: dict[str, TierSwitch]
    """Tiers that an operator has switched."""
    catalog: CatalogTotals
    tiers: dict[str, TierHealth]
    chains: ChainStatus
    listener: ListenerStatus
    tokens: dict[str, TokenCounts]
    """By namespace, named by the first 16 hex digits of its digest; beyond 32, `other`."""
    lookups: LookupHistograms
    traffic: dict[str, dict[str, TierTraffic]]
    """By tier, and by operation: read or write."""
    skipped_tokens: dict[str, int]
    """Tokens that engines wanted to save and could not, by reason."""
    loop_lag_seconds: Buckets
    """By how much a timer of the service's event loop was late, ten times a second."""


class EngineRow(msgspec.Struct, frozen=True):
    """An attached engine. Fields of its namespace that are not known are None."""

    id: str
    model: str | None
    engine: str | None
    """Versions of the engine and its libraries, in the format `paged`."""
    device: str | None
    """vLLM's type of device, in the format `paged`."""
    block_tokens: int | None
    """Tokens of a block of vLLM, in the format `paged`."""
    dtype: str | None
    layout: str | None
    format: str | None
    chunk_tokens: int | None
    world_size: int
    attached_ranks: int
    """Ranks with a connection."""
    scheduler_attached: bool
    namespace: str
    """Digest in hex."""
    since: float
    """Time of the first attach, in seconds since 1970."""
    asked_tokens: int
    """Of prompts that were looked up, since then; all counters begin then."""
    found_tokens: int
    """Of these, in the engine's own cache, in memory or in a tier."""
    loaded_bytes: int
    """By all ranks, of chunks whose load they acknowledged. A prompt's tail counts as a chunk."""
    saved_bytes: int
    """By all ranks, of chunks that they wrote."""
    skipped_tokens: int
    """That could not be saved: for a quota, for space, or as the service is draining."""


class NamespaceRow(msgspec.Struct, frozen=True):
    """A namespace: its digest in hex, and its chunks and bytes in memory and in each local tier."""

    id: str
    model: str | None
    engine: str | None
    format: str | None
    chunk_tokens: int | None
    chunks: dict[str, int]
    bytes: dict[str, int]


class TenantRow(msgspec.Struct, frozen=True):
    """A tenant: its chunks and bytes in memory and in each local tier, and its quotas in bytes.

    `id` has 16 hex digits, which stand for the cache salt. A place without a quota is left out.
    """

    id: str
    chunks: dict[str, int]
    bytes: dict[str, int]
    quotas: dict[str, int]


class Observation:
    """Source of snapshots and lists of a service."""

    def __init__(
        self,
        service: str,
        settings: RuntimeSettings,
        catalog: Catalog,
        arena: Arena,
        verifier: Verifier,
        engines: AttachedEngines,
        tiers: Mapping[TierName, Tier],
        accounts: Accounts,
        runner: TierRunner,
        pins: Pins,
        jobs: Jobs,
        draining: Callable[[], bool],
        protocol_errors: Callable[[], int],
    ) -> None:
        self._service = service
        self._settings = settings
        self._catalog = catalog
        self._arena = arena
        self._verifier = verifier
        self._engines = engines
        self._tiers = tiers
        self._accounts = accounts
        self._runner = runner
        self._pins = pins
        self._jobs = jobs
        self._draining = draining
        self._protocol_errors = protocol_errors
        self._lag = Histogram(SECONDS)
        self._started = time.time()

    def snapshot(
        self, chains: ChainStatus, listener: ListenerStatus, *, stopping: bool = False
    ) -> bytes:
        """Return a `ServiceSnapshot` as JSON; the cost does not depend on chunks and tenants."""
        return msgspec.json.encode(
            ServiceSnapshot(
                version=__version__,
                service=self._service,
                pid=os.getpid(),
                started=self._started,
                stopping=stopping,
                arena_allocated_bytes=self._arena.usable,
                arena_planned_bytes=self._arena.size,
                arena_allocating=self._arena.allocating,
                engines=len(self._engines),
                verified_chunks=self._verifier.checked,
                damaged_chunks=self._verifier.damaged,
                pinned_bytes=self._pins.bytes,
                pins=len(self._pins),
                draining=self._draining(),
                protocol_errors=self._protocol_errors(),
                config_generation=self._settings.generation,
                switched={str(name): state for name, state in self._runner.states.items()},
                catalog=self._catalog.totals(),
                tiers={str(name): tier.health() for name, tier in self._tiers.items()},
                chains=chains,
                listener=listener,
                tokens=self._accounts.tokens(),
                lookups=self._accounts.histograms(),
                traffic=self._runner.traffic(),
                skipped_tokens=self._accounts.skipped,
                loop_lag_seconds=self._lag.buckets(),
            )
        )

    async def measure_lag(self) -> None:
        """Measure the lag of the event loop, forever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def rows(self, message: List) -> Generator[bool, None, Listed]:
        """Collect a page of rows, one row per piece and a few per turn: engines come first.

        Raises `KVHavenError` if `after` cannot be the id of a row of this kind.
        """
        rows: list[bytes] = []
        last = ""
        for number, (id_, row) in enumerate(self._rows_after(message), 1):
            if row is not None:
                if len(rows) == message.limit:
                    return Listed(message.id, _joined(rows), last)
                rows.append(msgspec.json.encode(row))
                last = id_
            yield OTHERS_FIRST if number % _ROWS_OF_A_TURN == 0 else False
        return Listed(message.id, _joined(rows))

    def _rows_after(self, message: List) -> Iterable[tuple[str, msgspec.Struct | None]]:
        after = message.after
        if message.kind == "requests":
            clock = time.time() - asyncio.get_running_loop().time()
            requests = self._accounts.requests_before(after, clock)
            return ((row.id, row) for row in requests)
        if message.kind == "tenants":
            tenants = self._catalog.tenants_after(_bytes(after))
            return ((id_.hex(), _tenant_row(id_.hex(), stats)) for id_, stats in tenants)
        if message.kind == "namespaces":
            found = self._catalog.namespaces_after(_bytes(after))
            return ((id_.hex(), _namespace_row(id_.hex(), stats)) for id_, stats in found)
        if message.kind == "engines":
            engines = sorted(
                (e for e in self._engines if e.session.id > after), key=lambda e: e.session.id
            )
            return ((str(e.session.id), _engine_row(e)) for e in islice(engines, message.limit + 1))
        return self._few_after(message.kind, after)

    def _few_after(self, kind: ListKind, after: str) -> Iterable[tuple[str, msgspec.Struct | None]]:
        if kind == "pins":
            return ((pin.id, pin) for pin in self._pins.rows() if pin.id > after)
        if kind == "jobs":
            return ((job.id, job) for job in self._jobs.rows() if job.id > after)
        return ((row.name, row) for row in self._settings.rows() if row.name > after)


def _bytes(cursor: str) -> bytes:
    try:
        return bytes.fromhex(cursor)
    except ValueError as error:
        raise KVHavenError(f"after: not an id (got {cursor!r}); expected hex digits") from error


def _joined(rows: list[bytes]) -> bytes:
    return b"[" + b",".join(rows) + b"]"


def _tenant_row(id_: str, stats: TenantStats) -> TenantRow | None:
    """Return a row; None for a tenant without chunks, which exists only because it was queried."""
    if not any(used.bytes for used in (stats.memory, *stats.tiers.values())):
        return None
    status = tenant_status(id_, stats)
    return TenantRow(id_, status.chunks, status.bytes, status.quotas)


def _namespace_row(id_: str, stats: NamespaceStats) -> NamespaceRow:
    usage = {_MEMORY: stats.memory} | {str(name): used for name, used in stats.tiers.items()}
    return NamespaceRow(
        id=id_,
        model=_field(stats.fields, "model"),
        engine=_field(stats.fields, "engine"),
        format=_field(stats.fields, "format"),
        chunk_tokens=chunk_tokens_of(stats.fields),
        chunks={name: used.chunks for name, used in usage.items()},
        bytes={name: used.bytes for name, used in usage.items()},
    )


def _engine_row(engine: AttachedEngine) -> EngineRow:
    session, fields, traffic = engine.session, engine.session.fields, engine.traffic
    connected = {r for r, process in engine.processes.items() if process.connection is not None}
    return EngineRow(
        id=session.id,
        model=_field(fields, "model"),
        engine=_field(fields, "engine"),
        device=_field(fields, "device.device_type"),
        block_tokens=tokens_in(fields, "cache.block_size"),
        dtype=_field(fields, "model.dtype"),
        layout=_field(fields, "layout"),
        format=_field(fields, "format"),
        chunk_tokens=chunk_tokens_of(fields),
        world_size=session.world_size,
        attached_ranks=len(connected - {None}),
        scheduler_attached=None in connected,
        namespace=session.digest.hex(),
        since=engine.since,
        asked_tokens=traffic.asked_tokens,
        found_tokens=traffic.found_tokens,
        loaded_bytes=traffic.loaded_bytes,
        saved_bytes=traffic.saved_bytes,
        skipped_tokens=traffic.skipped_tokens,
    )


def _field(fields: Mapping[str, str], name: str) -> str | None:
    value = fields.get(name)
    return None if value is None else value[:_MOST_FIELD]
