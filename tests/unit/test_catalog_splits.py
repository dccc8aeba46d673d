# SPDX-License-Identifier: Apache-2.0
"""Ranks with several shards, engines that divide them differently, and ranks that hold the same."""

import pytest

from kvhaven.catalog.actions import CommitResult, MemberId, TierName
from kvhaven.types import Checksum, ChunkKey
from tests.unit.catalog_kit import PAGE, Node, checksums_of, keys_of, spec

KEYS = keys_of("a", 3)
KEY = KEYS[0]
ONE, HALVES, QUARTERS = (0b1111,), (0b0011, 0b1100), (1, 2, 4, 8)
TWINS = (0b01, 0b01, 0b10, 0b10)


def four_heads() -> Node:
    """Return a node with engines of one, two and four ranks over the same four heads."""
    node = Node(pages=32, split=HALVES)
    node.attach("one", split=ONE)
    node.attach("quarters", split=QUARTERS)
    return node


def save(node: Node, session: str, ranks: int, keys: list[ChunkKey] = KEYS, number: int = 1) -> int:
    """Have all ranks of a session save; return how many parts were granted."""
    granted = 0
    for rank in range(ranks):
        member = f"{session}/{rank}"
        for grant in node.reserve(keys, member, save=number):
            if grant is not None:
                node.commit(grant, member)
                granted += 1
    node.catalog.check()
    return granted


@pytest.mark.parametrize(("session", "ranks"), [("one", 1), ("s", 2), ("quarters", 4)])
def test_a_chunk_is_visible_when_all_ranks_have_written_all_their_shards(
    session: str, ranks: int
) -> None:
    node = four_heads()
    grants = [node.grant(KEY, f"{session}/{rank}") for rank in range(ranks)]
    assert {grant.extent for grant in grants} == {grants[0].extent}
    assert sum(grant.shards for grant in grants) == 0b1111
    for rank, grant in enumerate(grants[:-1]):
        assert node.commit(grant, f"{session}/{rank}") is CommitResult.WAITING
        assert node.acquire([KEY]).chunks == ()
    assert node.commit(grants[-1], f"{session}/{ranks - 1}") is CommitResult.RESIDENT
    assert node.catalog.checksums(KEY) == checksums_of(KEY, 4)
    node.catalog.check()


def test_engines_that_divide_the_heads_differently_share_what_one_has_saved() -> None:
    node = four_heads()
    assert save(node, "one", 1) == 3
    for session, ranks in (("s", 2), ("quarters", 4)):
        assert save(node, session, ranks) == 0
        assert len(node.acquire(KEYS, session).chunks) == 3


def test_a_chunk_that_one_engine_writes_is_not_granted_to_another() -> None:
    node = four_heads()
    grants = [node.grant(KEY, f"quarters/{rank}") for rank in (0, 3)]
    for member in ("one/0", "s/0", "s/1"):
        assert node.reserve([KEY], member) == [None]
    node.commit(grants[0], "quarters/0")
    assert node.reserve([KEY], "s/1") == [None], "rank 3 is still writing"


@pytest.mark.parametrize(("session", "ranks"), [("one", 1), ("s", 2), ("quarters", 4)])
def test_what_another_save_left_incomplete_is_written_anew(session: str, ranks: int) -> None:
    """Also by the same ranks: what never came may have been held back because all was wrong."""
    node = four_heads()
    for left in (0, 3):
        first = node.grant(KEY, f"quarters/{left}")
        node.commit(first, f"quarters/{left}")
    used = node.catalog.stats().used_bytes
    assert save(node, session, ranks, [KEY], 2) == ranks
    assert node.resident([KEY]) == 1
    assert node.catalog.stats().used_bytes == used, "the old one is freed at once"
    assert node.catalog.stats().evictions == 0


def test_what_was_left_is_free_although_its_engine_may_come_to_it_late() -> None:
    node = four_heads()
    node.commit(node.grant(KEY, "s/0"), "s/0")
    new = node.grant(KEY, "one/0")
    assert node.reserve([KEY], "s/1") == [None], "the other engine is writing all of it now"
    assert node.commit(new, "one/0") is CommitResult.RESIDENT
    assert node.reserve([KEY], "s/1") == [None]
    node.catalog.check()


def test_a_save_does_not_go_on_with_what_an_earlier_one_of_its_engine_left() -> None:
    node = four_heads()
    node.commit(node.grant(KEY, "s/0", save=1), "s/0")
    late = node.grant(KEY, "s/1", save=2)
    assert node.commit(late, "s/1") is CommitResult.WAITING
    assert node.reserve([KEY], "s/1", save=2) == [None]
    assert node.commit(node.grant(KEY, "s/0", save=2), "s/0") is CommitResult.RESIDENT


def test_what_is_left_and_asked_for_twice_is_granted_once() -> None:
    node = four_heads()
    node.commit(node.grant(KEY, "s/0"), "s/0")
    assert [grant is None for grant in node.reserve([KEY, KEY], "one/0")] == [False, True]
    node.catalog.check()


def test_one_of_two_ranks_that_hold_the_same_shard_writes_it() -> None:
    node = Node(split=TWINS)
    grants = [node.grant(KEY, f"s/{rank}") for rank in range(4)]
    assert [grant.shards for grant in grants] == [0b01, 0, 0b10, 0]
    for rank in (1, 0, 2):
        assert node.commit(grants[rank], f"s/{rank}") is CommitResult.WAITING
        assert node.resident([KEY]) == 0
        node.catalog.check()
    assert node.commit(grants[3], "s/3") is CommitResult.RESIDENT
    assert node.catalog.checksums(KEY) == checksums_of(KEY, 2)
    assert node.catalog.stats().commits == 2


def test_nothing_is_visible_without_the_word_of_the_rank_that_had_nothing_to_write() -> None:
    """A load failed on rank 1: all ranks computed from wrong KV, and it alone knows."""
    node = Node(split=TWINS)
    for rank in (0, 2, 3):
        node.commit(node.grant(KEY, f"s/{rank}"), f"s/{rank}")
    assert node.resident([KEY]) == 0
    silent = node.grant(KEY, "s/1")
    assert silent.shards == 0
    node.catalog.abort(MemberId("s/1"), KEY, silent.extent.generation)
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0


def test_a_rank_that_never_asked_keeps_a_chunk_out_of_sight_and_in_nobodys_way() -> None:
    node = Node(split=TWINS)
    for rank in (0, 2, 3):
        node.commit(node.grant(KEY, f"s/{rank}", save=1), f"s/{rank}")
    node.catalog.check()
    assert node.resident([KEY]) == 0
    assert save(node, "s", 4, [KEY], 2) == 4
    assert node.resident([KEY]) == 1
    assert node.save(keys_of("b", 8)) == 8, "and it gives way to others"


def test_a_commit_that_came_before_the_twin_asked_leaves_it_nothing_to_write() -> None:
    node = Node(split=TWINS)
    node.commit(node.grant(KEY, "s/1"), "s/1")
    assert node.grant(KEY, "s/0").shards == 0


@pytest.mark.parametrize("end", ["abort", "gone"])
def test_when_the_twin_that_writes_gives_up_nothing_is_left(end: str) -> None:
    node = Node(split=TWINS)
    writer, other = node.grant(KEY, "s/0"), node.grant(KEY, "s/1")
    if end == "abort":
        node.catalog.abort(MemberId("s/0"), KEY, writer.extent.generation)
    else:
        node.catalog.lost(MemberId("s/0"))
        node.catalog.check()
    assert node.commit(other, "s/1") is CommitResult.DISCARDED
    if end == "gone":
        assert node.catalog.stats().quarantined_bytes == 2 * PAGE
        node.catalog.gone(MemberId("s/0"))
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0


def test_a_twin_that_is_lost_takes_its_word_back() -> None:
    """What it was granted may never have reached it."""
    node = Node(split=TWINS)
    writer, silent = node.grant(KEY, "s/0"), node.grant(KEY, "s/1")
    node.catalog.lost(MemberId("s/1"))
    assert node.commit(writer, "s/0") is CommitResult.DISCARDED
    node.attach_rank("s", 1, node.namespace, TWINS)
    assert node.commit(silent, "s/1") is CommitResult.DISCARDED
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_commit_with_a_wrong_number_of_checksums_gives_the_chunk_up(count: int) -> None:
    node = four_heads()
    grant = node.grant(KEY, "s/0")
    checksums = [Checksum(b"c" * 16)] * count
    generation = grant.extent.generation
    result = node.catalog.commit(MemberId("s/0"), KEY, generation, checksums)
    assert result is CommitResult.REFUSED
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0
    assert node.catalog.stats().refused_commits == 1


def test_chunks_go_to_a_tier_and_back_with_all_heads_whoever_wrote_them() -> None:
    node = Node(pages=64, split=HALVES, tiers=[spec()])
    node.attach("quarters", split=QUARTERS)
    assert save(node, "s", 2) == 6
    for write in node.writes():
        assert write.checksums == checksums_of(write.key, 4)
        node.catalog.tier_write_done(write.tier, write.key, ok=True)
    node.catalog.clear(tier=TierName("memory"))
    answer = node.acquire(KEYS, "quarters")
    assert answer.promoting == 3
    for read in node.reads():
        node.finish(read)
    assert node.resident(KEYS) == 3
    assert node.catalog.checksums(KEY) == checksums_of(KEY, 4)


def test_a_chunk_of_which_a_tier_lacks_heads_is_neither_promoted_nor_counted_twice() -> None:
    node = Node(pages=32, split=HALVES, tiers=[spec()])
    for bit in (0, 1, 3):
        node.catalog.tier_found(spec().name, node.namespace.digest, KEY, bit, PAGE)
    assert node.acquire([KEY]).promoting == 0
    assert save(node, "s", 2, [KEY]) == 2
    (write,) = node.writes()
    node.catalog.tier_write_done(write.tier, write.key, ok=True)
    node.catalog.check()
    assert node.catalog.stats().tiers[spec().name].used_bytes == 4 * 2 * PAGE
