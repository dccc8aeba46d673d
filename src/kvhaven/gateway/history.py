# SPDX-License-Identifier: Apache-2.0
"""Recent history of the service's counters, so that a page shows rates when it is opened."""

from collections import deque
from typing import Final

import msgspec

from kvhaven.gateway.views import memory_of, tokens_of
from kvhaven.service.snapshot import ServiceSnapshot

STEP_S: Final = 10.0
MOST_POINTS: Final = 361
"""One hour, both ends included."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Counters at a `time`, in seconds since 1970. The lists are in the order of the names."""

    time: float
    asked: int
    """Prompt tokens of requests that were looked up, since the service started."""
    by_source: list[int]
    missed_by_reason: list[int]
    memory_used: int
    """Bytes of host memory that are neither free nor waste."""


class Recent(msgspec.Struct, frozen=True):
    """Counters of the last hour, oldest first: a point every 10 s, and the present ones.

    It begins when the API first sees the service, or the service starts again.
    """

    sources: list[str]
    reasons: list[str]
    rows: list[Point]


class History:
    """Points of one run of the service, at most one every `step_s` seconds; bounded."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self._service = ""
        self._points = deque[_Counters](maxlen=MOST_POINTS)

    def note(self, snapshot: ServiceSnapshot, now: float) -> None:
        """Record a snapshot at `now`, in seconds since 1970, if a point is due."""
        if snapshot.service != self._service:
            self._service = snapshot.service
            self._points.clear()
        if not self._points or now - self._points[-1].time >= self._step_s:
            self._points.append(_Counters(snapshot, now))

    def recent(self, snapshot: ServiceSnapshot, now: float) -> Recent:
        """Return the points, and the present one behind them."""
        points = [*self._points, _Counters(snapshot, now)]
        sources = list(dict.fromkeys(name for point in points for name in point.by_source))
        reasons = list(dict.fromkeys(name for point in points for name in point.missed))
        return Recent(
            sources,
            reasons,
            [
                Point(
                    point.time,
                    point.asked,
                    [point.by_source.get(name, 0) for name in sources],
                    [point.missed.get(name, 0) for name in reasons],
                    point.memory_used,
                )
                for point in points
            ],
        )


class _Counters:
    """Counters of one snapshot."""

    __slots__ = ("asked", "by_source", "memory_used", "missed", "time")

    def __init__(self, snapshot: ServiceSnapshot, time: float) -> None:
        tokens, memory = tokens_of(snapshot), memory_of(snapshot)
        self.time = time
        self.asked = tokens.asked
        self.by_source = tokens.by_source
        self.missed = tokens.missed_by_reason
        self.memory_used = memory.capacity - memory.free - memory.waste
