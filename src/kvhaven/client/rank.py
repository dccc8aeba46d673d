# SPDX-License-Identifier: Apache-2.0
"""A rank's client: maps the arena, reserves space for saves, reports copies that ended."""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvhaven.arena.segment import MappedSegment
from kvhaven.client.arena import close_all, close_descriptors, map_arena
from kvhaven.client.link import Link
from kvhaven.errors import ArenaError
from kvhaven.protocol import (
    Abort,
    Attached,
    AttachRank,
    Commit,
    Granted,
    Loaded,
    Reserve,
    ServiceMessage,
)
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, ShardTable, TenantId

logger = logging.getLogger(__name__)

_PROBE_EVERY_S = 1.0
_QUICK_S = 0.05
"""A slow service that answers within this is asked again."""


class MappedArena:
    """The arena of one service, mapped; `address_of` turns a place into a host address.

    `lock_bytes` are the bytes of its segments that are locked while it is mapped.
    """

    def __init__(
        self, service: str, segments: list[MappedSegment], lock_bytes: tuple[int, ...]
    ) -> None:
        self.service = service
        self.segments = segments
        self.lock_bytes = lock_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prefault, name="prefault", daemon=True)
        self._thread.start()

    def address_of(self, segment: int, offset: int, length: int) -> int:
        """Return the address of a place. Raises `ArenaError` when it is not in the segment."""
        if not 0 <= segment < len(self.segments):
            raise ArenaError(f"segment {segment} was never mapped")
        mapped = self.segments[segment]
        if offset < 0 or offset + length > mapped.size:
            raise ArenaError(f"{offset}+{length} is outside segment {segment} of {mapped.size}")
        return mapped.address + offset

    def close(self) -> None:
        """Unmap; no copy may be running."""
        self._stop.set()
        self._thread.join()
        close_all(self.segments)

    def _prefault(self) -> None:
        for segment in self.segments:
            segment.prefault(self._stop)


class Grant(NamedTuple):
    """This rank's part in a chunk that its engine saves; it is committed or aborted.

    The part is to write all shards of this rank, or none: another rank writes the same ones.
    Then too the chunk is only seen when this rank has committed, because only this rank
    knows whether its loads went well, and so whether what all ranks computed is right.
    """

    key: ChunkKey
    address: int
    """Of the first shard, in this process; the others lie at `RankClient.shard_offsets` from it.

    0 if there is nothing to write.
    """
    generation: int
    """What `commit` must repeat."""
    service: str
    """Whose arena it is."""
    writes: bool = True
    """Whether the shards are to be written."""


class Reservation:
    """An answer that is awaited; see `RankClient.reserve`."""

    def __init__(self, keys: Sequence[ChunkKey], asked: float) -> None:
        self.keys = keys
        self.asked = asked
        self.answered = threading.Event()
        self.grants: list[Grant | None] = [None] * len(keys)
        self.given_up = False


class RankClient:
    """One rank's side of the service. Only `grants` waits, with a deadline.

    `on_arena` is called with each arena that was mapped, before it is used, and `off_arena`
    before it is unmapped.
    """

    def __init__(
        self,
        address: str,
        attach: AttachRank,
        *,
        on_arena: Callable[[MappedArena], None] = lambda _: None,
        off_arena: Callable[[MappedArena], None] = lambda _: None,
        ensure_service: Callable[[], None] = lambda: None,
    ) -> None:
        held = ShardTable(attach.shards)
        self.shard_offsets = held.offsets
        """Where each shard of this rank starts, in bytes from its first one."""
        self.span_bytes = max(
            (at + shard.payload_bytes for at, shard in zip(held.offsets, held.shards, strict=True)),
            default=0,
        )
        """From the start of this rank's first shard to the end of its last."""
        self._attach = attach
        self._on_arena = on_arena
        self._off_arena = off_arena
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        # All below is guarded by the lock; `service` and figures may be read without it.
        self._reservations: dict[int, Reservation] = {}
        self._holding: set[int] = set()  # generations that are not committed or aborted yet
        self._arenas: dict[str, MappedArena] = {}
        self._replaced: list[MappedArena] = []
        self._slow = False
        self._next_probe = 0.0
        self.deadlines_missed = 0
        self.service = ""
        self._link = Link(address, self, ensure_service=ensure_service)

    def start(self, timeout_s: float) -> None:
        """Attach and map the arena. Raises as `Link.start` does."""
        self._link.start(timeout_s)

    def close(self) -> None:
        """Disconnect and unmap; no copy may be running."""
        if not self._link.close():
            return  # its thread may still map an arena; all goes with the process
        with self._lock:
            arenas = [*self._arenas.values(), *self._replaced]
            self._arenas.clear()
            self._replaced.clear()
        self._unmap(arenas)

    @property
    def up(self) -> bool:
        """Whether the service can be asked now."""
        return self._link.up

    def arena(self, service: str) -> MappedArena | None:
        """Return the arena of that service, as long as it is mapped."""
        return self._arenas.get(service)

    def keep_arenas(self, services: frozenset[str]) -> None:
        """Unmap the arenas of earlier services which are not among those in use.

        No copy from or to them may be running.
        """
        if len(self._arenas) < 2:  # noqa: PLR2004 - only the present one: the usual case
            return
        with self._lock:
            stale = [s for s in self._arenas if s not in services and s != self.service]
            arenas = [self._arenas.pop(service) for service in stale]
        self._unmap(arenas)

    def reserve(
        self,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tenant: TenantId = NO_TENANT,
    ) -> Reservation | None:
        """Ask for space for a tenant's consecutive chunks; None if the service is away or slow.

        `save` is the number of the save, the same on all ranks and used for no other. A slow
        service is asked for nothing once a second, to see whether it has recovered.
        """
        now = time.monotonic()
        if self._slow:
            if now < self._next_probe:
                return None
            self._next_probe = now + _PROBE_EVERY_S
            self._ask(Reserve(0, b"", b"", save), (), now)
            return None
        return self._ask(Reserve(0, parent or b"", b"".join(keys), save, tenant), keys, now)

    def grants(self, reservation: Reservation, deadline: float) -> list[Grant | None]:
        """Wait for an answer until `deadline` (`time.monotonic`), then do without.

        A service that did not answer in time counts as slow until it answers quickly.
        """
        if reservation.answered.wait(max(0.0, deadline - time.monotonic())):
            return reservation.grants
        with self._lock:
            if reservation.answered.is_set():
                return reservation.grants
            reservation.given_up = True
            self.deadlines_missed += 1
            self._slow = True
            self._next_probe = time.monotonic() + _PROBE_EVERY_S
        return [None] * len(reservation.keys)

    def commit(self, done: Sequence[tuple[Grant, Sequence[Checksum]]]) -> None:
        """Report parts that are done, with the checksums of the shards that were to be written."""
        for service in {grant.service for grant, _ in done}:
            pairs = [pair for pair in done if pair[0].service == service]
            chunks = [(grant.key, grant.generation, checksums) for grant, checksums in pairs]
            self._link.post_reliable(functools.partial(Commit, chunks=chunks), service)
        self._let_go([grant for grant, _ in done])

    def abort(self, grants: Sequence[Grant]) -> None:
        """Give grants up; no copy into them may be running."""
        for service in {grant.service for grant in grants}:
            chunks = [(g.key, g.generation) for g in grants if g.service == service]
            self._link.post_reliable(functools.partial(Abort, chunks=chunks), service)
        self._let_go(grants)

    def loaded(self, tickets: Sequence[int], service: str) -> None:
        """Report that this rank's copies for these leases have ended."""
        if tickets:
            self._link.post_reliable(functools.partial(Loaded, tickets=list(tickets)), service)

    # --- called by the link -----------------------------------------------------------------

    def greeting(self) -> AttachRank:
        """Say who we are, and which grants we got: the service ends all others."""
        with self._lock:
            return msgspec.structs.replace(self._attach, holding=tuple(self._holding))

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Map the arena, unless it is mapped under these locks already."""
        lock_bytes = tuple(segment.lock_byte for segment in answer.segments)
        known = self._arenas.get(service)
        if known is not None and known.lock_bytes == lock_bytes:
            close_descriptors(descriptors)
        else:
            # Other locks: we were taken for gone before we had mapped anything. What proves
            # from now on that we live are the new ones.
            arena = MappedArena(service, map_arena(answer.segments, descriptors), lock_bytes)
            try:
                self._on_arena(arena)
            except Exception:  # a driver may raise anything, and registering is for speed alone
                logger.exception("the arena could not be registered with the device")
            with self._lock:
                if known is not None:
                    self._replaced.append(known)
                self._arenas[service] = arena
        with self._lock:
            if service != self.service:
                self._holding.clear()
            self.service = service
            self._slow = False

    def received(self, message: ServiceMessage) -> None:
        """Hand an answer to who waits for it; one that comes too late is given back."""
        if not isinstance(message, Granted):
            return
        with self._lock:
            reservation = self._reservations.pop(message.id, None)
            if reservation is None:
                return
            if time.monotonic() - reservation.asked < _QUICK_S:
                self._slow = False
            grants = self._placed(reservation.keys, message)
            self._holding.update(grant.generation for grant in grants if grant is not None)
            if not reservation.given_up:
                reservation.grants = grants
                reservation.answered.set()
                return
        self.abort([grant for grant in grants if grant is not None])

    def detached(self) -> None:
        """Nothing will be answered: who waits goes on without."""
        with self._lock:
            reservations = list(self._reservations.values())
            self._reservations.clear()
            for reservation in reservations:
                reservation.answered.set()

    # --- helpers ----------------------------------------------------------------------------

    def _ask(self, request: Reserve, keys: Sequence[ChunkKey], now: float) -> Reservation | None:
        """Send a request under an id of its own."""
        reservation = Reservation(keys, now)
        with self._lock:
            id_ = next(self._ids)
            self._reservations[id_] = reservation
        if not self._link.post(msgspec.structs.replace(request, id=id_)):
            with self._lock:
                self._reservations.pop(id_, None)
            return None
        return reservation

    def _let_go(self, grants: Sequence[Grant]) -> None:
        with self._lock:
            self._holding.difference_update(
                grant.generation for grant in grants if grant.service == self.service
            )

    def _placed(self, keys: Sequence[ChunkKey], message: Granted) -> list[Grant | None]:
        arena = self._arenas[self.service]
        grants: list[Grant | None] = []
        for key, granted in zip(keys, message.grants, strict=True):
            if granted is None:
                grants.append(None)
                continue
            segment, offset, generation, writes = granted
            address = arena.address_of(segment, offset, self.span_bytes) if writes else 0
            grants.append(Grant(key, address, generation, self.service, writes))
        return grants

    def _unmap(self, arenas: Sequence[MappedArena]) -> None:
        for arena in arenas:
            self._off_arena(arena)
            arena.close()
