# SPDX-License-Identifier: Apache-2.0
"""Where loaded tokens came from, in vLLM's words."""

from typing import TYPE_CHECKING

from kvhaven.catalog.actions import Source
from kvhaven.engine.request_state import PendingLoad

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource


def hit_sources(offer: PendingLoad | None, tokens: int) -> "dict[CacheHitSource, int]":
    """Split `tokens` loaded tokens by the tier that supplied them; the counts add up."""
    # vLLM before 0.32 has no such thing, and does not ask.
    from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: PLC0415

    if offer is None or tokens <= 0:
        return {}
    size = offer.chunk_size
    counts = {CacheHitSource.HOST: 0, CacheHitSource.DISK: 0}
    at, end = offer.start, offer.start + tokens
    while at < end:
        chunk = at // size
        step = min((chunk + 1) * size, end) - at
        in_memory = offer.lease.sources[chunk - offer.first_chunk] == Source.MEMORY
        counts[CacheHitSource.HOST if in_memory else CacheHitSource.DISK] += step
        at += step
    return {source: count for source, count in counts.items() if count}
