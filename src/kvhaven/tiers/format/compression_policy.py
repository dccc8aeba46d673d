# SPDX-License-Identifier: Apache-2.0
"""Whether compressing pays for a namespace in a tier, found out on some of its shards."""

import enum
import statistics
from typing import Final

from kvhaven.tiers.executor import Lane

TRIAL_SHARDS: Final = 16
"""So many shards are compressed and measured before it is decided."""
EVERY_SHARDS: Final = 1024
"""After so many more it is measured and decided anew."""
LEAST_SAVED: Final = 0.10
"""Less than this part of the bytes saved is not worth it."""
MOST_SLOWER: Final = 2.0
"""Writing and reading a shard once may take this many times as long as uncompressed."""


class Turn(enum.Enum):
    """What is to be done with a shard."""

    PLAIN = enum.auto()
    COMPRESS = enum.auto()
    MEASURE = enum.auto()
    """Compress it, and tell `compressed`."""
    SURVEY = enum.auto()
    """The same, after finding out what `suits`."""


class CompressionPolicy:
    """The measurements and the choice, for one namespace. Not thread-safe.

    `on` is what was chosen last, and `why` says it in words; before the first choice it is on.
    """

    def __init__(self) -> None:
        self.on = True
        self.why = "being measured"
        self.width = 0
        """Of the byte planes that suit this namespace; 0: not known yet."""
        self._unpack_s = 0.0  # per byte of payload
        self._chosen = False
        self._left = 0  # shards until the next trial
        self._trial = _Trial()
        self._bytes = dict.fromkeys(Lane, 0.0)
        self._seconds = dict.fromkeys(Lane, 0.0)

    def turn(self) -> Turn:
        """Return what to do with the next shard."""
        if self._left:
            self._left -= 1
            return Turn.COMPRESS if self.on else Turn.PLAIN
        self._trial.begun += 1
        return Turn.SURVEY if self._trial.begun == 1 else Turn.MEASURE

    def suits(self, width: int, unpack_s: float) -> None:
        """Note the width that suits, and the seconds to decompress a byte of payload with it."""
        self.width = width
        self._unpack_s = unpack_s

    def moved(self, lane: Lane, size: int, seconds: float) -> None:
        """Note how long the tier took to write or read `size` bytes."""
        self._bytes[lane] += size
        self._seconds[lane] += seconds

    def compressed(self, payload_bytes: int, stored_bytes: int, seconds: float) -> bool:
        """Note a shard that was measured. Returns whether this changed or made a choice."""
        if self._left:  # it was begun for the trial that has ended
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
        for lane in Lane:  # older speeds count less and less
            self._bytes[lane] /= 2
            self._seconds[lane] /= 2
        return before != self.on

    def _choose(self, trial: "_Trial") -> None:
        stored = trial.stored_bytes / trial.payload_bytes
        # The median: a thread that had to wait for a core says nothing about compression.
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
        """Return how many times as long a write and a read take, as far as speeds are known."""
        write_s = self._byte_s(Lane.WRITE)
        if not write_s:
            return 1.0
        plain_s = write_s + (self._byte_s(Lane.READ) or write_s)
        return (pack_s + self._unpack_s + stored * plain_s) / plain_s

    def _byte_s(self, lane: Lane) -> float:
        return self._seconds[lane] / self._bytes[lane] if self._bytes[lane] else 0.0


class _Trial:
    """What was measured so far. `begun` may be more shards than that; `pack_s` is per byte."""

    def __init__(self) -> None:
        self.begun = 0
        self.payload_bytes = 0
        self.stored_bytes = 0
        self.pack_s: list[float] = []
