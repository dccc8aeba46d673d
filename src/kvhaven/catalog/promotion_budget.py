# SPDX-License-Identifier: Apache-2.0
"""Limits of promotions: how many a piece of work may begin, and why a lease grows no further."""

import enum
from collections import Counter

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.tier_spec import TierState


class End(enum.Enum):
    """Reason why a piece of work extended a lease no further."""

    PIECE = enum.auto()
    """The piece was complete: there is more."""
    NOWHERE = enum.auto()
    """The next chunk is in no known place."""
    LIMIT = enum.auto()
    """Too many bytes are being read, from its tier or in total."""
    OTHER = enum.auto()
    """No chunks are left, or the next one is not available now."""


class PromotionBudget:
    """Promotions that may still begin, in chunks and bytes.

    Chunks are limited per piece and in total, bytes per tier and in total. One chunk may always be
    read, from each tier and in total, however large it is.
    """

    def __init__(self, piece: int, most: int, reading: int, limit: int) -> None:
        self._piece = piece
        self._most = most
        self._reading = reading
        self._limit = limit
        self._taken = Counter[TierName]()

    def take(self, tier: TierState, bytes_: int, limit: int) -> End | None:
        """Count a promotion from a tier with this limit; return the reason if it must not begin."""
        reading = tier.reading_bytes + self._taken[tier.spec.name]
        much = reading and reading + bytes_ > limit
        if not self._most or much or (self._reading and self._reading + bytes_ > self._limit):
            return End.LIMIT
        if not self._piece:
            return End.PIECE
        self._piece -= 1
        self._most -= 1
        self._reading += bytes_
        self._taken[tier.spec.name] += bytes_
        return None
