# SPDX-License-Identifier: Apache-2.0
"""The faulty tier: each fault does what it says, none serves a wrong byte, a seed repeats it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.testing.faulty_tier import Faults, FaultyTier
from kvhaven.testing.tiers import (
    content,
    fetch,
    make_namespace,
    make_piece,
    page_buffer,
    scanned,
    store,
)
from kvhaven.tiers.base import Tier
from tests.tiers import disk_tier

SPACE = make_namespace()
PIECE = make_piece(SPACE)


@pytest.fixture
async def inner(tmp_path: Path) -> AsyncIterator[Tier]:
    async with disk_tier(tmp_path / "tier") as tier:
        await tier.add_namespace(SPACE)
        yield tier


def faulty(inner: Tier, **faults: float) -> FaultyTier:
    return FaultyTier(inner, 1, Faults(**faults))


async def test_without_faults_it_is_the_inner_tier(inner: Tier) -> None:
    tier = faulty(inner)
    await tier.add_namespace(SPACE)
    await store(tier, PIECE)
    assert await fetch(tier, PIECE.shard) == content(PIECE)
    assert list(await tier.contains([PIECE.shard])) == [True]
    assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})
    await tier.delete([PIECE.shard])
    assert (await tier.check()).shards == 0
    assert tier.health() == inner.health()
    assert not tier.injected.total()
    assert (tier.name, tier.shared) == (inner.name, inner.shared)


@pytest.mark.parametrize("fault", ["flip", "truncate"])
async def test_what_is_damaged_in_the_store_is_never_served(inner: Tier, fault: str) -> None:
    tier = faulty(inner, **{fault: 1})
    before = bytes(PIECE.payload)
    await store(tier, PIECE)
    assert bytes(PIECE.payload) == before  # a copy was damaged
    with pytest.raises(TierMissError):
        await fetch(inner, PIECE.shard)
    assert inner.health().rejected == 1
    assert tier.injected[fault] == 1


@pytest.mark.parametrize("fault", ["flip", "truncate"])
async def test_what_is_damaged_on_its_way_is_a_miss(inner: Tier, fault: str) -> None:
    await store(inner, PIECE)
    buffer = page_buffer(PIECE.shard.payload_bytes)
    with pytest.raises(TierMissError):
        await faulty(inner, **{fault: 1}).read(PIECE.shard, buffer)
    assert bytes(buffer[: PIECE.shard.payload_bytes]) != content(PIECE)
    assert await fetch(inner, PIECE.shard) == content(PIECE)


async def test_lost_writes_and_deletes_say_nothing(inner: Tier) -> None:
    tier = faulty(inner, lose=1)
    await store(tier, PIECE)
    assert list(await inner.contains([PIECE.shard])) == [False]
    await store(inner, PIECE)
    await tier.delete([PIECE.shard])
    assert list(await inner.contains([PIECE.shard])) == [True]
    assert await scanned(tier) == ({SPACE.digest}, set())


async def test_errors_come_before_and_after_the_work(inner: Tier) -> None:
    tier = faulty(inner, error=1)
    done = 0
    for number in range(40):
        with pytest.raises(TierError, match="injected"):
            await store(tier, make_piece(SPACE, number))
        done += next(iter(await inner.contains([make_piece(SPACE, number).shard])))
    assert 10 < done < 30
    with pytest.raises(TierError):
        await scanned(tier)


async def test_what_it_says_of_presence_may_be_a_lie(inner: Tier) -> None:
    await store(inner, PIECE)
    answer = await faulty(inner, lie=1).contains([PIECE.shard, make_piece(SPACE, 1).shard])
    assert list(answer) == [False, True]


async def test_duplicates_change_nothing(inner: Tier) -> None:
    tier = faulty(inner, duplicate=1)
    await store(tier, PIECE)
    assert await fetch(tier, PIECE.shard) == content(PIECE)
    assert inner.health().reads == 2
    await tier.delete([PIECE.shard])
    assert (await inner.check()).shards == 0


async def test_a_stall_ends_when_it_is_cancelled_over_or_closed(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "other") as inner:
        tier = faulty(inner, stall=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await fetch(tier, PIECE.shard)
        with pytest.raises(TierError, match="did not answer"):
            await fetch(faulty(inner, stall=1, stall_s=0.05), PIECE.shard)
        waiting = asyncio.create_task(fetch(tier, PIECE.shard))
        await asyncio.sleep(0.01)
        await tier.close(1)
        with pytest.raises(TierError, match="did not answer"):
            await waiting


async def test_delays_are_not_longer_than_said(inner: Tier) -> None:
    await store(inner, PIECE)
    tier = faulty(inner, delay=1, longest_delay_s=0.02)
    began = time.monotonic()
    for _ in range(10):
        assert await fetch(tier, PIECE.shard) == content(PIECE)
    assert time.monotonic() - began > 0.02
    assert tier.injected["delay"] == 10


async def test_a_seed_repeats_what_happens(inner: Tier) -> None:
    async def play(seed: int) -> list[str]:
        tier = FaultyTier(inner, seed, Faults(error=0.3, flip=0.3, lose=0.3, lie=0.3))
        said = []
        for number in range(30):
            piece = make_piece(SPACE, number)
            await inner.delete([piece.shard])
            try:
                await store(tier, piece)
                said.append(str(list(await tier.contains([piece.shard]))))
                said.append(str(len(await fetch(tier, piece.shard))))
            except (TierError, TierMissError) as error:
                said.append(type(error).__name__)
        return [*said, str(tier.injected)]

    first = await play(7)
    assert await play(7) == first
    assert await play(8) != first
