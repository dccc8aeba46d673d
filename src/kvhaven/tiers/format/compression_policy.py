# SPDX-License-Identifier: Apache-2.0
"""Policy that turns compression on or off for a namespace in a tier, from measured trials."""

import enum
import statistics
from typing import Final

from kvhaven.tiers.executor import Lane

TRIAL_SHARDS: Final = 16
"""Shards that are compressed and measured before a decision."""
EVERY_SHARDS: Final = 1024
"""Shards after a decision until the next trial."""
LEAST_SAVED: Final = 0.10
"""Smallest fraction of the bytes that compression must save."""
MOST_SLOWER: Final = 2.0
"""Largest accepted ratio of write-plus-read time of a shard, compressed to uncompressed."""


class Turn(enum.Enum):
    """Treatment of the next shard."""

    PLAIN = enum.auto()
    COMPRESS = enum.auto()
    MEASURE = enum.auto()
    """Compress it, and report to `compressed`."""
    SURVEY = enum.auto()
    """The same, after choosing a width and reporting it to `suits`."""


class CompressionPolicy:
    """Measurements and decision for one namespace. Not thread-safe.

    `on` is the latest decision (initially True), and `why` states its reason.
    """

    def __init__(self) -> None:
        self.on = True
        self.why = "the first trial is not complete"
        self.width = 0
        """Best width of byte planes for this namespace; 0: not measured yet."""
        self._unpack_s = 0.0  # per byte of payload
        self._chosen = False
        self._left = 0  # shards until the next trial
        self._trial = _Trial()
        self._bytes = dict.fromkeys(Lane, 0.0)
        self._seconds = dict.fromkeys(Lane, 0.0)

    def turn(self) -> Turn:
        """Return the treatment of the next shard."""
        if self._left:
            self._left -= 1
            return Turn.COMPRESS if self.on else Turn.PLAIN
        self._trial.begun += 1
        return Turn.SURVEY if self._trial.begun == 1 else Turn.MEASURE

    def suits(self, width: int, unpack_s: float) -> None:
        """Record the best width, and the seconds to decompress a byte of payload with it."""
        self.width = width
        self._unpack_s = unpack_s

    def moved(self, lane: Lane, size: int, seconds: float) -> None:
        """Record that the tier took `seconds` to write or read `size` bytes."""
        self._bytes[lane] += size
        self._seconds[lane] += seconds

    def compressed(self, payload_bytes: int, stored_bytes: int, seconds: float) -> bool:
        """Record a measured shard. Returns whether this made the first or a different decision."""
        if self._left:  # started for a trial that has ended
            return False
        trial = self._trial
        trial.payload_bytes += payload_bytes
        trial.stored_bytes += stored_bytes
        trial.pack_s.append(seconds / payload_bytes)
        if len(trial.pack_s) < TRIAL_SHARDS:
            return False
        before = self.on if self._chosen else None
        self._choose(trial)
        self._chosen = True
        self._trial = _Trial()
        self._left = EVERY_SHARDS
        for lane in Lane:  # decay older speeds
            self._bytes[lane] /= 2
            self._seconds[lane] /= 2
        return before != self.on

    def _choose(self, trial: "_Trial") -> None:
        stored = trial.stored_bytes / trial.payload_bytes
        # The median ignores threads that had to wait for a core.
        slower = self._slower(statistics.median(trial.pack_s), stored)
        if stored > 1 - LEAST_SAVED:
            self.on = False
            self.why = f"it would save {1 - stored:.0%} of the bytes, less than {LEAST_SAVED:.0%}"
            return
        self.on = slower <= MOST_SLOWER
        pace = f"writing and reading take {slower:.1f} times as long"
        self.why = f"{stored:.0%} of the bytes are stored, {pace}"
        if not self.on:
            self.why = f"{pace}, more than {MOST_SLOWER:g} times, for {stored:.0%} of the bytes"

    def _slower(self, pack_s: float, stored: float) -> float:
        """Return the ratio of write-plus-read times, compressed to plain; 1.0 if none is known."""
        write_s = self._byte_s(Lane.WRITE)
        if not write_s:
            return 1.0
        plain_s = write_s + (self._byte_s(Lane.READ) or write_s)
        return (pack_s + self._unpack_s + stored * plain_s) / plain_s

    def _byte_s(self, lane: Lane) -> float:
        return self._seconds[lane] / self._bytes[lane] if self._bytes[lane] else 0.0


class _Trial:
    """Running measurements; `begun` includes unfinished shards, `pack_s` is per byte."""

    def __init__(self) -> None:
        self.begun = 0
        self.payload_bytes = 0
        self.stored_bytes = 0
        self.pack_s: list[float] = []
