# SPDX-License-Identifier: Apache-2.0
"""Age of tails: incomplete chunks at the ends of prompts, which are kept for a short time."""

from typing import Final

from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

KEEP_S: Final = 60.0
"""Seconds for which a tail is kept after its last use: it serves repeats that follow soon."""


class TailAges:
    """Last use of each tail that can be evicted, least recent first.

    `tick` sets the time. A tail is used when it is committed and when it is leased.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._used = OrderedMap[ChunkKey, float]()

    def __len__(self) -> int:
        """Return the number of tails."""
        return len(self._used)

    def __contains__(self, key: ChunkKey) -> bool:
        """Return whether a tail is among them."""
        return key in self._used

    def tick(self, now: float) -> None:
        """Set the time in seconds; it never goes back."""
        self._now = max(self._now, now)

    def used(self, key: ChunkKey) -> None:
        """Record a use, which may be the first."""
        if key in self._used:
            self._used.pop(key)
        self._used.append(key, self._now)

    def drop(self, key: ChunkKey) -> None:
        """Forget a tail; an unknown one is not an error."""
        if key in self._used:
            self._used.pop(key)

    def expired(self, key: ChunkKey) -> bool:
        """Return whether a tail was not used for `KEEP_S` seconds."""
        used = self._used.get(key)
        return used is not None and self._now - used >= KEEP_S

    def oldest_expired(self) -> ChunkKey | None:
        """Return the least recently used tail if it has expired."""
        oldest = next(iter(self._used), None)
        return oldest if oldest is not None and self.expired(oldest) else None
