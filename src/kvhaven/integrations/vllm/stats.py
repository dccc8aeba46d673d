# SPDX-License-Identifier: Apache-2.0
"""Counters that are exported through vLLM's log line and its Prometheus endpoint."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvhaven.engine.request_state import PendingLoad
from kvhaven.engine.stats import COUNTERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.metrics.cache_hit_source import CacheHitSource


class KVHavenStats(KVConnectorStats):
    """Sums since the last report; `data` maps a counter's name to its value."""

    data: dict[str, float]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVHavenStats":
        """Add another report to this one."""
        for counter, amount in other.data.items():
            self.data[counter] = self.data.get(counter, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log line."""
        line: dict[str, int | float] = dict(self.data)
        looked_up = line.get("looked_up_tokens", 0)
        if looked_up:
            line["hit_rate"] = round(line.get("hit_tokens", 0) / looked_up, 3)
        return line

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.data


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


def hit_sources(offer: PendingLoad | None, tokens: int) -> "dict[CacheHitSource, int]":
    """Split `tokens` loaded tokens by the tier that supplied them; the counts add up."""
    # vLLM before 0.32 has no such class and does not call this.
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415

    if offer is None or tokens <= 0:
        return {}
    from_memory = offer.tokens_from_memory(tokens)
    counts = {CacheHitSource.HOST: from_memory, CacheHitSource.DISK: tokens - from_memory}
    return {source: count for source, count in counts.items() if count}
