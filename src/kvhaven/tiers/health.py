# SPDX-License-Identifier: Apache-2.0
"""Health of a tier: circuit breakers, stall detection, one log line for each change of state."""

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Final

from kvhaven.errors import TierError
from kvhaven.tiers.executor import Lane


class BreakerState(enum.Enum):
    """State of a breaker: the operations that it allows."""

    CLOSED = "closed"
    """All operations."""
    OPEN = "open"
    """No operation, until the pause has passed."""
    HALF_OPEN = "half-open"
    """Only the one probe that is in progress."""


class Breaker:
    """Circuit breaker: opens after `threshold` failures in a row, closes when a probe succeeds.

    The breaker has no clock and no timer: `clock` returns monotonic seconds, and the owner calls
    `take_probe` periodically. The pause before a probe starts at `pause_s`, is multiplied by
    `growth` for each failed probe up to `max_pause_s`, and is reset only after the breaker
    stayed closed for longer than its last pause. A store that passes small probes but fails
    under real load is therefore not retried at the shortest pause forever.

    Not thread-safe: used on the event loop only. Raises `ValueError` for invalid arguments.
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
                f"breaker: invalid arguments (got threshold {threshold}, pause {pause_s} s, growth "
                f"{growth}, longest pause {max_pause_s} s); expected threshold >= 1, pause > 0, "
                f"growth >= 1, longest pause >= pause"
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
        """Current state."""
        return self._state

    @property
    def closed(self) -> bool:
        """Whether operations are allowed."""
        return self._state is BreakerState.CLOSED

    @property
    def pause_s(self) -> float:
        """Seconds from the last opening to the next probe."""
        return self._pause_s

    def succeeded(self) -> None:
        """Record a success. Late results, of operations from before the opening, are ignored."""
        if self.closed:
            self._failures = 0

    def failed(self, *, enough: bool = False) -> bool:
        """Record a failure; return whether it opened the breaker, as it does if it is `enough`."""
        if not self.closed:
            return False
        self._failures += 1
        if self._failures < self._threshold and not enough:
            return False
        steady = self._clock() - self._since > self._pause_s
        self._open(self._first_pause_s if steady else self._pause_s * self._growth)
        return True

    def take_probe(self) -> bool:
        """Return whether the caller must probe now; if so, it must call `probed` once."""
        if self._state is not BreakerState.OPEN or self._clock() - self._since < self._pause_s:
            return False
        self._state = BreakerState.HALF_OPEN
        return True

    def probed(self, *, success: bool) -> None:
        """Record a probe's result: success closes, failure opens again for a longer pause.

        Raises `RuntimeError` if no probe is in progress.
        """
        if self._state is not BreakerState.HALF_OPEN:
            raise RuntimeError(
                f"breaker: no probe is in progress (got {self._state.value}); call take_probe first"
            )
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
"""Longest time that a tier's `start` waits for a store that does not answer."""

_LONGEST_PAUSE_S: Final = 60.0


class HealthMonitor:
    """State of one tier, named `title` in messages; used on the event loop only.

    Reads and writes have a breaker each: a full or read-only store still serves reads. If
    `longest_running_s` reports an operation that takes longer than `stall_s` seconds (a system
    call that hangs), the whole tier is off until the operation returns.
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
        """Reason why no store is open; empty if one is open."""
        self.holder = ""
        self.errors = 0
        self.last_error = ""

    async def started(self, tried: asyncio.Event) -> None:
        """Wait for the first attempt to open the store (`tried`), at most `START_WAIT_S`."""
        try:
            async with asyncio.timeout(START_WAIT_S):
                await tried.wait()
        except TimeoutError:
            if not tried.is_set():
                self.closed(f"no answer in {START_WAIT_S} s; the attempt continues")

    def serves(self, lane: Lane) -> bool:
        """Return whether operations of `lane` are allowed."""
        self._note_stall()
        return not self.offline and not self._stalled and self._breakers[lane].closed

    def require(self, lane: Lane) -> None:
        """Raise `TierError` with the reason if operations of `lane` are not allowed."""
        if self.serves(lane):
            return
        if self.offline:
            raise TierError(f"{self._title} is offline: {self.offline}")
        raise TierError(f"{self._title} has {lane.name.lower()}s off: {self.last_error}")

    def succeeded(self, lane: Lane) -> None:
        """Record a success of the store."""
        if lane in self._breakers:
            self._breakers[lane].succeeded()

    def failed(self, lane: Lane, error: Exception) -> TierError:
        """Record a failure of the store; return the error to raise."""
        self.errors += 1
        self.last_error = str(error)
        breaker = self._breakers.get(lane)
        if breaker is not None and breaker.failed():
            _log.warning(
                "%s: %ss are off after repeated failures, next probe in %.1f s: %s",
                self._title,
                lane.name.lower(),
                breaker.pause_s,
                error,
            )
        return TierError(f"{self._title}: {error}")

    def take_probe(self, lane: Lane) -> bool:
        """Return whether the caller must probe `lane` now; if so, it must call `probed` once."""
        return self._breakers[lane].take_probe()

    def probed(self, lane: Lane, *, success: bool) -> None:
        """Record the result of a probe."""
        self._breakers[lane].probed(success=success)
        if success:
            _log.warning("%s: %ss are on again", self._title, lane.name.lower())

    def opened(self) -> None:
        """Record that the store is open (and owned by this service, if stores have owners)."""
        if self.offline != NOT_STARTED:
            _log.warning("%s is online", self._title)
        self.offline = self.holder = ""

    def closed(self, reason: str, holder: str = "") -> None:
        """Record that no store is open, the reason, and the owner of its directory."""
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
            _log.warning("%s is on again: the hanging operation has ended", self._title)
