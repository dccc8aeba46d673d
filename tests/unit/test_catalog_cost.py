# SPDX-License-Identifier: Apache-2.0
"""What the catalog costs, in work that can be counted: time is for the benchmark."""

import gc

from kvhaven.catalog import StoreOn, TierSpec
from kvhaven.catalog.actions import MemberId, Ticket, TierLookup, TierName, TierRead, TierWrite
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas
from kvhaven.types import NO_TENANT, ChunkKey
from tests.unit.catalog_kit import PAGE, Node, keys_of, spec


class CountingDict(dict[ChunkKey, object]):
    """Counts look-ups."""

    lookups = 0

    def get(self, key: ChunkKey, default: object = None) -> object:
        self.lookups += 1
        return super().get(key, default)

    def __getitem__(self, key: ChunkKey) -> object:
        self.lookups += 1
        return super().__getitem__(key)


def test_an_acquire_looks_each_chunk_up_once() -> None:
    node, keys = Node(pages=2048, world=2), keys_of("a", 512)
    assert node.save(keys) == 512
    entries = CountingDict(node.catalog._space.entries)
    node.catalog._space.entries = entries  # type: ignore[assignment]
    assert len(node.acquire(keys).chunks) == 512
    assert entries.lookups == 512


def test_a_tenant_at_its_quota_costs_the_same_beside_many_others() -> None:
    lookups = []
    for others in (1, 500):
        node = Node(pages=2048, memory_quotas=Quotas(others=2 * PAGE))
        for number in range(others):
            node.save(keys_of(f"{number}", 2), tenant=tenant_id(f"user {number}"))
        node.save(keys_of("a", 2), tenant=tenant_id("ann"))
        entries = CountingDict(node.catalog._space.entries)
        node.catalog._space.entries = entries  # type: ignore[assignment]
        node.reserve(keys_of("b", 2), tenant=tenant_id("ann"))
        assert node.catalog.stats().quota_evictions == 2
        lookups.append(entries.lookups)
    assert lookups[0] == lookups[1]


def test_no_garbage_is_left_for_a_collector_that_is_off() -> None:
    shared = TierSpec(TierName("fs"), shared=True, store_on=StoreOn.SECOND)
    tiers = [spec(), spec(TierName("remote"), chunks=20), shared]
    node = Node(pages=16, tiers=tiers, memory_quotas=Quotas(others=12 * PAGE))
    gc.collect()
    gc.disable()
    try:
        for number in range(30):
            keys = keys_of(f"c{number % 7}", 5)
            node.attach(f"t{number}")
            node.catalog.tick(number)
            tenant = tenant_id("ann") if number % 4 == 1 else NO_TENANT
            node.catalog.prefetch(node.namespace.digest, keys_of(f"d{number}", 5), tenant)
            answer = node.acquire(keys, tenant=tenant)
            while actions := node.catalog.take_actions():
                for action in actions:
                    if isinstance(action, TierRead):
                        node.finish(action, ok=number % 3 != 0)
                    elif isinstance(action, TierWrite):
                        node.catalog.tier_write_done(action.tier, action.key, ok=number % 4 != 0)
                    elif isinstance(action, TierLookup):
                        found = None if number % 5 == 0 else dict.fromkeys(action.keys[:3], 1)
                        node.catalog.tier_looked_up(action.tier, action.number, found)
            node.catalog.release(node.session, answer.ticket)
            node.save(keys, tenant=tenant)
            for write in node.writes():
                node.catalog.tier_write_done(write.tier, write.key, ok=True)
            node.acquire(keys, f"t{number}")
            for member in (f"t{number}/0", f"t{number}/None"):
                node.catalog.lost(MemberId(member))
                node.catalog.gone(MemberId(member))
            node.catalog.settle(node.session, Ticket(0))
        node.catalog.clear(tenant=tenant_id("ann"))
        assert node.catalog.stats().tenants == {}
        assert node.catalog.stats().evictions > 20
        assert gc.collect() == 0
    finally:
        gc.enable()
