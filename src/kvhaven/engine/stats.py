# SPDX-License-Identifier: Apache-2.0
"""Counters of the two sides of an engine."""

from kvhaven.engine.request_state import RequestState

COUNTERS: dict[str, str] = {
    "lookups": "Requests looked up in the cache.",
    "looked_up_tokens": "Tokens looked up in the cache.",
    "hit_tokens": "Tokens found in the cache and offered to the engine.",
    "tail_hits": "Requests whose whole prompt was found in the cache, with its tail.",
    "skipped_slow_tokens": "Tokens in slow tiers, not loaded: computing them is faster.",
    "skipped_late_tokens": "Tokens not loaded: a tier was still reading them at the deadline.",
    "skipped_limit_tokens": "Tokens not looked up: the request limits what it loads.",
    "loaded_bytes": "Bytes copied from the arena to the device, over all ranks.",
    "loaded_seconds": "Duration of the copies from the arena to the device.",
    "saved_bytes": "Bytes copied from the device to the arena, over all ranks.",
    "saved_seconds": "Duration of the copies from the device to the arena, with checksums.",
    "saved_chunks": "Chunks saved by a rank, over all ranks.",
    "skipped_saves": "Chunks a rank did not save because the service was unreachable or slow.",
    "failed_loads": "Loads that failed and were reported to the engine.",
    "errors": "Errors that were caught; each is logged once.",
}


_COUNTERS_MOST = 256
"""Maximum number of counters in one report. Clients choose tags, so further ones are ignored."""


class Stats:
    """Sums since the last report; `data` maps a counter's name to its value."""

    def __init__(self) -> None:
        self.data: dict[str, float] = {}

    def add(self, counter: str, amount: float = 1) -> None:
        """Increase a counter of `COUNTERS`, or of a tag (`tag:<name>:<counter>`)."""
        self.data[counter] = self.data.get(counter, 0) + amount

    def take(self) -> dict[str, float]:
        """Return the sums since the last call."""
        taken, self.data = self.data, {}
        return taken


class SchedulerStats(Stats):
    """Counters of the scheduler side."""

    def looked_up(self, state: RequestState, tokens: int, hit: int) -> None:
        """Count a lookup of `tokens` tokens of which `hit` were offered."""
        self.add("lookups")
        self.add("looked_up_tokens", tokens)
        self.add("hit_tokens", hit)
        for tag in state.permissions.tags:
            counter = f"tag:{tag}:looked_up_tokens"
            if counter in self.data or len(self.data) < _COUNTERS_MOST:
                self.add(counter, tokens)
                self.add(f"tag:{tag}:hit_tokens", hit)
