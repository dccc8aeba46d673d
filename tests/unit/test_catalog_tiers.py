# SPDX-License-Identifier: Apache-2.0
"""What the catalog believes of the tiers, and what it has deleted from them."""

import pytest

from kvhaven.catalog.actions import TierDelete, TierName, Update
from kvhaven.errors import KVHavenError
from kvhaven.types import NO_TENANT, TENANT_BYTES, ChunkKey, NamespaceDigest, TenantId
from tests.unit.catalog_kit import DISK, PAGE, STORED, Node, keys_of, namespace_of, spec


def deleted(node: Node) -> list[ChunkKey]:
    return [a.key for a in node.of_type(TierDelete) if isinstance(a, TierDelete)]


def held(node: Node) -> int:
    return node.catalog.stats().tiers[DISK].chunks


def test_a_scan_is_counted_once() -> None:
    node, keys = Node(world_size=2, tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    node.store(keys)
    node.catalog.check()
    usage = node.catalog.stats().namespaces[node.namespace.digest].tiers[DISK]
    assert (usage.chunks, usage.bytes) == (2, 4 * STORED)


def test_a_clear_counts_until_a_scan_that_began_afterwards_has_ended() -> None:
    """A tier that is offline keeps what was cleared, and brings it back."""
    node, (key, after) = Node(tiers=[spec()]), keys_of("a", 2)

    def found() -> tuple[int, list[ChunkKey]]:
        node.store([key])
        return held(node), deleted(node)

    node.catalog.tier_online(DISK, False)
    node.catalog.clear()  # before it was ever open
    node.catalog.tier_online(DISK, True)
    node.catalog.tier_scanned(DISK, ended=False)
    assert found() == (0, [key])
    node.catalog.tier_scanned(DISK, ended=True, complete=False)
    assert found() == (0, [key])
    node.catalog.tier_scanned(DISK, ended=False)
    node.catalog.tier_scanned(DISK, ended=False)  # of a tier that was opened anew meanwhile
    node.catalog.tier_scanned(DISK, ended=True)
    assert found() == (0, [key])
    node.catalog.tier_scanned(DISK, ended=True)
    assert found() == (1, [])
    for tenant, namespace in ((NO_TENANT, None), (None, node.namespace.digest)):
        node.catalog.tier_online(DISK, False)
        node.catalog.clear(namespace, tenant=tenant)
        assert deleted(node) == [key]  # in vain
        node.catalog.tier_scanned(DISK, ended=False)
        node.catalog.tier_online(DISK, True)
        assert found() == (0, [key])
        node.catalog.clear(tenant=TenantId(b"another."))
        node.catalog.tier_scanned(DISK, ended=True)
        assert found() == (1, [])
    node.store([after])
    assert held(node) == 2
    node.catalog.check()


def test_what_is_written_after_a_clear_is_found_after_an_outage() -> None:
    """The clear was made when all was known, or in an outage that no scan followed."""
    for outage in (False, True):
        node, keys = Node(tiers=[spec()]), keys_of("a", 3)
        for ended in (False, True):
            node.catalog.tier_scanned(DISK, ended=ended)
        node.catalog.tier_online(DISK, not outage)
        node.catalog.clear()
        node.catalog.tier_online(DISK, True)
        node.catalog.tier_online(DISK, False)
        node.catalog.tier_scanned(DISK, ended=False)
        node.catalog.tier_online(DISK, True)
        node.store(keys)
        assert (held(node), deleted(node)) == (3, [])


def test_what_is_found_while_it_is_written_anew_after_a_clear_is_not_deleted() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.catalog.tier_scanned(DISK, ended=False)
    node.catalog.clear()
    node.save(keys)
    (write,) = node.writes()
    node.store(keys)
    assert deleted(node) == []
    node.catalog.tier_write_done(DISK, write.key, ok=True)
    assert held(node) == 1
    node.catalog.check()


def test_what_was_cleared_while_it_is_read_is_not_found_by_a_scan() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    for ended in (False, True):
        node.catalog.tier_scanned(DISK, ended=ended)
    node.store(keys)
    node.acquire(keys)
    (read,) = node.reads()
    node.catalog.clear()
    node.catalog.tier_scanned(DISK, ended=False)
    node.store(keys)
    assert (held(node), deleted(node)) == (0, [])
    node.finish(read)
    assert deleted(node) == keys


def test_an_older_scan_that_fails_last_leaves_the_tier_scanned() -> None:
    node = Node(tiers=[spec()])
    for ended, complete in ((False, True), (False, True), (True, True), (True, False)):
        assert not node.catalog.stats().tiers[DISK].scanned
        node.catalog.tier_scanned(DISK, ended=ended, complete=complete)
    assert node.catalog.stats().tiers[DISK].scanned


def test_after_more_clears_than_are_remembered_all_that_is_found_goes() -> None:
    node, (key,) = Node(tiers=[spec()]), keys_of("a", 1)
    for number in range(1100):
        node.catalog.clear(tenant=TenantId(number.to_bytes(TENANT_BYTES)))
    node.catalog.tier_scanned(DISK, ended=False)
    node.store([key])
    assert (held(node), deleted(node)) == (0, [key])


def test_above_its_capacity_a_tier_is_emptied_to_the_watermark() -> None:
    node, keys = Node(pages=32, tiers=[spec(chunks=10, watermark=0.5)]), keys_of("a", 11)
    node.store(keys[:10])
    assert deleted(node) == []
    node.store(keys[10:])
    node.catalog.check()
    assert len(deleted(node)) == 6
    assert held(node) == 5


def test_tails_that_were_not_used_go_first() -> None:
    node = Node(pages=32, tiers=[spec(chunks=6, watermark=1.0)])
    old, new = keys_of("o", 3), keys_of("n", 3)
    node.store(old)
    node.store(new)
    node.catalog.prefetch(node.namespace.digest, old)
    node.catalog.take_actions()
    extra = keys_of("x", 2)
    node.save(extra)
    for write in node.writes():
        node.catalog.tier_write_done(DISK, write.key, ok=True)
    assert node.catalog.stats().tiers[DISK].chunks == 6
    node.catalog.clear(tier=TierName("memory"))
    assert node.acquire(old).promoting == 3
    assert node.acquire(new).promoting == 1


def test_a_written_chain_loses_its_tail_first() -> None:
    node, keys = Node(tiers=[spec(chunks=4, watermark=1.0)]), keys_of("a", 4)
    node.save(keys)
    for write in node.writes():
        node.catalog.tier_write_done(DISK, write.key, ok=True)
    node.save(keys_of("b", 1))
    assert deleted(node) == keys[3:]


def test_what_is_being_read_is_not_deleted() -> None:
    node, keys = Node(tiers=[spec(chunks=2, watermark=0.5)]), keys_of("a", 2)
    node.store(keys)
    node.acquire(keys)
    reads = node.reads()
    node.save(keys_of("b", 2))
    for write in node.writes():
        node.catalog.tier_write_done(DISK, write.key, ok=True)
    node.catalog.check()
    assert not set(deleted(node)) & set(keys)
    for read in reads:
        node.finish(read)
    assert held(node) <= 2


def test_what_is_cleared_while_it_is_read_is_deleted_afterwards() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.store(keys)
    node.acquire(keys)
    (read,) = node.reads()
    assert node.catalog.clear() == (1, STORED)
    node.catalog.check()
    assert len(node.of_type(Update)) == 1, "the ticket does not wait any more"
    node.finish(read)
    assert deleted(node) == keys
    assert node.resident(keys) == 0
    assert node.allocator.used_bytes == 0


def test_a_failed_write_leaves_nothing_behind() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.save(keys)
    (write,) = node.writes()
    node.catalog.tier_write_done(DISK, write.key, ok=False)
    assert deleted(node) == keys
    assert held(node) == 0
    assert node.catalog.stats().dropped_writes == 1


def test_what_is_discarded_while_it_is_written_is_deleted_afterwards() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.save(keys)
    (write,) = node.writes()
    node.catalog.discard(keys[0])
    assert node.allocator.used_bytes == PAGE
    node.catalog.tier_write_done(DISK, write.key, ok=True)
    node.catalog.check()
    assert deleted(node) == keys
    assert (held(node), node.allocator.used_bytes) == (0, 0)


def test_what_a_tier_lost_is_a_miss() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.store(keys)
    node.catalog.tier_forgot(DISK, keys[0])
    node.catalog.tier_forgot(DISK, keys[0])
    assert node.acquire(keys).promoting == 0
    assert deleted(node) == []


def test_an_offline_tier_is_given_nothing_and_forgets_what_waited() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1)
    node.catalog.tier_online(DISK, online=False)
    node.save(keys)
    assert node.writes() == []
    node.catalog.tier_online(DISK, online=True)
    node.save(keys_of("b", 1))
    assert len(node.writes()) == 1


def test_chunks_that_take_less_than_was_reserved_leave_room_for_more() -> None:
    node, keys = Node(pages=8, tiers=[spec(chunks=4)]), keys_of("a", 8)
    for batch in (keys[:3], keys[3:6], keys[6:]):
        node.save(batch)
        for write in node.writes():
            node.catalog.tier_write_done(DISK, write.key, ok=True, taken_bytes=STORED // 4)
            node.catalog.check()
    usage = node.catalog.stats().tiers[DISK]
    assert (usage.chunks, usage.used_bytes) == (8, 2 * STORED)
    assert node.catalog.clear(tier=DISK) == (8, 2 * STORED)


def test_a_chunk_larger_than_the_tier_is_not_written() -> None:
    node = Node(tiers=[spec(chunks=0)])
    node.save(keys_of("a", 1))
    assert node.writes() == []
    assert node.catalog.stats().dropped_writes == 1


def test_clearing_memory_leaves_the_tiers() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.store(keys)
    node.save(keys)
    assert node.catalog.clear(tier=TierName("memory")) == (3, 3 * PAGE)
    assert (node.resident(keys), held(node)) == (0, 3)


def test_clearing_a_tier_leaves_memory_and_what_waits_for_it() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.save(keys)
    writes = node.writes()
    assert node.catalog.clear(tier=DISK) == (0, 0)
    for write in writes:
        node.catalog.tier_write_done(DISK, write.key, ok=True)
    assert sorted(deleted(node)) == sorted(keys), "a write under way does not survive the clear"
    assert (node.resident(keys), held(node)) == (3, 0)


def test_clearing_a_namespace_leaves_the_others() -> None:
    node, keys, others = Node(tiers=[spec()]), keys_of("a", 2), keys_of("b", 1)
    other = namespace_of("other")
    node.catalog.add_namespace(other)
    node.save(keys)
    node.catalog.tier_found(DISK, other.digest, others[0], 0, STORED)
    assert node.catalog.clear(other.digest) == (1, STORED)
    assert node.resident(keys) == 2
    node.catalog.check()


def test_what_is_pinned_is_cleared_from_sight_and_freed_later() -> None:
    node, keys = Node(), keys_of("a", 3)
    node.save(keys[:2])
    lease_id = node.acquire(keys).lease_id
    grant = node.grant(keys[2])
    assert node.catalog.clear() == (2, 2 * PAGE)
    node.catalog.check()
    assert node.acquire(keys).chunks == ()
    assert node.allocator.used_bytes == 3 * PAGE
    node.catalog.release(node.session, lease_id)
    node.commit(grant)
    assert node.allocator.used_bytes == 0


def test_mistakes_are_refused_by_name() -> None:
    node, key = Node(tiers=[spec()]), keys_of("a", 1)[0]
    digest = node.namespace.digest
    with pytest.raises(KVHavenError, match="tier tape is unknown; expected one of: disk"):
        node.catalog.clear(tier=TierName("tape"))
    with pytest.raises(KVHavenError, match=r"shard 1 .* does not exist"):
        node.catalog.tier_found(DISK, digest, key, 1, PAGE)
    with pytest.raises(KVHavenError, match="unknown"):
        node.catalog.tier_found(DISK, NamespaceDigest(b"?" * 32), key, 0, PAGE)
    with pytest.raises(KVHavenError, match="no write"):
        node.catalog.tier_write_done(DISK, key, ok=True)
    extent = node.grant(key).extent
    with pytest.raises(KVHavenError, match="no read"):
        node.catalog.tier_read_done(DISK, key, extent, None)
    with pytest.raises(KVHavenError, match="cannot be named memory"):
        Node(tiers=[spec(TierName("memory"))])


def test_what_is_saved_anew_while_the_cleared_one_is_read_is_not_deleted_with_it() -> None:
    node, (key,) = Node(tiers=[spec()]), keys_of("a", 1)
    node.store([key])
    node.acquire([key])
    (read,) = node.reads()
    node.catalog.clear()
    node.save([key])
    (write,) = node.writes()
    node.finish(read)
    assert node.of_type(TierDelete) == [], "it would come behind the write"
    node.catalog.tier_write_done(DISK, write.key, ok=True)
    node.catalog.check()
    assert node.catalog.stats().tiers[DISK].chunks == 1


def test_what_a_failed_write_left_is_deleted_when_the_cleared_one_was_read() -> None:
    node, (key,) = Node(tiers=[spec()]), keys_of("a", 1)
    node.store([key])
    node.acquire([key])
    (read,) = node.reads()
    node.catalog.clear()
    node.save([key])
    node.catalog.tier_write_done(DISK, node.writes()[0].key, ok=False)
    assert node.of_type(TierDelete) == []
    node.finish(read)
    assert len(node.of_type(TierDelete)) == 1


def test_what_is_cleared_during_a_scan_is_deleted_though_an_older_scan_ends() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.catalog.tier_scanned(DISK, ended=False)
    node.catalog.tier_scanned(DISK, ended=False)
    node.catalog.clear()
    node.catalog.tier_scanned(DISK, ended=True)
    assert not node.catalog.stats().tiers[DISK].scanned
    node.store(keys[:1])
    assert len(node.of_type(TierDelete)) == 1
    node.catalog.tier_scanned(DISK, ended=True)
    assert node.catalog.stats().tiers[DISK].scanned
    for ended in (False, True):  # one that began after the clear
        node.catalog.tier_scanned(DISK, ended=ended)
    node.store(keys)
    assert node.catalog.stats().tiers[DISK].chunks == 2
    node.catalog.check()
