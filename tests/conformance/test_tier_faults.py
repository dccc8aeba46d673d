# SPDX-License-Identifier: Apache-2.0
"""Every tier behind `faulty`, on a store that is damaged meanwhile: no wrong byte, no late answer.

`KVHAVEN_EVENTS` is the number of reads in each case; nightly, 1000 of them in each.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvhaven.errors import TierMissError
from kvhaven.testing.faulty_tier import EVERYTHING, FaultyTier
from kvhaven.testing.tier_damage import DAMAGE
from kvhaven.testing.tiers import (
    Kit,
    Piece,
    content,
    make_namespace,
    make_piece,
    page_buffer,
    store,
    until,
)
from kvhaven.tiers.base import Tier
from tests.tier_kits import KITS
from tests.timed_calls import DEADLINE_S, SEEDS, TimedCalls

_log = logging.getLogger(__name__)

READS = int(os.environ.get("KVHAVEN_EVENTS", "40"))
AT_ONCE = 20
FAULTS = msgspec.structs.replace(EVERYTHING, stall=0.003)
LATE_S = 5.0
"""An answer may be later than its deadline by what a busy machine takes."""

SPACE = make_namespace("model", (10_000, 4096, 1))
PIECES = [make_piece(SPACE, number, at) for number in range(6) for at in range(3)]


class Play(TimedCalls):
    """Random calls of random tiers over one store, with their deadlines."""

    def __init__(self, kit: Kit, tiers: list[FaultyTier], seed: int) -> None:
        self._random = random.Random(seed)
        super().__init__(self._random, (PIECES[0], PIECES[1]))
        self._kit = kit
        self._tiers = tiers

    async def call(self) -> None:
        """Make one call, and count how it ended."""
        piece = self._random.choice(PIECES)
        tier = self._random.choice(self._tiers)
        kind = self._random.choices(["read", "write", "contains", "delete"], [60, 25, 10, 5])[0]
        if self._random.random() < 0.05:
            self._damage(piece)
        await self.time(kind, getattr(self, kind)(tier, piece))

    async def write(self, tier: Tier, piece: Piece) -> str:
        await tier.write(*piece)
        return "done"

    async def delete(self, tier: Tier, piece: Piece) -> str:
        await tier.delete([piece.shard])
        return "done"

    def _damage(self, piece: Piece) -> None:
        damage = DAMAGE[self._random.choice(list(DAMAGE))]
        with contextlib.suppress(LookupError, ValueError, OSError):  # it is not there
            self._kit.change(piece.shard, lambda raw: damage(raw, piece) if raw else raw)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", KITS)
@pytest.mark.timeout(600)
async def test_no_wrong_byte_no_late_answer_and_no_leak(
    name: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kit = KITS[name](request, tmp_path)
    await _settle(kit)
    before = _held()
    async with contextlib.AsyncExitStack() as stack:
        inner = [await stack.enter_async_context(kit.open())]
        if inner[0].shared:
            inner.append(await stack.enter_async_context(kit.open()))
        for tier in inner:
            await tier.add_namespace(SPACE)
        await store(inner[0], *PIECES)
        tiers = [FaultyTier(tier, seed, FAULTS) for tier in inner]
        play = Play(kit, tiers, seed)
        while play.counts["read"] < READS or play.counts["read: right"] <= READS // 5:
            await asyncio.gather(*(play.call() for _ in range(AT_ONCE)))
        assert play.counts["read: wrong"] == play.counts["contains: wrong"] == 0, play.counts
        assert play.counts["read: right"] > READS // 5, play.counts
        _log.info("%s, seed %d: %s", name, seed, dict(play.counts))
        assert play.latest_s < DEADLINE_S + LATE_S
        assert sum((tier.injected for tier in tiers), Counter())["flip"] or READS < 50
        await _check_what_is_left(inner)
    gc.collect()
    await until(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)))


async def _check_what_is_left(tiers: list[Tier]) -> None:
    """Read everything without faults: right or a miss; then what is left is clean."""

    async def read(piece: Piece) -> None:
        buffer = page_buffer(piece.shard.payload_bytes)
        with contextlib.suppress(TierMissError):
            await tiers[-1].read(piece.shard, buffer)
            assert bytes(buffer[: piece.shard.payload_bytes]) == content(piece)

    await asyncio.gather(*(read(piece) for piece in PIECES))
    for tier in tiers:
        health = tier.health()
        assert (health.online, health.writable) == (True, True)
        assert health.queued_reads == health.queued_writes == 0
    assert (await tiers[-1].check()).problems == ()


async def _settle(kit: Kit) -> None:
    """Let what stays for the life of a process (a runtime's threads) come into being."""
    async with kit.open() as tier:
        await tier.contains([PIECES[0].shard])
    gc.collect()


def _held() -> tuple[int, int]:
    """Return how many threads of ours and descriptors this process has."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kvhaven")]
    return len(ours), len(list(Path("/proc/self/fd").iterdir()))
