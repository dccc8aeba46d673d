# SPDX-License-Identifier: Apache-2.0
"""Writing resident chunks to a tier, behind everybody's back and within bounds."""

from collections import deque
from collections.abc import Callable

from kvhaven.catalog.actions import Action, TierWrite
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.tierspec import TierState, WriteMode
from kvhaven.types import ChunkKey

OUTSTANDING_BYTES = 64 << 20
OUTSTANDING_CHUNKS = 4
"""A tier is given this many bytes at a time, or this many chunks if those are more."""


class WriteBehind:
    """The writes to one tier.

    A write that was handed out pins its chunk; one that waits does so only in the mode
    `THROUGH`, otherwise it is dropped when its chunk is evicted. When more than `limit_bytes`
    wait, the oldest is dropped. `let_go` is told of each chunk that a dropped write pinned.
    """

    def __init__(
        self,
        index: TierState,
        limit_bytes: int,
        actions: list[Action],
        let_go: Callable[[Entry], None],
    ) -> None:
        self.index = index
        self.pins = int(index.spec.write is WriteMode.THROUGH)
        self.queue: deque[Entry] = deque()
        self.queued_bytes = 0
        self.writing: dict[ChunkKey, Entry] = {}
        self.outstanding_bytes = 0
        self.dropped = 0
        self.written = 0
        self.cancelled: set[ChunkKey] = set()
        self.limit_bytes = limit_bytes
        self._actions = actions
        self._let_go = let_go

    def offer(self, entry: Entry) -> None:
        """Have a resident chunk written that the tier is not known to have."""
        index = self.index
        if index.spec.write is WriteMode.OFF or not index.online:
            return
        if index.holds(entry.key, entry.namespace):
            return
        self.queue.append(entry)
        self.queued_bytes += entry.extent.length
        entry.writes += self.pins
        self.pump()
        while self.queued_bytes > self.limit_bytes:
            self._drop_oldest()

    def pump(self) -> None:
        """Hand out what the tier can take now."""
        while self.queue and self._has_room(self.queue[0].extent.length):
            entry = self._next()
            index = self.index
            if not index.holds(entry.key, entry.namespace):
                fits = index.has_room(entry.namespace)
                if entry.state is State.RESIDENT and entry.key not in self.writing and fits:
                    self._hand_out(entry)
                else:
                    self.dropped += 1
            self._unpin(entry)

    def done(self, key: ChunkKey, *, ok: bool, taken_bytes: int | None = None) -> Entry:
        """End a write and return its chunk; raises KeyError when none is under way.

        The chunk takes `taken_bytes` in the tier; None: as many as uncompressed.
        """
        entry = self.writing.pop(key)
        entry.writes -= 1
        self.outstanding_bytes -= entry.extent.length
        self.index.write_ended(entry.namespace)
        cancelled = key in self.cancelled
        self.cancelled.discard(key)
        if ok and not cancelled:
            self.written += 1
            self.index.written(entry.namespace, key, taken_bytes)
            return entry
        self.dropped += not ok
        if cancelled:
            self.index.delete(key, entry.namespace)
        else:
            self.index.unfinished(key, entry.namespace)
        return entry

    def cancel(self, matches: Callable[[Entry], bool]) -> None:
        """Drop waiting writes of these chunks; those under way are deleted when they end."""
        waiting, self.queue = self.queue, deque()
        self.queued_bytes = 0
        for entry in waiting:
            if matches(entry):
                self._unpin(entry)
            else:
                self.queue.append(entry)
                self.queued_bytes += entry.extent.length
        self.cancelled.update(k for k, e in self.writing.items() if matches(e))

    def drop_queue(self) -> None:
        """Drop what waits, because the tier is offline."""
        while self.queue:
            self._drop_oldest()

    def _next(self) -> Entry:
        entry = self.queue.popleft()
        self.queued_bytes -= entry.extent.length
        return entry

    def _drop_oldest(self) -> None:
        self._unpin(self._next())
        self.dropped += 1

    def _unpin(self, entry: Entry) -> None:
        """End what pinned a waiting chunk; one that nothing pinned may be gone already."""
        if self.pins:
            entry.writes -= 1
            self._let_go(entry)

    def _has_room(self, length: int) -> bool:
        return (
            len(self.writing) < OUTSTANDING_CHUNKS
            or self.outstanding_bytes + length <= OUTSTANDING_BYTES
        )

    def _hand_out(self, entry: Entry) -> None:
        index, namespace = self.index, entry.namespace
        entry.writes += 1
        self.writing[entry.key] = entry
        self.outstanding_bytes += entry.extent.length
        index.write_begins(namespace)
        checksums = tuple(c for c in entry.checksums if c is not None)
        digest, tenant = namespace.namespace.digest, namespace.tenant.id
        self._actions.append(
            TierWrite(index.spec.name, digest, entry.key, entry.extent, checksums, tenant)
        )
