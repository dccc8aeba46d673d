# SPDX-License-Identifier: Apache-2.0
"""Reading the engine's KV tensors, and the formats their bytes are kept in."""

from kvhaven.layouts.attention_backends import head_geometry
from kvhaven.layouts.base import Layout, Pieces
from kvhaven.layouts.geometry import HeadGeometry, Plane
from kvhaven.layouts.paged import PagedLayout, PageRun, describe_kv_caches
from kvhaven.layouts.portable import PortableLayout, head_shards

__all__ = [
    "HeadGeometry",
    "Layout",
    "PageRun",
    "PagedLayout",
    "Pieces",
    "Plane",
    "PortableLayout",
    "describe_kv_caches",
    "head_geometry",
    "head_shards",
]
