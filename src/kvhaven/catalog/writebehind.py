# SPDX-License-Identifier: Apache-2.0
"""Writing resident chunks to a tier, behind everybody's back and within bounds."""

from collections import deque
from collections.abc import Callable

from kvhaven.catalog.actions import Action, TierWrite
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.tierindex import TierIndex
from kvhaven.types import ChunkKey

OUTSTANDING_BYTES = 64 << 20
OUTSTANDING_CHUNKS = 4
"""A tier is given this many bytes at a time, or this many chunks if those are more."""


class WriteBehind:
    """The writes to one tier.

    A write that was handed out pins its chunk; one that waits does not, and is dropped when
    its chunk is evicted, or when more than `limit_bytes` wait: the oldest then.
    """

    def __init__(self, index: TierIndex, limit_bytes: int, actions: list[Action]) -> None:
        self.index = index
        self.queue: deque[Entry] = deque()
        self.queued_bytes = 0
        self.writing: dict[ChunkKey, Entry] = {}
        self.outstanding_bytes = 0
        self.dropped = 0
        self.written = 0
        self.cancelled: set[ChunkKey] = set()
        self.limit_bytes = limit_bytes
        self._actions = actions

    def offer(self, entry: Entry) -> None:
        """Have a chunk written that has just become resident."""
        if not self.index.online or self.index.holds(entry.key, entry.namespace):
            return
        self.queue.append(entry)
        self.queued_bytes += entry.extent.length
        self.pump()
        while self.queued_bytes > self.limit_bytes:
            self._next()
            self.dropped += 1

    def pump(self) -> None:
        """Hand out what the tier can take now."""
        while self.queue and self._has_room(self.queue[0].extent.length):
            entry = self._next()
            stored_bytes = entry.namespace.stored_bytes
            index = self.index
            if index.holds(entry.key, entry.namespace):
                continue
            fits = index.writing_bytes + stored_bytes <= index.spec.capacity_bytes
            if entry.state is not State.RESIDENT or entry.key in self.writing or not fits:
                self.dropped += 1
                continue
            self._hand_out(entry)

    def done(self, key: ChunkKey, *, ok: bool) -> Entry:
        """End a write and return its chunk; raises KeyError when none is under way."""
        entry = self.writing.pop(key)
        entry.writes -= 1
        self.outstanding_bytes -= entry.extent.length
        self.index.writing_bytes -= entry.namespace.stored_bytes
        cancelled = key in self.cancelled
        self.cancelled.discard(key)
        if ok and not cancelled:
            self.written += 1
            self.index.written(entry.namespace, key)
        else:
            self.dropped += not ok
            # Some of its shards may be there.
            self.index.delete(key, entry.namespace)
        return entry

    def cancel(self, matches: Callable[[Entry], bool]) -> None:
        """Drop waiting writes of these chunks; those under way are deleted when they end."""
        kept = [e for e in self.queue if not matches(e)]
        self.queue = deque(kept)
        self.queued_bytes = sum(e.extent.length for e in kept)
        self.cancelled.update(k for k, e in self.writing.items() if matches(e))

    def drop_queue(self) -> None:
        """Drop what waits, because the tier is offline."""
        self.dropped += len(self.queue)
        self.queue.clear()
        self.queued_bytes = 0

    def _next(self) -> Entry:
        entry = self.queue.popleft()
        self.queued_bytes -= entry.extent.length
        return entry

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
        index.writing_bytes += namespace.stored_bytes
        index.trim()
        checksums = tuple(c for c in entry.checksums if c is not None)
        digest = namespace.namespace.digest
        self._actions.append(TierWrite(index.spec.name, digest, entry.key, entry.extent, checksums))
