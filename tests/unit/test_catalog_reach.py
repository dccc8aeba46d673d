# SPDX-License-Identifier: Apache-2.0
"""Of the arena, an engine is offered and granted what all its ranks are ready for, and no more."""

import pytest

from kvhaven.catalog.actions import MemberId
from kvhaven.tenants import Quotas
from kvhaven.types import TenantId
from tests.unit.catalog_kit import DISK, PAGE, Node, keys_of, spec

ANN = TenantId(b"annannan")


def ready(node: Node, member: str, pages: int) -> None:
    """Have a rank say that it is ready for the first pages."""
    node.catalog.ready(MemberId(member), 0, pages * PAGE)
    node.catalog.check()


def test_nothing_is_offered_to_an_engine_before_its_ranks_are_ready() -> None:
    node, keys = Node(), keys_of("a", 4)
    node.save(keys)
    node.attach("t", ready=False)
    assert node.acquire(keys, "t").chunks == ()
    assert node.catalog.stats().leases == 0
    assert node.catalog.stats().unready == 1
    ready(node, "t/0", 16)
    assert len(node.acquire(keys, "t").chunks) == 4
    assert len(node.acquire(keys).chunks) == 4, "the other engine was ready all the time"


def test_an_engine_is_offered_what_lies_in_its_reach() -> None:
    node, keys = Node(usable=4), keys_of("a", 8)
    node.save(keys)
    node.catalog.grew(0, 16 * PAGE)
    ready(node, "s/0", 16)
    assert node.save(keys) == 8, "four in the first four pages, and four behind them"
    node.attach("t", ready=False)
    for pages, offered in ((0, 0), (3, 3), (4, 4), (2, 4), (4, 4), (16, 8)):
        ready(node, "t/0", pages)  # two, after four, is a message that came late
        assert len(node.acquire(keys, "t").chunks) == offered


def test_the_rank_that_is_least_ready_counts() -> None:
    node, keys = Node(pages=32, world_size=2, ready=False), keys_of("a", 8)
    assert node.reserve(keys) == [None] * 8
    ready(node, "s/0", 32)
    assert node.reserve(keys) == [None] * 8
    ready(node, "s/1", 6)
    granted = [grant for grant in node.reserve(keys, save=1) if grant is not None]
    assert [g.extent.offset + g.extent.length <= 6 * PAGE for g in granted] == [True] * 3
    assert len([grant for grant in node.reserve(keys, "s/1", save=1) if grant is not None]) == 3


def test_nothing_is_evicted_for_an_engine_that_is_not_ready_for_all_of_the_arena() -> None:
    """What goes may lie where it cannot reach: then it would have gone in vain."""
    node, keys = Node(), keys_of("a", 16)
    node.save(keys)
    node.attach("t", ready=False)
    ready(node, "t/0", 15)
    assert node.reserve(keys_of("b", 2), "t/0") == [None, None]
    assert node.resident(keys) == 16
    ready(node, "t/0", 16)
    assert None not in node.reserve(keys_of("b", 2), "t/0")
    assert node.resident(keys) == 14


def test_no_quota_is_emptied_for_an_engine_that_is_not_ready_for_all_of_the_arena() -> None:
    node, keys = Node(memory_quotas=Quotas(others=4 * PAGE)), keys_of("a", 4)
    node.save(keys, tenant=ANN)
    node.attach("t", ready=False)
    ready(node, "t/0", 15)
    assert node.reserve(keys_of("b", 2), "t/0", tenant=ANN) == [None, None]
    assert node.resident(keys) == 4


def test_a_promotion_goes_to_where_the_engine_can_load_it() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 6)
    node.store(keys)
    node.attach("t", ready=False)
    assert node.acquire(keys, "t").promoting == 0
    assert node.reads() == []
    ready(node, "t/0", 4)
    assert node.acquire(keys, "t").promoting == 4
    reads = node.reads()
    assert [read.extent.offset < 4 * PAGE for read in reads] == [True] * 4
    for read in reads:
        node.finish(read)
    assert len(node.acquire(keys, "t").chunks) == 4


def test_a_prefetch_promotes_to_where_its_engine_can_load() -> None:
    node, keys = Node(pages=32, tiers=[spec()]), keys_of("a", 6)
    node.store(keys)
    node.attach("t", ready=False)
    digest = node.namespace.digest
    assert node.catalog.prefetch(digest, keys, session=node.sessions["t"]) == 0
    ready(node, "t/0", 2)
    assert node.catalog.prefetch(digest, keys, session=node.sessions["t"]) == 2
    assert node.catalog.prefetch(digest, keys) == 4, "of nobody nothing is known"


def test_what_another_engine_promotes_out_of_reach_is_not_waited_for() -> None:
    node, keys = Node(tiers=[spec()]), keys_of("a", 2)
    node.store(keys)
    node.attach("t", ready=False)
    assert node.acquire(keys).promoting == 2
    answer = node.acquire(keys, "t")
    assert not answer.chunks
    assert answer.promoting == 0


def test_a_lost_rank_stays_ready_and_one_that_is_gone_is_not() -> None:
    node, keys = Node(world_size=2), keys_of("a", 3)
    node.save(keys)
    node.catalog.lost(MemberId("s/1"))
    assert len(node.acquire(keys).chunks) == 3
    node.attach("s")
    node.catalog.lost(MemberId("s/1"))
    node.catalog.gone(MemberId("s/1"))
    assert node.acquire(keys).chunks == (), "nobody could load what rank 1 has to load"


# --- an arena that grows ------------------------------------------------------------------------


def test_what_has_come_is_used_when_the_ranks_are_ready_for_it() -> None:
    node, keys = Node(usable=4), keys_of("a", 16)
    assert node.save(keys) == 4
    node.catalog.grew(0, 10 * PAGE)
    assert node.catalog.stats().capacity_bytes == 10 * PAGE
    assert node.save(keys) == 4
    ready(node, "s/0", 10)
    assert node.save(keys) == 10
    node.catalog.grew(0, 16 * PAGE, last=True)
    ready(node, "s/0", 16)
    assert node.save(keys) == 16
    assert len({chunk.extent.offset for chunk in node.acquire(keys[:8]).chunks}) == 8


def test_what_was_offered_before_stays_offered_when_the_arena_grows() -> None:
    node, keys = Node(usable=4), keys_of("a", 2)
    node.save(keys)
    node.catalog.grew(0, 16 * PAGE)
    assert len(node.acquire(keys).chunks) == 2


def test_limits_follow_the_arena() -> None:
    node = Node(usable=4, tiers=[spec()], write_queue=6)
    writes = node.catalog._tiers.writes[DISK]
    assert node.catalog.stats().pin_limit_bytes == 2 * PAGE
    assert writes.limit_bytes == 2 * PAGE, "half of what there is"
    node.catalog.grew(0, 16 * PAGE)
    assert node.catalog.stats().pin_limit_bytes == 8 * PAGE
    assert writes.limit_bytes == 6 * PAGE


@pytest.mark.parametrize("member", ["s/None", "nobody"])
def test_who_is_no_rank_changes_nothing_by_being_ready(member: str) -> None:
    node, keys = Node(ready=False), keys_of("a", 2)
    ready(node, member, 16)
    assert node.reserve(keys) == [None, None]
