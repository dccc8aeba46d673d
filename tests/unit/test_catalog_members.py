# SPDX-License-Identifier: Apache-2.0
"""Connections that close, processes that are gone, and what stays in quarantine meanwhile."""

import msgspec
import pytest

from kvhaven.catalog.actions import CommitResult, MemberId, Update
from kvhaven.errors import KVHavenError
from kvhaven.types import NamespaceDigest
from tests.unit.catalog_kit import PAGE, Node, described, keys_of, namespace_of, spec

RANK, OTHER, SCHEDULER = MemberId("s/0"), MemberId("s/1"), MemberId("s/None")


def back(node: Node, rank: int | None) -> None:
    if rank is None:
        assert node.catalog.attach_scheduler("s", SCHEDULER, node.world_size) is not None
    else:
        node.attach_rank("s", rank, node.namespace, each_its_own(node.world_size))


def each_its_own(ranks: int) -> list[int]:
    return [1 << rank for rank in range(ranks)]


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
    back(node, 0)
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
    back(node, 0)
    node.catalog.loaded(node.session, lease_id, RANK)
    assert node.catalog.stats().leases == 0


def test_a_lost_scheduler_keeps_its_leases() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.lost(SCHEDULER)
    assert node.catalog.stats().leases == 1
    back(node, None)
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


def test_a_lease_of_a_scheduler_that_is_gone_does_not_await_ranks_that_are_gone() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.save(keys)
    lease_id = node.acquire(keys).lease_id
    node.catalog.gone(RANK)
    node.catalog.gone(SCHEDULER)
    assert node.catalog.stats().leases == 1
    node.catalog.loaded(node.session, lease_id, OTHER)
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
    catalog, mine = node.catalog, described(node.namespace, (1, 2), 1)
    replace = msgspec.structs.replace
    with pytest.raises(KVHavenError, match="attached already"):
        catalog.attach_rank("s", MemberId("x"), 1, replace(mine, world_size=4))
    catalog.gone(OTHER)
    for change, reason in (
        ({"world_size": 4}, "rank 1 attached with world_size 4, the other ranks with 2"),
        ({"namespace": NamespaceDigest(b"?" * 32)}, "differs .* in its digest"),
        ({"fields": {"model": "x"}, "namespace": NamespaceDigest(b"?" * 32)}, "in model"),
        ({"shared": True}, "with shared=True, the other ranks with shared=False"),
        ({"shards": described(node.namespace, (1, 2), 0).shards}, "it cannot attach again with"),
    ):
        with pytest.raises(KVHavenError, match=reason):
            catalog.attach_rank("s", OTHER, 1, replace(mine, **change))
    with pytest.raises(KVHavenError, match=r"rank 2 is not in 0\.\.1"):
        catalog.attach_rank("s", MemberId("x"), 2, mine)
    with pytest.raises(KVHavenError, match="has a scheduler already"):
        catalog.attach_scheduler("s", MemberId("x"), 2)
    with pytest.raises(KVHavenError, match="cannot attach in another role"):
        catalog.attach_rank("s", RANK, 1, mine)
    with pytest.raises(KVHavenError, match="cannot attach in another role"):
        catalog.attach_scheduler("s", RANK, 2)
    with pytest.raises(KVHavenError, match="attached to engine s#1 and cannot attach to t"):
        catalog.attach_rank("t", RANK, 0, described(node.namespace, (1, 2), 0))
    catalog.gone(SCHEDULER)
    with pytest.raises(KVHavenError, match=r"expects 4 ranks, .* world_size 2"):
        catalog.attach_scheduler("s", SCHEDULER, 4)
    catalog.check()
    assert catalog.stats().members == 1


def test_ranks_that_hold_impossible_shards_are_refused_and_leave_nothing() -> None:
    node = Node(split=(0b0011, 0b1100))
    catalog, namespace = node.catalog, node.namespace
    for mask, reason in ((0, "holds no shards"), (0b0101, "was added with")):
        with pytest.raises(KVHavenError, match=reason):
            catalog.attach_rank("t", MemberId("t/0"), 0, described(namespace, (mask,), 0))
        assert catalog.stats().sessions == 1
    twins = [0b0011, 0b0011, 0b1100]
    node.attach_rank("t", 0, namespace, twins)
    for mask in (0b0110, 0b0001, 0b0111):
        overlapping = msgspec.structs.replace(described(namespace, (0, mask, 0), 1), shared=True)
        with pytest.raises(KVHavenError, match="the same shards or none in common"):
            catalog.attach_rank("t", MemberId("t/1"), 1, overlapping)
    with pytest.raises(KVHavenError, match="it cannot attach again with"):
        node.attach_rank("t", 0, namespace, [0b1100, 0b0011, 0b0011])
    catalog.check()
    node.attach_rank("t", 1, namespace, twins)
    session = node.attach_rank("t", 2, namespace, twins)
    assert [member.shard_mask for member in session.members.values()] == twins
    catalog.check()


def test_a_session_is_complete_with_its_last_rank_and_admits_its_scheduler_then() -> None:
    node, late = Node(), namespace_of("late", 3)
    split, catalog = each_its_own(3), node.catalog
    for rank in (2, 0):
        session = node.attach_rank("t", rank, late, split)
        assert session.namespace is None
        assert catalog.attach_scheduler("t", MemberId("t/None"), 3) is None
        assert late not in catalog.namespaces()
        catalog.check()
    catalog.add_namespace(late)  # a tier has chunks of it
    with pytest.raises(KVHavenError, match=r"session t#2 is not complete"):
        catalog.reserve(MemberId("t/0"), late.digest, None, keys_of("a", 1), 0)
    assert node.attach_rank("t", 1, late, split) is session
    assert session.described == late
    assert catalog.attach_scheduler("t", MemberId("t/None"), 3) is session
    catalog.check()


def test_a_last_rank_whose_namespace_is_refused_is_not_a_member() -> None:
    node = Node(split=(0b11,))
    other = namespace_of("n", 2, 5000)
    assert other.digest == node.namespace.digest
    session = node.attach_rank("t", 0, other, (1, 2))
    for _ in range(2):
        with pytest.raises(KVHavenError, match="must name the geometry"):
            node.attach_rank("t", 1, other, (1, 2))
        assert list(session.members) == [MemberId("t/0")]
        assert (list(session.shards), session.namespace) == ([0], None)
        node.catalog.check()
    node.catalog.gone(MemberId("t/0"))
    assert node.attach_rank("t", 0, node.namespace, (1, 2)).id == "t#3"
    node.attach_rank("t", 1, node.namespace, (1, 2))
    node.catalog.check()


def test_an_engine_that_restarts_does_not_join_the_lost_members_of_the_old_one() -> None:
    node = Node(world_size=2)
    for member in (RANK, SCHEDULER):
        node.catalog.lost(member)
    digests, split = node.namespace, (1, 2)
    new = node.catalog.attach_rank("s", MemberId("new/0"), 0, described(digests, split, 0))
    assert new.id == "s#2"
    assert node.catalog.attach_scheduler("s", MemberId("new/None"), 2) is None
    node.catalog.gone(OTHER)
    node.catalog.gone(RANK)
    node.catalog.gone(SCHEDULER)
    again = node.catalog.attach_rank("s", MemberId("new/1"), 1, described(digests, split, 1))
    assert again is new
    assert node.catalog.attach_scheduler("s", MemberId("new/None"), 2) is new
    node.catalog.check()


def test_ranks_meet_again_after_all_were_lost_although_one_counted_as_gone() -> None:
    """It had not mapped the arena yet."""
    node = Node(world_size=2)
    for member in (RANK, OTHER, SCHEDULER):
        node.catalog.lost(member)
    node.catalog.gone(RANK)
    assert node.attach_rank("s", 0, node.namespace, each_its_own(2)).id == "s#1"
    back(node, 1)
    back(node, None)
    node.catalog.check()


def test_a_rank_that_is_back_after_it_was_gone_is_awaited() -> None:
    node, keys = Node(world_size=2), keys_of("a", 1)
    node.save(keys)
    node.catalog.gone(RANK)
    back(node, 0)
    node.catalog.ready(RANK, 0, node.allocator.usable[0])
    lease_id = node.acquire(keys).lease_id
    node.catalog.loaded(node.session, lease_id, OTHER)
    assert node.catalog.stats().leases == 1
    node.catalog.loaded(node.session, lease_id, RANK)
    assert node.catalog.stats().leases == 0
    node.catalog.check()


def test_a_member_that_attaches_again_before_it_was_lost_gives_up_what_it_was_writing() -> None:
    node, key = Node(), keys_of("a", 1)[0]
    grant = node.grant(key)
    back(node, 0)
    assert node.catalog.stats().lost_members == 0
    assert node.commit(grant) is CommitResult.DISCARDED
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0


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
        back(node, 0)
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
