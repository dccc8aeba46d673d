# SPDX-License-Identifier: Apache-2.0
"""Leases and promotions."""

import pytest

from kvhaven.catalog import leases
from kvhaven.catalog.actions import (
    Acquisition,
    LeaseId,
    MemberId,
    Prefix,
    SessionId,
    Source,
    Update,
)
from kvhaven.catalog.work import Pace
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey, NamespaceDigest
from tests.unit.catalog_kit import DISK, PAGE, Node, checksums_of, keys_of, spec

PIECE = Pace().leases


def offered(answer: Acquisition) -> list[ChunkKey]:
    return [chunk.key for chunk in answer.chunks]


def test_the_longest_resident_prefix_is_leased_at_once() -> None:
    node, keys = Node(), keys_of("a", 5)
    node.save(keys[:2])
    node.save(keys[3:], parent=keys[2])
    answer = node.acquire(keys)
    assert offered(answer) == keys[:2]
    assert answer.promoting == 0
    assert {chunk.source for chunk in answer.chunks} == {Source.MEMORY}
    assert node.catalog.stats().leased_bytes == 2 * PAGE
    assert node.catalog.take_actions() == []


def test_a_half_written_chunk_is_never_offered() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.commit(node.grant(keys[0], "s/0"), "s/0")
    assert offered(node.acquire(keys)) == []
    node.commit(node.grant(keys[0], "s/1"), "s/1")
    assert offered(node.acquire(keys)) == keys


def test_the_same_ticket_is_one_lease() -> None:
    node, keys = Node(), keys_of("a", 2)
    node.save(keys)
    session, lease_id, digest = node.session, LeaseId(7), node.namespace.digest
    first = node.catalog.acquire(session, lease_id, digest, keys)
    assert node.catalog.acquire(session, lease_id, digest, keys) == first
    node.catalog.release(session, lease_id)
    assert node.catalog.stats().leased_bytes == 0
    node.catalog.check()


def test_two_sessions_lease_the_same_chunk_independently() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.attach("t")
    node.save(keys)
    mine, yours = node.acquire(keys), node.acquire(keys, "t")
    assert mine.chunks == yours.chunks
    node.catalog.release(node.session, mine.lease_id)
    node.catalog.release(node.session, yours.lease_id)  # not that session's: nothing happens
    assert node.catalog.stats().leased_bytes == PAGE


def test_a_lease_ends_when_all_ranks_have_loaded_and_not_before() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    for chunks in (1, 0):  # it counts once
        assert node.catalog.loaded(node.session, lease_id, MemberId("s/0")) == chunks
        assert node.catalog.stats().leases == 1
    assert node.catalog.loaded(node.session, lease_id, MemberId("s/1")) == 1
    assert node.catalog.loaded(node.session, lease_id, MemberId("s/1")) == 0
    assert node.catalog.stats().leases == 0
    node.catalog.check()


def test_only_a_rank_of_the_session_can_say_loaded() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.attach("t")
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    for stranger in ("t/0", "s/None"):
        with pytest.raises(KVHavenError, match="not a rank of session s"):
            node.catalog.loaded(node.session, lease_id, MemberId(stranger))
    node.catalog.loaded(node.session, lease_id, MemberId("nobody"))
    assert node.catalog.stats().leases == 1


def test_releasing_what_is_not_leased_is_fine() -> None:
    node = Node()
    node.catalog.release(node.session, LeaseId(1))
    node.catalog.release(SessionId("unknown"), LeaseId(1))
    assert node.catalog.finalize(node.session, LeaseId(1)) == Acquisition(LeaseId(1), Prefix(), 0)


def test_a_leased_chunk_outlives_any_pressure() -> None:
    node, keys = Node(pages=16, pin_limit=16), keys_of("a", 4)
    node.save(keys)
    before = node.acquire(keys)
    assert node.save(keys_of("b", 40)) < 16
    assert node.acquire(keys).chunks == before.chunks


def test_an_acquire_is_cut_at_the_pin_limit() -> None:
    node, keys = Node(pages=16, pin_limit=3), keys_of("a", 5)
    node.save(keys)
    first = node.acquire(keys)
    assert offered(first) == keys[:3]
    assert offered(node.acquire(keys)) == keys[:3]  # pinned already, so it costs nothing
    node.save(keys_of("b", 1))
    assert offered(node.acquire(keys_of("b", 1))) == []
    node.catalog.check()


def test_a_chunk_in_a_tier_is_promoted_and_the_ticket_told() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.save(keys[:1])
    node.store(keys[1:])
    answer = node.acquire(keys)
    assert (offered(answer), answer.promoting) == (keys[:1], 2)
    reads = node.reads()
    assert [read.key for read in reads] == keys[1:]
    node.finish(reads[1])
    assert node.of_type(Update) == []
    node.finish(reads[0])
    final = Acquisition(answer.lease_id, final_chunks(node, answer, keys), 0)
    assert node.of_type(Update) == [Update(node.session, final)]
    assert [chunk.source for chunk in final.chunks] == [Source.MEMORY, Source.TIER, Source.TIER]
    assert node.catalog.checksums(keys[2]) == checksums_of(keys[2])


def final_chunks(node: Node, answer: Acquisition, keys: list[ChunkKey]) -> Prefix:
    again = node.catalog.acquire(node.session, answer.lease_id, node.namespace.digest, keys)
    assert offered(again) == keys
    return again.chunks


def test_what_is_being_promoted_is_read_once_for_all() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.attach("t")
    node.store(keys)
    first, second = node.acquire(keys), node.acquire(keys, "t")
    assert (first.promoting, second.promoting) == (1, 1)
    (read,) = node.reads()
    node.finish(read)
    updates = node.of_type(Update)
    assert {u.session for u in updates if isinstance(u, Update)} == set(node.sessions.values())
    assert node.catalog.stats().leased_bytes == PAGE


def test_a_failed_promotion_cuts_the_ticket_before_it() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.store(keys)
    lease_id = node.acquire(keys).lease_id
    reads = node.reads()
    node.finish(reads[0])
    node.finish(reads[1], ok=False)
    (update,) = node.of_type(Update)
    assert isinstance(update, Update)
    assert update.acquisition.lease_id == lease_id
    assert offered(update.acquisition) == keys[:1]
    node.finish(reads[2])
    assert node.resident(keys) == 2
    assert node.catalog.stats().leased_bytes == PAGE
    node.catalog.release(node.session, lease_id)
    assert node.acquire(keys).promoting == 0, "what the tier did not have is not asked for again"


def test_a_ticket_that_ends_up_with_nothing_is_forgotten() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.store(keys)
    node.acquire(keys)
    node.finish(node.reads()[0], ok=False)
    assert len(node.of_type(Update)) == 1
    assert node.catalog.stats().leases == 0
    assert node.allocator.used_bytes == 0


def test_a_read_with_too_few_checksums_is_a_failure() -> None:
    node, keys = Node(world_size=2, tiers=[spec()]), keys_of("a", 1)
    node.store(keys)
    node.acquire(keys)
    (read,) = node.reads()
    node.catalog.tier_read_done(read.tier, read.key, read.extent, checksums_of(keys[0], 1))
    assert node.resident(keys) == 0
    node.catalog.check()


def test_settling_answers_with_what_is_ready_and_lets_promotions_go_on() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.save(keys[:1])
    node.store(keys[1:])
    lease_id = node.acquire(keys).lease_id
    reads = node.reads()
    answer = node.catalog.finalize(node.session, lease_id)
    assert (offered(answer), answer.promoting) == (keys[:1], 0)
    assert node.catalog.finalize(node.session, lease_id) == answer
    for read in reads:
        node.finish(read)
    assert node.of_type(Update) == []
    assert node.resident(keys) == 3
    assert node.catalog.stats().leased_bytes == PAGE


def test_a_resident_chunk_behind_a_promotion_is_kept_for_the_ticket() -> None:
    node, keys = Node(pages=16, pin_limit=16, tiers=[spec()]), keys_of("a", 3)
    node.save(keys[2:], parent=keys[1])
    for write in node.writes():
        node.catalog.tier_write_done(write.tier, write.key, ok=True)
    node.store(keys[:2])
    lease_id = node.acquire(keys).lease_id
    reads = node.reads()
    node.save(keys_of("b", 40))
    for read in reads:
        node.finish(read)
    again = node.catalog.acquire(node.session, lease_id, node.namespace.digest, keys)
    assert [c.source for c in again.chunks] == [Source.TIER, Source.TIER, Source.MEMORY]


def test_promotions_are_cut_to_the_space_there_is() -> None:
    node, keys = Node(pages=16, pin_limit=16, tiers=[spec()]), keys_of("a", 8)
    held = keys_of("held", 12)
    node.reserve(held)
    node.store(keys)
    answer = node.acquire(keys)
    assert answer.promoting == 4
    assert [read.key for read in node.reads()] == keys[:4]
    node.catalog.check()


def test_promotions_count_against_the_pin_limit() -> None:
    node, keys, resident = Node(pages=16, pin_limit=4, tiers=[spec()]), *map(keys_of, "ar", (4, 3))
    node.save(resident)
    node.store(keys)
    assert len(node.acquire(resident[:2]).chunks) == 2
    assert node.acquire(keys).promoting == 2
    assert not node.acquire(resident[2:]).chunks
    node.catalog.check()


def test_a_disk_that_hangs_leaves_room_for_what_is_resident() -> None:
    """Its reads never end; an eighth of what may be pinned stays for memory."""
    node, keys, resident = Node(pages=32, tiers=[spec()]), *map(keys_of, "ar", (20, 2))
    node.save(resident)
    node.store(keys)
    assert node.catalog.prefetch(node.namespace.digest, keys) == 14
    node.acquire(keys)
    node.catalog.tier_online(DISK, False)
    node.catalog.check()
    assert len(node.acquire(resident).chunks) == 2


def test_two_prompts_that_fit_the_pin_limit_are_read_from_the_disk_together() -> None:
    """The second is not told a miss since the first is long."""
    node, first, second = Node(pages=40, tiers=[spec()]), *map(keys_of, "ab", (12, 4))
    node.store([*first, *second])
    assert [node.acquire(first).promoting, node.acquire(second).promoting] == [12, 4]
    node.catalog.check()


def test_a_prompt_longer_than_the_disk_may_be_read_at_a_time_comes_whole() -> None:
    node, keys = Node(pages=16, tiers=[spec()]), keys_of("a", 8)
    node.store(keys)
    assert node.acquire(keys).promoting == 7
    while reads := node.reads():
        for read in reads:
            node.finish(read)
    assert node.catalog.stats().leased_bytes == 8 * PAGE


def test_a_chunk_larger_than_may_be_read_at_a_time_is_read_alone() -> None:
    node, keys = Node(pages=16, pin_limit=1, tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    assert node.acquire(keys).promoting == 1
    node.catalog.check()


def test_nothing_is_promoted_from_a_tier_that_is_offline() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.store(keys)
    node.catalog.tier_online(DISK, online=False)
    assert node.acquire(keys).promoting == 0
    node.catalog.tier_online(DISK, online=True)
    assert node.acquire(keys).promoting == 1


def test_a_chunk_with_a_shard_missing_in_the_tier_is_not_promoted() -> None:
    node, keys = Node(world_size=2, tiers=[spec()]), keys_of("a", 1)
    node.catalog.tier_found(DISK, node.namespace.digest, keys[0], 0, PAGE)
    assert node.acquire(keys).promoting == 0


def test_the_first_lease_after_a_prefetch_says_that_it_came_from_a_tier() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    node.catalog.prefetch(node.namespace.digest, keys)
    for read in node.reads():
        node.finish(read)
    assert [chunk.source for chunk in node.acquire(keys).chunks] == [Source.TIER] * 2
    assert [chunk.source for chunk in node.acquire(keys).chunks] == [Source.MEMORY] * 2


def test_a_prefetch_promotes_without_a_lease() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.save(keys[:1])
    node.store(keys[1:])
    assert node.catalog.prefetch(node.namespace.digest, keys) == 2
    assert node.catalog.prefetch(node.namespace.digest, keys) == 0
    for read in node.reads():
        node.finish(read)
    assert node.resident(keys) == 3
    assert node.catalog.stats().leased_bytes == 0
    assert node.of_type(Update) == []


def test_a_discarded_chunk_is_never_offered_again_but_stays_while_leased() -> None:
    node, keys = Node(), keys_of("a", 2)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.discard(keys[0])
    node.catalog.check()
    assert offered(node.acquire(keys)) == []
    assert node.allocator.used_bytes == 2 * PAGE
    assert node.save(keys[:1]) == 1, "it can be written anew meanwhile"
    node.catalog.release(node.session, lease_id)
    assert node.allocator.used_bytes == 2 * PAGE


def test_a_chunk_discarded_while_its_ticket_waits_is_not_in_the_final_answer() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.save(keys[:2])
    node.store(keys[2:])
    assert offered(node.acquire(keys)) == keys[:2]
    reads = node.reads()
    node.catalog.discard(keys[1])
    node.finish(reads[-1])
    (update,) = node.of_type(Update)
    assert isinstance(update, Update)
    assert offered(update.acquisition) == keys[:1]


def test_a_verification_of_an_extent_that_was_replaced_drops_nothing() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    old = node.acquire(keys).chunks[0].extent
    node.catalog.clear()
    node.save(keys)
    assert node.catalog.checksums(keys[0], old) is None
    node.catalog.discard(keys[0], old)
    assert node.resident(keys) == 1


def test_strangers_are_refused() -> None:
    node = Node()
    with pytest.raises(KVHavenError, match="session x is not attached"):
        node.acquire(keys_of("a", 1), "x")
    unknown = NamespaceDigest(b"?" * 32)
    with pytest.raises(KVHavenError, match="unknown"):
        node.catalog.acquire(node.session, LeaseId(1), unknown, [])


def test_hits_misses_and_promotions_are_counted_by_chunk() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 4)
    node.save(keys[:1])
    node.store(keys[1:3])
    node.acquire(keys)
    for read in node.reads():
        node.finish(read)
    stats = node.catalog.stats()
    assert (stats.hit_chunks, stats.missed_chunks, stats.promoted_chunks) == (1, 1, 2)
    assert (stats.awaited_chunks, stats.hit_rate) == (2, 0.75)


def test_a_chunk_that_was_prefetched_and_then_requested_is_one_hit() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 4)
    node.store(keys[:2])
    node.catalog.prefetch(node.namespace.digest, keys)
    for read in node.reads():
        node.finish(read)
    node.acquire(keys)
    totals = node.catalog.totals()
    assert (totals.hit_chunks, totals.awaited_chunks, totals.promoted_chunks) == (2, 0, 2)
    assert totals.hit_rate == 0.5


def test_prefetches_pile_up_to_a_bound_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MOST_PREFETCHED", 10_000)
    node, keys = Node(pages=8192, pin_limit=8192), keys_of("a", 5000)
    node.save(keys)
    node.attach("t")
    for _ in range(100):
        node.catalog.prefetch(node.namespace.digest, keys, session=node.session)
        node.catalog.prefetch(node.namespace.digest, keys, session=node.sessions["t"])
    node.catalog.check()
    assert node.acquire(keys).promoting == 1, "that is more than a piece of work"
    pieces = 0
    while not node.of_type(Update):
        assert node.catalog.work()
        pieces += 1
    later = -(-5000 // PIECE) - 1
    assert pieces == later, "the prefetches go on when nobody waits"
    while node.catalog.work():
        pieces += 1
        node.catalog.check()
    assert pieces <= 6 * later, "two of each session go on, and the others had a piece each"


def test_a_lease_that_is_released_leaves_no_work_behind() -> None:
    node, keys = Node(pages=4096, pin_limit=4096), keys_of("a", 3000)
    node.save(keys)
    for _ in range(3):
        node.catalog.release(node.session, node.acquire(keys).lease_id)
        assert not node.catalog.busy
        node.catalog.check()
    lease_id = node.acquire(keys).lease_id
    assert len(node.catalog.finalize(node.session, lease_id).chunks) == PIECE
    assert not node.catalog.busy
    node.catalog.check()
