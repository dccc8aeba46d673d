# SPDX-License-Identifier: Apache-2.0
"""Calls of tiers with deadlines, for tests that play faults: how each ended, and how late."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Final

from kvhaven.errors import TierError, TierMissError
from kvhaven.testing.tiers import Piece, content, page_buffer
from kvhaven.tiers.base import Tier

SEEDS: Final = 20 if "KVHAVEN_EVENTS" in os.environ else 5
"""Random runs of each test of faults; the long form has more."""
DEADLINE_S = 0.4


class TimedCalls:
    """Counters of calls. `known` are two pieces that every lookup asks for, too."""

    def __init__(self, dice: random.Random, known: tuple[Piece, Piece]) -> None:
        self.counts: Counter[str] = Counter()
        self.latest_s = 0.0
        self._dice = dice
        self._known = known

    async def time(self, kind: str, call: Awaitable[str]) -> None:
        """Make one call with a deadline, at times a very short one, and count how it ended."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._dice.choice([0.002] + 9 * [DEADLINE_S])):
                outcome = await call
        except (TimeoutError, TierError, TierMissError) as error:
            outcome = type(error).__name__
        self.latest_s = max(self.latest_s, time.monotonic() - began)
        self.counts[f"{kind}: {outcome}"] += 1
        self.counts[kind] += 1

    async def read(self, tier: Tier, piece: Piece) -> str:
        """Read a piece; return whether its bytes and checksum are right."""
        buffer = page_buffer(piece.shard.payload_bytes)
        checksum = await tier.read(piece.shard, buffer)
        right = bytes(buffer[: piece.shard.payload_bytes]) == content(piece)
        return "right" if right and checksum == piece.checksum else "wrong"

    async def contains(self, tier: Tier, piece: Piece) -> str:
        """Look up three pieces; return whether there are three answers."""
        asked = [one.shard for one in (piece, *self._known)]
        return "done" if len(await tier.contains(asked)) == len(asked) else "wrong"
