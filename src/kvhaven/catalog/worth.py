# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: whether chunks in tiers are read, or left to the engine to compute."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvhaven.types import NamespaceDigest

SKIP_ABOVE: Final = 1.1
TAKE_BELOW: Final = 0.9
"""Near 1 either choice costs little; between the two the last choice remains."""
WAIT_MEASURED: Final = 1.25
"""A request waits for chunks of measured tiers up to so many times what computing them takes.

A tier that sends everything together has sent nothing before the end, so a limit of 1 would lose
all of a wait that is longer than predicted by the noise.
"""
_IN_A_ROW: Final = 3
_TRIED: Final = 32
"""Of so many skipped chunks one is read, without a request that waits, to measure the tier ..."""
_TOGETHER: Final = 8
"""... so many together: single reads measure the delay rather than the rate."""
_MOST_NAMESPACES: Final = 256


class Price(NamedTuple):
    """Time to compute chunks: the first one a request asks for, and the growth with each further.

    A later chunk attends to more tokens, so it costs more.
    """

    first_s: float
    growth_s: float

    def seconds(self, start: int, end: int) -> float:
        """Return the time to compute the requested chunks `start` to `end`."""
        if end <= start:
            return 0.0
        steps = (end * (end - 1) - start * (start - 1)) / 2
        return (end - start) * self.first_s + steps * self.growth_s


class TierSpeed(NamedTuple):
    """Measured speed of a tier: seconds before the first byte, and seconds per byte."""

    delay_s: float
    byte_s: float

    def seconds(self, bytes_: int) -> float:
        """Return the time to read these bytes, all reads in the queue included."""
        return self.delay_s + bytes_ * self.byte_s


class Segment(NamedTuple):
    """Consecutive chunks of a request in one tier; `tier` is its position, `load_s` may be None."""

    tier: int
    start: int
    end: int
    load_s: float | None


class Judgement:
    """Whether a namespace's chunks are read from a tier; with hysteresis."""

    __slots__ = ("_above", "_untried", "skipping")

    def __init__(self) -> None:
        self.skipping = False
        self._above = 0
        self._untried = 0

    def take(self, ratio: float) -> bool:
        """Note a prediction, as a multiple of the time to compute; return whether to read."""
        if self.skipping:
            self.skipping = ratio >= TAKE_BELOW
            self._above = 0
        else:
            self._above = self._above + 1 if ratio > SKIP_ABOVE else 0
            self.skipping = self._above >= _IN_A_ROW
        return not self.skipping

    def try_some(self, skipped: int) -> int:
        """Return how many of the chunks just skipped to read without a waiting request."""
        self._untried += skipped
        if self._untried < _TRIED * _TOGETHER:
            return 0
        self._untried = 0
        return min(_TOGETHER, skipped)


class Judgements:
    """Judgements of one tier by namespace."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[NamespaceDigest, Judgement] = {}

    def of(self, namespace: NamespaceDigest) -> Judgement:
        """Return the judgement of a namespace."""
        known = self._known.get(namespace)
        if known is None:
            if len(self._known) >= _MOST_NAMESPACES:
                self._known.clear()
            known = self._known[namespace] = Judgement()
        return known

    def skips(self, namespace: NamespaceDigest) -> bool:
        """Return whether chunks of a namespace are not read now."""
        known = self._known.get(namespace)
        return known is not None and known.skipping


def best_ratios(segments: Sequence[Segment], price: Price) -> list[float | None]:
    """Return for each segment how long loading takes, as a multiple of the time to compute.

    Chunks behind a skipped segment cannot be loaded either. So a segment's figure is the smallest
    one over all ends at or behind its own: a slow short segment before a fast long one is worth its
    time. Tiers are read concurrently, but the sum of their times is used: the slower one counts
    most. None: a tier was not measured yet.

    With the total times to compute and to load as x and y, each end of a segment is a point, and a
    figure is the smallest slope from a start to any point behind it. That is the slope of the first
    edge of the lower convex hull of these points. So the hull is extended from the last segment to
    the first: a new edge absorbs the following ones while they are less steep than it is. Each
    segment is absorbed at most once, so the time is linear; a chain may alternate between places
    with each chunk.
    """
    found: list[float | None] = []
    hull: list[_Edge] = []  # the first edge last, so each is at most as steep as the one before
    for segment in reversed(segments):
        if segment.load_s is None:
            break
        load, compute = segment.load_s, price.seconds(segment.start, segment.end)
        slope = load / compute if compute > 0 else math.inf
        free = compute <= 0
        while hull and hull[-1].slope < slope:
            behind = hull.pop()
            load, compute = load + behind.load_s, compute + behind.compute_s
            slope = load / compute
        hull.append(_Edge(slope, load, compute))
        found.append(0.0 if free else slope)
    found += [None] * (len(segments) - len(found))
    return found[::-1]


class _Edge(NamedTuple):
    """Edge of a convex hull: the times to load and to compute some consecutive segments."""

    slope: float
    load_s: float
    compute_s: float
