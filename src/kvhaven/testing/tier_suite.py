# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of tiers: the contract of `kvhaven.tiers.base.Tier` as tests.

To run the suite, a test module imports all names of this module and defines a fixture `kit` that
returns a `Kit`. The suite needs pytest with pytest-asyncio in the mode `auto`.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.keys import tenant_id
from kvhaven.testing.tier_damage import DAMAGE
from kvhaven.testing.tiers import (
    CAPACITY,
    PAYLOAD,
    Kit,
    Piece,
    content,
    fetch,
    make_namespace,
    make_piece,
    page_buffer,
    scanned,
    store,
)
from kvhaven.tiers.base import StoredShard, Tier
from kvhaven.types import NO_TENANT, Checksum

Open = Callable[[], AbstractAsyncContextManager[Tier]]

SPACE = make_namespace("model", (10_000, 4096, 1))
SAME_DIGEST = msgspec.structs.replace(SPACE, table=make_namespace("model", (5000,)).table)
"""Impossible in practice, since a digest covers its table."""
ANN, BEN = tenant_id("ann"), tenant_id("ben")
OTHER = make_namespace("other model", (10_000,))


@pytest.fixture
def open_kit(kit: Kit) -> Open:
    """Return a function that opens a tier of `CAPACITY` bytes over one store, repeatedly."""
    return kit.open


async def test_what_was_written_is_read(open_kit: Open) -> None:
    pieces = [make_piece(SPACE, 0, at) for at in range(3)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, *pieces)
        for piece in pieces:
            buffer = page_buffer(piece.shard.payload_bytes)
            assert await tier.read(piece.shard, buffer) == piece.checksum
            assert bytes(buffer[: piece.shard.payload_bytes]) == content(piece)
        assert (await tier.check()).problems == ()


async def test_what_a_tenant_wrote_is_there_for_it_alone(open_kit: Open) -> None:
    """This holds even for equal keys, which two tenants never have in practice."""
    pieces = [make_piece(SPACE, 0, 0, tenant) for tenant in (NO_TENANT, ANN, BEN)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, pieces[0], pieces[1])
        assert list(await tier.contains([p.shard for p in pieces])) == [True, True, False]
        with pytest.raises(TierMissError):
            await fetch(tier, pieces[2].shard)
        await store(tier, pieces[2])
    async with open_kit() as tier:
        assert (await scanned(tier))[1] == {piece.shard for piece in pieces}
        for piece in pieces:
            assert (await scanned(tier, piece.shard.tenant))[1] == {piece.shard}
            assert await fetch(tier, piece.shard) == content(piece)
        assert (await tier.check()).problems == ()
        await tier.delete([pieces[1].shard])
        assert list(await tier.contains([p.shard for p in pieces])) == [True, False, True]


async def test_what_was_not_written_is_a_miss(open_kit: Open) -> None:
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        with pytest.raises(TierMissError):
            await fetch(tier, make_piece(SPACE).shard)
        assert tier.health().misses == 1
        assert tier.health().errors == 0


async def test_a_batch_is_asked_for_at_once_and_answered_in_its_order(open_kit: Open) -> None:
    pieces = [make_piece(SPACE, number, at) for number in range(20) for at in range(3)]
    unknown = make_piece(OTHER).shard
    other_size = msgspec.structs.replace(pieces[0].shard, payload_bytes=PAYLOAD + 4096)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, *pieces[::2])
        asked = [piece.shard for piece in pieces]
        assert list(await tier.contains(asked)) == [at % 2 == 0 for at in range(len(asked))]
        asked = [unknown, pieces[0].shard, other_size, pieces[1].shard, pieces[0].shard]
        assert list(await tier.contains(asked)) == [False, True, False, False, True]
        assert list(await tier.contains([])) == []
        await tier.delete([pieces[0].shard])
        assert list(await tier.contains([pieces[0].shard, pieces[2].shard])) == [False, True]
        await store(tier, pieces[0])
        assert list(await tier.contains([pieces[0].shard])) == [True]


async def test_a_namespace_that_was_not_added_is_a_miss_and_takes_no_writes(
    open_kit: Open,
) -> None:
    async with open_kit() as tier:
        with pytest.raises(TierMissError):
            await fetch(tier, make_piece(SPACE).shard)
        with pytest.raises(TierError):
            await store(tier, make_piece(SPACE))


async def test_writing_again_changes_nothing(open_kit: Open) -> None:
    piece = make_piece(SPACE)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, piece)
        used = tier.health().used_bytes
        await tier.add_namespace(SPACE)
        await store(tier, piece)
        await asyncio.gather(store(tier, piece), store(tier, piece))
        assert tier.health().used_bytes == used
        assert await fetch(tier, piece.shard) == content(piece)
        assert (await tier.check()).clean


async def test_deleted_shards_are_gone_and_their_bytes_too(open_kit: Open) -> None:
    pieces = [make_piece(SPACE, number) for number in range(4)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, *pieces)
        await tier.delete([piece.shard for piece in pieces[1:]])
        await tier.delete([piece.shard for piece in pieces[1:]])  # absent shards are not an error
        for piece in pieces[1:]:
            with pytest.raises(TierMissError):
                await fetch(tier, piece.shard)
        assert await fetch(tier, pieces[0].shard) == content(pieces[0])
        await tier.delete([pieces[0].shard])
        assert tier.health().used_bytes == 0
        assert (await tier.check()).clean


async def test_a_scan_after_opening_anew_finds_everything(open_kit: Open) -> None:
    pieces = [make_piece(SPACE, number, at) for number in range(3) for at in range(3)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await tier.add_namespace(OTHER)
        await store(tier, *pieces)
        used = tier.health().used_bytes
    async with open_kit() as tier:
        assert tier.health().epoch == 1
        namespaces, shards = await scanned(tier)
        assert namespaces == {SPACE.digest, OTHER.digest}
        assert shards == {piece.shard for piece in pieces}
        assert tier.health().used_bytes == used
        assert (await tier.check()).clean
        for piece in pieces:
            assert await fetch(tier, piece.shard) == content(piece)
        await store(tier, make_piece(OTHER))  # the scan registered it


async def test_a_scan_gives_the_namespace_back_as_it_was(open_kit: Open) -> None:
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
    async with open_kit() as tier:
        assert [namespace async for namespace, _ in tier.scan()] == [SPACE]


async def test_reads_do_not_wait_for_the_scan(open_kit: Open) -> None:
    piece = make_piece(SPACE)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, piece)
    async with open_kit() as tier:
        assert await fetch(tier, piece.shard) == content(piece)


async def test_reads_writes_and_deletes_go_on_while_it_scans(open_kit: Open) -> None:
    old = [make_piece(SPACE, number) for number in range(20)]
    new = [make_piece(SPACE, number) for number in range(20, 40)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, *old)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await asyncio.gather(
            scanned(tier),
            store(tier, *new),
            *(tier.delete([piece.shard]) for piece in old[:10]),
            *(fetch(tier, piece.shard) for piece in old[10:]),
        )
        assert (await tier.check()).problems == ()
        assert (await tier.check()).shards == 30


async def test_bytes_that_do_not_match_the_checksum_given_are_never_served(
    open_kit: Open,
) -> None:
    damaged = make_piece(SPACE)._replace(checksum=Checksum(bytes(16)))
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, damaged)
        with pytest.raises(TierMissError):
            await fetch(tier, damaged.shard)
        assert tier.health().rejected == 1
        assert tier.health().used_bytes == 0
        await store(tier, make_piece(SPACE))
        assert await fetch(tier, damaged.shard) == content(make_piece(SPACE))


async def test_a_shard_of_another_size_than_its_table_says_is_refused(open_kit: Open) -> None:
    shard, payload, checksum = make_piece(SPACE)
    wrong = StoredShard(shard.namespace, shard.key, shard.shard, shard.payload_bytes - 1)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        with pytest.raises(TierError):
            await tier.write(wrong, payload, checksum)
        with pytest.raises(TierMissError):
            await fetch(tier, wrong)


async def test_a_namespace_with_another_table_is_refused(open_kit: Open) -> None:
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        with pytest.raises(TierError):
            await tier.add_namespace(SAME_DIGEST)


async def test_a_buffer_of_another_length_is_refused(open_kit: Open) -> None:
    piece = make_piece(SPACE)
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        with pytest.raises(ValueError, match="12288"):
            await tier.write(piece.shard, piece.payload[:10_000], piece.checksum)
        with pytest.raises(ValueError, match="12288"):
            await tier.read(piece.shard, page_buffer(20_000))


async def test_capacity_is_not_exceeded_by_more_than_a_margin(open_kit: Open) -> None:
    big = make_namespace("big", (CAPACITY // 8,))
    async with open_kit() as tier:
        if tier.shared:
            assert tier.health().capacity_bytes is None
            return
        await tier.add_namespace(big)
        results = await asyncio.gather(
            *(store(tier, make_piece(big, number)) for number in range(12)),
            return_exceptions=True,
        )
        refused = [result for result in results if result is not None]
        assert all(isinstance(result, TierError) for result in refused)
        assert len(refused) >= 3
        health = tier.health()
        assert health.used_bytes <= CAPACITY * 17 // 16
        assert health.writable
        await tier.delete([make_piece(big, number).shard for number in range(12)])
        await store(tier, make_piece(big))


async def test_a_closed_tier_fails_and_says_so(open_kit: Open) -> None:
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, make_piece(SPACE))
    assert not tier.health().online
    with pytest.raises(TierError):
        await fetch(tier, make_piece(SPACE).shard)
    with pytest.raises(TierError):
        await store(tier, make_piece(SPACE, 1))
    with pytest.raises(TierError):
        await tier.contains([make_piece(SPACE).shard])
    with pytest.raises(TierError):
        await tier.delete([make_piece(SPACE).shard])


async def test_closing_finishes_what_was_queued(open_kit: Open) -> None:
    pieces = [make_piece(SPACE, number) for number in range(20)]
    async with open_kit() as tier:
        await tier.add_namespace(SPACE)
        writes = [asyncio.create_task(store(tier, piece)) for piece in pieces]
        await asyncio.sleep(0)
        await tier.close(5)
        await asyncio.gather(*writes)
    async with open_kit() as tier:
        _, shards = await scanned(tier)
        assert shards == {piece.shard for piece in pieces}


async def test_a_buffer_is_left_alone_after_a_cancelled_read_has_ended(open_kit: Open) -> None:
    big = make_namespace("big", (1 << 20,))
    piece = make_piece(big)
    chosen = random.Random(1)
    async with open_kit() as tier:
        await tier.add_namespace(big)
        await store(tier, piece)
        buffers = [page_buffer(1 << 20) for _ in range(40)]
        for buffer in buffers:
            try:
                async with asyncio.timeout(chosen.random() * 0.002):
                    await tier.read(piece.shard, buffer)
            except TimeoutError:
                pass
            buffer[:] = bytes(len(buffer))  # the call has ended: the buffer is free
        assert await fetch(tier, piece.shard) == content(piece)
        assert not any(any(buffer) for buffer in buffers)


@pytest.mark.parametrize("seed", range(3))
async def test_any_history_ends_clean_and_serves_no_wrong_byte(open_kit: Open, seed: int) -> None:
    chosen = random.Random(seed)
    pieces = [make_piece(SPACE, number, at) for number in range(12) for at in range(3)]

    async def act(piece: Piece) -> None:
        try:
            async with asyncio.timeout(chosen.choice([0, 0.0005, 0.002, 5])):
                match chosen.randrange(3):
                    case 0:
                        await store(tier, piece)
                    case 1:
                        assert await fetch(tier, piece.shard) == content(piece)
                    case _:
                        await tier.delete([piece.shard])
        except (TimeoutError, TierMissError):
            pass

    for _ in range(2):
        async with open_kit() as tier:
            await tier.add_namespace(SPACE)
            await scanned(tier)
            for _ in range(10):
                await asyncio.gather(*(act(chosen.choice(pieces)) for _ in range(30)))
            assert (await tier.check()).problems == ()
            assert tier.health().rejected == 0
            assert tier.health().queued_reads == tier.health().queued_writes == 0


@pytest.mark.parametrize("damage", DAMAGE)
async def test_what_is_damaged_in_the_store_is_a_miss_and_goes(kit: Kit, damage: str) -> None:
    piece = make_piece(SPACE)
    async with kit.open() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, piece, make_piece(SPACE, 1))
        kit.change(piece.shard, lambda raw: DAMAGE[damage](raw, piece))
        assert len((await tier.check()).problems) >= 1
        with pytest.raises(TierMissError):
            await fetch(tier, piece.shard)
        health = tier.health()
        assert (health.rejected, health.errors) == (1, 0)
        assert (health.online, health.writable) == (True, True)
        assert (await tier.check()).problems == ()
        await store(tier, piece)
        assert await fetch(tier, piece.shard) == content(piece)
        assert (await tier.check()).shards == 2


async def test_two_services_share_a_store_or_one_of_them_waits(kit: Kit) -> None:
    mine, both, others = (make_piece(SPACE, number) for number in range(3))
    async with kit.open() as here, kit.open() as there:
        if not here.shared:
            assert not there.health().online
            return
        await asyncio.gather(here.add_namespace(SPACE), there.add_namespace(SPACE))
        await asyncio.gather(store(here, mine, both), store(there, both), store(there, others))
        for piece in (mine, both, others):
            assert await fetch(here, piece.shard) == content(piece)
            assert await fetch(there, piece.shard) == content(piece)
        assert list(await there.contains([mine.shard, others.shard])) == [True, True]
        await here.delete([both.shard, others.shard])
        for piece in (both, others):
            with pytest.raises(TierMissError):
                await fetch(there, piece.shard)
        assert (await there.check()).problems == ()
        assert (await here.check()).shards == 1
        with pytest.raises(TierError):
            await there.add_namespace(SAME_DIGEST)


async def test_a_namespace_with_another_table_in_the_store_is_refused(kit: Kit) -> None:
    async with kit.open() as tier:
        await tier.add_namespace(SPACE)
    async with kit.open() as tier:
        with pytest.raises(TierError, match="cannot be stored there"):
            await tier.add_namespace(SAME_DIGEST)
