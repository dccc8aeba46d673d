# SPDX-License-Identifier: Apache-2.0
"""Every tier behind `faulty`, on a store that is damaged meanwhile: no wrong byte, no late answer.

`KVHAVEN_EVENTS` is the number of reads in each case; nightly, 1000 of them in each.
"""

import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import Tier
from kvhaven.tiers.faulty import EVERYTHING, FaultyTier
from tests.tier_damage import DAMAGE
from tests.tier_kits import KITS, Kit
from tests.tiers import Piece, content, make_namespace, make_piece, page_buffer

READS = int(os.environ.get("KVHAVEN_EVENTS", "60"))
SEEDS = 20
AT_ONCE = 20
FAULTS = msgspec.structs.replace(EVERYTHING, stall=0.005)
DEADLINE_S = 0.2
LATE_S = 1.0
"""An answer may be later than its deadline by what a busy machine takes."""

SPACE = make_namespace("model", (10_000, 4096, 1))
PIECES = [make_piece(SPACE, number, at) for number in range(12) for at in range(3)]


class Play:
    """Random calls of random tiers over one store, with their deadlines."""

    def __init__(self, kit: Kit, tiers: list[FaultyTier], seed: int) -> None:
        self._kit = kit
        self._tiers = tiers
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.latest_s = 0.0

    async def call(self) -> None:
        """Make one call, and count how it ended."""
        piece = self._random.choice(PIECES)
        tier = self._random.choice(self._tiers)
        kind = self._random.choices(["read", "write", "contains", "delete"], [50, 35, 10, 5])[0]
        if self._random.random() < 0.1:
            self._damage(piece)
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._random.choice([0.002, DEADLINE_S, DEADLINE_S])):
                outcome = await getattr(self, f"_{kind}")(tier, piece)
        except (TimeoutError, TierError, TierMissError) as error:
            outcome = type(error).__name__
        self.latest_s = max(self.latest_s, time.monotonic() - began)
        self.counts[f"{kind}: {outcome}"] += 1
        self.counts[kind] += 1

    async def _read(self, tier: Tier, piece: Piece) -> str:
        buffer = page_buffer(piece.shard.payload_bytes)
        checksum = await tier.read(piece.shard, buffer)
        right = bytes(buffer[: piece.shard.payload_bytes]) == content(piece)
        return "right" if right and checksum == piece.checksum else "wrong"

    async def _write(self, tier: Tier, piece: Piece) -> str:
        await tier.write(*piece)
        return "done"

    async def _contains(self, tier: Tier, piece: Piece) -> str:
        answer = await tier.contains([piece.shard for piece in PIECES])
        return "done" if len(answer) == len(PIECES) else "wrong"

    async def _delete(self, tier: Tier, piece: Piece) -> str:
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
        tiers = [FaultyTier(tier, seed, FAULTS) for tier in inner]
        play = Play(kit, tiers, seed)
        while play.counts["read"] < READS:
            await asyncio.gather(*(play.call() for _ in range(AT_ONCE)))
        assert play.counts["read: wrong"] == play.counts["contains: wrong"] == 0, play.counts
        assert play.counts["read: right"] > READS // 50
        assert play.latest_s < DEADLINE_S + LATE_S
        assert sum((tier.injected for tier in tiers), Counter())["flip"] or READS < 50
        await _check_what_is_left(inner)
    gc.collect()
    threads, descriptors = _held()
    assert threads <= before[0]
    assert descriptors <= before[1]


async def _check_what_is_left(tiers: list[Tier]) -> None:
    """Read everything without faults: right or a miss; then what is left is clean."""
    for _ in range(2):
        for tier in tiers:
            for piece in PIECES:
                buffer = page_buffer(piece.shard.payload_bytes)
                with contextlib.suppress(TierMissError):
                    await tier.read(piece.shard, buffer)
                    assert bytes(buffer[: piece.shard.payload_bytes]) == content(piece)
    for tier in tiers:
        health = tier.health()
        assert (health.online, health.writable) == (True, True)
        assert health.queued_reads == health.queued_writes == 0
        assert (await tier.check()).problems == ()


async def _settle(kit: Kit) -> None:
    """Let what stays for the life of a process (a runtime's threads) come into being."""
    async with kit.open() as tier:
        await tier.contains([PIECES[0].shard])
    gc.collect()


def _held() -> tuple[int, int]:
    """Return how many threads of ours and descriptors this process has."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kvhaven")]
    return len(ours), len(list(Path("/proc/self/fd").iterdir()))
