# SPDX-License-Identifier: Apache-2.0
"""Loans: pins of chunks that the service itself sends to another node."""

from kvhaven.types import NamespaceDigest, TenantId
from tests.unit.catalog_kit import PAGE, Node, keys_of

TENANT = TenantId(b"t" * 8)


def test_a_lent_chunk_stays_until_it_is_returned() -> None:
    node, keys = Node(pages=4, pin_limit=4), keys_of("a", 4)
    assert node.save(keys) == 4
    loan = node.catalog.lend(node.namespace.digest, keys[3])
    assert loan is not None
    assert loan.checksums == node.catalog.checksums(keys[3])
    node.catalog.clear()
    node.catalog.check()
    assert node.save(keys_of("b", 4)) == 3, "its space is not given to another"
    node.catalog.returned(loan.number)
    node.catalog.returned(loan.number)
    node.catalog.check()
    assert node.save(keys_of("c", 4)) == 4


def test_only_what_is_resident_as_this_tenants_is_lent() -> None:
    node, keys = Node(pages=8), keys_of("a", 2)
    digest = node.namespace.digest
    assert node.catalog.has(digest, keys) == [False, False]
    node.grant(keys[1])
    assert node.save(keys[:1], tenant=TENANT) == 1
    assert node.catalog.has(digest, keys, TENANT) == [True, False]
    assert node.catalog.has(digest, keys) == [False, False]
    assert node.catalog.has(NamespaceDigest(b"?" * 32), keys, TENANT) == [False, False]
    assert node.catalog.lend(digest, keys[0]) is None
    assert node.catalog.lend(digest, keys[1]) is None
    assert node.catalog.lend(NamespaceDigest(b"?" * 32), keys[0], TENANT) is None
    assert node.catalog.lend(digest, keys[0], TENANT) is not None


def test_loans_pin_half_of_what_may_be_pinned() -> None:
    node, keys = Node(pages=16, pin_limit=8), keys_of("a", 8)
    assert node.save(keys) == 8
    loans = [node.catalog.lend(node.namespace.digest, key) for key in keys]
    assert [loan is not None for loan in loans] == 4 * [True] + 4 * [False]
    assert node.catalog.lend(node.namespace.digest, keys[0]) is not None, "it is pinned already"
    assert node.catalog.stats().leased_bytes == 4 * PAGE
    node.catalog.check()
    assert len(node.acquire(keys).chunks) == 8, "leases share pins with loans"
    node.catalog.check()


def test_lending_a_chain_from_its_head_leaves_the_order_of_eviction() -> None:
    granted = []
    for lend in (False, True):
        node, keys = Node(pages=64), keys_of("a", 64)
        assert node.save(keys) == 64
        for key in keys if lend else ():
            loan = node.catalog.lend(node.namespace.digest, key)
            assert loan is not None
            node.catalog.returned(loan.number)
        granted.append(node.save(keys_of("b", 16)))
        assert node.resident(keys[:48]) == 48, "the tail went, the head is here"
    assert granted == [16, 16]
