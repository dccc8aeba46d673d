# SPDX-License-Identifier: Apache-2.0
"""A rank's client: maps the arena, reserves space for saves, reports copies that ended."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
from kvhaven.types import Checksum, ChunkKey

logger = logging.getLogger(__name__)

_SLOW_PAUSE_S = 1.0


class MappedArena:
    """The arena of one service, mapped; `address_of` turns a place into a host address."""

    def __init__(self, service: str, segments: list[MappedSegment]) -> None:
        self.service = service
        self.segments = segments
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
    """Where this rank may write its shard of a chunk."""

    key: ChunkKey
    address: int
    """In this process."""
    generation: int
    """What `commit` must repeat."""
    service: str
    """Whose arena it is."""


class Reservation:
    """An answer that is awaited; see `RankClient.reserve`."""

    def __init__(self, keys: Sequence[ChunkKey]) -> None:
        self.keys = keys
        self.answered = threading.Event()
        self.grants: list[Grant | None] = [None] * len(keys)
        self.given_up = False


class RankClient:
    """One rank's side of the service. Only `Reservation` waits, with a deadline."""

    def __init__(
        self,
        address: str,
        attach: AttachRank,
        *,
        on_arena: Callable[[MappedArena], None] = lambda _: None,
        ensure_service: Callable[[], None] = lambda: None,
    ) -> None:
        self._shard_bytes = attach.shard.payload_bytes
        self._on_arena = on_arena
        self._lock = threading.Lock()
        self._reservations: dict[int, Reservation] = {}
        self._ids = itertools.count(1)
        self._arenas: dict[str, MappedArena] = {}
        self._slow_until = 0.0
        self.deadlines_missed = 0
        self.service = ""
        self._link = Link(address, attach, self, ensure_service=ensure_service)

    def start(self, timeout_s: float) -> None:
        """Attach and map the arena. Raises as `Link.start` does."""
        self._link.start(timeout_s)

    def close(self) -> None:
        """Disconnect and unmap; no copy may be running."""
        self._link.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

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
        with self._lock:
            stale = [s for s in self._arenas if s not in services and s != self.service]
            arenas = [self._arenas.pop(service) for service in stale]
        for arena in arenas:
            arena.close()

    def reserve(self, parent: ChunkKey | None, keys: Sequence[ChunkKey]) -> Reservation | None:
        """Ask for space for consecutive chunks; None when the service is away or slow."""
        if time.monotonic() < self._slow_until:
            return None
        reservation = Reservation(keys)
        with self._lock:
            id_ = next(self._ids)
            self._reservations[id_] = reservation
        if not self._link.post(Reserve(id_, parent or b"", b"".join(keys))):
            with self._lock:
                self._reservations.pop(id_, None)
            return None
        return reservation

    def grants(self, reservation: Reservation, deadline: float) -> list[Grant | None]:
        """Wait for an answer until `deadline` (`time.monotonic`), then do without.

        A service that did not answer in time is not asked again for a second.
        """
        if reservation.answered.wait(max(0.0, deadline - time.monotonic())):
            return reservation.grants
        with self._lock:
            if reservation.answered.is_set():
                return reservation.grants
            reservation.given_up = True
            self.deadlines_missed += 1
            self._slow_until = time.monotonic() + _SLOW_PAUSE_S
        return [None] * len(reservation.keys)

    def commit(self, written: Sequence[tuple[Grant, Checksum]]) -> None:
        """Report shards that are written, with their checksums."""
        shards = [
            (grant.key, grant.generation, checksum)
            for grant, checksum in written
            if grant.service == self.service
        ]
        if shards:
            self._link.post_reliable(lambda seq: Commit(seq, list(shards)))

    def abort(self, grants: Sequence[Grant]) -> None:
        """Give grants up; no copy into them may be running."""
        shards = [
            (grant.key, grant.generation) for grant in grants if grant.service == self.service
        ]
        if shards:
            self._link.post_reliable(lambda seq: Abort(seq, list(shards)))

    def loaded(self, tickets: Sequence[int], service: str) -> None:
        """Report that this rank's copies for these leases have ended."""
        if tickets and service == self.service:
            self._link.post_reliable(lambda seq: Loaded(seq, list(tickets)))

    # --- called by the link -----------------------------------------------------------------

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Map the arena, unless it is mapped already."""
        if service in self._arenas:
            close_descriptors(descriptors)
        else:
            arena = MappedArena(service, map_arena(answer.segments, descriptors))
            with contextlib.suppress(ArenaError):
                # Registering with the device is for speed; without it copies are slower.
                self._on_arena(arena)
            with self._lock:
                self._arenas[service] = arena
        self.service = service
        self._slow_until = 0.0

    def received(self, message: ServiceMessage) -> None:
        """Hand an answer to who waits for it; one that comes too late is given back."""
        if not isinstance(message, Granted):
            return
        with self._lock:
            reservation = self._reservations.pop(message.id, None)
            if reservation is None:
                return
            grants = self._placed(reservation.keys, message)
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

    def _placed(self, keys: Sequence[ChunkKey], message: Granted) -> list[Grant | None]:
        arena = self._arenas[self.service]
        return [
            None
            if place is None
            else Grant(
                key,
                arena.address_of(place[0], place[1], self._shard_bytes),
                place[2],
                self.service,
            )
            for key, place in zip(keys, message.grants, strict=True)
        ]
