# SPDX-License-Identifier: Apache-2.0
"""The contract of `Tier` for reads from another node's memory, over TCP and over NIXL.

Peers are only read. Writes, deletes and scans of the suite go to a tier over memory that also fills
the other node. Left out is what concerns the files of a store: damaged headers, foreign tables.
"""

import asyncio
import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.peers import peer
from kvhaven.peers import tier as peer_tier
from kvhaven.testing import tier_suite, tiers
from kvhaven.testing.faulty_tier import FaultyTier
from kvhaven.testing.tier_suite import (  # noqa: F401 - tests and a fixture, collected here
    open_kit,
    test_a_batch_is_asked_for_at_once_and_answered_in_its_order,
    test_a_buffer_is_left_alone_after_a_cancelled_read_has_ended,
    test_a_closed_tier_fails_and_says_so,
    test_any_history_ends_clean_and_serves_no_wrong_byte,
    test_bytes_that_do_not_match_the_checksum_given_are_never_served,
    test_deleted_shards_are_gone_and_their_bytes_too,
    test_reads_do_not_wait_for_the_scan,
    test_reads_writes_and_deletes_go_on_while_it_scans,
    test_what_a_tenant_wrote_is_there_for_it_alone,
    test_what_was_not_written_is_a_miss,
    test_what_was_written_is_read,
    test_writing_again_changes_nothing,
)
from kvhaven.testing.tiers import Kit, content, fetch, make_namespace, make_piece, store, until
from kvhaven.tiers.base import Tier
from kvhaven.tiers.health import Breaker
from tests.conformance import test_tier_faults as faults
from tests.other_node import Buffers, Pair, pair_of
from tests.timed_calls import DEADLINE_S, SEEDS

SPACE = make_namespace()


@pytest.fixture(scope="module", params=["tcp", "nixl"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.param) as pair:
        yield pair


@pytest.fixture
def kit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Kit:
    buffers = Buffers(pair.arena)  # NIXL reads into the arena only
    for module in (tier_suite, tiers, faults):
        monkeypatch.setattr(module, "page_buffer", buffers)
    return pair.kit()


@pytest.mark.parametrize("number", range(3))
async def test_a_damaged_byte_is_a_miss(kit: Kit, number: int) -> None:
    piece = make_piece(SPACE, number)
    at = (0, 5000, 9999)[number]

    def flip(raw: bytes) -> bytes:
        changed = bytearray(raw)
        changed[4096 + at] ^= 1
        return bytes(changed)

    async with kit.open() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, piece)
        kit.change(piece.shard, flip)
        with pytest.raises(TierMissError):
            await fetch(tier, piece.shard)
        assert (tier.health().rejected, tier.health().misses) == (1, 1)
        await store(tier, piece)
        assert await fetch(tier, piece.shard) == content(piece)


async def test_nothing_stays_pinned(kit: Kit, pair: Pair) -> None:
    pieces = [make_piece(SPACE, number) for number in range(20)]
    async with kit.open() as tier:
        await tier.add_namespace(SPACE)
        await store(tier, *pieces)
        read = await asyncio.gather(*(fetch(tier, piece.shard) for piece in pieces))
        assert read == [content(piece) for piece in pieces]
        await until(lambda: not pair.node.open_loans)


async def _remove_damaged(peers: list[Tier]) -> None:
    """Read everything, which removes what is damaged; three such reads leave out the peer."""
    for piece in faults.PIECES:
        await until(lambda: all(tier.health().online for tier in peers))
        with contextlib.suppress(TierMissError, TierError):
            assert await fetch(peers[-1], piece.shard) == content(piece)
    await until(lambda: all(tier.health().online for tier in peers))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_wrong_byte_no_late_answer_and_no_leak(
    kit: Kit, pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short pauses: so much damage would leave out the peer for most of the time."""
    monkeypatch.setattr(peer_tier, "_PING_S", 0.02)
    breaker = functools.partial(Breaker, threshold=3, pause_s=0.02, max_pause_s=0.1)
    monkeypatch.setattr(peer, "Breaker", lambda clock, **_: breaker(clock))
    await faults._settle(kit)
    before = faults._held()
    async with contextlib.AsyncExitStack() as stack:
        inner = [await stack.enter_async_context(kit.open()) for _ in range(2)]
        for tier in inner:
            await tier.add_namespace(faults.SPACE)
        await store(inner[0], *faults.PIECES)
        faulty = [FaultyTier(tier, seed, faults.FAULTS) for tier in inner]
        play = faults.Play(kit, faulty, seed)
        fewest = faults.READS // 5
        while play.counts["read"] < faults.READS or play.counts["read: right"] <= fewest:
            await asyncio.gather(*(play.call() for _ in range(faults.AT_ONCE)))
        assert play.counts["read: wrong"] == play.counts["contains: wrong"] == 0, play.counts
        assert play.counts["read: right"] > faults.READS // 5, play.counts
        assert play.latest_s < DEADLINE_S + faults.LATE_S
        assert sum((tier.injected for tier in faulty), Counter())["flip"] or faults.READS < 50
        await _remove_damaged(inner)
        await faults._check_what_is_left(inner)
        await until(lambda: not pair.node.open_loans)
    gc.collect()
    await until(lambda: all(now <= then for now, then in zip(faults._held(), before, strict=True)))
