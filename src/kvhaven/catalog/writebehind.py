# SPDX-License-Identifier: Apache-2.0
"""Bounded write-behind queue of one tier."""

from collections import Counter, deque
from collections.abc import Callable

from kvhaven.catalog.actions import Action, TierWrite
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.ghosts import Ghosts
from kvhaven.catalog.holdings import Scope, scopes_over
from kvhaven.catalog.tier_spec import TierState, WriteMode
from kvhaven.catalog.work import Job, Work
from kvhaven.types import ChunkKey

OUTSTANDING_BYTES = 64 << 20
OUTSTANDING_CHUNKS = 4
"""A tier has writes of at most this many bytes under way, or of this many chunks if those are
more."""
MOST_OUTSTANDING = 1024
"""Maximum number of chunks in writes under way, whatever their size."""

_Offer = tuple[Entry, int, int]
"""Chunk that waits to be written, the number of its offer, and 1 if it is pinned."""


class WriteBehind:
    """Writes to one tier.

    A write under way pins its chunk. A waiting write does so only in the mode `THROUGH`; otherwise
    it is dropped when its chunk is evicted. When more than `limit_bytes` wait, the oldest write is
    dropped. `let_go` is called with each chunk that a dropped write pinned.

    A waiting write whose chunk is cleared is dropped at its turn, or when `_prune` reaches it.
    `voids` maps each clear to the number of the last offer before it. The clears in `later_voids`
    came while `_prune` was running and need another round.
    """

    def __init__(
        self,
        index: TierState,
        limit_bytes: int,
        actions: list[Action],
        let_go: Callable[[Entry], None],
        work: Work,
        ghosts: Ghosts,
    ) -> None:
        self.index = index
        self.mode = index.spec.write
        self.store_on = index.spec.store_on
        self.queue: deque[_Offer] = deque()
        self.dropping: deque[_Offer] = deque()  # writes dropped as the tier went offline
        self.queued_bytes = 0
        self.writing: dict[ChunkKey, Entry] = {}
        self.outstanding_bytes = 0
        self.dropped = Counter[str]()  # chunks not written, by reason
        self.written = 0
        self.cancelled: set[ChunkKey] = set()
        self.voids: dict[Scope, int] = {}
        self.later_voids: dict[Scope, int] = {}
        self.limit_bytes = limit_bytes
        self._actions = actions
        self._let_go = let_go
        self._work = work
        self._ghosts = ghosts
        self._offers = 0
        self._pumping = False
        self._pruning = False

    def offer(self, entry: Entry) -> None:
        """Queue a write of a resident chunk, unless the tier is known to have it."""
        index = self.index
        if self.mode is WriteMode.OFF or not index.online:
            return
        if index.holds(entry.key, entry.namespace):
            return
        self._offers += 1
        self._append((entry, self._offers, self.pins))
        entry.writes += self.pins
        self.pump()
        while self.queued_bytes > self.limit_bytes:
            self._drop_oldest()

    @property
    def pins(self) -> int:
        """1 if waiting writes pin their chunks, else 0."""
        return int(self.mode is WriteMode.THROUGH)

    def switch(self, mode: WriteMode) -> None:
        """Set the treatment of chunks offered from now on; `OFF` drops all waiting writes."""
        self.mode = mode
        if mode is WriteMode.OFF:
            self.drop_queue("off")

    def limit(self, bytes_: int) -> None:
        """Set the limit of waiting bytes; writes above a lower one are dropped piece by piece."""
        self.limit_bytes = bytes_
        if self.queued_bytes > bytes_:
            self._work.start(self._shed())

    def pump(self) -> None:
        """Start as many writes as the tier can take now."""
        if not self._pumping and self._can_take():
            self._pumping = True
            self._work.start(self._pump())

    def done(self, key: ChunkKey, *, ok: bool, taken_bytes: int | None = None) -> Entry:
        """End a write and return its chunk. Raises `KeyError` if none is under way.

        The chunk takes `taken_bytes` in the tier; None: as uncompressed.
        """
        entry = self.writing.pop(key)
        entry.writes -= 1
        self.outstanding_bytes -= entry.extent.length
        self.index.write_ended(entry.namespace)
        cancelled = key in self.cancelled
        self.cancelled.discard(key)
        if ok and not cancelled:
            self.written += 1
            self._ghosts.back(key)
            self.index.written(entry.namespace, key, taken_bytes)
            return entry
        if not ok:
            self._drop_one(entry, "failed")
        if cancelled:
            self.index.delete(key, entry.namespace)
        else:
            self.index.unfinished(key, entry.namespace)
        return entry

    def clear(self, scope: Scope) -> None:
        """Drop waiting writes in a scope; those under way are deleted when they end."""
        self.cancelled.update(k for k, e in self.writing.items() if scope.covers(e.namespace))
        if self.queue:
            self.later_voids[scope] = self._offers
            if not self._pruning:
                self._pruning = True
                self._work.start_if_small(self._prune(), len(self.queue))

    def discard(self, entry: Entry) -> None:
        """Cancel the write under way of a chunk that is retired."""
        if self.writing.get(entry.key) is entry:
            self.cancelled.add(entry.key)

    def drop_queue(self, reason: str = "offline") -> None:
        """Drop all waiting writes, because the tier is offline or switched off."""
        if not self.queue:
            return
        self.dropped[reason] += len(self.queue)
        self.queued_bytes = 0
        queue, self.queue = self.queue, deque()
        if self.dropping:
            self.dropping += queue
        else:
            self.dropping = queue
            self._work.start(self._drop())

    def _pump(self) -> Job:
        taken = 0
        while self._can_take():
            if taken == self._work.pace.heavy:
                yield
                taken = 0
                continue
            taken += 1
            offer = self._next()
            entry, index = offer[0], self.index
            if not index.holds(entry.key, entry.namespace) and not self._is_void(offer):
                here = entry.state is State.RESIDENT and not entry.holding.cleared
                if here and entry.key not in self.writing and index.has_room(entry.namespace):
                    self._hand_out(entry)
                else:
                    self._drop_one(entry, "room" if here else "evicted")
            self._unpin(offer)
        self._pumping = False

    def _prune(self) -> Job:
        """Drop all void writes of the queue; each round goes once through the whole queue."""
        while self.later_voids:
            self.voids, self.later_voids = self.later_voids, {}
            for done in range(len(self.queue)):
                if done and done % self._work.pace.heavy == 0:
                    yield
                if not self.queue:
                    break
                offer = self._next()
                if self._is_void(offer):
                    self._unpin(offer)
                else:
                    self._append(offer)
        self.voids = {}
        self._pruning = False

    def _drop(self) -> Job:
        dropped = 0
        while self.dropping:
            if dropped == self._work.pace.heavy:
                yield
                dropped = 0
                continue
            dropped += 1
            offer = self.dropping.popleft()
            self._ghosts.unwritten(offer[0].key)
            self._unpin(offer)

    def _shed(self) -> Job:
        """Drop the oldest waiting writes above the limit."""
        dropped = 0
        while self.queued_bytes > self.limit_bytes:
            if dropped == self._work.pace.heavy:
                yield
                dropped = 0
                continue
            dropped += 1
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        offer = self._next()
        self._drop_one(offer[0], "overload")
        self._unpin(offer)

    def _drop_one(self, entry: Entry, reason: str) -> None:
        self.dropped[reason] += 1
        self._ghosts.unwritten(entry.key)

    def _is_void(self, offer: _Offer) -> bool:
        """Return whether a chunk was cleared from the tier after it was offered."""
        if not self._pruning:
            return False
        entry, number, _ = offer
        return any(
            number <= max(self.voids.get(scope, 0), self.later_voids.get(scope, 0))
            for scope in scopes_over(entry.namespace)
        )

    def _append(self, offer: _Offer) -> None:
        self.queue.append(offer)
        self.queued_bytes += offer[0].extent.length

    def _next(self) -> _Offer:
        offer = self.queue.popleft()
        self.queued_bytes -= offer[0].extent.length
        return offer

    def _unpin(self, offer: _Offer) -> None:
        """End the pin of a waiting chunk; without a pin the chunk may be dropped already."""
        entry, _, pinned = offer
        if pinned:
            entry.writes -= 1
            self._let_go(entry)

    def _can_take(self) -> bool:
        """Return whether a write waits and the tier can take it."""
        if not self.queue:
            return False
        if len(self.writing) < OUTSTANDING_CHUNKS:
            return True
        bytes_ = self.outstanding_bytes + self.queue[0][0].extent.length
        return bytes_ <= OUTSTANDING_BYTES and len(self.writing) < MOST_OUTSTANDING

    def _hand_out(self, entry: Entry) -> None:
        index, namespace = self.index, entry.namespace
        entry.writes += 1
        self.writing[entry.key] = entry
        self.outstanding_bytes += entry.extent.length
        index.write_begins(entry.key, namespace)
        checksums = tuple(c for c in entry.checksums if c is not None)
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(
            TierWrite(index.spec.name, space, entry.key, entry.extent, checksums, tenant)
        )
