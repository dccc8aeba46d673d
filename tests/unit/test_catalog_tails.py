# SPDX-License-Identifier: Apache-2.0
"""Tails in the catalog: behind their chain or not at all, in memory alone, and not for long."""

import pytest

from kvhaven.catalog import TierSpec
from kvhaven.catalog.actions import (
    Acquisition,
    CommitResult,
    LeaseId,
    MemberId,
    TierLookup,
    TierRead,
    Update,
)
from kvhaven.catalog.policies import POLICIES
from kvhaven.catalog.tails import KEEP_S
from kvhaven.catalog.tier_spec import StoreOn
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, NamespaceDigest, ShardTable
from tests.unit.catalog_kit import DISK, PAGE, Node, checksums_of, keys_of, spec

TAIL, *OTHERS = keys_of("tail", 9)
TOKENS = 37


def found(answer: Acquisition) -> list[ChunkKey]:
    return [chunk.key for chunk in answer.chunks]


def end(node: Node, answer: Acquisition) -> None:
    node.catalog.release(node.session, answer.lease_id)
    node.catalog.check()


def test_a_tail_is_leased_behind_its_whole_chain() -> None:
    node, keys = Node(), keys_of("a", 3)
    node.save(keys)
    assert node.save([TAIL], keys[-1], tail=TOKENS) == 1
    answer = node.acquire(keys, tail=TAIL)
    assert found(answer) == [*keys, TAIL]
    assert [chunk.tail for chunk in answer.chunks] == [0, 0, 0, TOKENS]
    assert not answer.promoting
    node.catalog.check()
    assert node.catalog.stats().leased_bytes == 4 * PAGE
    assert node.catalog.stats().hit_chunks == 4
    end(node, answer)
    assert node.catalog.stats().leased_bytes == 0


def test_a_prompt_shorter_than_a_chunk_has_a_tail_alone() -> None:
    node = Node()
    node.save([TAIL], tail=TOKENS)
    assert found(node.acquire([], tail=TAIL)) == [TAIL]
    assert found(node.acquire([], tail=OTHERS[0])) == []
    assert node.catalog.stats().leases == 1
    assert node.catalog.stats().missed_chunks == 0  # an absent tail is no missed chunk


def test_without_the_whole_chain_the_tail_is_not_offered() -> None:
    node, keys = Node(), keys_of("a", 3)
    node.save(keys[:2])
    node.save([TAIL], keys[-1], tail=TOKENS)
    assert found(node.acquire(keys, tail=TAIL)) == keys[:2]


def test_a_full_chunk_is_not_offered_as_a_tail() -> None:
    node, keys = Node(), keys_of("a", 2)
    node.save(keys)
    assert found(node.acquire(keys[:1], tail=keys[1])) == keys[:1]


def test_a_tail_that_is_being_written_or_belongs_to_another_is_not_offered() -> None:
    node, alice = Node(world_size=2), tenant_id("alice")
    grant = node.reserve([TAIL], "s/0", tail=TOKENS)[0]
    assert grant is not None
    assert node.commit(grant, "s/0") is CommitResult.WAITING
    assert found(node.acquire([], tail=TAIL)) == []
    other = node.reserve([TAIL], "s/1", tail=TOKENS)[0]
    assert other is not None
    assert node.commit(other, "s/1") is CommitResult.RESIDENT
    assert found(node.acquire([], tail=TAIL, tenant=alice)) == []
    assert found(node.acquire([], tail=TAIL)) == [TAIL]


def test_ranks_that_disagree_about_a_tail_do_not_write_it_together() -> None:
    node = Node(world_size=2)
    assert node.reserve([TAIL], "s/0", tail=TOKENS) != [None]
    assert node.reserve([TAIL], "s/1", tail=TOKENS + 1) == [None]
    assert node.reserve([TAIL], "s/1") == [None]


@pytest.mark.parametrize("store_on", list(StoreOn))
@pytest.mark.parametrize("shared", [True, False])
def test_a_tail_is_never_written_to_a_tier_nor_asked_for_there(
    store_on: StoreOn, *, shared: bool
) -> None:
    tier = TierSpec(DISK, 0 if shared else 1 << 30, shared=shared, store_on=store_on)
    node = Node(tiers=[tier])
    for _ in range(3):
        node.save([TAIL], tail=TOKENS)
        end(node, node.acquire([], tail=TAIL))
        node.catalog.clear(tier=None)
    answer = node.acquire([], tail=TAIL)
    assert (found(answer), answer.promoting) == ([], 0)
    assert node.writes() == []
    assert node.of_type(TierLookup) == []
    assert node.catalog.unwritten() == 0


def test_a_lease_that_waits_for_promotions_gets_the_tail_with_them() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    node.save([TAIL], keys[-1], tail=TOKENS)
    answer = node.acquire(keys, tail=TAIL)
    assert answer.promoting == 2
    for read in node.reads():
        node.finish(read)
    final = node.catalog.finalize(node.session, answer.lease_id)
    assert found(final) == [*keys, TAIL]


def test_a_failed_promotion_cuts_off_the_tail() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    node.save([TAIL], keys[-1], tail=TOKENS)
    answer = node.acquire(keys, tail=TAIL)
    first, second = node.reads()
    node.finish(first)
    node.finish(second, ok=False)
    assert found(node.catalog.finalize(node.session, answer.lease_id)) == keys[:1]
    end(node, answer)
    assert node.catalog.stats().leased_bytes == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_tails_are_evicted_before_all_full_chunks(policy: str) -> None:
    node, keys = Node(pages=8, policy=policy), keys_of("a", 5)
    node.save(keys)
    for tail in OTHERS[:3]:
        node.save([tail], keys[-1], tail=TOKENS)
    end(node, node.acquire([], tail=OTHERS[0]))
    keys += keys_of("b", 3)
    assert node.save(keys[5:]) == 3
    assert node.resident(keys) == 8
    assert node.resident(OTHERS[:3]) == 0
    assert node.save(keys_of("c", 1)) == 1
    assert node.resident(keys) == 7, "then full chunks go"


def test_a_tail_makes_room_for_itself_among_tails_only_as_long_as_there_are_some() -> None:
    node, keys = Node(pages=4), keys_of("a", 2)
    node.save(keys)
    for tail in OTHERS:
        assert node.save([tail], keys[-1], tail=TOKENS) == 1
    assert node.resident(keys) == 2
    assert node.resident(OTHERS[-2:]) == 2


def test_a_tail_in_use_is_not_evicted() -> None:
    node, keys = Node(pages=4), keys_of("a", 4)
    node.save([TAIL], tail=TOKENS)
    answer = node.acquire([], tail=TAIL)
    assert node.save(keys) == 3
    assert node.resident([TAIL]) == 1
    end(node, answer)
    assert node.save(keys_of("b", 1)) == 1
    assert node.resident([TAIL]) == 0


def test_a_tail_counts_for_its_tenants_quota_and_goes_first_there_too() -> None:
    alice = tenant_id("alice")
    node, keys = Node(memory_quotas=Quotas({alice: 3 * PAGE})), keys_of("a", 3)
    node.save(keys[:2], tenant=alice)
    node.save([TAIL], keys[1], tenant=alice, tail=TOKENS)
    assert node.catalog.stats().used_bytes == 3 * PAGE
    assert node.save(keys[2:], keys[1], tenant=alice) == 1
    assert (node.resident(keys), node.resident([TAIL])) == (3, 0)


def test_a_tail_is_dropped_after_its_time_without_use() -> None:
    node = Node()
    node.catalog.tick(1000.0)
    node.save([TAIL], tail=TOKENS)
    node.save([OTHERS[0]], tail=TOKENS)
    node.catalog.tick(1000.0 + KEEP_S - 1)
    end(node, node.acquire([], tail=TAIL))
    assert node.catalog.stats().tails == 2
    node.catalog.tick(1000.0 + KEEP_S)
    node.catalog.check()
    assert (node.resident([TAIL]), node.resident([OTHERS[0]])) == (1, 0)
    node.catalog.tick(1000.0 + 2 * KEEP_S - 2)
    assert node.resident([TAIL]) == 1
    node.catalog.tick(1000.0 + 2 * KEEP_S - 1)
    assert node.resident([TAIL]) == 0
    assert node.catalog.stats().used_bytes == 0
    assert found(node.acquire([], tail=TAIL)) == []


def test_a_tail_that_is_being_loaded_does_not_expire() -> None:
    node = Node()
    node.save([TAIL], tail=TOKENS)
    answer = node.acquire([], tail=TAIL)
    for time in range(1, 4):
        node.catalog.tick(time * KEEP_S)
    assert node.resident([TAIL]) == 1
    end(node, answer)
    node.catalog.tick(5 * KEEP_S)
    assert node.resident([TAIL]) == 0


def test_an_expired_tail_that_was_not_dropped_yet_is_neither_offered_nor_kept() -> None:
    node, many = Node(pages=200), keys_of("many", 100)
    for tail in many:
        node.save([tail], tail=TOKENS)
    node.catalog.tick(KEEP_S)
    left = [tail for tail in many if node.resident([tail])]
    assert left, "all were dropped in one event"
    assert found(node.acquire([], tail=left[0])) == []
    assert node.save([left[1]], tail=TOKENS) == 1
    node.catalog.tick(KEEP_S + 1)
    assert node.resident(left) == 1


def test_a_half_written_tail_expires_too() -> None:
    node = Node(world_size=2)
    grant = node.reserve([TAIL], "s/0", tail=TOKENS)[0]
    assert grant is not None
    node.commit(grant, "s/0")
    node.catalog.tick(KEEP_S)
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0
    grant = node.reserve([TAIL], "s/1", tail=TOKENS)[0]
    assert grant is not None
    node.catalog.tick(3 * KEEP_S)
    assert node.catalog.stats().reserved_bytes == 2 * PAGE, "it is being written"
    node.catalog.abort(MemberId("s/1"), TAIL, grant.extent.generation)
    node.catalog.check()


def test_a_damaged_tail_is_not_offered() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    node.save([TAIL], keys[-1], tail=TOKENS)
    answer = node.acquire(keys, tail=TAIL)
    node.catalog.discard(TAIL)
    again = node.catalog.acquire(
        node.session, LeaseId(answer.lease_id), node.namespace.digest, keys, tail=TAIL
    )
    assert found(again) == keys
    end(node, answer)
    assert found(node.acquire(keys, tail=TAIL)) == keys


def test_a_tail_is_lent_to_other_nodes_with_its_length() -> None:
    node, (full,) = Node(), keys_of("a", 1)
    node.save([full])
    node.save([TAIL], full, tail=TOKENS)
    digest = node.namespace.digest
    assert node.catalog.has(digest, [full, TAIL, OTHERS[0]]) == [True, True, False]
    assert [node.catalog.retain_tail(digest, key) for key in (full, TAIL, OTHERS[0])] == [
        *(0, TOKENS, 0)
    ]
    loan = node.catalog.lend(digest, TAIL)
    assert loan is not None
    assert (loan.tail, loan.checksums) == (TOKENS, checksums_of(TAIL))
    alice = tenant_id("alice")
    assert node.catalog.has(digest, [TAIL], alice) == [False]
    assert node.catalog.retain_tail(digest, TAIL, alice) == 0


def test_whether_a_tail_is_being_saved_is_known() -> None:
    node = Node(world_size=2)
    digest = node.namespace.digest
    assert not node.catalog.is_being_saved(digest, TAIL)
    for rank in ("s/0", "s/1"):
        (grant,) = node.reserve([TAIL], rank, tail=TOKENS)
        assert grant is not None
        assert node.catalog.is_being_saved(digest, TAIL)
        assert not node.catalog.is_being_saved(digest, TAIL, tenant_id("alice"))
        node.commit(grant, rank)
    assert not node.catalog.is_being_saved(digest, TAIL)


def _expecting(keys: list[ChunkKey]) -> tuple[Node, dict[ChunkKey, int]]:
    """Return a node that expects a chain and `TAIL` behind it from another one."""
    node = Node(tiers=[TierSpec(DISK, 0, shared=True)])
    return node, node.catalog.expected(DISK, node.namespace.digest, keys, tail=TAIL)


def _come(node: Node, number: int, key: ChunkKey, tail: int = 0) -> None:
    """Answer a lookup: the chunk can be read."""
    node.catalog.tier_looked_up(DISK, number, {key: node.namespace.table.complete}, tail)


def test_a_lease_waits_for_an_expected_tail() -> None:
    keys = keys_of("a", 2)
    node, numbers = _expecting(keys)
    assert list(numbers) == [*keys, TAIL]
    for key in keys:
        _come(node, numbers[key], key)
        node.finish(*node.reads())
    answer = node.acquire(keys, tail=TAIL)
    assert (found(answer), answer.promoting) == (keys, 1)
    _come(node, numbers[TAIL], TAIL, TOKENS)
    (read,) = node.reads()
    assert (read.key, read.tail) == (TAIL, TOKENS)
    node.finish(read)
    (update,) = node.catalog.take_actions()
    assert isinstance(update, Update)
    assert found(update.acquisition) == [*keys, TAIL]
    assert [chunk.tail for chunk in update.acquisition.chunks] == [0, 0, TOKENS]


@pytest.mark.parametrize("fate", ["absent", "read fails", "offline", "deadline"])
def test_a_lease_goes_on_without_a_tail_that_does_not_come(fate: str) -> None:
    node, numbers = _expecting([])
    answer = node.acquire([], tail=TAIL)
    assert (found(answer), answer.promoting) == ([], 1)
    if fate == "absent":
        node.catalog.tier_looked_up(DISK, numbers[TAIL], None)
    elif fate == "read fails":
        _come(node, numbers[TAIL], TAIL, TOKENS)
        node.finish(*node.reads(), ok=False)
    elif fate == "offline":
        node.catalog.tier_online(DISK, online=False)
    else:
        final = node.catalog.finalize(node.session, LeaseId(answer.lease_id))
        assert (found(final), final.promoting) == ([], 0)
        return
    (update,) = node.catalog.take_actions()
    assert isinstance(update, Update)
    assert found(update.acquisition) == []


def test_a_tail_of_which_no_tokens_are_stored_is_not_read() -> None:
    node, numbers = _expecting([])
    _come(node, numbers[TAIL], TAIL)
    answer = node.acquire([], tail=TAIL)
    assert (found(answer), answer.promoting) == ([], 0)
    assert node.reads() == []


def test_a_tail_that_arrives_without_a_lookup_of_its_own_is_read_when_asked_for() -> None:
    node, _ = _expecting([])
    assert node.catalog.expected(DISK, node.namespace.digest, [], tail=TAIL) == {}
    node.catalog.arrived(DISK, node.namespace.digest, TAIL, tail=TOKENS)
    assert node.acquire([], tail=TAIL).promoting
    (read,) = node.reads()
    assert read.tail == TOKENS


def test_a_tail_that_was_asked_for_elsewhere_wakes_whom_it_arrives_for() -> None:
    """Two nodes compute the same prompt: the second is quicker, then the first gives up."""
    keys = keys_of("a", 2)
    node, numbers = _expecting(keys)
    digest = node.namespace.digest
    answer = node.acquire(keys, tail=TAIL)
    assert answer.promoting
    for key in keys:
        node.catalog.arrived(DISK, digest, key)
    node.catalog.arrived(DISK, digest, TAIL, tail=TOKENS)
    for key in (*keys, TAIL):
        node.catalog.tier_looked_up(DISK, numbers[key], None)
    reads = node.reads()
    assert [read.key for read in reads] == [*keys, TAIL]
    for read in reads:
        node.finish(read)
    (update,) = node.catalog.take_actions()
    assert isinstance(update, Update)
    assert found(update.acquisition) == [*keys, TAIL]


def test_a_tail_behind_more_than_may_be_read_at_once_is_read_after_it() -> None:
    node, keys = Node(pages=64, tiers=[TierSpec(DISK, 0, shared=True)]), keys_of("a", 24)
    for key in keys:
        node.catalog.arrived(DISK, node.namespace.digest, key)
    node.catalog.arrived(DISK, node.namespace.digest, TAIL, tail=TOKENS)
    node.acquire(keys, tail=TAIL)
    open_reads = node.reads()
    assert len(open_reads) == 16  # half of the pin limit, which is half of the arena
    updates: list[Update] = []
    while open_reads:
        node.finish(open_reads.pop(0))
        actions = node.catalog.take_actions()
        open_reads += [action for action in actions if isinstance(action, TierRead)]
        updates += [action for action in actions if isinstance(action, Update)]
    assert found(updates[-1].acquisition) == [*keys, TAIL]


def _is_resident(node: Node, key: ChunkKey) -> bool:
    return node.catalog.checksums(key) is not None


def test_a_tail_that_arrived_stays_until_its_first_use_like_a_full_chunk() -> None:
    tier = TierSpec(DISK, 0, shared=True, store_on=StoreOn.SECOND)  # writes would pin the chunks
    node = Node(pages=8, tiers=[tier])
    old, new = keys_of("old", 7), keys_of("new", 5)
    node.save(old)
    number = node.catalog.expected(DISK, node.namespace.digest, [], tail=TAIL)[TAIL]
    _come(node, number, TAIL, TOKENS)
    node.finish(*node.reads())
    node.save(new[:2])
    assert _is_resident(node, TAIL)
    end(node, node.acquire([], tail=TAIL))
    node.save(new[2:4])
    assert not _is_resident(node, TAIL)
    assert all(_is_resident(node, key) for key in new[:4])


def test_a_tail_that_another_node_will_read_stays_until_it_is_lent() -> None:
    node, old, new = Node(pages=8), keys_of("old", 7), keys_of("new", 5)
    digest = node.namespace.digest
    node.save(old)
    node.save([TAIL], tail=TOKENS)
    assert node.catalog.retain_tail(digest, TAIL) == TOKENS
    node.save(new[:2])
    loan = node.catalog.lend(digest, TAIL)
    assert loan is not None
    node.catalog.returned(loan.number)
    node.save(new[2:3])
    assert not _is_resident(node, TAIL)
    assert all(_is_resident(node, key) for key in new[:3])


def test_a_tail_of_several_shards_stays_until_the_last_was_lent() -> None:
    node, old, new = Node(pages=8, world_size=2), keys_of("old", 3), keys_of("new", 3)
    digest = node.namespace.digest
    node.save(old)
    node.save([TAIL], tail=TOKENS)
    node.catalog.retain_tail(digest, TAIL)
    for shard in range(2):
        node.save(new[shard : shard + 1])
        loan = node.catalog.lend(digest, TAIL)
        assert loan is not None, f"evicted before shard {shard} was lent"
        node.catalog.returned(loan.number)
    node.save(new[2:])
    assert not _is_resident(node, TAIL)


def test_a_tail_that_one_rank_has_written_waits_for_the_others_like_a_full_chunk() -> None:
    node = Node(pages=8, world_size=2)
    node.save(keys_of("old", 3))
    (first,) = node.reserve([TAIL], "s/0", tail=TOKENS)
    assert first is not None
    node.commit(first, "s/0")
    node.reserve(keys_of("more", 1), "s/0", save=1)
    (second,) = node.reserve([TAIL], "s/1", tail=TOKENS)
    assert second is not None
    assert node.commit(second, "s/1") is CommitResult.RESIDENT


@pytest.mark.parametrize("quota", [3, None])
def test_a_tail_does_not_push_out_its_own_chain(quota: int | None) -> None:
    alice, keys = tenant_id("alice"), keys_of("a", 3)
    node = Node(
        pages=16 if quota else 3,
        pin_limit=16 if quota else 3,
        tiers=[TierSpec(DISK, 0, shared=True)],
        memory_quotas=Quotas({alice: quota * PAGE}) if quota else Quotas(),
    )
    numbers = node.catalog.expected(DISK, node.namespace.digest, keys, alice, tail=TAIL)
    for key in (*keys, TAIL):
        _come(node, numbers[key], key, TOKENS if key == TAIL else 0)
        for read in node.reads():
            node.finish(read)
    assert all(_is_resident(node, key) for key in keys)


def test_what_a_lying_node_calls_a_tail_is_not_leased_as_a_full_chunk() -> None:
    node, numbers = _expecting([])
    _come(node, numbers[TAIL], TAIL, TOKENS)
    assert found(node.acquire([TAIL])) == []
    node.finish(*node.reads())
    assert found(node.acquire([TAIL])) == []


@pytest.mark.parametrize(
    ("chunk_size", "tokens", "expected"),
    [
        ("16", 1, 256),
        ("16", 16, 4096),
        ("16", 17, None),
        ("16", 0, 4096),
        ("", 1, None),
        ("0", 1, None),
        ("-16", 1, None),
        ("many", 1, None),
        ("3", 1, None),
    ],
)
def test_a_shard_of_a_tail_has_its_share_of_the_bytes(
    chunk_size: str, tokens: int, expected: int | None
) -> None:
    namespace = Namespace(NamespaceDigest(bytes(32)), {"chunk_size": chunk_size}, ShardTable(()))
    assert namespace.shard_bytes(4096, tokens) == expected
    assert Namespace(namespace.digest, {}, namespace.table).shard_bytes(4096, tokens) == (
        None if tokens else 4096
    )


def test_a_clear_drops_tails() -> None:
    node, keys = Node(), keys_of("a", 1)
    node.save(keys)
    node.save([TAIL], keys[-1], tail=TOKENS)
    assert node.catalog.clear() == (2, 2 * PAGE)
    assert found(node.acquire(keys, tail=TAIL)) == []
    node.catalog.check()
    assert node.catalog.stats().used_bytes == 0


def test_keys_that_repeat_leave_no_lookup_behind() -> None:
    """Other nodes and clients choose the keys: nobody may wait for a lookup that was dropped."""
    node = Node(tiers=[TierSpec(DISK, 0, shared=True)])
    one, two = keys_of("a", 2)
    node.acquire([one, two, one, two])
    (asked,) = node.of_type(TierLookup)
    assert isinstance(asked, TierLookup)
    assert list(asked.keys) == [one, two]
    node.catalog.tier_looked_up(DISK, asked.number, {})
    node.catalog.check()
    assert node.acquire([two]).promoting == 0
