# SPDX-License-Identifier: Apache-2.0
"""Steering: what operators ask and change while the service runs, for the HTTP API."""

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Final, TypeVar

import msgspec

from kvhaven.catalog.actions import LeaseId, TierName
from kvhaven.catalog.tier_spec import MEMORY, WriteMode
from kvhaven.catalog.unused import Counting
from kvhaven.errors import KVHavenError
from kvhaven.peers.tier import PeerTier
from kvhaven.protocol import KeyList, Steer, Steered, batches, tenant_of
from kvhaven.service.admin import Admin, Spawn, quota_of, require_tenant
from kvhaven.service.connection import Connection
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngines, chunk_tokens_of
from kvhaven.service.jobs import JobPlan, JobRow, Jobs, Result
from kvhaven.service.membership import Membership
from kvhaven.service.pins import ChainKeys, Pins
from kvhaven.service.runtime_settings import ConflictError, RuntimeSettings
from kvhaven.service.saves import Saves
from kvhaven.service.steering_messages import (
    AnyRequest,
    ChainJob,
    ChunkRow,
    Configure,
    Drain,
    Drained,
    Dropped,
    DropUnused,
    EndedPin,
    FlushAll,
    Found,
    GetChunk,
    GetConfig,
    GetJob,
    LookUp,
    Move,
    OnChain,
    PinChain,
    Refusal,
    SetQuotas,
    SwitchTier,
    TenantQuota,
    TierState,
    Unpin,
    Verify,
)
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.turns import Job
from kvhaven.service.verify import Verifier
from kvhaven.types import ChunkKey, NamespaceDigest

_PIECE: Final = 256
"""Chunks that one piece of a job looks up."""
_COUNT_S: Final = 8.0
"""Longest dry run that counts chunks; less than the API waits for the answer."""
_PROMOTE_S: Final = 600.0
_PIN_S: Final = 5.0
_MOVE_S: Final = 600.0
"""Longest wait of a move for writes; other writes count, too, and may never end under load."""
_MOST_DIGITS: Final = 20
_UNKNOWN: Final = 404
CHUNK_ID_BYTES: Final = 8
INTERNAL_ERROR: Final = "internal error; the log of the service has the details"

R = TypeVar("R", bound=msgspec.Struct)
logger = logging.getLogger(__name__)
_decoder: Final[msgspec.json.Decoder[AnyRequest]] = msgspec.json.Decoder(AnyRequest)


class Steering:
    """Handler of `Steer`. Every answer has a status of HTTP; a refusal changes nothing."""

    def __init__(
        self,
        driver: Driver,
        settings: RuntimeSettings,
        runner: TierRunner,
        verifier: Verifier,
        admin: Admin,
        engines: AttachedEngines,
        membership: Membership,
        saves: Saves,
        pins: Pins,
        jobs: Jobs,
        spawn: Spawn,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._runner = runner
        self._verifier = verifier
        self._admin = admin
        self._engines = engines
        self._membership = membership
        self._saves = saves
        self._pins = pins
        self._jobs = jobs
        self._spawn = spawn
        self._counting = False

    def handle(self, connection: Connection, message: Steer) -> Job | None:
        """Answer a request now, or by a job or task."""
        try:
            request = _decoder.decode(message.request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _send(connection, message.id, 400, Refusal(f"request: not valid ({error})"))
            return None
        if isinstance(request, LookUp):
            return self._look_up(connection, message.id, request)
        later = ChainJob | DropUnused
        if (
            isinstance(request, PinChain)
            or (isinstance(request, Configure) and request.persist)
            or (request.dry_run and isinstance(request, later))
        ):
            self._spawn(self._answer_later(connection, message.id, request))
            return None
        with _failures_answered(connection, message.id):
            _send(connection, message.id, *self._answer(request))
        return None

    def _answer(self, request: AnyRequest) -> tuple[int, msgspec.Struct]:
        if isinstance(request, ChainJob):
            return 202, self._start(request)
        if isinstance(request, DropUnused):
            return 202, self._jobs.start("drop", self._counted(self._unused(request)))
        if isinstance(request, FlushAll):
            return self._flush_all(request)
        if isinstance(request, Drain):
            return self._drain(request)
        if isinstance(request, GetConfig | GetChunk | GetJob):
            return 200, self._tell(request)
        return 200, self._change(request)

    def _change(self, request: AnyRequest) -> msgspec.Struct:
        if isinstance(request, Configure):
            return self._settings.change(
                request.values, dry_run=request.dry_run, version=request.version
            )
        if isinstance(request, Unpin):
            return self._unpin(request)
        if isinstance(request, SwitchTier):
            return self._switch(self._tier(request.tier), request)
        assert isinstance(request, SetQuotas), "handled before"
        return self._set_quotas(request)

    def _tell(self, request: GetConfig | GetChunk | GetJob) -> msgspec.Struct:
        if isinstance(request, GetJob):
            return _known(self._jobs.get(request.id), "job", request.id)
        if isinstance(request, GetChunk):
            return self._describe(self._chain(request))
        return self._settings.config()

    def _start(self, request: ChainJob) -> JobRow:
        """Start the job of a request. Raises `KVHavenError` if the request is not valid."""
        chain = self._chain(request)
        if isinstance(request, Move):
            return self._jobs.start("move", self._move(chain, self._writable(request.to)))
        if isinstance(request, Verify):
            return self._jobs.start("verify", self._verify(chain))
        return self._jobs.start("prefetch", self._promote(chain))

    # --- chains -----------------------------------------------------------------------------

    def _chain(self, request: OnChain) -> ChainKeys:
        """Return the chain of a request. Raises `ConflictError` for an unknown namespace."""
        namespace = NamespaceDigest(request.namespace)
        try:
            fields = self._driver.catalog.namespace(namespace).fields
        except KVHavenError:
            raise ConflictError("namespace: unknown; /v1/namespaces lists all", _UNKNOWN) from None
        size = chunk_tokens_of(fields)
        if not size:
            raise ConflictError("namespace: its engine does not name its chunk size")
        return ChainKeys(namespace, tenant_of(request.tenant), KeyList(request.keys), size)

    def _look_up(self, connection: Connection, id_: int, request: LookUp) -> Job:
        with _failures_answered(connection, id_):
            chain = self._chain(request)
            places: list[TierName] = []
            yield from self._walk(chain, places, {})
            if len(places) < len(chain.keys) and self._shared:
                self._spawn(self._look_up_further(connection, id_, chain, places))
            else:
                _send(connection, id_, 200, self._found(chain, places))

    def _walk(
        self, chain: ChainKeys, places: list[TierName], told: Mapping[ChunkKey, TierName]
    ) -> Job:
        """Extend `places` by the places of the next chunks, up to the first that is nowhere."""
        while len(places) < len(chain.keys):
            for key in list(chain.keys[len(places) : len(places) + _PIECE]):
                place = self._driver.catalog.place_of(chain.namespace, key, chain.tenant)
                place = place or told.get(key)
                if place is None:
                    return
                places.append(place)
            yield

    def _describe(self, chain: ChainKeys) -> ChunkRow:
        if len(chain.keys) != 1:
            raise ConflictError(f"chunk: {len(chain.keys)} keys; expected one", 400)
        key = chain.keys[0]
        state = self._driver.catalog.chunk(chain.namespace, key, chain.tenant)
        return ChunkRow(
            id=chunk_id(key),
            namespace=chain.namespace.hex(),
            tenant=chain.tenant.hex(),
            places=state.places,
            leases=state.leases,
            pins=self._pins.of(state.generation),
            writes=state.writes,
            age_s=state.age_s,
            idle_s=state.idle_s,
        )

    async def _look_up_further(
        self, connection: Connection, id_: int, chain: ChainKeys, places: list[TierName]
    ) -> None:
        """Ask the shared tiers for the chunks behind the known ones, and answer."""
        with _failures_answered(connection, id_):
            await self._extend_by_shared(chain, places)
            _send(connection, id_, 200, self._found(chain, places))

    async def _places(self, chain: ChainKeys) -> list[TierName]:
        """Return the places of a chain's chunks, up to the first that is nowhere."""
        places: list[TierName] = []
        for _ in self._walk(chain, places, {}):
            await asyncio.sleep(0)
        await self._extend_by_shared(chain, places)
        return places

    async def _extend_by_shared(self, chain: ChainKeys, places: list[TierName]) -> None:
        """Extend `places` by what the shared tiers say about the chunks behind them."""
        namespace = self._driver.catalog.namespace(chain.namespace)
        most = max(1, _PIECE // len(namespace.table.shards))
        known = -1
        while known < len(places) < len(chain.keys):
            known = len(places)
            asked = list(chain.keys[known : known + most])
            told: dict[ChunkKey, TierName] = {}
            for name in self._shared:
                there = await self._runner.ask(name, namespace, chain.tenant, asked)
                if there is None:
                    continue
                for key, present in zip(asked, there, strict=True):
                    if present:
                        told.setdefault(key, name)
            for _ in self._walk(chain, places, told):
                await asyncio.sleep(0)

    @property
    def _shared(self) -> list[TierName]:
        """The shared tiers that are in use."""
        return [
            name
            for name, tier in self._runner.tiers.items()
            if tier.shared and tier.health().online and self._runner.state_of(name) != "off"
        ]

    def _found(self, chain: ChainKeys, places: list[TierName]) -> Found:
        size, count = chain.chunk_tokens, len(places)
        reason = None
        if count < len(chain.keys):
            catalog = self._driver.catalog
            reason = catalog.gap(chain.namespace, chain.keys, count, chain.tenant).reason.label
        return Found(
            tokens=len(chain.keys) * size,
            cached_tokens=count * size,
            by_place={str(name): places.count(name) * size for name in dict.fromkeys(places)},
            first_gap=count * size if reason is not None else None,
            reason=reason,
        )

    async def _answer_later(
        self,
        connection: Connection,
        id_: int,
        request: PinChain | Configure | ChainJob | DropUnused,
    ) -> None:
        """Pin a chain, persist settings, or answer a dry run that has to look at many chunks."""
        status, answer = 200, msgspec.Struct()
        with _failures_answered(connection, id_):
            if isinstance(request, Configure):
                answer = await self._settings.persist(
                    request.values, dry_run=request.dry_run, version=request.version
                )
            elif isinstance(request, DropUnused):
                answer = Dropped(**await self._count_unused(request), dry_run=True)
            elif isinstance(request, ChainJob):
                answer = await self._plan(request)
            elif request.dry_run:
                chain = self._chain(request)
                answer = self._pins.plan(chain, await self._places(chain))
            else:
                status = 201
                answer = await self._pins.pin(self._chain(request), request.ttl_s, _PIN_S)
            _send(connection, id_, status, answer)

    async def _plan(self, request: ChainJob) -> JobPlan:
        """Return what the job of a request would do. Raises as `_start` does."""
        chain = self._chain(request)
        if isinstance(request, Move):
            self._writable(request.to)
        self._jobs.require_room()
        if isinstance(request, Move):
            resident = 0
            for part in batches(chain.keys, _PIECE):
                has = self._driver.catalog.has(chain.namespace, part, chain.tenant)
                resident += sum(has)
                await asyncio.sleep(0)
            return JobPlan("move", {"resident_chunks": resident}, "")
        error = ""
        try:
            self._pins.require_borrowable(chain)
        except ConflictError as conflict:
            error = str(conflict)
        places = await self._places(chain)
        if isinstance(request, Verify):
            return JobPlan("verify", {"chunks": len(places)}, error)
        expected = {
            "asked_chunks": len(chain.keys),
            "resident_chunks": len(places),
            "promoted_chunks": len(places) - places.count(MEMORY),
        }
        return JobPlan("prefetch", expected, error)

    def _unpin(self, request: Unpin) -> EndedPin:
        number = int(request.id) if _is_number(request.id) else 0  # no lease has this number
        act = self._pins.get if request.dry_run else self._pins.unpin
        row = _known(act(LeaseId(number)), "pin", request.id)
        return EndedPin(**msgspec.structs.asdict(row), dry_run=request.dry_run)

    # --- jobs -------------------------------------------------------------------------------

    async def _promote(self, chain: ChainKeys) -> Result:
        resident = promoted = 0
        async with aclosing(self._pins.borrow(chain, _PROMOTE_S)) as parts:
            async for acquisition in parts:
                sources = acquisition.chunks.sources
                resident += len(sources)
                promoted += len(sources) - sources.count(0)
        return {
            "asked_chunks": len(chain.keys),
            "resident_chunks": resident,
            "promoted_chunks": promoted,
        }

    async def _verify(self, chain: ChainKeys) -> Result:
        checked = intact = 0
        namespace = self._driver.catalog.namespace(chain.namespace)
        async with aclosing(self._pins.borrow(chain, _PROMOTE_S)) as parts:
            async for acquisition in parts:
                good = await self._verifier.audit(acquisition, namespace)
                checked += len(acquisition.chunks)
                intact += good
                if good < len(acquisition.chunks):
                    break
        return {
            "chunks": checked,
            "intact_chunks": intact,
            "damaged_chunks": int(intact < checked),
        }

    async def _move(self, chain: ChainKeys, tier: TierName) -> Result:
        resident = 0
        for part in batches(chain.keys, _PIECE):
            with self._driver.event() as catalog:
                resident += catalog.push(chain.namespace, part, tier, chain.tenant)
            await asyncio.sleep(0)
        left = await self._admin.flush(_MOVE_S)
        return {"resident_chunks": resident, "outstanding_writes": left}

    async def _flush(self, wait_s: float) -> Result:
        return {"outstanding_writes": await self._admin.flush(wait_s)}

    def _unused(self, request: DropUnused) -> Counting:
        """Return the job of the catalog. Raises `KVHavenError` if the request is not valid."""
        return self._driver.catalog.drop_unused(
            request.older_than_s,
            NamespaceDigest(request.namespace) if request.namespace else None,
            TierName(request.tier) if request.tier else None,
            tenant_of(request.tenant) or None,
            dry_run=request.dry_run,
        )

    async def _count_unused(self, request: DropUnused) -> Result:
        """Return what a job would drop. Raises `ConflictError` if that takes too long."""
        self._jobs.require_room()
        if self._counting:
            raise ConflictError("another dry run is counting chunks; try again")
        self._counting = True
        try:
            async with asyncio.timeout(_COUNT_S):
                return await self._counted(self._unused(request))
        except TimeoutError:
            raise ConflictError(
                f"too many chunks to count in {_COUNT_S:g} s; name a namespace, tenant or tier"
            ) from None
        finally:
            self._counting = False

    async def _counted(self, pieces: Counting) -> Result:
        """Run a job of the catalog; return the chunks and bytes that it counted."""
        while True:
            with self._driver.event():
                try:
                    next(pieces)
                except StopIteration as end:
                    chunks, bytes_ = end.value
                    return {"chunks": chunks, "bytes": bytes_}
            await asyncio.sleep(0)

    # --- tiers and the service --------------------------------------------------------------

    def _tier(self, name: str) -> TierName:
        if name not in self._runner.tiers:
            known = ", ".join(self._runner.tiers) or f"none ({MEMORY} is no tier)"
            raise ConflictError(f"unknown tier {name[:32]!r}; expected one of: {known}", _UNKNOWN)
        return TierName(name)

    def _writable(self, name: str) -> TierName:
        """Return the name of a tier that takes writes now. Raises `ConflictError`."""
        tier = self._tier(name)
        mode = self._runner.mode_of(tier, self._configured(tier))
        if mode is WriteMode.OFF or not self._runner.tiers[tier].health().online:
            raise ConflictError(f"tier {name} takes no writes now: see /v1/tiers for its state")
        return tier

    def _configured(self, name: TierName) -> WriteMode:
        settings, tier = self._settings.settings, self._runner.tiers[name]
        if isinstance(tier, PeerTier):
            return WriteMode.OFF
        return WriteMode(settings.remote_write if tier.shared else settings.disk_write)

    def _switch(self, name: TierName, request: SwitchTier) -> TierState:
        state, was = request.state, self._runner.state_of(name)
        before = self._driver.catalog.totals().tiers[name]
        dropped = before.queued_writes if state != "on" else 0
        if not request.dry_run:
            self._runner.states[name] = state
            with self._driver.event() as catalog:
                catalog.switch_tier(name, self._runner.mode_of(name, self._configured(name)))
            self._runner.check_health()
            logger.warning("tier %s was switched: %s", name, state)
            after = self._driver.catalog.totals().tiers[name]
            dropped = after.dropped_writes - before.dropped_writes
        hidden = 0 if state != "off" else None if before.shared else before.chunks
        return TierState(str(name), state, was, dropped, hidden, request.dry_run)

    def _set_quotas(self, request: SetQuotas) -> TenantQuota:
        tenant = tenant_of(request.tenant)
        require_tenant(tenant)
        was = now = self._driver.catalog.tenant_stats(tenant)
        memory = was.memory_quota if request.memory is None else quota_of(request.memory)
        disk = was.disk_quota if request.disk is None else quota_of(request.disk)
        if not request.dry_run:
            self._admin.set_quotas(tenant, request.memory, request.disk)
            now = self._driver.catalog.tenant_stats(tenant)
        return TenantQuota(
            id=tenant.hex(),
            memory=memory,
            disk=disk,
            memory_was=was.memory_quota,
            disk_was=was.disk_quota,
            memory_bytes=now.memory.bytes,
            disk_bytes=sum(usage.bytes for usage in now.tiers.values()),
            memory_excess=_excess(was.memory.bytes, memory),
            disk_excess=sum(_excess(usage.bytes, disk) for usage in was.tiers.values()),
            dry_run=request.dry_run,
        )

    def _flush_all(self, request: FlushAll) -> tuple[int, JobRow | JobPlan]:
        if not request.dry_run:
            return 202, self._jobs.start("flush", self._flush(request.wait_s))
        self._jobs.require_room()
        return 200, JobPlan("flush", {"waiting_writes": self._driver.catalog.unwritten()}, "")

    def _drain(self, request: Drain) -> tuple[int, Drained]:
        was, on, job = self._membership.draining, request.on, None
        totals, unwritten = self._driver.catalog.totals(), self._driver.catalog.unwritten()
        if request.dry_run:
            if on:
                self._jobs.require_room()
        else:
            # If the job is refused, nothing has changed.
            job = self._jobs.start("drain", self._flush(request.wait_s)) if on else None
            self._membership.draining = self._saves.draining = on
            logger.warning("draining: %s", "on" if on else "off")
        return 202 if job is not None else 200, Drained(
            draining=on,
            was=was,
            engines=len(self._engines),
            reserved_bytes=totals.reserved_bytes,
            outstanding_writes=unwritten,
            job=job,
            dry_run=request.dry_run,
        )


def chunk_id(key: ChunkKey) -> str:
    """Return the id of a chunk. A key gives access to a chunk, so it is not shown itself."""
    return hashlib.sha256(key).digest()[:CHUNK_ID_BYTES].hex()


def _excess(used: int, quota: int | None) -> int:
    """Return the bytes above a quota."""
    return 0 if quota is None else max(0, used - quota)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _known(found: R | None, kind: str, id_: str) -> R:
    """Return what was found. Raises `ConflictError` if it is None."""
    if found is None:
        raise ConflictError(f"unknown {kind} {id_[:32]!r}", _UNKNOWN)
    return found


@contextmanager
def _failures_answered(connection: Connection, id_: int) -> Iterator[None]:
    """Answer a request that fails; its connection, which all clients of the API share, remains."""
    try:
        yield
    except KVHavenError as error:
        status = error.status if isinstance(error, ConflictError) else 400
        _send(connection, id_, status, Refusal(str(error)))
    except Exception:  # a bug must not end the other requests, nor show its details
        logger.exception("a request of the HTTP API failed")
        _send(connection, id_, 500, Refusal(INTERNAL_ERROR))


def _send(connection: Connection, id_: int, status: int, answer: msgspec.Struct) -> None:
    connection.send(Steered(id_, status, msgspec.json.encode(answer)))
