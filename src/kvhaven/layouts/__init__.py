# SPDX-License-Identifier: Apache-2.0
"""Reading the engine's KV tensors, and the formats their bytes are kept in."""

from kvhaven.layouts.paged import PagedLayout, PageRun, describe_kv_caches

__all__ = ["PageRun", "PagedLayout", "describe_kv_caches"]
