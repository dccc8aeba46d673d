# SPDX-License-Identifier: Apache-2.0
"""Reservations and commits."""

import pytest

from kvhaven.catalog.actions import CommitResult, MemberId, TierName, TierWrite
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey
from tests.unit.catalog_kit import DISK, PAGE, Node, checksums_of, keys_of, namespace_of, spec


def test_the_last_shard_makes_a_chunk_visible() -> None:
    node, key = Node(world_size=2), keys_of("a", 1)[0]
    one, two = node.grant(key, "s/0"), node.grant(key, "s/1")
    assert one.extent == two.extent
    assert node.commit(one, "s/0") is CommitResult.WAITING
    assert node.catalog.checksums(key) is None
    assert node.commit(two, "s/1") is CommitResult.RESIDENT
    assert node.catalog.checksums(key) == checksums_of(key, 2)


def test_what_is_here_or_being_written_is_not_granted_again() -> None:
    node, keys = Node(world_size=2), keys_of("a", 3)
    node.attach("t")
    node.save(keys[:1])
    node.grant(keys[1], "t/0")
    granted = node.grant(keys[2], "s/0")
    assert node.reserve(keys, "s/0") == [None, None, None]
    assert node.reserve(keys, "t/1")[0] is None
    node.commit(granted, "s/0")
    assert node.reserve(keys[2:], "s/0") == [None]
    assert node.grant(keys[2], "s/1").extent == granted.extent


def test_a_commit_with_another_generation_or_member_or_key_changes_nothing() -> None:
    node, keys = Node(world_size=2), keys_of("a", 2)
    grant = node.grant(keys[0])
    generation = grant.extent.generation
    for member, key, number in (
        ("s/0", keys[0], generation + 1),
        ("s/1", keys[0], generation),
        ("s/0", keys[1], generation),
        ("nobody", keys[0], generation),
    ):
        result = node.catalog.commit(MemberId(member), key, number, [Checksum(b"c" * 16)])
        assert result is CommitResult.REFUSED
    assert node.commit(grant) is CommitResult.WAITING
    assert node.commit(grant) is CommitResult.REFUSED
    assert node.catalog.stats().refused_commits == 5


def test_an_aborted_chunk_is_discarded_and_its_space_waits_for_the_other_writer() -> None:
    node, key = Node(world_size=2), keys_of("a", 1)[0]
    one, two = node.grant(key, "s/0"), node.grant(key, "s/1")
    node.catalog.abort(MemberId("s/0"), key, one.extent.generation)
    node.catalog.check()
    assert node.catalog.stats().retired_bytes == 2 * PAGE
    assert node.save([key]) == 1, "it can be reserved anew at once"
    assert node.catalog.stats().used_bytes == 4 * PAGE
    assert node.commit(two, "s/1") is CommitResult.DISCARDED
    assert node.catalog.stats().used_bytes == 2 * PAGE
    assert node.resident([key]) == 1


def test_aborting_what_is_not_reserved_is_fine() -> None:
    node, key = Node(), keys_of("a", 1)[0]
    node.catalog.abort(MemberId("s/0"), key, 1)
    node.catalog.abort(MemberId("nobody"), key, 1)
    grant = node.grant(key)
    node.commit(grant)
    node.catalog.abort(MemberId("s/0"), key, grant.extent.generation)
    assert node.resident([key]) == 1


def test_a_half_written_chunk_that_nobody_writes_gives_way_to_others() -> None:
    node, key = Node(pages=16, world_size=2), keys_of("a", 1)[0]
    node.commit(node.grant(key, "s/0"), "s/0")
    node.catalog.check()
    assert node.save(keys_of("b", 8)) == 8
    assert node.catalog.stats().evictions == 0, "it was never resident"


def test_a_chunk_that_is_being_written_does_not_give_way() -> None:
    node, key = Node(pages=16, world_size=2), keys_of("a", 1)[0]
    grant = node.grant(key, "s/0")
    assert node.save(keys_of("b", 8)) == 7
    assert node.commit(grant, "s/0") is CommitResult.WAITING


def test_without_space_the_head_of_the_chain_is_granted() -> None:
    node, keys = Node(pages=16), keys_of("a", 20)
    grants = node.reserve(keys)
    assert [g is not None for g in grants] == [True] * 16 + [False] * 4
    node.catalog.check()


def test_a_chain_is_not_evicted_for_its_own_tail() -> None:
    node, keys = Node(pages=16), keys_of("a", 20)
    node.save(keys[:15])
    node.save(keys_of("b", 1))
    assert node.save(keys[15:], parent=keys[14]) == 1, "only the other chain gives way"
    assert node.resident(keys) == 16


def test_the_same_key_twice_in_a_reservation_is_granted_once() -> None:
    node, keys = Node(), keys_of("a", 1)
    assert [g is None for g in node.reserve(keys * 3)] == [False, True, True]
    node.catalog.check()


def test_a_circle_of_parents_does_no_harm() -> None:
    node, keys = Node(), keys_of("a", 2)
    node.save(keys[:1], parent=keys[1])
    node.save(keys[1:], parent=keys[0])
    node.save(keys_of("b", 1), parent=keys[1])
    assert node.resident(keys) == 2


def test_a_chunk_larger_than_the_arena_evicts_nothing() -> None:
    node = Node(pages=16)
    node.save(keys_of("a", 16))
    huge = namespace_of("huge", 1, 17 * PAGE)
    node.catalog.add_namespace(huge)
    node.attach("t", huge)
    grants = node.catalog.reserve(MemberId("t/0"), huge.digest, None, keys_of("b", 1), 1)
    assert grants == [None]
    assert node.catalog.stats().evictions == 0


@pytest.mark.parametrize("member", ["s/None", "nobody", "t/1"])
def test_only_ranks_of_the_namespace_write(member: str) -> None:
    node, other = Node(world_size=2), namespace_of("other", 2)
    node.catalog.add_namespace(other)
    node.attach("t", other)
    with pytest.raises(KVHavenError, match=member):
        node.reserve(keys_of("a", 1), member)


def writes_of(node: Node) -> list[ChunkKey]:
    return [write.key for write in node.writes()]


def test_a_chunk_that_becomes_resident_is_written_to_the_tiers_that_lack_it() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.store(keys[:1])
    node.save(keys)
    (write,) = node.writes()
    assert (write.key, write.checksums) == (keys[1], checksums_of(keys[1]))
    node.catalog.tier_write_done(write.tier, write.key, ok=True)
    node.catalog.check()
    assert node.catalog.stats().namespaces[node.namespace.digest].tiers[DISK].chunks == 2


def test_a_chunk_that_is_being_written_to_a_tier_is_not_evicted() -> None:
    node, keys = Node(pages=16, tiers=[spec()]), keys_of("a", 1)
    node.save(keys)
    (write,) = node.writes()
    node.save(keys_of("b", 40))
    assert node.resident(keys) == 1
    node.catalog.tier_write_done(write.tier, write.key, ok=True)
    node.save(keys_of("c", 40))
    assert node.resident(keys) == 0


def test_small_chunks_may_all_be_under_way_at_once() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 6)
    node.save(keys)
    assert writes_of(node) == keys
    for key in keys:
        node.catalog.tier_write_done(spec().name, key, ok=True)
    assert node.writes() == []
    assert node.catalog.stats().tiers[spec().name].written == 6


def test_on_overload_the_oldest_waiting_writes_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvhaven.catalog.writebehind.OUTSTANDING_BYTES", 0)
    node, keys = Node(tiers=[spec()], write_queue=2), keys_of("a", 9)
    for key in keys:
        node.save([key])
    assert writes_of(node) == keys[:4]
    assert node.catalog.stats().queued_writes == 2
    assert node.catalog.stats().dropped_writes == 3
    for key in keys[:4]:
        node.catalog.tier_write_done(spec().name, key, ok=True)
    assert writes_of(node) == keys[7:]


def test_a_waiting_write_does_not_keep_its_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhaven.catalog.writebehind.OUTSTANDING_BYTES", 0)
    node, keys = Node(tiers=[spec()], write_queue=16), keys_of("a", 6)
    node.save(keys)
    assert writes_of(node) == keys[:4]
    node.catalog.clear(tier=TierName("memory"))
    node.catalog.tier_write_done(spec().name, keys[0], ok=True)
    assert writes_of(node) == []
    assert node.catalog.stats().dropped_writes == 2


def test_a_promoted_chunk_is_written_to_the_other_tiers_only() -> None:
    disk, remote = spec(), spec(TierName("remote"))
    node, keys = Node(tiers=[disk, remote]), keys_of("a", 1)
    node.store(keys, remote.name)
    node.acquire(keys)
    node.finish(node.reads()[0])
    assert [w.tier for w in node.of_type(TierWrite) if isinstance(w, TierWrite)] == [disk.name]
