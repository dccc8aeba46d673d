# SPDX-License-Identifier: Apache-2.0
"""Chunks that were stored once and are absent now, and why: the memory behind reasons of misses."""

import enum
from typing import Final

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

MOST_GHOSTS: Final = 1 << 16
"""Maximum number of absent chunks that are remembered; beyond, the oldest are forgotten."""


class Reason(enum.IntEnum):
    """Why tokens of a prompt were found nowhere."""

    COLD = 0
    """Never stored, as far as is remembered."""
    EVICTED = 1
    """Stored once and evicted, also by another node from a shared tier."""
    LATE = 2
    """Being looked up or read from a tier when the request's deadline came."""
    WRITE_DROPPED = 3
    """Evicted from memory after a write to a tier was dropped or failed."""
    TIER_OFF = 4
    """In a tier that is off, or evicted from memory while a shared tier is off."""
    QUOTA = 5
    """Evicted, or not stored, for the quota of its tenant."""
    PIN_LIMIT = 6
    """Stored, but no memory could be pinned or allocated for it, or a rank was not ready for it."""
    DAMAGED = 7
    """Failed verification, or could not be read from a local tier."""
    PARTIAL_CHUNK = 8
    """Behind the last full chunk."""
    SLOW_TIER = 9
    """In a tier, but reading them would take longer than computing them."""
    LOAD_LIMIT = 10
    """Not looked up: the request limits the tokens that it loads."""

    @property
    def label(self) -> str:
        """The name in metrics and answers."""
        return self.name.lower()


class Ghosts:
    """Reasons by chunk; the most recent `MOST_GHOSTS` chunks."""

    def __init__(self) -> None:
        self._reasons = OrderedMap[ChunkKey, Reason]()

    def __len__(self) -> int:
        """Return the number of chunks that are remembered."""
        return len(self._reasons)

    def left(self, key: ChunkKey, reason: Reason) -> None:
        """Record that a chunk left memory, or a tier. A dropped write remains the reason."""
        known = self._reasons
        before = known.get(key)
        if before is not None:
            known.pop(key)
            if before is Reason.WRITE_DROPPED and reason is Reason.EVICTED:
                reason = before
        known.append(key, reason)
        if len(known) > MOST_GHOSTS:
            known.pop(next(iter(known)))

    def unwritten(self, key: ChunkKey) -> None:
        """Record that a write of a chunk was dropped or failed."""
        self.left(key, Reason.WRITE_DROPPED)

    def back(self, key: ChunkKey) -> None:
        """Record that a chunk is stored again."""
        if key in self._reasons:
            self._reasons.pop(key)

    def reason(self, key: ChunkKey) -> Reason | None:
        """Return why a chunk is absent; None if it is not remembered."""
        return self._reasons.get(key)
