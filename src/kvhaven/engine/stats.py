# SPDX-License-Identifier: Apache-2.0
"""Counters of the two sides of an engine."""

from kvhaven.engine.request_state import RequestState

COUNTERS: dict[str, str] = {
    "lookups": "Requests that were looked up in the cache.",
    "looked_up_tokens": "Tokens that were looked up.",
    "hit_tokens": "Tokens offered to the engine.",
    "loaded_bytes": "Bytes copied from the arena to the device, over all ranks.",
    "loaded_seconds": "Time these copies took.",
    "saved_bytes": "Bytes copied from the device to the arena, over all ranks.",
    "saved_seconds": "Time these copies took, their checksums included.",
    "saved_chunks": "Chunks that a rank has saved, over all ranks.",
    "skipped_saves": "Chunks that a rank did not save: the service was away or slow.",
    "failed_loads": "Loads that failed, which the engine was told of.",
    "errors": "Errors that were caught; each is in the log once.",
}


_COUNTERS_MOST = 256
"""Counters in one report; clients choose tags, so further ones are left out."""


class Stats:
    """Sums since the last report; `data` maps a counter's name to its value."""

    def __init__(self) -> None:
        self.data: dict[str, float] = {}

    def add(self, counter: str, amount: float = 1) -> None:
        """Add to a counter of `COUNTERS` (or of a tag: `tag:<name>:<counter>`)."""
        self.data[counter] = self.data.get(counter, 0) + amount

    def take(self) -> dict[str, float]:
        """Return what has been counted since the last call."""
        taken, self.data = self.data, {}
        return taken


class SchedulerStats(Stats):
    """The scheduler side's counters."""

    def looked_up(self, state: RequestState, tokens: int, hit: int) -> None:
        """Count a look-up of `tokens` tokens of which `hit` were offered."""
        self.add("lookups")
        self.add("looked_up_tokens", tokens)
        self.add("hit_tokens", hit)
        for tag in state.permissions.tags:
            counter = f"tag:{tag}:looked_up_tokens"
            if counter in self.data or len(self.data) < _COUNTERS_MOST:
                self.add(counter, tokens)
                self.add(f"tag:{tag}:hit_tokens", hit)
