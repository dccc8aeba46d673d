# SPDX-License-Identifier: Apache-2.0
"""Conformance suites and test doubles, for tiers and eviction policies of other packages.

Needs `pip install 'kvhaven[testing]'`. `docs/extending.md` shows how to use it.
"""

from kvhaven.testing.tiers import Kit, Piece, make_namespace, make_piece, online, opened
from kvhaven.tiers.faulty import Faults, FaultyTier
from kvhaven.tiers.memory import MemoryStore, memory_tier

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
