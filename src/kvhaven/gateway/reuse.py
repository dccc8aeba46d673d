# SPDX-License-Identifier: Apache-2.0
"""The reuse curve: the hit rate with less or more memory, from a sample of all requests.

The sampled chunks are in one list in the order of their last use, divided where the chunks before
reach a quarter, a half, ... of the memory. A chunk that is asked for again would be found with all
sizes from its division's on, if chunks were evicted in the order of their last use.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from kvhaven.service.reuse import Sampled, weights

SIZES: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes of memory, as multiples of the present one."""
WINDOWS: Final = {"15m": 900.0, "1h": 3600.0, "1d": 86400.0}
MOST_KEYS: Final = 50_000
_MINUTE_S: Final = 60.0
_HOUR_S: Final = 3600.0
_PRESENT: Final = SIZES.index(1.0)


class CurvePoint(msgspec.Struct, frozen=True):
    """The hit rate with `memory` times the present memory; None if the sample is too small."""

    memory: float
    bytes: int
    hit_ratio: float | None


class Curve(msgspec.Struct, frozen=True):
    """Estimate for the requests of the last hour: prompt tokens that need not be computed.

    Counted are the engine's own cache and host memory, without tiers, as a fraction of all prompt
    tokens. `ceilings` are the fractions with unlimited memory that forgets chunks after a time, and
    `all` that never forgets. `measured_ratio` is what was really in the engine and in memory, and
    `error_ratio` how far the estimate for the present memory is from that. An API that starts after
    its service underestimates at first, since it has not seen the chunks that are cached.
    """

    capacity_bytes: int
    requests: int
    seconds: float
    """For how long the API has observed, at most an hour."""
    measured_ratio: float | None
    error_ratio: float | None
    ceilings: dict[str, float | None]
    points: list[CurvePoint]


class _Minute:
    """Tokens of the requests of one minute. The last entry of `hits` is for unlimited memory."""

    __slots__ = ("asked", "began", "hits", "measured", "recent", "requests")

    def __init__(self, began: float) -> None:
        self.began = began
        self.requests = 0
        self.asked = 0
        self.measured = 0
        self.hits = [0.0] * (len(SIZES) + 1)
        self.recent = [0.0] * len(WINDOWS)


class _Chunk:
    """A sampled chunk: where it is, the bytes of those that it stands for, and its last use."""

    __slots__ = ("bytes", "division", "used")

    def __init__(self) -> None:
        self.division = len(SIZES)
        self.bytes = 0
        self.used = 0.0


class ReuseCurve:
    """Estimator of the curve of one service, bounded to `MOST_KEYS` sampled chunks."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._capacity = 0
        self._limits = [0.0] * len(SIZES)
        self._divisions = [OrderedDict[bytes, _Chunk]() for _ in range(len(SIZES) + 1)]
        self._bytes = [0] * (len(SIZES) + 1)
        self._chunks: dict[bytes, _Chunk] = {}
        self._forgot = False
        self._minutes = deque[_Minute]()

    def note(self, capacity: int, requests: Iterable[Sampled], now: float) -> None:
        """Account for requests, the oldest first, of a service with so many bytes of memory."""
        if capacity != self._capacity:
            self._resize(capacity)
        if not self._minutes or now - self._minutes[-1].began >= _MINUTE_S:
            self._minutes.append(_Minute(now))
            while now - self._minutes[0].began > _HOUR_S:
                self._minutes.popleft()
        for request in requests:
            self._account(request, self._minutes[-1], now)
            self._use(request, now)

    def curve(self, now: float) -> Curve:
        """Return the estimate."""
        minutes = self._minutes
        asked = sum(minute.asked for minute in minutes)

        def share(tokens: Iterable[float]) -> float | None:
            return min(1.0, sum(tokens) / asked) if asked else None

        ratios = [share(minute.hits[at] for minute in minutes) for at in range(len(SIZES) + 1)]
        measured = share(minute.measured for minute in minutes)
        present, known = ratios[_PRESENT], sum(self._bytes)
        points = [
            CurvePoint(
                size,
                int(size * self._capacity),
                ratio if not self._forgot or size * self._capacity <= known else None,
            )
            for size, ratio in zip(SIZES, ratios, strict=False)
        ]
        ceilings = {
            name: share(minute.recent[at] for minute in minutes) for at, name in enumerate(WINDOWS)
        }
        return Curve(
            capacity_bytes=self._capacity,
            requests=sum(minute.requests for minute in minutes),
            seconds=now - minutes[0].began if minutes else 0.0,
            measured_ratio=measured,
            error_ratio=(None if present is None or measured is None else abs(present - measured)),
            ceilings=ceilings | {"all": ratios[-1]},
            points=points,
        )

    def _account(self, request: Sampled, minute: _Minute, now: float) -> None:
        """Add the tokens that would be found, from the head to the first chunk that would not."""
        minute.requests += 1
        minute.asked += request.prompt
        minute.measured += request.computed + request.memory
        hits, recent = minute.hits, minute.recent
        for at in range(len(hits)):
            hits[at] += request.computed
        for at in range(len(recent)):
            recent[at] += request.computed
        size, division, oldest = request.chunk_tokens, 0, 0.0
        begun = request.computed % size  # of the first chunk, which the engine has
        left = request.prompt - request.computed
        for key, chunks in zip(
            request.prefixes, weights(request.first, request.chunks), strict=True
        ):
            chunk = self._chunks.get(key)
            if chunk is None:
                return
            tokens = min(left, chunks * size - begun)
            left, begun = left - tokens, 0
            division, oldest = max(division, chunk.division), max(oldest, now - chunk.used)
            for at in range(division, len(hits)):
                hits[at] += tokens
            for at, window in enumerate(WINDOWS.values()):
                if oldest <= window:
                    recent[at] += tokens

    def _use(self, request: Sampled, now: float) -> None:
        """Record the use of the chunks; the head of a prompt is evicted last."""
        front, known = self._divisions[0], self._chunks
        pairs = zip(request.prefixes, weights(request.first, request.chunks), strict=True)
        for key, chunks in reversed(list(pairs)):
            chunk = known.get(key)
            if chunk is None:
                chunk = known[key] = _Chunk()
            else:
                del self._divisions[chunk.division][key]
                self._bytes[chunk.division] -= chunk.bytes
            chunk.division, chunk.used = 0, now
            chunk.bytes = chunks * request.chunk_bytes
            front[key] = chunk
            self._bytes[0] += chunk.bytes
        self._settle()

    def _settle(self) -> None:
        """Move chunks on where the divisions are larger than their memory."""
        for at, limit in enumerate(self._limits):
            division, after = self._divisions[at], self._divisions[at + 1]
            while division:
                oldest = next(iter(division.values()))
                if self._bytes[at] - oldest.bytes / 2 <= limit:
                    break
                key, _ = division.popitem(last=False)
                after[key] = oldest
                oldest.division = at + 1
                self._bytes[at] -= oldest.bytes
                self._bytes[at + 1] += oldest.bytes
        while len(self._chunks) > self._most_keys:
            at = next(n for n in reversed(range(len(self._divisions))) if self._divisions[n])
            key, gone = self._divisions[at].popitem(last=False)
            del self._chunks[key]
            self._bytes[at] -= gone.bytes
            self._forgot = True

    def _resize(self, capacity: int) -> None:
        """Divide the list again, for another memory."""
        self._capacity = capacity
        sizes = [size * capacity for size in SIZES]
        self._limits = [b - a for a, b in zip([0.0, *sizes], sizes, strict=False)]
        everything = list(self._oldest_first())
        self._divisions = [OrderedDict() for _ in self._divisions]
        self._bytes = [0] * len(self._bytes)
        for key, chunk in everything:
            chunk.division = 0
            self._divisions[0][key] = chunk
            self._bytes[0] += chunk.bytes
        self._settle()

    def _oldest_first(self) -> Iterator[tuple[bytes, _Chunk]]:
        for division in reversed(self._divisions):
            yield from division.items()
