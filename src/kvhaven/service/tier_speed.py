# SPDX-License-Identifier: Apache-2.0
"""Measured speed of a tier: the delay before the first byte, and the rate, of its last reads."""

from collections import deque
from typing import Final, NamedTuple

from kvhaven.catalog.worth import TierSpeed

_READS: Final = 64
_ROWS: Final = 16
_STEP: Final = 2.0
"""Reads this many times faster or slower than expected, ..."""
_IN_A_ROW: Final = 3
"""... so many in a row, mean that the tier has changed: earlier reads no longer count."""
_SOON: Final = 1e-6
_PRIOR: Final = 0.5
"""Weight of the assumption that there is no delay: noise must not look like one."""


class Begun(NamedTuple):
    """A read under way: when it began, and bytes before its end in the queue, and ever begun."""

    time: float
    queued: int
    total: int


class _Busy:
    """Part of a time in which reads were under way: its duration, bytes read, and reads.

    `opens` says that no read was under way before, so that it contains the tier's delay.
    """

    __slots__ = ("bytes", "opens", "reads", "seconds")

    def __init__(self, *, opens: bool) -> None:
        self.opens = opens
        self.seconds = 0.0
        self.bytes = 0
        self.reads = 0


class SpeedMeter:
    """Speed of a tier over its last 64 reads.

    Reads overlap, so not their durations are fitted but the times in which any read was under way:
    each took the delay once and each byte its time.
    """

    def __init__(self) -> None:
        self.speed: TierSpeed | None = None
        self._busy: deque[_Busy] = deque()
        self._under_way: dict[int, Begun] = {}  # the oldest first
        self._queued = 0
        self._total = 0
        self._since = 0.0
        self._odd = 0
        self._odd_from: _Busy | None = None

    def begin(self, bytes_: int, now: float) -> Begun:
        """Note that a read begins."""
        if not self._under_way:
            self._since = now
            if not self._busy or self._busy[-1].reads:  # reads that failed leave it unused
                self._busy.append(_Busy(opens=True))
        self._queued += bytes_
        self._total += bytes_
        begun = self._under_way[self._total] = Begun(now, self._queued, self._total)
        return begun

    def end(self, bytes_: int, begun: Begun, now: float, *, ok: bool) -> None:
        """Note that a read has ended; a failed one does not count.

        A failed read may have ended early or at a deadline, so its time says nothing of the rate,
        unless others were under way meanwhile.
        """
        del self._under_way[begun.total]
        self._queued -= bytes_
        if not ok:
            oldest = next(iter(self._under_way.values()), None)
            self._since = max(self._since, oldest.time) if oldest is not None else now
        else:
            self._notice_change(begun, now)
            busy = self._busy[-1]
            if busy.reads >= _READS:
                busy = self._next()
            busy.seconds += now - self._since
            busy.bytes += bytes_
            busy.reads += 1
            rows = self._busy
            while len(rows) > _ROWS or (len(rows) > 1 and sum(b.reads for b in rows) > _READS):
                rows.popleft()
            self._fit()
            self._since = now

    def _next(self) -> _Busy:
        busy = _Busy(opens=False)
        self._busy.append(busy)
        return busy

    def _notice_change(self, begun: Begun, now: float) -> None:
        """Forget earlier reads once several in a row did not take the expected time.

        Reads may be served one after another or all together. So a read is slow if it took longer
        than all bytes that were queued until its end, and fast if it took less than those before.
        """
        if self.speed is None:
            return
        seconds = max(now - begun.time, _SOON)
        until_end = begun.queued + self._total - begun.total
        if seconds > _STEP * self.speed.seconds(until_end):
            sign = 1
        elif seconds * _STEP < self.speed.seconds(begun.queued):
            sign = -1
        else:
            self._odd = 0
            return
        if self._odd * sign <= 0:
            self._odd = 0
            self._odd_from = self._next() if self._busy[-1].reads else self._busy[-1]
        self._odd += sign
        if abs(self._odd) >= _IN_A_ROW:
            self._odd = 0
            while self._busy[0] is not self._odd_from and len(self._busy) > 1:
                self._busy.popleft()

    def _fit(self) -> None:
        """Fit `seconds = delay + bytes x time of a byte`, by least squares with neither negative.

        A weight of 1 / bytes makes it the total time by total bytes if there is no delay. Without
        different sizes, no delay is assumed.
        """
        bytes_ = seconds = 0.0
        opened = delays = by_byte = 0.0
        for busy in self._busy:
            if not busy.reads:
                continue
            bytes_ += busy.bytes
            seconds += busy.seconds
            if busy.opens:
                opened += 1
                delays += 1 / busy.bytes
                by_byte += busy.seconds / busy.bytes
        delays *= 1 + _PRIOR
        whole = bytes_ * delays - opened * opened
        byte_s, delay_s = seconds / bytes_, 0.0
        if whole > 1e-6 * opened * opened and opened:
            delay_s = max(0.0, (bytes_ * by_byte - opened * seconds) / whole)
            byte_s = (seconds - opened * delay_s) / bytes_
            if byte_s < 0:
                byte_s, delay_s = 0.0, by_byte / delays
        self.speed = TierSpeed(delay_s, byte_s)
