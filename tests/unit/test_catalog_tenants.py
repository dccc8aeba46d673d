# SPDX-License-Identifier: Apache-2.0
"""Tenants in the catalog: who sees what, who pays for a quota, and what becomes of a lower one."""

from collections.abc import Sequence

import pytest

from kvhaven.catalog import TierSpec
from kvhaven.catalog.actions import (
    LeaseId,
    MemberId,
    TierDelete,
    TierLookup,
    TierName,
)
from kvhaven.catalog.eviction_queues import EvictionQueues
from kvhaven.catalog.policies import POLICIES
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas
from kvhaven.types import NO_TENANT, ChunkKey, TenantId
from tests.unit.catalog_kit import DISK, PAGE, STORED, Node, keys_of, namespace_of, spec

ANN, BEN = tenant_id("ann"), tenant_id("ben")


def node_with(
    memory: Quotas | None = None,
    disk: Quotas | None = None,
    tiers: Sequence[TierSpec] = (),
    **more: object,
) -> Node:
    return Node(tiers=tiers, memory_quotas=memory or Quotas(), disk_quotas=disk or Quotas(), **more)  # type: ignore[arg-type]


def pages(node: Node, tenant: TenantId) -> int:
    """Return how many pages of memory a tenant has."""
    return node.catalog.tenant_stats(tenant).memory.bytes // PAGE


def stored(node: Node, tenant: TenantId) -> int:
    """Return how many chunks a tenant has on disk."""
    return node.catalog.tenant_stats(tenant).tiers[DISK].chunks


def write_all(node: Node) -> None:
    """Do every write that is asked for."""
    while writes := node.writes():
        for write in writes:
            node.catalog.tier_write_done(write.tier, write.key, ok=True)
            node.catalog.check()


@pytest.mark.parametrize("other", [BEN, NO_TENANT])
def test_a_tenants_chunk_is_not_there_for_anybody_else(other: TenantId) -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    assert node.save(keys, tenant=ANN) == 3
    assert len(node.acquire(keys, tenant=ANN).chunks) == 3
    foreign = node.acquire(keys, tenant=other)
    assert (len(foreign.chunks), foreign.promoting) == (0, 0)
    assert node.catalog.stats().foreign == 1
    assert node.reserve(keys, tenant=other) == [None] * 3
    node.catalog.check()


def test_a_tenants_chunk_on_disk_is_not_there_for_anybody_else() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 3)
    node.store(keys, tenant=ANN)
    assert node.acquire(keys, tenant=BEN).promoting == 0
    assert node.acquire(keys).promoting == 0
    assert node.catalog.stats().foreign == 2
    assert not node.reads()
    assert node.acquire(keys, tenant=ANN).promoting == 3
    assert {read.tenant for read in node.reads()} == {ANN}


def test_a_chunk_of_the_same_name_never_harms_the_first_ones() -> None:
    """No client computes another tenant's keys; one that is wrong only fails itself."""
    node, (key,) = Node(tiers=[spec()]), keys_of("a", 1)
    node.store([key], tenant=ANN)
    assert node.save([key], tenant=BEN) == 1
    (write,) = node.writes()
    assert write.tenant == BEN
    node.catalog.tier_write_done(DISK, key, ok=True)
    assert node.of_type(TierDelete) == [TierDelete(DISK, node.namespace, key, BEN)]
    node.store([key], tenant=BEN)
    assert node.of_type(TierDelete) == [TierDelete(DISK, node.namespace, key, BEN)]
    assert (stored(node, ANN), stored(node, BEN)) == (1, 0)
    node.catalog.check()
    node.catalog.clear(tier=TierName("memory"))
    assert node.acquire([key], tenant=ANN).promoting == 1


def test_a_shared_tier_is_asked_for_a_tenants_chunks_as_that_tenant() -> None:
    node = Node(tiers=[TierSpec(TierName("fs"), shared=True)])
    node.acquire(keys_of("a", 2), tenant=ANN)
    (lookup,) = node.of_type(TierLookup)
    assert isinstance(lookup, TierLookup)
    assert lookup.tenant == ANN


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_at_its_quota_evicts_its_own(policy: str) -> None:
    node = node_with(Quotas({ANN: 3 * PAGE}), policy=policy)
    others = keys_of("others", 5)
    node.save(others)
    node.save(keys_of("ben", 4), tenant=BEN)
    for name in "abcd":
        assert node.save(keys_of(name, 2), tenant=ANN) == 2
        assert pages(node, ANN) <= 3
    assert node.resident(others) == 5
    assert pages(node, BEN) == 4
    stats = node.catalog.stats()
    assert stats.quota_evictions == stats.evictions > 0


def test_it_takes_the_least_recently_used_chain_from_its_tail() -> None:
    node = node_with(Quotas({ANN: 6 * PAGE}))
    old, used = keys_of("old", 3), keys_of("used", 3)
    node.save(old, tenant=ANN)
    node.save(used, tenant=ANN)
    lease_id = node.acquire(old, tenant=ANN).lease_id
    node.catalog.release(node.session, lease_id)
    node.save(keys_of("new", 2), tenant=ANN)
    assert [node.resident([key]) for key in (*old, *used)] == [1, 1, 1, 1, 0, 0]


def test_what_does_not_fit_is_not_saved_and_nobody_else_pays() -> None:
    node, used = node_with(Quotas(others=3 * PAGE)), keys_of("used", 2)
    node.save(keys_of("others", 6))
    node.save(used, tenant=ANN)
    node.acquire(used, tenant=ANN)
    grants = node.reserve(keys_of("more", 3), tenant=ANN)
    assert [grant is not None for grant in grants] == [True, False, False]
    assert node.catalog.stats().quota_refusals == 2
    assert node.resident(used) == 2
    assert node.resident(keys_of("others", 6)) == 6
    node.catalog.check()


def test_a_quota_smaller_than_a_chunk_saves_nothing_and_evicts_nothing() -> None:
    node = node_with(Quotas({ANN: 2 * PAGE}))
    small, big = keys_of("small", 2), namespace_of("big", 3)
    node.catalog.add_namespace(big)
    node.attach("t", big)
    node.save(small, tenant=ANN)
    member, keys = MemberId("t/0"), keys_of("big", 1)
    assert node.catalog.reserve(member, big.digest, None, keys, 0, ANN) == [None]
    assert node.resident(small) == 2


def test_sizes_share_one_quota_and_the_older_goes() -> None:
    node = node_with(Quotas({ANN: 4 * PAGE}))
    big = namespace_of("big", 2)
    node.catalog.add_namespace(big)
    node.attach("t", big)
    first, second = keys_of("first", 2), keys_of("second", 2)
    node.save(first, tenant=ANN)
    node.save(second, tenant=ANN)
    grants = node.catalog.reserve(MemberId("t/0"), big.digest, None, keys_of("big", 1), 0, ANN)
    assert grants[0] is not None
    assert (node.resident(first), node.resident(second)) == (0, 2)
    assert pages(node, ANN) == 4
    node.catalog.check()


def test_a_promotion_beyond_the_quota_is_a_miss() -> None:
    node, keys = node_with(Quotas({ANN: 2 * PAGE}), tiers=[spec()]), keys_of("a", 4)
    node.store(keys, tenant=ANN)
    assert node.acquire(keys, tenant=ANN).promoting == 2
    for read in node.reads():
        node.finish(read)
    assert pages(node, ANN) == 2
    assert node.catalog.prefetch(node.namespace.digest, keys_of("b", 1), ANN) == 0


def test_a_lower_quota_counts_at_once_and_what_is_used_goes_when_it_is_not() -> None:
    node, used, idle = Node(), keys_of("used", 3), keys_of("idle", 3)
    node.save(used, tenant=ANN)
    node.save(idle, tenant=ANN)
    node.save(keys_of("ben", 3), tenant=BEN)
    lease_id = node.acquire(used, tenant=ANN).lease_id
    node.catalog.limit_memory(ANN, PAGE)
    assert (node.resident(idle), node.resident(used), pages(node, ANN)) == (0, 3, 3)
    node.catalog.check()
    assert node.reserve(keys_of("new", 1), tenant=ANN) == [None]
    node.catalog.release(node.session, lease_id)
    node.catalog.take_actions()
    assert node.resident(used[:1]) == pages(node, ANN) == 1
    assert pages(node, BEN) == 3
    node.catalog.check()
    node.catalog.limit_memory(ANN, None)
    assert node.save(keys_of("new", 5), tenant=ANN) == 5


def test_a_quota_finds_chunks_that_move_while_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for victims moves chunks in use to the end of the order, behind the quota's walk."""
    node = Node()
    node.save(keys_of("a", 3), tenant=ANN)
    monkeypatch.setattr(EvictionQueues, "walk", lambda _: iter(()))
    node.catalog.limit_memory(ANN, 3 * PAGE)
    node.catalog.check()
    node.save(keys_of("more", 2), tenant=ANN)
    assert pages(node, ANN) == 3
    node.catalog.check()


def test_a_quota_is_remembered_when_nothing_of_the_tenant_is_here() -> None:
    node = Node()
    node.catalog.limit_memory(ANN, 2 * PAGE)
    assert node.catalog.stats().tenants == {}
    node.save(keys_of("a", 5), tenant=ANN)
    assert pages(node, ANN) == 2
    node.catalog.clear(tenant=ANN)
    assert node.catalog.stats().tenants == {}
    node.save(keys_of("a", 5), tenant=ANN)
    assert pages(node, ANN) == 2


def test_tenants_of_whom_nothing_is_here_are_forgotten() -> None:
    node = Node(tiers=[TierSpec(TierName("fs"), shared=True, lookup_ttl_s=1.0)])
    for number in range(200):
        tenant, keys = tenant_id(f"user {number}"), keys_of(f"{number}", 1)
        node.catalog.tick(float(2 * number))
        answer = node.acquire(keys, tenant=tenant)
        for lookup in node.of_type(TierLookup):
            assert isinstance(lookup, TierLookup)
            node.catalog.tier_looked_up(lookup.tier, lookup.number, {})
        node.catalog.release(node.session, LeaseId(answer.lease_id))
    assert len(list(node.catalog._owners.tenants())) < 5


def test_figures_name_the_tenants_that_have_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhaven.catalog.stats.MOST_TENANTS", 2)
    node = Node()
    for number, tenant in enumerate((ANN, BEN, tenant_id("cat")), 1):
        node.save(keys_of(tenant.hex(), number), tenant=tenant)
    stats = node.catalog.stats()
    assert [usage.memory.chunks for usage in stats.tenants.values()] == [3, 2]
    assert stats.more_tenants == 1
    assert stats.namespaces[node.namespace.digest].memory.chunks == 6


def test_clear_by_tenant_leaves_all_others() -> None:
    node = Node(tiers=[spec()])
    for tenant in (ANN, BEN, NO_TENANT):
        node.save(keys_of(tenant.hex(), 2), tenant=tenant)
        node.store(keys_of(tenant.hex(), 3), tenant=tenant)
    write_all(node)
    assert node.catalog.clear(tenant=ANN) == (5, 2 * PAGE + 3 * STORED)
    assert {write.tenant for write in node.of_type(TierDelete)} == {ANN}  # type: ignore[union-attr]
    assert (pages(node, ANN), stored(node, ANN)) == (0, 0)
    assert (pages(node, BEN), stored(node, BEN)) == (2, 3)
    assert node.resident(keys_of("", 2)) == 2
    assert node.catalog.clear(tenant=tenant_id("stranger")) == (0, 0)
    node.catalog.check()


# The disk


def test_a_tenant_at_its_quota_of_the_disk_deletes_its_own() -> None:
    node = node_with(disk=Quotas({ANN: 3 * STORED}), tiers=[spec()])
    node.save(keys_of("ben", 4), tenant=BEN)
    write_all(node)
    first, second = keys_of("first", 2), keys_of("second", 2)
    for keys in (first, second):
        node.save(keys, tenant=ANN)
        write_all(node)
    assert (stored(node, ANN), stored(node, BEN)) == (3, 4)
    assert node.acquire(second, tenant=ANN).chunks
    held = node.catalog._tiers.own[DISK].stored
    assert [key in held for key in (*first, *second)] == [True, False, True, True]


def test_what_is_read_stays_and_nothing_more_is_written() -> None:
    node = node_with(disk=Quotas(others=2 * STORED), tiers=[spec()])
    read = keys_of("read", 2)
    node.store(read, tenant=ANN)
    node.acquire(read, tenant=ANN)
    reads = node.reads()
    node.save(keys_of("new", 1), tenant=ANN)
    assert not node.writes()
    assert stored(node, ANN) == 2
    assert node.catalog.stats().dropped_writes == 1
    for one in reads:
        node.finish(one)
    node.save(keys_of("newer", 1), tenant=ANN)
    write_all(node)
    assert stored(node, ANN) == 2
    assert keys_of("newer", 1)[0] in node.catalog._tiers.own[DISK].stored


def test_what_the_scan_finds_beyond_a_quota_is_deleted() -> None:
    node = node_with(disk=Quotas({ANN: 2 * STORED}), tiers=[spec()])
    node.store(keys_of("a", 5), tenant=ANN)
    node.store(keys_of("b", 5), tenant=BEN)
    assert (stored(node, ANN), stored(node, BEN)) == (2, 5)
    assert len(node.of_type(TierDelete)) == 3
    node.catalog.check()


def test_a_lower_quota_of_the_disk_counts_at_once() -> None:
    node = Node(tiers=[spec()])
    keys: list[ChunkKey] = keys_of("a", 5)
    node.store(keys, tenant=ANN)
    node.acquire(keys[:1], tenant=ANN)
    (read,) = node.reads()
    node.catalog.limit_disk(ANN, 0)
    assert stored(node, ANN) == 1  # it is being read
    node.catalog.check()
    node.finish(read)
    assert stored(node, ANN) == 0
    node.catalog.limit_disk(ANN, None)
    node.store(keys, tenant=ANN)
    assert stored(node, ANN) == 5
    node.catalog.check()


def test_a_first_quota_of_the_disk_counts_no_chunk_that_goes_meanwhile() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 1500)
    node.store(keys, tenant=ANN)
    node.catalog.limit_disk(ANN, 2000 * STORED)
    assert node.catalog.busy, "that is one piece of work"
    for piece in range(len(keys)):
        for key in keys[piece::100]:
            node.catalog.tier_forgot(DISK, key)
        if not node.catalog.work():
            break
    node.catalog.check()


@pytest.mark.parametrize("pieces", range(5))
def test_a_first_quota_of_the_disk_counts_what_a_scan_finds_meanwhile(pieces: int) -> None:
    node = Node(tiers=[spec()])
    node.catalog.tier_scanned(DISK, ended=False)
    node.store(keys_of("b", 4096), tenant=BEN)
    node.catalog.limit_disk(ANN, 10 * STORED)
    assert node.catalog.work(pieces) or pieces == 4
    node.store(keys_of("a", 20), tenant=ANN)
    node.catalog.check()
    while node.catalog.work():
        node.catalog.check()
    assert stored(node, ANN) == 10
    node.store(keys_of("c", 20), tenant=ANN)
    assert stored(node, ANN) == 10
    node.catalog.check()
