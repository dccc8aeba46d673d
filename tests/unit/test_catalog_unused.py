# SPDX-License-Identifier: Apache-2.0
"""Chunks that were not used for a time are dropped; what is in use, or was used since, stays."""

from collections.abc import Sequence

import pytest

from kvhaven import maps
from kvhaven.catalog import histograms
from kvhaven.catalog.actions import TierDelete
from kvhaven.catalog.histograms import Marks
from kvhaven.catalog.local_index import DIVISION_S
from kvhaven.catalog.tier_spec import MEMORY, TierSpec, WriteMode
from kvhaven.catalog.unused import Counting
from kvhaven.catalog.work import Pace
from kvhaven.errors import KVHavenError
from kvhaven.keys import tenant_id
from kvhaven.types import NO_TENANT, ChunkKey, NamespaceDigest
from tests.unit.catalog_kit import DISK, PAGE, STORED, Node, keys_of, namespace_of, spec
from tests.unit.test_catalog_cost import calls_of

ANN, BEN = tenant_id("ann"), tenant_id("ben")


def counted(job: Counting) -> tuple[int, int]:
    """Run a job to its end."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            chunks, bytes_ = end.value
            return chunks, bytes_


def drop(node: Node, age: float, **scope: object) -> tuple[int, int]:
    """Drop, after a dry run that counts the same."""
    before = node.catalog.totals()
    expected = counted(node.catalog.drop_unused(age, dry_run=True, **scope))  # type: ignore[arg-type]
    assert node.catalog.totals() == before
    assert not node.of_type(TierDelete)
    assert counted(node.catalog.drop_unused(age, **scope)) == expected  # type: ignore[arg-type]
    node.catalog.check()
    node.catalog.take_actions()
    return expected


def tick(node: Node, *times: float) -> None:
    for time in times:
        node.catalog.tick(time)


def in_tier(node: Node, keys: Sequence[ChunkKey]) -> int:
    return sum(key in node.catalog._tiers.own[DISK].stored for key in keys)


def test_chunks_in_memory_go_by_their_last_use() -> None:
    node = Node(pages=16)
    old, used, young = keys_of("old", 2), keys_of("used", 3), keys_of("young", 1)
    tick(node, 100.0)
    node.save(old)
    node.save(used)
    tick(node, 102.0, 160.0)
    lease = node.acquire(used[:2])
    node.catalog.release(node.session, lease.lease_id)
    tick(node, 162.0, 190.0)
    node.save(young)
    tick(node, 192.0, 200.0)
    assert drop(node, 150.0) == (0, 0)
    assert drop(node, 60.0) == (3, 3 * PAGE)  # with the end of the chain that was not used
    assert (node.resident(old), node.resident(used), node.resident(young)) == (0, 2, 1)
    assert drop(node, 20.0) == (2, 2 * PAGE)
    assert drop(node, 1.0) == (1, PAGE)
    assert node.catalog.totals().used_bytes == 0
    assert node.catalog.totals().cleared_chunks == 6


def test_a_chunk_that_is_published_late_is_young() -> None:
    """A chunk with a child in memory, and a tail, are not put in order when they are published."""
    node = Node(pages=16)
    tick(node, 100.0)
    first, second = keys_of("a", 2)
    node.save([second], parent=first)
    tick(node, 102.0, 500.0)
    node.save([first])
    assert drop(node, 300.0) == (1, PAGE)
    assert node.resident([first]) == 1
    tick(node, 502.0)
    tail = keys_of("tail", 1)
    grants = node.reserve(tail, tail=3)
    tick(node, 550.0, 600.0)
    assert grants[0] is not None
    node.commit(grants[0])
    assert drop(node, 50.0) == (1, PAGE)
    assert node.resident(tail) == 1


def test_what_is_in_use_stays() -> None:
    node = Node(pages=16, tiers=[spec()])
    tick(node, 100.0)
    leased, reserved, promoted = keys_of("leased", 2), keys_of("reserved", 1), keys_of("disk", 1)
    node.save(leased)
    node.writes()
    lease = node.acquire(leased)
    node.grant(reserved[0])
    node.store(promoted)
    promoting = node.acquire(promoted)
    (read,) = node.reads()
    tick(node, 102.0, 200.0, 300.0)
    assert drop(node, 50.0) == (0, 0)
    node.finish(read)
    for one in (lease, promoting):
        node.catalog.release(node.session, one.lease_id)
    for key in leased:
        node.catalog.tier_write_done(DISK, key, ok=True)
    tick(node, 302.0, 320.0, 340.0, 400.0)
    # They were asked for at 100; at 300, two came to disk, and one to memory.
    assert drop(node, 200.0) == (3, 2 * PAGE + STORED)
    assert drop(node, 30.0) == (3, PAGE + 2 * STORED)


def test_chunks_on_disk_go_by_their_last_use_since_the_start() -> None:
    node = Node(pages=16, tiers=[spec()])
    unused, used = keys_of("unused", 2), keys_of("used", 2)
    tick(node, 100.0)
    node.store(unused)
    node.store(used)
    tick(node, 100.0 + DIVISION_S, 160.0)
    lease = node.acquire(used)
    for read in node.reads():
        node.finish(read)
    tick(node, 160.0 + DIVISION_S, 190.0, 200.0)
    assert drop(node, 101.0, tier=DISK) == (0, 0)  # nothing is known of the time before the start
    assert drop(node, 80.0, tier=DISK) == (2, 2 * STORED)
    assert (in_tier(node, unused), in_tier(node, used)) == (0, 2)
    node.catalog.release(node.session, lease.lease_id)
    assert drop(node, 20.0, tier=DISK) == (2, 2 * STORED)
    assert node.resident(used) == 2


def test_what_a_later_scan_finds_may_have_been_used_meanwhile() -> None:
    """It was forgotten when the tier was reopened, and used in memory before it was found again."""
    node = Node(pages=16, tiers=[spec()])
    node.catalog.switch_tier(DISK, WriteMode.OFF)
    tick(node, 100.0, 200.0)
    keys = keys_of("a", 2)
    node.save(keys)
    node.catalog.tier_scanned(DISK, ended=False)
    tick(node, 201.0, 260.0)
    lease = node.acquire(keys)
    node.catalog.release(node.session, lease.lease_id)
    tick(node, 261.0)
    node.store(keys)
    node.catalog.tier_scanned(DISK, ended=True)
    tick(node, 262.0, 300.0)
    assert drop(node, 50.0, tier=DISK) == (0, 0)
    assert drop(node, 20.0, tier=DISK) == (2, 2 * STORED)


def test_chunks_are_dropped_also_if_no_scan_is_complete() -> None:
    """A scan that fails is repeated every second; one of an earlier opening may hang for ever."""
    node = Node(pages=16, tiers=[spec()])
    for _ in range(2):
        node.catalog.tier_scanned(DISK, ended=False)
    node.store(keys_of("a", 2))
    for time in range(100, 200):
        node.catalog.tier_scanned(DISK, ended=True, complete=False)
        tick(node, time)
        node.catalog.tier_scanned(DISK, ended=False)
    assert drop(node, 110.0, tier=DISK) == (0, 0)
    assert drop(node, 60.0, tier=DISK) == (2, 2 * STORED)


def test_what_is_deleted_is_deleted_in_the_tier() -> None:
    node = Node(pages=4, tiers=[spec()])
    tick(node, 100.0)
    keys = keys_of("a", 3)
    node.store(keys)
    tick(node, 101.0, 201.0)
    job = node.catalog.drop_unused(100.0, tier=DISK)
    assert counted(job) == (3, 3 * STORED)
    deleted = node.of_type(TierDelete)
    assert {a.key for a in deleted if isinstance(a, TierDelete)} == set(keys)


def test_only_the_scope_goes() -> None:
    node = Node(pages=16, tiers=[spec()])
    node.catalog.switch_tier(DISK, WriteMode.OFF)
    tick(node, 100.0)
    anns, bens, nones = keys_of("ann", 2), keys_of("ben", 3), keys_of("none", 1)
    for keys, tenant in ((anns, ANN), (bens, BEN), (nones, NO_TENANT)):
        node.save(keys, tenant=tenant)
        node.store(keys, tenant=tenant)
    tick(node, 102.0, 120.0, 200.0)
    assert drop(node, 50.0, tenant=ANN, tier=MEMORY) == (2, 2 * PAGE)
    assert drop(node, 50.0, tenant=ANN) == (2, 2 * STORED)
    with pytest.raises(KVHavenError, match="unknown"):
        node.catalog.drop_unused(50.0, NamespaceDigest(b"x" * 32))
    other = namespace_of("other")
    node.catalog.add_namespace(other)
    assert drop(node, 50.0, namespace=other.digest) == (0, 0)
    assert drop(node, 50.0, namespace=node.namespace.digest, tenant=BEN) == (6, 3 * (PAGE + STORED))
    assert drop(node, 50.0, namespace=node.namespace.digest) == (2, PAGE + STORED)


def test_what_was_cleared_is_not_counted_again() -> None:
    node = Node(pages=512, tiers=[spec()])
    node.catalog.switch_tier(DISK, WriteMode.OFF)
    tick(node, 100.0)
    keys = keys_of("a", 300)
    node.save(keys)
    node.store(keys)
    tick(node, 102.0, 200.0)
    assert node.catalog.clear()[0] == 600
    assert node.catalog.busy
    assert drop(node, 50.0) == (0, 0)


def test_a_shared_tier_and_one_that_is_offline_are_refused() -> None:
    shared = TierSpec(name="fs", capacity_bytes=1 << 40, shared=True)  # type: ignore[arg-type]
    node = Node(pages=4, tiers=[spec(), shared])
    tick(node, 100.0)
    node.store(keys_of("a", 2))
    node.catalog.tier_online(DISK, online=False)
    tick(node, 200.0)
    for tier, reason in (("fs", "is shared"), (DISK, "offline"), ("tape", "unknown")):
        with pytest.raises(KVHavenError, match=reason):
            node.catalog.drop_unused(10.0, tier=tier)  # type: ignore[arg-type]
    assert drop(node, 10.0) == (0, 0)
    node.catalog.tier_online(DISK, online=True)
    job = node.catalog.drop_unused(10.0)
    node.catalog.tier_online(DISK, online=False)
    assert counted(job) == (0, 0)


def test_what_is_used_while_the_others_go_stays() -> None:
    node = Node(pages=4096, tiers=[spec()])
    tick(node, 100.0)
    keys = keys_of("a", 3000)
    for start in range(0, 3000, 500):
        node.save(keys[start : start + 500], parent=keys[start - 1] if start else None)
    node.catalog.take_actions()
    tick(node, 102.0, 200.0)
    job = node.catalog.drop_unused(50.0)
    next(job)
    node.catalog.work(10)
    left = [key for key in keys if node.resident([key])]
    assert 0 < len(keys) - len(left) <= 64
    first = keys[: keys.index(next(k for k in keys if k not in left))]
    lease = node.acquire(first)
    while node.catalog.work():
        pass
    node.catalog.release(node.session, lease.lease_id)
    counted(job)
    assert node.resident(first) == len(first)


@pytest.mark.parametrize("dry_run", [True, False])
def test_no_piece_is_long_however_many_chunks_there_are(dry_run: bool) -> None:
    def longest(chunks: int) -> tuple[int, int]:
        node = Node(pages=chunks, tiers=[spec()])
        tick(node, 100.0)
        keys = keys_of("a", chunks)
        node.save(keys)
        node.catalog.take_actions()
        node.store(keys_of("b", chunks))
        tick(node, 102.0, 200.0)
        job = node.catalog.drop_unused(50.0, dry_run=dry_run)
        pieces: list[int] = []
        while not pieces or pieces[-1] > 3:
            pieces.append(calls_of(lambda: next(job, None)))
            assert len(node.of_type(TierDelete)) <= maps.PAGE + Pace().heavy
        return max(pieces), len(pieces)

    (few, small), (most, many) = longest(6000), longest(24_000)
    assert many > 2 * small
    assert most < 1.5 * few


def test_marks_of_long_ago_are_thinned_but_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "_MOST_MARKS", 40)
    marks = Marks()
    for second in range(1000):
        marks.mark(second, float(second))
        assert len(marks._values) == len(marks._times) <= 91
    assert marks.value_at(-1.0) is None
    assert marks.value_at(0.5) == 0
    for time in (10.0, 100.0, 500.0, 990.0, 999.0):
        value = marks.value_at(time)
        assert value is not None
        assert time - 200 <= value <= time
    assert marks.value_at(999.5) == 999
    assert marks.value_at(970.5) == 970


def test_the_copies_in_a_tier_of_chunks_that_are_used_in_memory_stay() -> None:
    node = Node(pages=16, tiers=[spec()])
    tick(node, 100.0)
    leased, used = keys_of("leased", 2), keys_of("used", 2)
    node.save(leased + used)
    node.writes()
    for key in leased + used:
        node.catalog.tier_write_done(DISK, key, ok=True)
    node.acquire(leased)
    tick(node, 102.0, 120.0, 1000.0)
    node.catalog.release(node.session, node.acquire(used).lease_id)
    tick(node, 1010.0)
    node.catalog.take_actions()
    for tier in (None, DISK):
        for dry_run in (True, False):
            assert counted(node.catalog.drop_unused(60.0, None, tier, dry_run=dry_run)) == (0, 0)
    assert in_tier(node, leased + used) == 4
