# SPDX-License-Identifier: Apache-2.0
"""What a power cut may leave: every prefix of a written file is a miss, and cleaned up."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhaven.errors import TierMissError
from kvhaven.testing.tiers import content, fetch, make_namespace, make_piece
from kvhaven.tiers.base import Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.format.header import may_hold
from kvhaven.tiers.shared.maintenance import audit, collect
from kvhaven.tiers.shared.store import blob_name
from kvhaven.tiers.shared.tier import SharedTier
from tests.tiers import disk_tier, file_of

SPACE = make_namespace("model", (5000,))
PIECE = make_piece(SPACE)
WHOLE = 4096 + 8192
LENGTHS = sorted({*range(0, WHOLE, 61), *(at + d for at in range(0, WHOLE, 512) for d in (0, 1))})


def opened(path: Path) -> SharedTier:
    return filesystem_tier(path, executor=TierExecutor(1), retry_s=0.05)


def cut(file: Path, length: int) -> None:
    os.truncate(file, length)


async def no_prefix_is_served(tier: Tier, find: Callable[[], Path]) -> None:
    """Leave the file cut at every length in turn; the tier stays open."""
    await tier.add_namespace(SPACE)
    for length in LENGTHS:
        await tier.write(*PIECE)
        cut(find(), length)
        with pytest.raises(TierMissError):
            await fetch(tier, PIECE.shard)
    await tier.write(*PIECE)  # what was cut is set aside, or removed
    assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_no_prefix_of_a_shared_file_is_served(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    await tier.start()
    try:
        await no_prefix_is_served(tier, lambda: tmp_path / blob_name(PIECE.shard))
        assert (await tier.check()).clean
    finally:
        await tier.close(5)


async def test_no_prefix_of_a_disk_file_is_served(tmp_path: Path) -> None:
    async with disk_tier(tmp_path) as tier:
        await no_prefix_is_served(tier, lambda: file_of(tmp_path, PIECE.shard))


async def test_no_prefix_of_a_file_outlives_a_restart_of_the_disk_tier(tmp_path: Path) -> None:
    for length in LENGTHS[:: len(LENGTHS) // 12]:
        async with disk_tier(tmp_path) as tier:
            await tier.add_namespace(SPACE)
            await tier.write(*PIECE)
        cut(file_of(tmp_path, PIECE.shard), length)
        async with disk_tier(tmp_path) as tier:
            assert [shard async for _, page in tier.scan() for shard in page] == []
            with pytest.raises(TierMissError):
                await fetch(tier, PIECE.shard)
            assert (await tier.check()).clean


async def test_nothing_torn_is_left_after_gc(tmp_path: Path) -> None:
    pieces = [make_piece(SPACE, number) for number in range(len(LENGTHS))]
    tier = opened(tmp_path)
    await tier.start()
    try:
        await tier.add_namespace(SPACE)
        await asyncio.gather(*(tier.write(*piece) for piece in pieces))
        for length, piece in zip(LENGTHS, pieces, strict=True):
            cut(tmp_path / blob_name(piece.shard), length)
        assert len((await tier.check()).problems) == len(pieces)
        done = await collect(tier.store, Limits())
        kept = sum(may_hold(length, PIECE.shard.payload_bytes) for length in LENGTHS)
        assert kept <= 1, "cut where a compressed shard might end: only who reads it can tell"
        assert (done.shards, done.left_shards) == (len(pieces) - kept, kept)
        async for found in audit(tier.store):
            await tier.store.remove([found.name])
        assert (await tier.check()).clean
    finally:
        await tier.close(5)
