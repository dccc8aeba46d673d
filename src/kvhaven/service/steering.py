# SPDX-License-Identifier: Apache-2.0
"""Steering: what operators ask and change while the service runs, for the HTTP API.

Requests and answers are JSON; every request is a struct of this module, with its name under `do`.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Annotated, Final, TypeVar

import msgspec

from kvhaven.catalog.actions import LeaseId, TierName
from kvhaven.catalog.tier_spec import MEMORY, WriteMode
from kvhaven.errors import KVHavenError
from kvhaven.peers.tier import PeerTier
from kvhaven.protocol import MOST_KEYS, KeyList, Steer, Steered, batches, tenant_of
from kvhaven.service.admin import Admin, Spawn
from kvhaven.service.connection import Connection
from kvhaven.service.driver import Driver
from kvhaven.service.engines import chunk_tokens_of
from kvhaven.service.jobs import JobRow, Jobs, Result
from kvhaven.service.membership import Membership
from kvhaven.service.pins import ChainKeys, Pins
from kvhaven.service.runtime_settings import ConflictError, RuntimeSettings
from kvhaven.service.saves import Saves
from kvhaven.service.tier_runner import TierRunner, TierSwitch
from kvhaven.service.turns import Job
from kvhaven.service.verify import Verifier
from kvhaven.types import KEY_BYTES, ChunkKey, NamespaceDigest

_PIECE: Final = 256
"""Chunks that one piece of a job looks up."""
_PROMOTE_S: Final = 600.0
_PIN_S: Final = 5.0
_MOVE_S: Final = 600.0
"""Longest wait of a move for writes; other writes count, too, and may never end under load."""
_MOST_DIGITS: Final = 20
MOST_TTL_S: Final = 30 * 86400.0
MOST_WAIT_S: Final = 3600.0
_UNKNOWN: Final = 404
CHUNK_ID_BYTES: Final = 8
INTERNAL_ERROR: Final = "internal error; the log of the service has the details"

Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_WAIT_S)]
Ttl = Annotated[float, msgspec.Meta(gt=0, le=MOST_TTL_S)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MOST_KEYS * KEY_BYTES)]

R = TypeVar("R", bound=msgspec.Struct)
logger = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True, tag_field="do", forbid_unknown_fields=True):
    """Base class of requests."""


class GetConfig(Request, frozen=True, tag="config"):
    """All settings."""


class Configure(Request, frozen=True, tag="configure"):
    """Change settings; see `RuntimeSettings.change`."""

    values: dict[str, str | int | float | bool | dict[str, str | int | float | None] | None]
    dry_run: bool = False
    version: str | None = None


class _OnChain(Request, frozen=True):
    """Request about the full chunks of a prompt: consecutive keys of 32 bytes."""

    namespace: bytes
    keys: Keys
    tenant: bytes = b""


class LookUp(_OnChain, frozen=True, tag="lookup"):
    """Where the chunks are, without promoting them."""


class GetChunk(_OnChain, frozen=True, tag="chunk"):
    """State of one chunk: `keys` has its key."""


class Promote(_OnChain, frozen=True, tag="prefetch"):
    """Promote the chunks to memory, as a job."""


class Verify(_OnChain, frozen=True, tag="verify"):
    """Verify the checksums of the chunks in memory, as a job."""


class Move(_OnChain, frozen=True, tag="move", kw_only=True):
    """Write the chunks to a tier, as a job."""

    to: str


class PinChain(_OnChain, frozen=True, tag="pin", kw_only=True):
    """Pin the chunks for `ttl_s` seconds."""

    ttl_s: Ttl


class Unpin(Request, frozen=True, tag="unpin"):
    """End a pin."""

    id: str


class SwitchTier(Request, frozen=True, tag="tier"):
    """Switch a tier on, off, or to reads only."""

    tier: str
    state: TierSwitch


class FlushAll(Request, frozen=True, tag="flush"):
    """Wait until all resident chunks are written, as a job."""

    wait_s: Seconds


class Drain(Request, frozen=True, tag="drain"):
    """Accept no new engine and save nothing more, and flush, as a job; `on` false: undo."""

    on: bool
    wait_s: Seconds


class GetJob(Request, frozen=True, tag="job"):
    """A job by its id."""

    id: str


AnyRequest = (
    GetConfig
    | Configure
    | LookUp
    | Promote
    | Verify
    | Move
    | PinChain
    | Unpin
    | SwitchTier
    | FlushAll
    | Drain
    | GetJob
    | GetChunk
)
_decoder: Final[msgspec.json.Decoder[AnyRequest]] = msgspec.json.Decoder(AnyRequest)


class Refusal(msgspec.Struct, frozen=True):
    """The reason why a request failed, as the HTTP API answers it."""

    error: str


class Found(msgspec.Struct, frozen=True):
    """Where the tokens of a prompt are, from its head to the first gap.

    `first_gap` is the index of the first token that is nowhere, and `reason` why; None if the whole
    prompt is cached. `by_place` has memory and the names of tiers.
    """

    tokens: int
    cached_tokens: int
    by_place: dict[str, int]
    first_gap: int | None
    reason: str | None
    chunks: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Ids of all full chunks of the prompt, if the request asks for them."""


class ChunkRow(msgspec.Struct, frozen=True):
    """A chunk: its bytes by place, and its leases, pins and ages if it is in memory.

    `writes` are the tiers that write it, or wait to; `age_s` is the time since it came to memory,
    and `idle_s` since its last use there.
    """

    id: str
    namespace: str
    tenant: str
    places: dict[str, int]
    leases: int
    pins: int
    writes: int
    age_s: float | None
    idle_s: float | None


class TierState(msgspec.Struct, frozen=True):
    """How a tier is switched; `dropped_writes` are the waiting writes that were dropped for it."""

    id: str
    state: TierSwitch
    dropped_writes: int


class Drained(msgspec.Struct, frozen=True):
    """Whether the service is draining, and the job that flushes it."""

    draining: bool
    job: JobRow | None


class Steering:
    """Handler of `Steer`. Every answer has a status of HTTP; a refusal changes nothing."""

    def __init__(
        self,
        driver: Driver,
        settings: RuntimeSettings,
        runner: TierRunner,
        verifier: Verifier,
        admin: Admin,
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
        self._membership = membership
        self._saves = saves
        self._pins = pins
        self._jobs = jobs
        self._spawn = spawn

    def handle(self, connection: Connection, message: Steer) -> Job | None:
        """Answer a request now, or by a job or task."""
        try:
            request = _decoder.decode(message.request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _send(connection, message.id, 400, Refusal(f"request: not valid ({error})"))
            return None
        if isinstance(request, LookUp):
            return self._look_up(connection, message.id, request)
        if isinstance(request, PinChain):
            self._spawn(self._pin(connection, message.id, request))
            return None
        with _failures_answered(connection, message.id):
            _send(connection, message.id, *self._answer(request))
        return None

    def _answer(self, request: AnyRequest) -> tuple[int, msgspec.Struct]:
        if isinstance(request, Promote | Verify | Move | FlushAll):
            return 202, self._start(request)
        if isinstance(request, Drain):
            return 202 if request.on else 200, self._drain(request)
        return 200, self._answer_now(request)

    def _answer_now(self, request: AnyRequest) -> msgspec.Struct:
        if isinstance(request, Configure):
            return self._settings.change(
                request.values, dry_run=request.dry_run, version=request.version
            )
        if isinstance(request, Unpin):
            number = int(request.id) if _is_number(request.id) else 0  # no lease has this number
            row = self._pins.unpin(LeaseId(number))
            return _known(row, "pin", request.id)
        if isinstance(request, SwitchTier):
            return self._switch(self._tier(request.tier), request.state)
        if isinstance(request, GetJob):
            return _known(self._jobs.get(request.id), "job", request.id)
        if isinstance(request, GetChunk):
            return self._describe(self._chain(request))
        assert isinstance(request, GetConfig), "handled before"
        return self._settings.config()

    def _start(self, request: Promote | Verify | Move | FlushAll) -> JobRow:
        """Start the job of a request. Raises `KVHavenError` if the request is not valid."""
        if isinstance(request, FlushAll):
            return self._jobs.start("flush", self._flush(request.wait_s))
        chain = self._chain(request)
        if isinstance(request, Move):
            return self._jobs.start("move", self._move(chain, self._writable(request.to)))
        if isinstance(request, Verify):
            return self._jobs.start("verify", self._verify(chain))
        return self._jobs.start("prefetch", self._promote(chain))

    # --- chains -----------------------------------------------------------------------------

    def _chain(self, request: _OnChain) -> ChainKeys:
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
            await self._ask_shared(chain, places)
            _send(connection, id_, 200, self._found(chain, places))

    async def _ask_shared(self, chain: ChainKeys, places: list[TierName]) -> None:
        """Extend `places` by the chunks behind the known ones that the shared tiers have."""
        namespace = self._driver.catalog.namespace(chain.namespace)
        most = max(1, _PIECE // len(namespace.table.shards))
        known = -1
        while known < len(places) < len(chain.keys):
            known = len(places)
            asked = list(chain.keys[known : known + most])
            told: dict[ChunkKey, TierName] = {}
            for name in self._shared:
                there = await self._runner.ask(name, namespace, chain.tenant, asked)
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

    async def _pin(self, connection: Connection, id_: int, request: PinChain) -> None:
        with _failures_answered(connection, id_):
            row = await self._pins.pin(self._chain(request), request.ttl_s, _PIN_S)
            _send(connection, id_, 201, row)

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

    def _switch(self, name: TierName, state: TierSwitch) -> TierState:
        before = self._driver.catalog.totals().tiers[name].dropped_writes
        self._runner.states[name] = state
        with self._driver.event() as catalog:
            catalog.switch_tier(name, self._runner.mode_of(name, self._configured(name)))
        self._runner.check_health()
        logger.warning("tier %s was switched: %s", name, state)
        after = self._driver.catalog.totals().tiers[name].dropped_writes
        return TierState(str(name), state, after - before)

    def _drain(self, request: Drain) -> Drained:
        # If the job is refused, nothing has changed.
        job = self._jobs.start("drain", self._flush(request.wait_s)) if request.on else None
        self._membership.draining = self._saves.draining = request.on
        logger.warning("draining: %s", "on" if request.on else "off")
        return Drained(request.on, job)


def chunk_id(key: ChunkKey) -> str:
    """Return the id of a chunk. A key gives access to a chunk, so it is not shown itself."""
    return hashlib.sha256(key).digest()[:CHUNK_ID_BYTES].hex()


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
