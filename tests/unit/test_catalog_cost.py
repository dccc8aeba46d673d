# SPDX-License-Identifier: Apache-2.0
"""What the catalog costs, in work that can be counted: time is for the benchmark."""

import gc

from kvhaven.catalog import StoreOn, TierSpec
from kvhaven.catalog.actions import MemberId, Ticket, TierLookup, TierName, TierRead, TierWrite
from kvhaven.types import ChunkKey
from tests.unit.catalog_kit import Node, keys_of, spec


class CountingDict(dict[ChunkKey, object]):
    """Counts look-ups."""

    lookups = 0

    def get(self, key: ChunkKey, default: object = None) -> object:
        self.lookups += 1
        return super().get(key, default)


def test_an_acquire_looks_each_chunk_up_once() -> None:
    node, keys = Node(pages=2048, world=2), keys_of("a", 512)
    assert node.save(keys) == 512
    entries = CountingDict(node.catalog._space.entries)
    node.catalog._space.entries = entries  # type: ignore[assignment]
    assert len(node.acquire(keys).chunks) == 512
    assert entries.lookups == 512


def test_no_garbage_is_left_for_a_collector_that_is_off() -> None:
    shared = TierSpec(TierName("fs"), shared=True, store_on=StoreOn.SECOND)
    node = Node(pages=16, tiers=[spec(), spec(TierName("remote"), chunks=20), shared])
    gc.collect()
    gc.disable()
    try:
        for number in range(30):
            keys = keys_of(f"c{number % 7}", 5)
            node.attach(f"t{number}")
            node.catalog.tick(number)
            node.catalog.prefetch(node.namespace.digest, keys_of(f"d{number}", 5))
            answer = node.acquire(keys)
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
            node.save(keys)
            for write in node.writes():
                node.catalog.tier_write_done(write.tier, write.key, ok=True)
            node.acquire(keys, f"t{number}")
            for member in (f"t{number}/0", f"t{number}/None"):
                node.catalog.lost(MemberId(member))
                node.catalog.gone(MemberId(member))
            node.catalog.settle(node.session, Ticket(0))
        assert node.catalog.stats().evictions > 20
        assert gc.collect() == 0
    finally:
        gc.enable()
