# SPDX-License-Identifier: Apache-2.0
"""Eviction: what the catalog makes of the policies' proposals."""

from collections.abc import Iterator

import pytest

from kvhaven.catalog.actions import MemberId
from kvhaven.catalog.policies import LRU, POLICIES
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey
from tests.unit.catalog_kit import PAGE, Node, keys_of, namespace_of

EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def test_the_tail_of_the_oldest_chain_goes_first() -> None:
    node, old, new = Node(pages=16), keys_of("old", 8), keys_of("new", 8)
    node.save(old)
    node.save(new)
    node.save(keys_of("x", 3))
    assert (node.resident(old), node.resident(new)) == (5, 8)
    assert node.resident(old[:5]) == 5
    assert node.catalog.stats().evictions == 3


def test_a_chain_that_was_asked_for_is_younger() -> None:
    node, old, new = Node(pages=16), keys_of("old", 8), keys_of("new", 8)
    node.save(old)
    node.save(new)
    node.catalog.prefetch(node.namespace.digest, old)
    node.save(keys_of("x", 3))
    assert (node.resident(old), node.resident(new)) == (8, 5)


def test_a_parent_stays_while_its_child_is_here() -> None:
    node, keys = Node(pages=16), keys_of("a", 4)
    node.save(keys[2:], parent=keys[1])  # as if the head had been evicted, or came later
    node.save(keys[:2])
    node.save(keys_of("b", 12))
    node.catalog.prefetch(node.namespace.digest, keys[3:])  # the child is younger than the parent
    node.save(keys_of("c", 12))
    assert node.resident(keys) == 4


@EVERY_POLICY
def test_with_any_policy_the_head_of_a_chain_stays_while_more_of_it_is_here(policy: str) -> None:
    node = Node(pages=16, policy=policy)
    chains = [keys_of(f"c{n}", 4) for n in range(12)]
    for chain in chains:
        node.save(chain)
        node.catalog.prefetch(node.namespace.digest, chains[0])
        resident = [[node.resident([key]) for key in c] for c in chains]
        assert all(r == sorted(r, reverse=True) for r in resident)
    assert node.catalog.stats().evictions == 32


class CountingLRU(LRU):
    """Counts its proposals."""

    proposals = 0

    def fresh(self) -> "CountingLRU":
        return CountingLRU()

    def candidates(self) -> Iterator[ChunkKey]:
        for key in super().candidates():
            type(self).proposals += 1
            yield key


def test_what_is_held_for_long_is_not_gone_over_at_each_eviction() -> None:
    """An engine that was stopped keeps its leases, and they grow old."""
    node = Node(pages=1024, policy=CountingLRU())
    held = [keys_of(f"h{n}", 1) for n in range(500)]
    for keys in held:
        node.save(keys)
        node.acquire(keys)
    CountingLRU.proposals = 0
    for number in range(1500):
        node.commit(node.grant(keys_of(f"x{number}", 1)[0], save=number))
    assert node.catalog.stats().evictions > 900
    assert CountingLRU.proposals < 6000


class TwoClasses:
    """An arena of four slabs, and namespaces with chunks of one and of two pages."""

    def __init__(self) -> None:
        self.node = Node(pages=16)
        self.wide = namespace_of("wide", 1, 2 * PAGE)
        self.node.catalog.add_namespace(self.wide)
        self.node.attach("wide", self.wide)

    def save(self, namespace: Namespace, keys: list[ChunkKey]) -> int:
        """Save chunks one after the other; return how many were granted."""
        catalog, rank = self.node.catalog, "wide/0" if namespace is self.wide else "s/0"
        granted = 0
        for index, key in enumerate(keys):
            parent = keys[index - 1] if index else None
            (grant,) = catalog.reserve(MemberId(rank), namespace.digest, parent, [key], 0)
            if grant is not None:
                granted += 1
                self.node.commit(grant, rank)
        catalog.check()
        return granted


def test_a_class_without_anything_to_evict_gets_the_coldest_slab_of_another() -> None:
    two = TwoClasses()
    cold, warm = keys_of("cold", 4), keys_of("warm", 12)
    two.save(two.node.namespace, cold)
    two.save(two.node.namespace, warm)
    assert two.save(two.wide, keys_of("w", 2)) == 2
    assert (two.node.resident(cold), two.node.resident(warm)) == (0, 12)


def test_a_class_that_came_late_gets_its_share_of_what_is_colder() -> None:
    two = TwoClasses()
    two.save(two.node.namespace, keys_of("old", 16))
    wide = keys_of("w", 8)
    assert two.save(two.wide, wide) == 8
    assert two.node.resident(wide) == 8


def test_a_slab_with_a_leased_chunk_is_not_emptied() -> None:
    two = TwoClasses()
    narrow = keys_of("n", 16)
    two.save(two.node.namespace, narrow)
    two.node.catalog.clear()
    heads = [keys_of(f"h{n}", 1) for n in range(16)]
    for head in heads:
        two.save(two.node.namespace, head)
    for head in heads[::4]:
        two.node.acquire(head)
    assert two.save(two.wide, keys_of("w", 4)) == 0
    assert sum(two.node.resident(head) for head in heads) == 16
