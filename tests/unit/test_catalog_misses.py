# SPDX-License-Identifier: Apache-2.0
"""Why a chain ends where it ends: each reason, and how far it reaches."""

import gc
from collections.abc import Sequence

import pytest

from kvhaven.catalog import writebehind
from kvhaven.catalog.actions import LeaseId, MemberId, SessionId, TierName
from kvhaven.catalog.ghosts import MOST_GHOSTS, Ghosts, Reason
from kvhaven.catalog.histograms import Histogram, Marks
from kvhaven.catalog.misses import Gap
from kvhaven.catalog.tier_spec import StoreOn, TierSpec, WriteMode
from kvhaven.tenants import Quotas
from kvhaven.types import NO_TENANT, ChunkKey, TenantId
from tests.unit.catalog_kit import DISK, PAGE, Node, keys_of, spec

SHARE = TierName("share")
ANN = TenantId(b"ann-ann-")


def gap(node: Node, keys: Sequence[ChunkKey], at: int = 0, tenant: TenantId = NO_TENANT) -> Gap:
    return node.catalog.gap(node.namespace.digest, keys, at, tenant)


def test_a_chunk_that_was_never_stored_is_cold() -> None:
    node = Node()
    keys = keys_of("a", 5)
    assert gap(node, keys) == Gap(Reason.COLD, 5)
    node.save(keys[:2])
    assert gap(node, keys, 2) == Gap(Reason.COLD, 3)
    reserved = keys_of("b", 1)
    node.reserve(reserved)
    assert gap(node, reserved).reason is Reason.COLD, "it is only being written"
    assert gap(node, keys, 0, ANN) == Gap(Reason.COLD, 5), "of another tenant"


@pytest.mark.parametrize("evicted", range(1, 9))
def test_evicted_chunks_are_told_from_those_behind_them_that_never_were(evicted: int) -> None:
    node = Node(pages=8)
    old = keys_of("old", 8)
    node.save(old)
    node.save(keys_of("new", evicted))
    left = 8 - evicted
    assert node.resident(old) == left
    assert gap(node, [*old, *keys_of("x", 5)], left) == Gap(Reason.EVICTED, evicted)
    node.save(old[left:], old[left - 1] if left else None)
    assert gap(node, old, 0).reason is Reason.PIN_LIMIT, "they are back"
    assert {node.catalog._ghosts.reason(key) for key in old[left:]} == {None}


def test_what_a_tenant_had_is_remembered_when_it_has_nothing_left() -> None:
    node = Node(pages=8)
    old = keys_of("old", 8)
    node.save(old, tenant=ANN)
    node.save(keys_of("new", 8))
    assert node.resident(old) == 0
    gc.collect()
    assert gap(node, old, 0, ANN) == Gap(Reason.EVICTED, 8)


def test_an_evicted_chunk_whose_write_was_dropped_says_so() -> None:
    node = Node(pages=8, tiers=[spec()], write_queue=1)
    old = keys_of("old", 8)
    node.save(old)
    for write in node.writes():
        node.catalog.tier_write_done(DISK, write.key, ok=write.key != old[0])
    node.save(keys_of("new", 8))
    assert gap(node, old).reason is Reason.WRITE_DROPPED
    node.catalog.check()


def test_a_write_that_succeeds_later_is_no_dropped_one() -> None:
    ghosts = Ghosts()
    (key,) = keys_of("a", 1)
    ghosts.unwritten(key)
    ghosts.left(key, Reason.EVICTED)
    assert ghosts.reason(key) is Reason.WRITE_DROPPED
    ghosts.left(key, Reason.DAMAGED)
    assert ghosts.reason(key) is Reason.DAMAGED
    ghosts.back(key)
    ghosts.back(key)
    assert ghosts.reason(key) is None


def test_a_tier_that_is_off_is_the_reason_for_what_it_has() -> None:
    node = Node(pages=8, tiers=[spec()])
    keys = keys_of("a", 3)
    node.store(keys)
    node.catalog.tier_online(DISK, False)
    assert gap(node, [*keys, *keys_of("x", 2)]) == Gap(Reason.TIER_OFF, 3)
    node.catalog.tier_online(DISK, True)
    assert gap(node, keys).reason is Reason.PIN_LIMIT


def test_a_shared_tier_that_is_off_may_have_what_was_evicted() -> None:
    node = Node(pages=8, tiers=[TierSpec(SHARE, shared=True, write=WriteMode.OFF)])
    old = keys_of("old", 8)
    node.save(old)
    node.save(keys_of("new", 8))
    assert gap(node, old).reason is Reason.EVICTED
    node.catalog.tier_online(SHARE, False)
    assert gap(node, old).reason is Reason.TIER_OFF
    assert gap(node, keys_of("never", 2)).reason is Reason.COLD


def test_the_pin_limit_is_the_reason_for_what_could_not_be_leased() -> None:
    node = Node(pages=8, pin_limit=2)
    keys = keys_of("a", 5)
    node.save(keys)
    assert len(node.acquire(keys).chunks) == 2
    assert gap(node, [*keys, *keys_of("x", 2)], 2) == Gap(Reason.PIN_LIMIT, 3)


def test_a_quota_is_the_reason_for_what_it_evicted_or_kept_out() -> None:
    node = Node(pages=8, memory_quotas=Quotas({ANN: 2 * PAGE}))
    first, second = keys_of("first", 2), keys_of("second", 2)
    node.save(first, tenant=ANN)
    node.catalog.take_actions()
    node.save(second, tenant=ANN)
    assert gap(node, first, 0, ANN).reason is Reason.QUOTA
    large = keys_of("large", 3)
    node.save(large, tenant=ANN)
    assert gap(node, large, 2, ANN).reason is Reason.QUOTA


def test_a_damaged_chunk_says_so() -> None:
    node = Node(tiers=[spec()])
    keys = keys_of("a", 2)
    node.save(keys)
    node.catalog.discard(keys[0])
    assert gap(node, keys).reason is Reason.DAMAGED
    stored = keys_of("b", 1)
    node.store(stored)
    node.acquire(stored)
    (read,) = node.reads()
    node.finish(read, ok=False)
    assert gap(node, stored).reason is Reason.DAMAGED


def test_only_the_last_chunks_that_left_are_remembered() -> None:
    ghosts = Ghosts()
    keys = keys_of("many", MOST_GHOSTS + 3)
    for key in keys:
        ghosts.left(key, Reason.EVICTED)
    assert len(ghosts) == MOST_GHOSTS
    assert [ghosts.reason(key) for key in keys[:4]] == [None, None, None, Reason.EVICTED]


def test_a_long_chain_takes_few_lookups() -> None:
    node = Node(pages=8)
    keys = keys_of("long", 1 << 12)
    node.save(keys[:8])
    looked: list[ChunkKey] = []

    class Counted(list[ChunkKey]):
        def __getitem__(self, at: object) -> ChunkKey:  # type: ignore[override]
            looked.append(super().__getitem__(at))  # type: ignore[call-overload]
            return looked[-1]

    assert gap(node, Counted(keys)) == Gap(Reason.PIN_LIMIT, 8)
    assert len(looked) <= 14


# --- what the other figures are made of -----------------------------------------------------


def test_residence_and_reuse_have_the_ages_of_chunks() -> None:
    node = Node(pages=8)
    keys = keys_of("a", 8)
    node.catalog.tick(100.0)
    node.save(keys)
    node.catalog.tick(150.0)
    node.catalog.tick(160.0)
    node.acquire(keys[:1])
    node.catalog.tick(161.5)
    node.catalog.release(node.session, node.acquire(keys[:1]).lease_id)
    reuse = node.catalog.totals().reuse_age
    assert reuse is not None
    assert reuse.sum == pytest.approx(60 - 50 + 1.5, abs=52), "to a second, and to a mark"
    node.catalog.tick(400.0)
    node.save(keys_of("b", 4))
    residence = node.catalog.totals().residence["space"]
    assert sum(residence.counts) == 4
    assert residence.sum / 4 == pytest.approx(250, abs=51)


def test_marks_give_the_time_since_a_counter_had_a_value() -> None:
    marks = Marks()
    assert marks.age(3, 10.0) == 0.0
    for value, now in ((1, 0.0), (5, 0.5), (5, 10.0), (5, 11.0), (9, 20.0)):
        marks.mark(value, now)
    assert marks.age(0, 30.0) == 30.0
    assert marks.age(1, 30.0) == 30.0
    assert marks.age(4, 30.0) == 20.0, "it had 5 when it was marked"
    assert marks.age(9, 30.0) == 10.0
    assert marks.age(10, 30.0) == 0.0


def test_a_histogram_counts_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    buckets = histogram.buckets()
    assert (buckets.counts, buckets.sum) == ([2, 1, 1], 5.5)


# --- switches -------------------------------------------------------------------------------


def test_writes_are_switched_while_some_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writebehind, "OUTSTANDING_BYTES", PAGE)
    node = Node(pages=16, tiers=[spec()], write_queue=8)
    node.save(keys_of("a", 8))
    writes = node.catalog._tiers.writes[DISK]
    assert writes.queue
    node.catalog.switch_tier(DISK, WriteMode.THROUGH)
    node.save(keys_of("b", 2))
    node.catalog.check()
    node.catalog.switch_tier(DISK, WriteMode.OFF)
    node.catalog.check()
    assert not writes.queue
    node.save(keys_of("c", 1))
    assert not writes.queue
    for write in node.writes():
        node.catalog.tier_write_done(DISK, write.key, ok=True)
    node.catalog.check()
    assert node.catalog.totals().tiers[DISK].dropped["off"] > 0
    node.catalog.switch_tier(DISK, WriteMode.BEHIND, StoreOn.SECOND)
    node.save(keys_of("d", 1))
    assert not node.writes(), "not at its first use"
    node.catalog.limit_queues(0)
    node.catalog.check()


def test_a_session_of_the_service_leases_what_engines_cannot_reach_yet() -> None:
    node = Node(pages=8)
    keys = keys_of("a", 2)
    node.save(keys)
    own = SessionId("api")
    node.catalog.open_session(own)
    node.catalog.open_session(own)
    sessions = node.catalog.totals().sessions
    found = node.catalog.acquire(own, LeaseId(1), node.namespace.digest, keys)
    assert (len(found.chunks), sessions) == (2, 1)
    node.catalog.check()
    node.catalog.gone(MemberId("nobody"))
    node.save(keys_of("b", 8))
    assert node.resident(keys) == 2, "it pins them"
    node.catalog.release(own, LeaseId(1))
    node.catalog.check()
