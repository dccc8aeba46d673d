# SPDX-License-Identifier: Apache-2.0
"""The eviction policies that there are. Which is good for what: docs/settings.md."""

from collections.abc import Callable

from kvhaven.catalog.policies.fifo import FIFO
from kvhaven.catalog.policies.lfu import LFU
from kvhaven.catalog.policies.lru import LRU
from kvhaven.catalog.policies.mru import MRU
from kvhaven.catalog.policies.s3fifo import S3FIFO
from kvhaven.catalog.policy import EvictionPolicy

__all__ = ["FIFO", "LFU", "LRU", "MRU", "POLICIES", "S3FIFO"]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, MRU, S3FIFO)
}
"""Every policy by its name in the settings. A new one is a file and a line here."""
