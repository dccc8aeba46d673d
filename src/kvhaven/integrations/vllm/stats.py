# SPDX-License-Identifier: Apache-2.0
"""Counters that go through vLLM's own channel: its log line and its Prometheus endpoint."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

    from kvhaven.integrations.vllm.tracker import Tracker

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


class KVHavenStats(KVConnectorStats):
    """Sums since the last report; `data` maps a counter's name to its value."""

    data: dict[str, float]

    def add(self, counter: str, amount: float = 1) -> None:
        """Add to a counter of `COUNTERS` (or of a tag: `tag:<name>:<counter>`)."""
        self.data[counter] = self.data.get(counter, 0) + amount

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVHavenStats":
        """Add another report to this one."""
        for counter, amount in other.data.items():
            self.add(counter, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log line shows."""
        line: dict[str, int | float] = dict(self.data)
        looked_up = line.get("looked_up_tokens", 0)
        if looked_up:
            line["hit_rate"] = round(line.get("hit_tokens", 0) / looked_up, 3)
        return line

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.data

    def take(self) -> "KVHavenStats | None":
        """Return what has been counted and begin anew; None when nothing was."""
        if not self.data:
            return None
        taken, self.data = KVHavenStats(data=self.data), {}
        return taken


class SchedulerStats(KVHavenStats):
    """The scheduler side's counters."""

    def looked_up(self, tracker: "Tracker", tokens: int, hit: int) -> None:
        """Count a look-up of `tokens` tokens of which `hit` were offered."""
        self.add("lookups")
        self.add("looked_up_tokens", tokens)
        self.add("hit_tokens", hit)
        for tag in tracker.permissions.tags:
            counter = f"tag:{tag}:looked_up_tokens"
            if counter in self.data or len(self.data) < _COUNTERS_MOST:
                self.add(counter, tokens)
                self.add(f"tag:{tag}:hit_tokens", hit)


class KVHavenPromMetrics(KVConnectorPromMetrics):
    """The counters as `vllm:kvhaven_<name>` with the engine's labels."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, description in COUNTERS.items():
            family = self._counter_cls(
                name=f"vllm:kvhaven_{name}", documentation=description, labelnames=labelnames
            )
            self._counters[name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report to the counters."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(amount)
