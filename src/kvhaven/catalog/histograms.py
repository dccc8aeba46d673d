# SPDX-License-Identifier: Apache-2.0
"""Histograms, and the age of events that are counted instead of timed."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

SECONDS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0)
"""Upper bounds for waits, in seconds."""
AGES: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0)
"""Upper bounds for ages, in seconds."""
RATIOS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_MOST_MARKS: Final = 86_400


class Buckets(msgspec.Struct, frozen=True):
    """A histogram: `counts[i]` values are at most `bounds[i]`, and above the bound before it.

    The last count is that of values above all bounds.
    """

    bounds: Sequence[float]
    counts: list[int]
    sum: float


class Histogram:
    """Counts of values between bounds; not thread-safe."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Buckets:
        """Return the present counts."""
        return Buckets(self.bounds, self.counts.copy(), self.sum)


class Marks:
    """Times at which a counter that only grows had its values, to a second.

    A counter that every chunk has anyway (its generation, the event of its last use) thus gives an
    age, without a time in each of a million chunks.
    """

    def __init__(self) -> None:
        self._values: list[int] = []
        self._times: list[float] = []
        self._thinned = 0  # marks that were thinned, the oldest
        self._stride = 1  # of so many marks, one of these was kept

    def mark(self, value: int, now: float) -> None:
        """Record that the counter has this value now.

        At most one mark a second is kept, and after more than a day only some of them.
        """
        if not self._times or (now >= self._times[-1] + 1 and value != self._values[-1]):
            self._values.append(value)
            self._times.append(now)
            if len(self._times) > self._thinned + 2 * _MOST_MARKS:
                self._thin()

    def value_at(self, time: float) -> int | None:
        """Return the last known value at a time: the counter did not get it later; None: unknown.

        A later value that the counter had by then is possible.
        """
        at = bisect_right(self._times, time)
        return self._values[at - 1] if at else None

    def age(self, value: int, now: float) -> float:
        """Return the seconds since the counter got a value; at least, for one before all marks."""
        at = bisect_left(self._values, value)
        return max(0.0, now - self._times[at]) if at < len(self._times) else 0.0

    def _thin(self) -> None:
        """Keep one of `_stride` of the oldest marks."""
        end = self._thinned + _MOST_MARKS
        values, times = self._values, self._times
        values[self._thinned : end] = values[self._thinned : end : self._stride]
        times[self._thinned : end] = times[self._thinned : end : self._stride]
        self._thinned += -(-_MOST_MARKS // self._stride)
        while self._thinned > _MOST_MARKS // 4:
            values[: self._thinned] = values[: self._thinned : 2]
            times[: self._thinned] = times[: self._thinned : 2]
            self._thinned -= self._thinned // 2
            self._stride *= 2
