# SPDX-License-Identifier: Apache-2.0
"""Leases of the service itself: pins with a time limit, and promotions that a job waits for."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

import msgspec

from kvhaven.catalog.actions import Acquisition, LeaseId, SessionId, TierName
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.protocol import batches
from kvhaven.service.driver import Driver
from kvhaven.service.jobs import MOST_RUNNING
from kvhaven.service.runtime_settings import ConflictError, RuntimeSettings
from kvhaven.service.turns import Job
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

OWN_SESSION: Final = SessionId("api")
"""Session of these leases; those of engines contain a `#`."""
MOST_PINS: Final = 1024
_PIECE: Final = 512
"""Chunks that are counted in a piece of work."""
_MOST_BORROWED: Final = 256
_ROOM_POLL_S: Final = 0.02
_ABSENT: Final = "pins: the first chunk is in no place; compute or prefetch it"


class ChainKeys(NamedTuple):
    """Full chunks of a prompt, of one tenant, and their tokens."""

    namespace: NamespaceDigest
    tenant: TenantId
    keys: Sequence[ChunkKey]
    chunk_tokens: int


class PinRow(msgspec.Struct, frozen=True):
    """A pin: chunks from the head of a chain that stay in memory until `expires` (since 1970)."""

    id: str
    namespace: str
    tenant: str
    tokens: int
    chunks: int
    bytes: int
    expires: float


class PinPlan(msgspec.Struct, frozen=True):
    """The dry run of a pin: what it would hold, if nothing is evicted until then.

    `promoted_chunks` would be read from tiers first. `pinned_bytes` are pinned now, or held for
    jobs; with the new ones, `most_bytes` are possible (`pin_share`).
    """

    namespace: str
    tenant: str
    tokens: int
    chunks: int
    bytes: int
    promoted_chunks: int
    pinned_bytes: int
    most_bytes: int
    dry_run: bool = True


class _Pin(NamedTuple):
    row: PinRow
    timer: asyncio.TimerHandle
    generations: list[int]
    extent_bytes: int


class Pins:
    """Pins of the HTTP API, within the share of memory that the settings allow."""

    def __init__(self, driver: Driver, settings: RuntimeSettings) -> None:
        self._driver = driver
        self._settings = settings
        self._numbers = itertools.count(1)
        self._waiting: dict[LeaseId, asyncio.Future[Acquisition]] = {}
        self._pins: dict[LeaseId, _Pin] = {}
        self._pinned = Counter[int]()  # pins by generation of the extent
        self._under_way = 0  # bytes of pins that are being made
        self.bytes = 0
        """Bytes of pinned chunks; one that several pins hold counts once."""

    def __len__(self) -> int:
        return len(self._pins)

    def rows(self) -> list[PinRow]:
        """Return all pins, in ascending order of their ids."""
        return [pin.row for pin in self._pins.values()]

    def of(self, generation: int) -> int:
        """Return the number of pins that hold the chunk in the extent of a generation."""
        return self._pinned.get(generation, 0)

    def updated(self, acquisition: Acquisition) -> None:
        """Pass on the final state of a lease."""
        waiting = self._waiting.pop(acquisition.lease_id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(acquisition)

    async def lease(self, chain: ChainKeys, wait_s: float) -> Acquisition:
        """Lease the longest prefix of a chain, and wait for its promotions; see `release`."""
        lease_id = LeaseId(next(self._numbers))
        with self._driver.event() as catalog:
            catalog.open_session(OWN_SESSION)
            acquisition = catalog.acquire(
                OWN_SESSION, lease_id, chain.namespace, chain.keys, chain.tenant
            )
        if not acquisition.promoting:
            return acquisition
        waiting = self._waiting[lease_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(wait_s):
                acquisition = await waiting
        except TimeoutError:
            with self._driver.event() as catalog:
                acquisition = catalog.finalize(OWN_SESSION, lease_id)
        except asyncio.CancelledError:
            self.release(lease_id)
            raise
        finally:
            self._waiting.pop(lease_id, None)
        return acquisition

    async def borrow(self, chain: ChainKeys, wait_s: float) -> AsyncGenerator[Acquisition, None]:
        """Lease a chain for a job part by part, each until the next one, up to its first gap.

        Parts are small, and count within the share of memory for pins. Raises `ConflictError` if
        pins fill it.
        """
        extent_bytes = self._driver.catalog.extent_bytes(chain.namespace)
        for part in batches(chain.keys, self._part(extent_bytes)):
            size = len(part) * extent_bytes
            while self.bytes + self._under_way + size > self._most:
                self._require_room(size, others=0)
                await asyncio.sleep(_ROOM_POLL_S)  # other jobs have it
            self._under_way += size
            try:
                acquisition = await self.lease(chain._replace(keys=part), wait_s)
                try:
                    yield acquisition
                finally:
                    self.release(acquisition.lease_id)
            finally:
                self._under_way -= size
            if len(acquisition.chunks) < len(part):
                return

    def require_borrowable(self, chain: ChainKeys) -> None:
        """Raise `ConflictError` if pins leave no room to `borrow` a chain."""
        extent_bytes = self._driver.catalog.extent_bytes(chain.namespace)
        first = min(len(chain.keys), self._part(extent_bytes))
        self._require_room(first * extent_bytes, others=0)

    def _part(self, extent_bytes: int) -> int:
        """Return the chunks of this size that are borrowed at a time."""
        return max(1, min(_MOST_BORROWED, self._most // MOST_RUNNING // extent_bytes))

    @property
    def _most(self) -> int:
        """Bytes that pins and jobs may hold."""
        capacity = self._driver.catalog.totals().capacity_bytes
        return int(self._settings.settings.pin_share * capacity)

    def _require_room(self, wanted: int, others: int) -> None:
        """Raise `ConflictError` if there is no room beside the pins and `others` bytes."""
        held = self.bytes + others
        if held + wanted > self._most:
            raise ConflictError(
                f"pins: {wanted} bytes do not fit (got {held} pinned); "
                f"expected at most {self._most} in total (pin_share). Unpin others, or raise "
                "pin_share"
            )

    def _require_pinnable(self, wanted: int) -> None:
        """Raise `ConflictError` if there is no room for another pin of so many bytes."""
        self._require_room(wanted, self._under_way)
        if len(self._pins) >= MOST_PINS:
            raise ConflictError(f"pins: there are {MOST_PINS} already; unpin others")

    def release(self, lease_id: LeaseId) -> None:
        """End a lease."""
        with self._driver.event() as catalog:
            catalog.release(OWN_SESSION, lease_id)

    async def pin(self, chain: ChainKeys, ttl_s: float, wait_s: float) -> PinRow:
        """Pin a chain for `ttl_s` seconds; chunks are promoted first.

        Raises `ConflictError` if the chain does not fit into the share of memory for pins, or if
        there are too many pins.
        """
        extent_bytes = self._driver.catalog.extent_bytes(chain.namespace)
        wanted = len(chain.keys) * extent_bytes
        self._require_pinnable(wanted)
        self._under_way += wanted
        try:
            acquisition = await self.lease(chain, wait_s)
        finally:
            self._under_way -= wanted
        chunks = len(acquisition.chunks)
        if not chunks:
            self.release(acquisition.lease_id)
            raise ConflictError(_ABSENT)
        row = PinRow(
            id=f"{acquisition.lease_id:016d}",
            namespace=chain.namespace.hex(),
            tenant=chain.tenant.hex(),
            tokens=chunks * chain.chunk_tokens,
            chunks=chunks,
            bytes=chunks * extent_bytes,
            expires=time.time() + ttl_s,
        )
        generations: list[int] = []
        for first in range(0, chunks, _PIECE):
            extents = acquisition.chunks.extents(first, first + _PIECE)
            self._hold([extent.generation for extent in extents], extent_bytes)
            generations += [extent.generation for extent in extents]
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ttl_s, self.unpin, acquisition.lease_id)
        self._pins[acquisition.lease_id] = _Pin(row, timer, generations, extent_bytes)
        return row

    def plan(self, chain: ChainKeys, places: Sequence[TierName]) -> PinPlan:
        """Return what `pin` would do with a chain whose first chunks are in these places.

        Raises as `pin` does.
        """
        extent_bytes = self._driver.catalog.extent_bytes(chain.namespace)
        self._require_pinnable(len(chain.keys) * extent_bytes)
        if not places:
            raise ConflictError(_ABSENT)
        return PinPlan(
            namespace=chain.namespace.hex(),
            tenant=chain.tenant.hex(),
            tokens=len(places) * chain.chunk_tokens,
            chunks=len(places),
            bytes=len(places) * extent_bytes,
            promoted_chunks=len(places) - places.count(MEMORY),
            pinned_bytes=self.bytes + self._under_way,
            most_bytes=self._most,
        )

    def get(self, lease_id: LeaseId) -> PinRow | None:
        """Return a pin; None for an unknown one."""
        pin = self._pins.get(lease_id)
        return None if pin is None else pin.row

    def unpin(self, lease_id: LeaseId) -> PinRow | None:
        """End a pin and return it; None for an unknown one."""
        pin = self._pins.pop(lease_id, None)
        if pin is None:
            return None
        pin.timer.cancel()
        self._driver.turns.start(self._let_go(pin, lease_id))
        return pin.row

    def _hold(self, generations: Sequence[int], extent_bytes: int) -> None:
        """Count chunks as pinned once more."""
        for generation in generations:
            self.bytes += 0 if self._pinned[generation] else extent_bytes
            self._pinned[generation] += 1

    def _let_go(self, pin: _Pin, lease_id: LeaseId) -> Job:
        """Count the chunks of a pin as pinned once less, piece by piece, and end its lease."""
        for first in range(0, len(pin.generations), _PIECE):
            for generation in pin.generations[first : first + _PIECE]:
                self._pinned[generation] -= 1
                if not self._pinned[generation]:
                    del self._pinned[generation]
                    self.bytes -= pin.extent_bytes
            yield
        self.release(lease_id)
