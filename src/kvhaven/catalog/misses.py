# SPDX-License-Identifier: Apache-2.0
"""Reasons of misses: why a chain ends where it ends."""

from collections.abc import Sequence
from typing import NamedTuple

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState, State
from kvhaven.catalog.ghosts import Ghosts, Reason
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.tiering import Tiers
from kvhaven.types import ChunkKey


class Gap(NamedTuple):
    """Why a chain ends: the first `chunks` chunks from there on are missed for `reason`.

    All chunks behind them were never stored, as far as is remembered.
    """

    reason: Reason
    chunks: int


def gap_at(
    space: ResidentChunks[S],
    tiers: Tiers,
    ghosts: Ghosts,
    part: NamespaceState | None,
    keys: Sequence[ChunkKey],
    at: int,
) -> Gap:
    """Return why a chain could not be leased from its chunk `at` on.

    A chunk is stored after its ancestors and evicted before them. So the chunks that were stored
    once are the first ones, and the search for their end takes a logarithm of the chunks.
    """
    if part is None or at >= len(keys):
        return Gap(Reason.COLD, max(0, len(keys) - at))
    reason = _reason(space, tiers, ghosts, part, keys[at])
    if reason is Reason.COLD:
        return Gap(reason, len(keys) - at)
    low, high = at, len(keys)  # chunk `low` was stored, those from `high` on were not
    while high - low > 1:
        middle = (low + high) // 2
        if _reason(space, tiers, ghosts, part, keys[middle]) is Reason.COLD:
            high = middle
        else:
            low = middle
    return Gap(reason, high - at)


def _reason(
    space: ResidentChunks[S], tiers: Tiers, ghosts: Ghosts, part: NamespaceState, key: ChunkKey
) -> Reason:
    entry = space.entries.get(key)
    if entry is not None and not entry.holding.cleared and entry.namespace is part:
        return Reason.COLD if entry.state is State.RESERVED else Reason.PIN_LIMIT
    if tiers.source(key, part) is not None:
        tenant = part.tenant
        quota = tenant.memory_quota
        full = quota is not None and tenant.memory_bytes + part.extent_bytes > quota
        return Reason.QUOTA if full else Reason.PIN_LIMIT
    if any(not index.online and index.holds(key, part) for index in tiers.indexes.values()):
        return Reason.TIER_OFF
    reason = ghosts.reason(key)
    if reason is None:
        return Reason.COLD
    shared_off = any(not index.online for index in tiers.shared.values())
    return Reason.TIER_OFF if reason is Reason.EVICTED and shared_off else reason
