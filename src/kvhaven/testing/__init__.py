# SPDX-License-Identifier: Apache-2.0
"""Conformance suites and test doubles for tiers and eviction policies of other packages.

Needs `pip install 'kvhaven[testing]'`. `docs/extending.md` shows how to use it.
"""

from kvhaven.testing.faulty_tier import Faults, FaultyTier
from kvhaven.testing.memory_store import MemoryStore, memory_tier
from kvhaven.testing.tiers import Kit, Piece, make_namespace, make_piece, online, opened

__all__ = [
    "Faults",
    "FaultyTier",
    "Kit",
    "MemoryStore",
    "Piece",
    "make_namespace",
    "make_piece",
    "memory_tier",
    "online",
    "opened",
]
