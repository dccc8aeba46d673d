# SPDX-License-Identifier: Apache-2.0
"""Connections that close, processes that are gone, and what stays in quarantine meanwhile."""

import pytest

from kvhaven.catalog.actions import CommitResult, MemberId, SessionId, Update
from kvhaven.errors import KVHavenError
from kvhaven.types import NamespaceDigest
from tests.unit.catalog_kit import PAGE, Node, keys_of, namespace_of, spec

RANK, OTHER, SCHEDULER = MemberId("s/0"), MemberId("s/1"), MemberId("s/None")


def back(node: Node, member: MemberId, rank: int | None) -> None:
    shard_mask = 0 if rank is None else 1 << rank
    node.catalog.attach(
        node.session, member, rank, node.namespace.digest, node.world_size, shard_mask
    )


def test_what_a_lost_rank_was_writing_is_quarantined_until_it_is_gone() -> None:
    node, keys = Node(pages=16), keys_of("a", 16)
    node.reserve(keys)
    node.catalog.lost(RANK)
    node.attach("t")
    assert list(node.catalog.lost_members()) == [RANK]
    assert node.catalog.stats().quarantined_by == {RANK: 16 * PAGE}
    assert node.reserve(keys[:1], "t/0") == [None], "there is no space, though nothing is in sight"
    node.catalog.check()
    node.catalog.gone(RANK)
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0
    assert node.reserve(keys[:1], "t/0") != [None]


def test_a_rank_that_is_back_gets_discarded_for_what_it_had_reserved() -> None:
    node, keys = Node(), keys_of("a", 3)
    grants = [node.grant(key) for key in keys]
    node.commit(grants[0])
    node.catalog.lost(RANK)
    back(node, RANK, 0)
    assert list(node.catalog.lost_members()) == []
    assert node.commit(grants[1]) is CommitResult.DISCARDED
    node.catalog.abort(RANK, keys[2], grants[2].extent.generation)
    node.catalog.check()
    assert node.catalog.stats().used_bytes == PAGE
    assert node.resident(keys) == 1, "what it had committed before stays"
    assert node.save(keys) == 3


def test_a_shard_committed_before_the_rank_was_lost_counts() -> None:
    node, key = Node(world_size=2), keys_of("a", 1)[0]
    node.commit(node.grant(key, "s/0"), "s/0")
    node.catalog.lost(RANK)
    node.catalog.gone(RANK)
    node.catalog.check()
    assert node.commit(node.grant(key, "s/1"), "s/1") is CommitResult.RESIDENT


def test_a_lease_stays_while_a_lost_rank_may_still_be_loading() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.lost(RANK)
    node.catalog.loaded(node.session, lease_id, OTHER)
    assert node.catalog.stats().leased_bytes == 2 * PAGE
    assert node.catalog.stats().quarantined_bytes == 2 * PAGE
    node.catalog.gone(RANK)
    node.catalog.check()
    assert node.catalog.stats().leased_bytes == 0


def test_a_lost_rank_that_is_back_can_acknowledge() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.lost(RANK)
    back(node, RANK, 0)
    node.catalog.loaded(node.session, lease_id, RANK)
    assert node.catalog.stats().leases == 0


def test_a_lost_scheduler_keeps_its_leases() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.lost(SCHEDULER)
    assert node.catalog.stats().leases == 1
    back(node, SCHEDULER, None)
    node.catalog.release(node.session, lease_id)
    assert node.catalog.stats().leases == 0


def test_a_lease_outlives_its_scheduler_until_every_rank_is_done_or_gone() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.lost(SCHEDULER)
    node.catalog.gone(SCHEDULER)
    node.catalog.loaded(node.session, lease_id, RANK)
    node.catalog.check()
    assert node.catalog.stats().leases == 1
    node.catalog.lost(OTHER)
    assert node.catalog.stats().leases == 1
    node.catalog.gone(OTHER)
    node.catalog.check()
    assert node.catalog.stats().leases == 0


def test_a_lease_of_a_scheduler_that_is_gone_does_not_await_ranks_that_never_came() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    digest, late = node.namespace.digest, SessionId("late")
    node.catalog.attach(late, MemberId("late/None"), None, digest, 1, 0)
    node.acquire(keys, "late")
    node.catalog.gone(MemberId("late/None"))
    node.catalog.check()
    assert node.catalog.stats().leases == 0
    assert node.catalog.stats().sessions == 1


def test_promotions_end_up_resident_when_their_scheduler_is_gone() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.save(keys[:1])
    node.store(keys[1:])
    node.acquire(keys)
    reads = node.reads()
    node.catalog.gone(SCHEDULER)
    node.catalog.check()
    node.finish(reads[-1])
    assert node.of_type(Update) == []
    assert node.resident(keys) == 2
    node.catalog.gone(RANK)
    assert node.catalog.stats().leases == 0


def test_nothing_is_left_of_a_session_without_members() -> None:
    node, keys = Node(world_size=2), keys_of("a", 4)
    node.save(keys[:1])
    node.acquire(keys)
    node.commit(node.grant(keys[1], "s/0"), "s/0")  # half written
    node.grant(keys[2], "s/0")
    for member in (RANK, OTHER, SCHEDULER):
        node.catalog.lost(member)
        node.catalog.check()
    for member in (OTHER, SCHEDULER, RANK):
        node.catalog.gone(member)
        node.catalog.check()
    stats = node.catalog.stats()
    assert (stats.sessions, stats.members, stats.leases) == (0, 0, 0)
    assert (stats.used_bytes, stats.resident_chunks) == (2 * PAGE, 1)


def test_losing_a_stranger_is_fine() -> None:
    node = Node()
    node.catalog.lost(MemberId("nobody"))
    node.catalog.gone(MemberId("nobody"))
    assert list(node.catalog.lost_members()) == []


def test_members_that_contradict_the_session_are_refused() -> None:
    node = Node(world_size=2)
    digest, session = node.namespace.digest, node.session
    attach = node.catalog.attach
    with pytest.raises(KVHavenError, match="has 2 ranks, but member x expects 4"):
        attach(session, MemberId("x"), 1, digest, 4, 2)
    with pytest.raises(KVHavenError, match=r"rank 2 .* world of 2"):
        attach(session, MemberId("x"), 2, digest, 2, 1)
    with pytest.raises(KVHavenError, match="has a rank 0 already"):
        attach(session, MemberId("x"), 0, digest, 2, 1)
    with pytest.raises(KVHavenError, match="has a scheduler already"):
        attach(session, MemberId("x"), None, digest, 2, 0)
    with pytest.raises(KVHavenError, match="cannot become rank 0 of session t"):
        attach(SessionId("t"), RANK, 0, digest, 2, 1)
    with pytest.raises(KVHavenError, match="unknown"):
        attach(session, MemberId("x"), None, NamespaceDigest(b"?" * 32), 2, 0)
    node.catalog.check()
    assert node.catalog.stats().members == 3


def test_members_that_hold_impossible_shards_are_refused() -> None:
    node = Node(split=(0b0011, 0b1100))
    digest, other = node.namespace.digest, namespace_of("other", 4)
    node.catalog.add_namespace(other)
    attach = node.catalog.attach
    for rank, shard_mask in ((0, 0), (0, 0b10000), (0, 0b0101), (0, -1), (None, 1)):
        with pytest.raises(KVHavenError, match="a rank holds some of these without a gap"):
            attach(SessionId("t"), MemberId("t/x"), rank, digest, 2, shard_mask)
    attach(SessionId("t"), MemberId("t/0"), 0, digest, 2, 0b0011)
    for shard_mask in (0b0110, 0b0001, 0b0111):
        with pytest.raises(KVHavenError, match="the same shards or none in common"):
            attach(SessionId("t"), MemberId("t/1"), 1, digest, 2, shard_mask)
    with pytest.raises(KVHavenError, match="the same shards or none in common"):
        attach(SessionId("t"), MemberId("t/1"), 1, other.digest, 2, 0b1100)
    for namespace, shard_mask in ((digest, 0b1100), (other.digest, 0b0011)):
        with pytest.raises(KVHavenError, match="cannot reattach"):
            attach(SessionId("t"), MemberId("t/0"), 0, namespace, 2, shard_mask)
    attach(SessionId("t"), MemberId("t/1"), 1, digest, 2, 0b0011)
    node.catalog.check()


def test_a_namespace_is_known_once_and_keeps_its_geometry() -> None:
    node = Node()
    node.catalog.add_namespace(node.namespace)
    other = namespace_of("n", 2)
    with pytest.raises(KVHavenError, match="must name the geometry"):
        node.catalog.add_namespace(other)
    with pytest.raises(KVHavenError, match="no shards"):
        node.catalog.add_namespace(namespace_of("empty", 0))


def work_off(node: Node) -> None:
    """Have the catalog do all that it has begun, and audit it after each piece."""
    while node.catalog.work():
        node.catalog.check()
    node.catalog.check()


def test_a_rank_may_be_back_and_gone_again_before_its_first_life_has_ended() -> None:
    node, keys = Node(pages=400), keys_of("a", 300)
    for life in range(3):
        assert None not in node.reserve(keys[life * 100 :][:100], save=life)
        node.catalog.lost(RANK)
        node.catalog.gone(RANK)
        assert node.catalog.busy, "it had more to give up than a piece of work"
        back(node, RANK, 0)
        node.catalog.ready(RANK, 0, node.allocator.usable[0])
        node.catalog.check()
    work_off(node)
    assert node.catalog.stats().used_bytes == 0
    assert node.save(keys) == 300


def test_members_of_a_session_may_leave_while_others_of_it_still_do() -> None:
    node, keys = Node(world_size=2), keys_of("a", 4)
    node.save(keys)
    for _ in range(100):
        node.acquire(keys)
    for member, pieces in ((RANK, 5), (OTHER, 0), (SCHEDULER, 0)):
        node.catalog.lost(member)
        node.catalog.gone(member)
        node.catalog.check()
        assert node.catalog.work(pieces), "it has more leases than pieces of work can look through"
    work_off(node)
    stats = node.catalog.stats()
    assert (stats.leases, stats.leased_bytes) == (0, 0)


def test_a_lease_of_a_session_that_is_gone_is_never_told_to_the_next_of_its_name() -> None:
    node, keys = Node(pages=4096, pin_limit=4096), keys_of("a", 3000)
    node.save(keys)
    for _ in range(200):
        assert node.acquire(keys).promoting == 1
    for member in (RANK, SCHEDULER):
        node.catalog.lost(member)
        node.catalog.gone(member)
    assert node.catalog.busy, "it had more leases than a piece of work"
    node.attach("s")
    while node.catalog.work():
        pass
    node.catalog.check()
    assert node.of_type(Update) == []
    assert node.catalog.stats().leases == 0
