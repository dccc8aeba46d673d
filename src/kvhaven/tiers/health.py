# SPDX-License-Identifier: Apache-2.0
"""Whether a tier works: what failed, what is switched off for it, one log line a change."""

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Final

from kvhaven.errors import TierError
from kvhaven.tiers.executor import Lane


class BreakerState(enum.Enum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until its pause has passed."""
    HALF_OPEN = "half-open"
    """Nothing but the one probe that is on its way."""


class Breaker:
    """Opens after `threshold` failures in a row; closes when a probe succeeds.

    It has no clock and no timer of its own: `clock` returns seconds that never go back, and
    whoever owns it asks `take_probe` now and then. The pause before a probe starts at
    `pause_s`, grows by `growth` for each failed probe up to `max_pause_s`, and starts over
    only after the breaker stayed closed for longer than its last pause. So a store that works
    for small probes and fails for real use is not asked at the shortest pause for ever.

    Not thread-safe: used on the event loop only.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 3,
        pause_s: float = 1.0,
        growth: float = 2.0,
        max_pause_s: float = 60.0,
    ) -> None:
        if threshold < 1 or pause_s <= 0 or growth < 1 or max_pause_s < pause_s:
            raise ValueError(
                f"breaker: threshold {threshold} (at least 1), pause {pause_s} s (above 0), "
                f"growth {growth} (at least 1), longest pause {max_pause_s} s (at least pause)"
            )
        self._clock = clock
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._growth = growth
        self._max_pause_s = max_pause_s
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = 0.0
        self._since = clock()

    @property
    def state(self) -> BreakerState:
        """What it lets through now."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether operations may go on."""
        return self._state is BreakerState.CLOSED

    @property
    def pause_s(self) -> float:
        """Seconds between the last opening and the next probe."""
        return self._pause_s

    def succeeded(self) -> None:
        """Note that an operation succeeded. Late ones, of before it opened, change nothing."""
        if self.closed:
            self._failures = 0

    def failed(self) -> bool:
        """Note that an operation failed; return whether that opened the breaker."""
        if not self.closed:
            return False
        self._failures += 1
        if self._failures < self._threshold:
            return False
        steady = self._clock() - self._since > self._pause_s
        self._open(self._first_pause_s if steady else self._pause_s * self._growth)
        return True

    def take_probe(self) -> bool:
        """Return whether the caller shall probe now; it then reports to `probed`, once."""
        if self._state is not BreakerState.OPEN or self._clock() - self._since < self._pause_s:
            return False
        self._state = BreakerState.HALF_OPEN
        return True

    def probed(self, *, success: bool) -> None:
        """Report a probe's end: success closes, failure opens again for a longer pause."""
        if self._state is not BreakerState.HALF_OPEN:
            raise RuntimeError(f"a probe was reported to a breaker that is {self._state.value}")
        if not success:
            self._open(self._pause_s * self._growth)
            return
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._since = self._clock()

    def _open(self, pause_s: float) -> None:
        self._state = BreakerState.OPEN
        self._pause_s = min(max(pause_s, self._first_pause_s), self._max_pause_s)
        self._since = self._clock()


_log = logging.getLogger(__name__)

NOT_STARTED: Final = "not started"
START_WAIT_S: Final = 2.0
"""A tier's `start` waits no longer than this for a store that does not answer."""

_LONGEST_PAUSE_S: Final = 60.0


class HealthMonitor:
    """The state of one tier, called `title` in messages; used on the event loop only.

    A breaker each for reads and writes: a full or read-only store still serves reads. When
    `longest_running_s` tells of an operation that takes longer than `stall_s` seconds (a system
    call that hangs), all is off until it returns.
    """

    def __init__(
        self,
        title: str,
        longest_running_s: Callable[[], float],
        clock: Callable[[], float],
        *,
        failures: int,
        retry_s: float,
        stall_s: float,
    ) -> None:
        self._title = title
        self._longest_running_s = longest_running_s
        self._stall_s = stall_s
        self._stalled = False
        self._breakers = {
            lane: Breaker(
                clock,
                threshold=failures,
                pause_s=retry_s,
                max_pause_s=max(retry_s, _LONGEST_PAUSE_S),
            )
            for lane in (Lane.READ, Lane.WRITE)
        }
        self.offline = NOT_STARTED
        """Why there is no open store; empty when there is one."""
        self.holder = ""
        self.errors = 0
        self.last_error = ""

    async def started(self, tried: asyncio.Event) -> None:
        """Wait until the store was `tried` for the first time, but not for ever."""
        try:
            async with asyncio.timeout(START_WAIT_S):
                await tried.wait()
        except TimeoutError:
            if not tried.is_set():
                self.closed(f"no answer in {START_WAIT_S} s; it is still being asked")

    def serves(self, lane: Lane) -> bool:
        """Return whether this kind of work is to be tried."""
        self._note_stall()
        return not self.offline and not self._stalled and self._breakers[lane].closed

    def require(self, lane: Lane) -> None:
        """Raise `TierError` with the reason when this kind of work is not to be tried."""
        if self.serves(lane):
            return
        if self.offline:
            raise TierError(f"{self._title} is offline: {self.offline}")
        raise TierError(f"{self._title} has {lane.name.lower()}s off: {self.last_error}")

    def succeeded(self, lane: Lane) -> None:
        """Note that the store did what it was asked."""
        if lane in self._breakers:
            self._breakers[lane].succeeded()

    def failed(self, lane: Lane, error: Exception) -> TierError:
        """Note what the store complained of; return what to raise."""
        self.errors += 1
        self.last_error = str(error)
        breaker = self._breakers.get(lane)
        if breaker is not None and breaker.failed():
            _log.warning(
                "%s: %ss are off after repeated failures, next try in %.1f s: %s",
                self._title,
                lane.name.lower(),
                breaker.pause_s,
                error,
            )
        return TierError(f"{self._title}: {error}")

    def take_probe(self, lane: Lane) -> bool:
        """Return whether the caller shall find out if this works again, and tell `probed`."""
        return self._breakers[lane].take_probe()

    def probed(self, lane: Lane, *, success: bool) -> None:
        """Note how a probe ended."""
        self._breakers[lane].probed(success=success)
        if success:
            _log.warning("%s: %ss are on again", self._title, lane.name.lower())

    def opened(self) -> None:
        """Note that the store is open (and ours, where it has an owner)."""
        if self.offline != NOT_STARTED:
            _log.warning("%s is online", self._title)
        self.offline = self.holder = ""

    def closed(self, reason: str, holder: str = "") -> None:
        """Note that there is no store to work with."""
        if reason != self.offline:
            _log.warning("%s is offline: %s", self._title, reason)
        self.offline = self.last_error = reason
        self.holder = holder

    def _note_stall(self) -> None:
        stalled = self._longest_running_s() > self._stall_s
        if stalled == self._stalled:
            return
        self._stalled = stalled
        if stalled:
            self.last_error = f"an operation hangs for more than {self._stall_s} s"
            _log.warning("%s is off: %s", self._title, self.last_error)
        else:
            _log.warning("%s is on again: the operation that hung has ended", self._title)
