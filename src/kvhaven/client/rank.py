# SPDX-License-Identifier: Apache-2.0
"""A rank's client: maps the arena, reserves space for saves, reports finished copies."""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvhaven.arena.segment import MappedSegment
from kvhaven.client.arena import (
    HostMemory,
    MappedArena,
    SharedArena,
    close_descriptors,
    map_arena,
)
from kvhaven.client.link import Link
from kvhaven.keys import namespace_digest
from kvhaven.protocol import (
    MOST_ITEMS,
    Abort,
    Attached,
    AttachRank,
    Commit,
    Granted,
    Grown,
    Loaded,
    ModelChanged,
    ModelState,
    Ready,
    Reserve,
    SegmentInfo,
    ServiceMessage,
    batches,
)
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, ShardTable, TenantId

logger = logging.getLogger(__name__)

_UNMAP_S = 5.0
"""Seconds for which `close` waits for an arena to be unmapped; else it ends with the process."""
_READY_POLL_S = 0.001
_PROBE_EVERY_S = 1.0
_QUICK_S = 0.05
"""A slow service that answers within this many seconds counts as recovered."""


class RankGrant(NamedTuple):
    """This rank's part of a chunk that its engine saves; it must be committed or aborted.

    The rank writes all its shards of the chunk, or none if another rank writes the same ones. In
    that case, too, the chunk becomes visible only after this rank has committed, because only this
    rank knows whether its loads succeeded, and so whether the KV that all ranks computed is right.
    """

    key: ChunkKey
    address: int
    """Of the first shard, in this process; the others lie at `RankClient.shard_offsets` from it.

    0 if there is nothing to write.
    """
    generation: int
    """The generation of the extent; `commit` repeats it."""
    service: str
    """The service whose arena holds the extent."""
    writes: bool = True
    """Whether this rank writes the shards."""


class Reservation:
    """A pending request for space; see `RankClient.reserve`."""

    def __init__(self, keys: Sequence[ChunkKey], asked: float) -> None:
        self.keys = keys
        self.asked = asked
        self.answered = threading.Event()
        self.grants: list[RankGrant | None] = [None] * len(keys)
        self.given_up = False


_abandoned: list[MappedArena | SharedArena] = []
"""Arenas that a device may still access: kept until the process ends."""


class RankClient:
    """One rank's client of the service. In an engine's step, only `grants` waits, to a deadline.

    `memory` registers the arena with the device, in a thread of the arena; no call waits for it.
    The service neither offers nor grants memory that is not registered yet. With `beside`, a client
    of the same rank for another part of the KV, this one uses that client's mappings: `beside` must
    be closed after it, and must keep the arenas that this one keeps.
    """

    def __init__(
        self,
        address: str,
        attach: AttachRank,
        *,
        memory: HostMemory = HostMemory(),  # noqa: B008  it is frozen
        ensure_service: Callable[[], None] = lambda: None,
        beside: "RankClient | None" = None,
    ) -> None:
        held = ShardTable(attach.shards)
        self.shard_offsets = held.offsets
        """Bytes from this rank's first shard to the start of each of its shards."""
        self.span_bytes = max(
            (at + shard.payload_bytes for at, shard in zip(held.offsets, held.shards, strict=True)),
            default=0,
        )
        """Bytes from the start of this rank's first shard to the end of its last."""
        self._attach = attach
        self._memory = memory
        self._beside = beside
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        # All below is guarded by the lock; `service` and figures may be read without it.
        self._reservations: dict[int, Reservation] = {}
        self._holding: set[int] = set()  # generations that are not yet committed or aborted
        self._arenas: dict[str, MappedArena | SharedArena] = {}
        self._replaced: list[MappedArena | SharedArena] = []
        self._slow = False
        self._next_probe = 0.0
        self._said = attach.model
        self.deadlines_missed = 0
        self.service = ""
        self._link = Link(address, self, ensure_service=ensure_service)

    @property
    def closing(self) -> threading.Event:
        """Set once `close` was called."""
        return self._link.closing

    def identify(self, fields: Mapping[str, str]) -> None:
        """Set the namespace's fields, if they were not known from the beginning.

        Called before `start`: until then no space is reserved.
        """
        digest = namespace_digest(fields)
        with self._lock:
            self._attach = msgspec.structs.replace(
                self._attach, namespace=digest, fields=dict(fields)
            )

    def start(self, timeout_s: float) -> None:
        """Attach and map the arena. Raises as `Link.start` does."""
        self._link.start(timeout_s)

    def abandon(self) -> None:
        """Disconnect, and leave the memory mapped and registered: a copy may still be running.

        The lock that shows the mapping to the service stays with it, so that the service does not
        reuse the memory before this process has ended.
        """
        self._link.close()
        with self._lock:
            _abandoned.extend([*self._arenas.values(), *self._replaced])

    def close(self) -> None:
        """Disconnect and unmap; no copy may be running."""
        if not self._link.close():
            return  # the link's thread may still map an arena; the process's end unmaps all
        with self._lock:
            arenas = [*self._arenas.values(), *self._replaced]
            self._arenas.clear()
            self._replaced.clear()
        for thread in [arena.close() for arena in arenas]:
            thread.join(_UNMAP_S)

    @property
    def up(self) -> bool:
        """Whether the service is connected."""
        return self._link.up

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until all memory known to be allocated is ready and the service has been told.

        Engines do not wait: they have misses until then. Benchmarks and tests need hits from the
        start.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            arena = self._arenas.get(self.service)
            if self.up and arena is not None and arena.ready and self._link.acknowledged:
                return True
            time.sleep(_READY_POLL_S)
        return False

    def arena(self, service: str) -> MappedArena | SharedArena | None:
        """Return the arena of a service, as long as it is mapped."""
        return self._arenas.get(service)

    def mapped_arena(self, service: str) -> MappedArena | None:
        """Return the arena of a service if this client has mapped it itself."""
        arena = self._arenas.get(service)
        return arena if isinstance(arena, MappedArena) else None

    def keep_arenas(self, services: frozenset[str]) -> None:
        """Unmap the arenas of earlier services that are not in `services`.

        No copy from or to them may be running.
        """
        if len(self._arenas) < 2:  # noqa: PLR2004 - only the present arena: the usual case
            return
        with self._lock:
            stale = [s for s in self._arenas if s not in services and s != self.service]
            arenas = [self._arenas.pop(service) for service in stale]
        for arena in arenas:
            arena.close()

    def reserve(
        self,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> Reservation | None:
        """Request space for a tenant's consecutive chunks; None if the service is away or slow.

        Chunks beyond the first `MOST_ITEMS` get none. `save` is the number of the save, the same on
        all ranks and unique to it. With `tail`, the chunks are tails, of which so many tokens are
        stored. Once a second, a slow service gets an empty request, to see
        whether it has recovered.
        """
        now = time.monotonic()
        if self._slow:
            if now < self._next_probe:
                return None
            self._next_probe = now + _PROBE_EVERY_S
            self._ask(Reserve(0, b"", b"", save), (), now)
            return None
        wanted = b"".join(keys[:MOST_ITEMS])
        return self._ask(Reserve(0, parent or b"", wanted, save, tenant, tail), keys, now)

    def grants(self, reservation: Reservation, deadline: float) -> list[RankGrant | None]:
        """Wait for an answer until `deadline` (`time.monotonic`); without one, return no grants.

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

    def commit(self, done: Sequence[tuple[RankGrant, Sequence[Checksum]]]) -> None:
        """Report finished parts, with the checksums of the shards that this rank had to write."""
        for service in {grant.service for grant, _ in done}:
            pairs = [pair for pair in done if pair[0].service == service]
            chunks = [(grant.key, grant.generation, checksums) for grant, checksums in pairs]
            sums = max(len(checksums) for _, checksums in pairs)
            for part in batches(chunks, max(1, MOST_ITEMS // max(1, sums))):
                self._link.post_reliable(functools.partial(Commit, chunks=part), service)
        self._let_go([grant for grant, _ in done])

    def abort(self, grants: Sequence[RankGrant]) -> None:
        """Return grants without committing; no copy into them may be running."""
        for service in {grant.service for grant in grants}:
            chunks = [(g.key, g.generation) for g in grants if g.service == service]
            for part in batches(chunks, MOST_ITEMS):
                self._link.post_reliable(functools.partial(Abort, chunks=part), service)
        self._let_go(grants)

    def loaded(self, lease_ids: Sequence[int], service: str) -> None:
        """Report that this rank's copies for these leases have ended."""
        for part in batches(lease_ids, MOST_ITEMS):
            self._link.post_reliable(functools.partial(Loaded, lease_ids=part), service)

    def model_changed(self, model: ModelState) -> None:
        """Send the content of the model to the engine's scheduler, through the service."""
        with self._lock:
            self._attach = msgspec.structs.replace(self._attach, model=model)
            service = self.service
        self._post_model(model, service)

    # --- called by the link -----------------------------------------------------------------

    def greeting(self) -> AttachRank:
        """Return the attach message with the grants that are held: the service ends all others."""
        with self._lock:
            self._said = self._attach.model
            return msgspec.structs.replace(self._attach, holding=tuple(self._holding))

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Map the arena, unless it is mapped under these locks already."""
        lock_bytes = tuple(segment.lock_byte for segment in answer.segments)
        known = self._arenas.get(service)
        if known is not None and known.lock_bytes == lock_bytes:
            close_descriptors(descriptors)
            for segment in answer.segments:
                known.grown(segment.index, segment.usable)
        else:
            # Other locks: the service considered this rank gone before it had mapped anything.
            # From now on, the new locks prove that this process lives.
            segments = map_arena(answer.segments, descriptors)
            say_ready = functools.partial(self._say_ready, service)
            arena = self._share(service, answer.segments, segments, say_ready)
            with self._lock:
                if known is not None:
                    self._replaced.append(known)
                self._arenas[service] = arena
        with self._lock:
            if service != self.service:
                self._holding.clear()
            self.service = service
            self._slow = False
            model, said = self._attach.model, self._said
        if model != said:  # the model changed between the greeting and the answer
            self._post_model(model, service)

    def received(self, message: ServiceMessage) -> None:
        """Pass an answer to its reservation; abort the grants of one that comes too late."""
        if isinstance(message, Grown):
            self._arenas[self.service].grown(message.segment, message.usable)
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
        """End all pending reservations without grants: they will not be answered."""
        with self._lock:
            reservations = list(self._reservations.values())
            self._reservations.clear()
            for reservation in reservations:
                reservation.answered.set()

    def forked(self) -> None:
        """Renew all locks in a forked child."""
        self._lock = threading.Lock()
        for arena in [*self._arenas.values(), *self._replaced]:
            arena.forked()

    # --- helpers ----------------------------------------------------------------------------

    def _share(
        self,
        service: str,
        infos: Sequence[SegmentInfo],
        segments: Sequence[MappedSegment],
        say_ready: Callable[[int, int, int], None],
    ) -> MappedArena | SharedArena:
        """Return an arena over mapped segments, or over another client's."""
        beside = self._beside
        if beside is None:
            return MappedArena(service, infos, segments, self._memory, say_ready)
        return SharedArena(infos, segments, lambda: beside.mapped_arena(service), say_ready)

    def _ask(self, request: Reserve, keys: Sequence[ChunkKey], now: float) -> Reservation | None:
        """Send a request under a new id."""
        with self._lock:  # held, so that `detached` ends it only if this connection is lost
            id_ = next(self._ids)
            if not self._link.post(msgspec.structs.replace(request, id=id_)):
                return None
            reservation = self._reservations[id_] = Reservation(keys, now)
        return reservation

    def _post_model(self, model: ModelState, service: str) -> None:
        self._link.post_reliable(functools.partial(ModelChanged, model=model), service)

    def _let_go(self, grants: Sequence[RankGrant]) -> None:
        with self._lock:
            self._holding.difference_update(
                grant.generation for grant in grants if grant.service == self.service
            )

    def _placed(self, keys: Sequence[ChunkKey], message: Granted) -> list[RankGrant | None]:
        arena = self._arenas[self.service]
        grants: list[RankGrant | None] = []
        beyond = [None] * (len(keys) - len(message.grants))  # `MOST_ITEMS`
        for key, granted in zip(keys, [*message.grants, *beyond], strict=True):
            if granted is None:
                grants.append(None)
                continue
            segment, offset, generation, writes = granted
            address = arena.address_of(segment, offset, self.span_bytes) if writes else 0
            grants.append(RankGrant(key, address, generation, self.service, writes))
        return grants

    def _say_ready(self, service: str, segment: int, lock_byte: int, usable: int) -> None:
        ready = functools.partial(Ready, segment=segment, lock_byte=lock_byte, usable=usable)
        self._link.post_reliable(ready, service)
