# SPDX-License-Identifier: Apache-2.0
"""Layouts: places of the engine's KV in its tensors, and the formats in which it is kept."""

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
