# SPDX-License-Identifier: Apache-2.0
"""Whether a tier works: what failed, what is switched off for it, one log line a change."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvhaven.errors import TierError
from kvhaven.tiers.breaker import Breaker
from kvhaven.tiers.executor import Lane

_log = logging.getLogger(__name__)

NOT_STARTED: Final = "not started"
START_WAIT_S: Final = 2.0
"""A tier's `start` waits no longer than this for a store that does not answer."""

_LONGEST_PAUSE_S: Final = 60.0


class Condition:
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
