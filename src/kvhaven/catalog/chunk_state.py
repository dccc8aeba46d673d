# SPDX-License-Identifier: Apache-2.0
"""State of one chunk, for operators."""

import msgspec

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState, State
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.catalog.tiering import Tiers
from kvhaven.types import ChunkKey


class ChunkState(msgspec.Struct, frozen=True):
    """Places of a chunk, and its use in memory.

    `places` has the bytes in each; of shared tiers, only unexpired lookup results count. The other
    fields are 0 or None if it is not in memory.
    """

    places: dict[str, int]
    leases: int = 0
    writes: int = 0
    """Tiers that write from it, or wait to."""
    age_s: float | None = None
    """Since it came to memory."""
    idle_s: float | None = None
    """Since its last use there."""
    generation: int = 0
    """Of its extent in memory."""


def chunk_state(
    space: ResidentChunks[S], tiers: Tiers, part: NamespaceState | None, key: ChunkKey
) -> ChunkState:
    """Return the state of a chunk of a tenant's part of a namespace (None: it has no chunks)."""
    if part is None:
        return ChunkState({})
    places = {
        str(name): part.stored_bytes
        for name, index in tiers.indexes.items()
        if index.holds(key, part)
    }
    entry = space.find(key)
    if (
        entry is None
        or entry.state is not State.RESIDENT
        or entry.namespace is not part
        or entry.holding.cleared
    ):
        return ChunkState(places)
    age_s, idle_s = space.ages(entry)
    return ChunkState(
        {str(MEMORY): entry.extent.length} | places,
        entry.leases,
        entry.writes,
        age_s,
        idle_s,
        entry.extent.generation,
    )
