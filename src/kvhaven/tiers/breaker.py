# SPDX-License-Identifier: Apache-2.0
"""Switches something that keeps failing off, and finds out when it works again."""

import enum
from collections.abc import Callable


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
