# SPDX-License-Identifier: Apache-2.0
"""Tiers that others write to: they are asked, believed for a while, and never waited for."""

from collections.abc import Mapping, Sequence

import pytest

from kvhaven.catalog import StoreOn, TierSpec, WriteMode
from kvhaven.catalog.actions import Acquisition, TierLookup, TierName, Update
from kvhaven.catalog.shared_index import FAILED_S, LOOKUP_SHARDS
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey
from tests.unit.catalog_kit import DISK, PAGE, Node, checksums_of, keys_of, spec

FS, S3 = TierName("fs"), TierName("s3")
BELIEVE_S = 4.0


def shared(
    name: TierName = FS,
    write: WriteMode = WriteMode.BEHIND,
    store_on: StoreOn = StoreOn.FIRST,
) -> TierSpec:
    return TierSpec(name, shared=True, lookup_ttl_s=BELIEVE_S, write=write, store_on=store_on)


def lookups(node: Node) -> list[TierLookup]:
    """Take all actions; return the lookups."""
    return [a for a in node.catalog.take_actions() if isinstance(a, TierLookup)]


def answer(node: Node, lookup: TierLookup, there: Sequence[ChunkKey] | None) -> None:
    """Answer a lookup: these chunks are there, whole; None: the tier failed."""
    complete = node.namespace.table.complete
    found = None if there is None else dict.fromkeys(there, complete)
    node.catalog.tier_looked_up(lookup.tier, lookup.number, found)
    node.catalog.check()


def ask(node: Node, keys: Sequence[ChunkKey]) -> TierLookup:
    """Acquire, for which one tier must be asked."""
    assert node.acquire(keys).promoting == 1
    (lookup,) = lookups(node)
    return lookup


def updates(node: Node) -> list[Acquisition]:
    return [a.acquisition for a in node.catalog.take_actions() if isinstance(a, Update)]


def test_only_what_is_not_known_is_asked_for_in_one_batch() -> None:
    node, keys = Node(pages=32, tiers=[spec(), shared()]), keys_of("a", 8)
    node.save(keys[:2])
    node.store(keys[2:4])
    node.store(keys[6:7])
    node.catalog.take_actions()
    assert node.acquire(keys).promoting == 3
    actions = node.catalog.take_actions()
    (lookup,) = [a for a in actions if isinstance(a, TierLookup)]
    assert (lookup.tier, lookup.keys) == (FS, (*keys[4:6], keys[7]))
    node.catalog.check()


def test_what_the_tier_has_is_promoted_up_to_the_first_gap() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 5)
    lookup = ask(node, keys)
    assert lookup.keys == tuple(keys)
    answer(node, lookup, [*keys[:2], *keys[3:]])
    reads = node.reads()
    assert [(read.tier, read.key) for read in reads] == [(FS, keys[0]), (FS, keys[1])]
    for read in reads:
        node.finish(read)
    (final,) = updates(node)
    assert [chunk.key for chunk in final.chunks] == keys[:2]
    stats = node.catalog.stats()
    assert (stats.promoted_chunks, stats.missed_chunks) == (2, 3)
    assert (stats.tiers[FS].looked_up, stats.tiers[FS].found) == (5, 4)


def test_a_chunk_of_which_a_shard_is_missing_is_not_there() -> None:
    node, keys = Node(tiers=[shared()], world_size=2), keys_of("a", 2)
    lookup = ask(node, keys)
    node.catalog.tier_looked_up(FS, lookup.number, {keys[0]: 0b01, keys[1]: 0b11})
    assert node.reads() == []
    assert node.acquire(keys).promoting == 0


def test_a_known_absence_costs_no_request_until_it_is_old() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 3)
    answer(node, ask(node, keys), [])
    assert [a.chunks for a in updates(node)] == [()]
    node.catalog.tick(BELIEVE_S - 0.1)
    assert node.acquire(keys).promoting == 0
    assert lookups(node) == []
    node.catalog.tick(1.0)  # time does not go back
    node.catalog.tick(BELIEVE_S)
    ask(node, keys)
    node.catalog.check()


def test_a_known_presence_is_read_without_asking_until_it_is_old() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 1)
    answer(node, ask(node, keys), keys)
    node.finish(node.reads()[0])
    node.catalog.clear()
    assert node.acquire(keys).promoting == 1
    assert len(node.reads()) == 1
    node.catalog.tick(BELIEVE_S)
    node.catalog.clear()
    assert node.acquire(keys).promoting == 1
    assert len(lookups(node)) == 1


def test_a_tier_that_does_not_answer_is_a_miss_and_left_alone_for_a_moment() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    answer(node, ask(node, keys), None)
    assert [a.chunks for a in updates(node)] == [()]
    assert node.acquire(keys).promoting == 0
    node.catalog.tick(FAILED_S)
    ask(node, keys)


def test_a_deadline_ends_the_waiting_and_the_answer_is_remembered() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    node.save(keys[:1])
    node.catalog.take_actions()
    lease_id = node.acquire(keys).lease_id
    (lookup,) = lookups(node)
    final = node.catalog.finalize(node.session, lease_id)
    assert ([c.key for c in final.chunks], final.promoting) == (keys[:1], 0)
    answer(node, lookup, keys[1:])
    assert node.catalog.take_actions() == []
    assert node.acquire(keys).promoting == 1
    assert [read.key for read in node.reads()] == keys[1:]


def test_a_prefetch_asks_and_promotes_for_nobody() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 3)
    assert node.catalog.prefetch(node.namespace.digest, keys) == 0
    (lookup,) = lookups(node)
    answer(node, lookup, keys[:2])
    for read in node.reads():
        node.finish(read)
    assert node.resident(keys) == 2
    stats = node.catalog.stats()
    assert (stats.leases, stats.leased_bytes, stats.missed_chunks) == (0, 0, 0)
    assert len(node.acquire(keys).chunks) == 2


def test_equal_questions_are_asked_once() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 3)
    node.attach("t")
    node.catalog.prefetch(node.namespace.digest, keys)
    (lookup,) = lookups(node)
    node.acquire(keys)
    node.acquire(keys, "t")
    assert lookups(node) == []
    answer(node, lookup, keys)
    (*reads,) = node.reads()
    assert len(reads) == 3
    for read in reads:
        node.finish(read)
    assert [len(a.chunks) for a in updates(node)] == [3, 3]


def test_a_long_chain_is_asked_for_batch_by_batch() -> None:
    node, keys = Node(pages=2048, tiers=[shared()], world_size=2), keys_of("a", 600)
    lookup = ask(node, keys)
    assert len(lookup.keys) == LOOKUP_SHARDS // 2
    node.catalog.take_actions()
    answer(node, lookup, lookup.keys)
    while node.catalog.work():
        node.catalog.check()
    actions = node.catalog.take_actions()
    assert [a.keys for a in actions if isinstance(a, TierLookup)] == []
    assert node.catalog.stats().tiers[FS].reads == 256, "half of the pin limit, of 2 pages each"


def test_all_tiers_are_asked_at_once_and_the_first_that_has_it_is_read() -> None:
    node, keys = Node(pages=64, tiers=[shared(), shared(S3)]), keys_of("a", 3)
    assert node.acquire(keys).promoting == 1
    fs, s3 = lookups(node)
    assert (fs.tier, s3.tier) == (FS, S3)
    answer(node, s3, keys[:2])
    assert [read.tier for read in node.reads()] == [S3, S3]
    answer(node, fs, keys[:1])
    node.catalog.check()
    assert node.reads() == []
    node.catalog.clear()
    assert node.acquire(keys).promoting == 2
    assert [read.tier for read in node.reads()] == [FS, S3], "the faster one, if both have it"


def test_a_tier_that_is_stuck_does_not_hold_up_what_others_have() -> None:
    node, keys = Node(tiers=[spec(), shared(), shared(S3)]), keys_of("a", 3)
    node.store(keys[:1])
    node.acquire(keys)
    actions = node.catalog.take_actions()
    stuck, s3 = [a for a in actions if isinstance(a, TierLookup)]
    answer(node, s3, keys[1:])
    assert [read.key for read in node.reads()] == keys[1:]
    node.catalog.tier_online(stuck.tier, online=False)
    node.catalog.check()
    answer(node, stuck, None)


def test_a_tier_that_goes_offline_is_waited_for_by_nobody() -> None:
    node, keys = Node(tiers=[shared(), shared(S3)]), keys_of("a", 2)
    node.acquire(keys)
    fs, s3 = lookups(node)
    answer(node, s3, [])
    assert updates(node) == []
    node.catalog.tier_online(FS, online=False)
    node.catalog.check()
    assert [a.chunks for a in updates(node)] == [()]
    assert node.acquire(keys).promoting == 0
    answer(node, fs, keys)
    node.catalog.tier_online(FS, online=True)
    assert node.acquire(keys).promoting == 2


def test_a_read_that_misses_is_made_up_for_by_another_tier() -> None:
    node, keys = Node(tiers=[spec(), shared()]), keys_of("a", 3)
    node.store(keys)
    lease_id = node.acquire(keys).lease_id
    one, two, three = node.reads()
    node.finish(one)
    node.finish(two, ok=False)
    (lookup,) = lookups(node)
    assert lookup.keys == (keys[1],), "the disk has lost it; what follows is there"
    node.finish(three)
    answer(node, lookup, [keys[1]])
    (read,) = node.reads()
    assert (read.tier, read.key) == (FS, keys[1])
    node.finish(read)
    (final,) = updates(node)
    assert (final.lease_id, [c.key for c in final.chunks]) == (lease_id, keys)


def test_a_presence_that_proves_wrong_is_a_miss_and_not_believed_again() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    answer(node, ask(node, keys), keys)
    one, two = node.reads()
    node.finish(one)
    node.finish(two, ok=False)
    (final,) = updates(node)
    assert [c.key for c in final.chunks] == keys[:1]
    assert node.acquire(keys).promoting == 0
    assert lookups(node) == []


def test_one_that_hangs_leaves_room_for_others() -> None:
    """Its reads never end; half of what may be pinned stays for the disk and for memory.

    If the disk hangs too, an eighth stays for memory.
    """
    node = Node(pages=16, pin_limit=8, tiers=[spec(), shared()])
    hanging, keys, resident = keys_of("h", 8), keys_of("a", 4), keys_of("r", 1)
    node.save(resident)
    node.store(keys)
    answer(node, ask(node, hanging), hanging)
    assert len(node.reads()) == 4
    assert node.acquire(keys).promoting == 3
    answered = node.acquire(resident)
    assert len(answered.chunks) == 1
    node.catalog.release(node.session, answered.lease_id)
    for count in (3, 1):
        reads = node.reads()
        assert [read.tier for read in reads] == [DISK] * count
        for read in reads:
            node.finish(read)
    assert [len(a.chunks) for a in updates(node)] == [4]


def test_a_prompt_longer_than_may_be_read_at_a_time_goes_on_when_its_first_chunks_came() -> None:
    node, keys = Node(pages=16, pin_limit=8, tiers=[shared()]), keys_of("a", 8)
    answer(node, ask(node, keys), keys)
    count = 0
    while reads := node.reads():
        node.finish(reads[0])
        count += len(reads)
        for read in reads[1:]:
            node.finish(read)
        found = node.resident(keys)
        assert found == count
    assert node.resident(keys) == 8
    assert node.catalog.stats().leased_bytes == 8 * PAGE
    assert node.catalog.stats().missed_chunks == 0


def test_what_is_written_is_known_to_be_there_and_not_deleted_when_it_failed() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    node.save(keys)
    one, two = node.writes()
    node.catalog.tier_write_done(FS, one.key, ok=True)
    node.catalog.tier_write_done(FS, two.key, ok=False)
    assert node.catalog.take_actions() == [], "another node may have written the other"
    node.catalog.clear()
    assert node.acquire(keys).promoting == 2
    node.catalog.check()


@pytest.mark.parametrize(("mode", "kept"), [(WriteMode.THROUGH, 10), (WriteMode.BEHIND, 4)])
def test_writes_through_keep_their_chunks_and_writes_behind_do_not(
    monkeypatch: pytest.MonkeyPatch, mode: WriteMode, kept: int
) -> None:
    monkeypatch.setattr("kvhaven.catalog.writebehind.OUTSTANDING_BYTES", 4 * PAGE)
    node = Node(pages=16, write_queue=8, tiers=[shared(write=mode)])
    keys = keys_of("a", 10)
    node.save(keys)
    assert node.save(keys_of("b", 16)) == 16 - kept, "saves take what is not pinned"
    assert node.resident(keys) == kept
    assert node.catalog.stats().tiers[FS].queued_write_bytes <= 8 * PAGE
    node.catalog.tier_online(FS, online=False)
    assert node.save(keys_of("c", 16)) == 12, "what is being written stays, what waits does not"
    for write in node.writes():
        node.catalog.tier_write_done(FS, write.key, ok=False)
    node.catalog.clear()
    node.catalog.check()
    assert node.allocator.used_bytes == 0


def test_a_tier_that_is_only_read_is_never_written() -> None:
    node, keys = Node(tiers=[shared(write=WriteMode.OFF)]), keys_of("a", 2)
    node.save(keys)
    assert node.writes() == []
    assert node.catalog.stats().dropped_writes == 0


def test_what_is_stored_on_its_second_use_is_not_stored_on_its_first() -> None:
    node, keys = Node(tiers=[shared(store_on=StoreOn.SECOND)]), keys_of("a", 3)
    node.save(keys)
    assert node.writes() == []
    node.acquire(keys[:2])
    assert [write.key for write in node.writes()] == keys[:2]
    node.acquire(keys[:2])
    assert node.writes() == []
    node.catalog.clear(tier=TierName("memory"))
    node.save(keys[2:])
    assert [write.key for write in node.writes()] == keys[2:], "it is computed again"


def test_what_was_read_is_written_to_faster_tiers_and_not_to_slower_shared_ones() -> None:
    for fill, expected in ((True, [DISK, FS]), (False, [])):
        tiers = [spec(), shared(), shared(S3), shared(TierName("redis"))]
        node, keys = Node(tiers=tiers, fill_faster=fill), keys_of("a", 1)
        node.acquire(keys)
        for lookup in lookups(node):
            answer(node, lookup, keys if lookup.tier == S3 else [])
        node.finish(node.reads()[0])
        assert [write.tier for write in node.writes()] == expected


def test_clearing_leaves_shared_tiers_unless_they_are_named() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    answer(node, ask(node, keys), keys)
    node.catalog.clear()
    for read in node.reads():
        node.finish(read)
    assert node.catalog.take_actions() == []
    assert node.acquire(keys).promoting == 2, "it is still believed to be there"
    for read in node.reads():
        node.finish(read)
    node.catalog.clear(tier=FS)
    node.catalog.clear()
    ask(node, keys)


def test_an_answer_that_fits_no_question_is_refused() -> None:
    node, keys = Node(tiers=[spec(), shared()]), keys_of("a", 1)
    lookup = ask(node, keys)
    wrong: list[tuple[int, Mapping[ChunkKey, int]]] = [
        (lookup.number + 1, {}),
        (lookup.number, dict.fromkeys(keys_of("b", 1), 1)),
    ]
    for number, found in wrong:
        with pytest.raises(KVHavenError, match="answer each TierLookup once"):
            node.catalog.tier_looked_up(FS, number, found)
    with pytest.raises(KVHavenError, match="disk is not shared"):
        node.catalog.tier_looked_up(DISK, 1, {})
    digest = node.namespace.digest
    with pytest.raises(KVHavenError, match="fs is shared"):
        node.catalog.tier_found(FS, digest, keys[0], 0, PAGE)
    with pytest.raises(KVHavenError, match="fs is shared"):
        node.catalog.tier_capacity(FS, 1)
    answer(node, lookup, keys)
    with pytest.raises(KVHavenError, match="answer each TierLookup once"):
        answer(node, lookup, keys)
    assert checksums_of(keys[0])


def expected(node: Node, keys: Sequence[ChunkKey]) -> dict[ChunkKey, int]:
    """Announce a chain to the tier FS."""
    return node.catalog.expected(FS, node.namespace.digest, keys)


def arrive(node: Node, number: int, key: ChunkKey, *, came: bool = True) -> None:
    """Say whether an expected chunk has come."""
    found = {key: node.namespace.table.complete} if came else None
    node.catalog.tier_looked_up(FS, number, found)


def test_expected_chunks_are_read_when_they_arrive_and_leases_wait_for_them() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 3)
    numbers = expected(node, keys)
    assert list(numbers) == keys
    assert node.reads() == []
    assert node.acquire(keys).promoting == 1
    assert lookups(node) == []
    arrive(node, numbers[keys[0]], keys[0])
    (read,) = node.reads()
    node.finish(read)
    arrive(node, numbers[keys[1]], keys[1], came=False)
    (final,) = updates(node)
    assert [chunk.key for chunk in final.chunks] == keys[:1]
    arrive(node, numbers[keys[2]], keys[2], came=False)
    node.catalog.check()


def test_a_chunk_that_is_named_twice_is_expected_once() -> None:
    node, (key,) = Node(tiers=[shared()]), keys_of("a", 1)
    numbers = expected(node, [key] * 128)
    arrive(node, numbers[key], key, came=False)
    node.catalog.check()
    assert node.catalog.stats().tiers[FS].looking_up == 0


def test_a_chunk_that_was_being_looked_up_when_it_was_announced_is_found_when_it_came() -> None:
    node, keys = Node(tiers=[shared()]), keys_of("a", 2)
    lookup = ask(node, keys)
    assert expected(node, keys) == {}
    node.catalog.arrived(FS, node.namespace.digest, keys[0])
    answer(node, lookup, [])
    assert [read.key for read in node.reads()] == keys[:1]
    node.catalog.check()
