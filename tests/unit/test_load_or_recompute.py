# SPDX-License-Identifier: Apache-2.0
"""Load or recompute in the catalog: which chunks of slow tiers are read, tried or skipped."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvhaven.catalog.actions import Acquisition, LeaseId, SessionId, TierName
from kvhaven.catalog.work import Pace
from kvhaven.catalog.worth import Judgement, Price, Segment, TierSpeed, best_ratios
from kvhaven.service.loads import Wait
from kvhaven.service.tier_speed import SpeedMeter
from kvhaven.types import ChunkKey
from tests.unit.catalog_kit import DISK, PAGE, Node, keys_of, spec

OTHER = TierName("other")
PRICE = Price(0.01, 0.0)
SLOW, FAST = TierSpeed(0.0, 1.0 / PAGE), TierSpeed(0.0, 1e-4 / PAGE)
"""A chunk takes a second, and a hundredth of its price."""


def node_with(*tiers: TierName, pages: int = 1024) -> Node:
    return Node(pages=pages, tiers=[spec(tier) for tier in tiers])


def ask(
    node: Node, keys: list[ChunkKey], lease_id: int, price: Price | None = PRICE
) -> Acquisition:
    return node.catalog.acquire(
        SessionId("s#1"), LeaseId(lease_id), node.namespace.digest, keys, price=price
    )


def stored(node: Node, name: str, count: int, tier: TierName = DISK) -> list[ChunkKey]:
    keys = keys_of(name, count)
    node.store(keys, tier)
    return keys


def made_to_skip(node: Node) -> None:
    """Have three requests find the tier too slow."""
    node.catalog.tier_speed(DISK, SLOW)
    for number in range(3):
        ask(node, stored(node, f"before {number}", 2), 100 + number)
    for read in node.reads():
        node.finish(read)


def test_a_tier_is_skipped_after_three_slow_predictions_in_a_row() -> None:
    node = node_with(DISK)
    node.catalog.tier_speed(DISK, SLOW)
    for number, expected in enumerate((4, 4, 0, 0), 1):
        answer = ask(node, stored(node, f"chain {number}", 4), number)
        assert answer.promoting == expected
        assert answer.skipped == 4 - expected
        assert len(node.reads()) == expected


def test_a_fast_prediction_between_slow_ones_starts_the_count_again() -> None:
    node = node_with(DISK)
    for number, speed in enumerate((SLOW, SLOW, FAST, SLOW, SLOW), 1):
        node.catalog.tier_speed(DISK, speed)
        assert ask(node, stored(node, f"chain {number}", 2), number).promoting == 2
    assert ask(node, stored(node, "last", 2), 9).skipped == 2


def test_a_skipped_tier_is_used_again_once_it_is_fast() -> None:
    node = node_with(DISK)
    made_to_skip(node)
    keys = stored(node, "chain", 4)
    node.catalog.tier_speed(DISK, TierSpeed(0.0, 0.0095 / PAGE))  # not below 0.9 of the price
    assert ask(node, keys, 1).skipped == 4
    node.catalog.tier_speed(DISK, TierSpeed(0.0, 0.0085 / PAGE))
    assert ask(node, keys, 2).promoting == 4


def test_chunks_in_memory_are_leased_before_a_skipped_tier() -> None:
    node = node_with(DISK)
    keys = keys_of("chain", 6)
    node.save(keys[:3])
    node.store(keys[3:])
    made_to_skip(node)
    answer = ask(node, keys, 1)
    assert (len(answer.chunks), answer.promoting, answer.skipped) == (3, 0, 3)


@pytest.mark.parametrize("price", [None, PRICE])
def test_without_a_price_or_a_measurement_everything_is_read(price: Price | None) -> None:
    node = node_with(DISK)
    if price is None:
        made_to_skip(node)
    for number in range(1, 6):
        answer = ask(node, stored(node, f"chain {number}", 4), number, price)
        assert (answer.promoting, answer.skipped) == (4, 0)


def test_a_silent_tier_counts_as_slow_before_it_was_measured() -> None:
    node = node_with(DISK)
    node.catalog.tick(10.0)
    assert ask(node, stored(node, "first", 4), 1).promoting == 4
    for number, promoting in ((2, 4), (3, 4), (4, 0)):
        node.catalog.tick(10.0 + number)
        assert ask(node, stored(node, f"chain {number}", 4), number).promoting == promoting


def test_an_engines_prefetch_leaves_a_skipped_tier_alone_and_other_prefetches_do_not() -> None:
    node = node_with(DISK)
    made_to_skip(node)
    keys, digest = stored(node, "chain", 4), node.namespace.digest
    assert node.catalog.prefetch(digest, keys, session=SessionId("s#1")) == 0
    assert node.catalog.prefetch(digest, keys) == 4


def test_one_in_32_skipped_chunks_is_read_with_no_request_waiting() -> None:
    node = node_with(DISK, pages=4096)
    made_to_skip(node)
    for number in range(1, 33):
        answer = ask(node, stored(node, f"chain {number}", 32), number)
        assert (answer.promoting, answer.skipped) == (0, 32)
    reads = node.reads()
    assert len(reads) == 32
    # The first chunks of a chain are read: only a prefix can be used.
    wanted = [key for n in (8, 16, 24, 32) for key in keys_of(f"chain {n}", 32)[:8]]
    assert {read.key for read in reads} == set(wanted)


def test_a_short_slow_segment_before_a_long_fast_one_is_worth_its_time() -> None:
    segments = [Segment(1, 0, 1, 0.02), Segment(2, 1, 21, 0.02)]
    assert best_ratios(segments, PRICE) == pytest.approx([0.04 / 0.21, 0.1])
    assert best_ratios(segments[:1], PRICE) == pytest.approx([2.0])
    assert best_ratios([*segments[:1], Segment(2, 1, 21, None)], PRICE) == [None, None]


def plain_ratios(segments: list[Segment], price: Price) -> list[float | None]:
    """Compute what `best_ratios` is defined to return: the smallest figure over all ends."""
    found: list[float | None] = []
    for first in range(len(segments)):
        behind = segments[first:]
        ratios = []
        for end in range(1, len(behind) + 1):
            load = sum(s.load_s or 0.0 for s in behind[:end])
            compute = sum(price.seconds(s.start, s.end) for s in behind[:end])
            ratios.append(load / compute if compute else 0.0)
        found.append(None if any(s.load_s is None for s in behind) else min(ratios))
    return found


whole = st.integers(0, 6).map(float)
"""Sums of whole numbers are exact, so that results must be equal, not only close."""


@given(
    st.lists(st.tuples(st.integers(1, 3), st.none() | whole), max_size=4),
    st.lists(st.tuples(st.integers(1, 3), whole), max_size=16),
    st.builds(Price, whole, whole),
)
@example([], [], Price(1.0, 0.0))
@example([], [(2, 3.0)], Price(1.0, 0.0))
@example([], [(1, 2.0)] * 5, Price(1.0, 0.0))  # equal slopes
@example([], [(1, 0.0), (1, 5.0)] * 4, Price(1.0, 0.0))  # memory between slow chunks
@example([], [(1, 3.0), (2, 4.0)], Price(0.0, 1.0))  # the first chunk takes no time to compute
@example([], [(1, 3.0)] * 3, Price(0.0, 0.0))
@example([(1, None)], [(1, 3.0)] * 3, Price(1.0, 0.0))
def test_the_best_ratios_are_those_of_the_plain_definition(
    some_unmeasured: list[tuple[int, float | None]], measured: list[tuple[int, float]], price: Price
) -> None:
    parts = [*some_unmeasured, *measured]
    ends = list(itertools.accumulate((count for count, _ in parts), initial=0))
    segments = [
        Segment(1, start, end, load_s)
        for (start, end), (_, load_s) in zip(itertools.pairwise(ends), parts, strict=True)
    ]
    assert best_ratios(segments, price) == plain_ratios(segments, price)


def test_the_second_of_two_tiers_can_be_skipped_alone() -> None:
    node = node_with(DISK, OTHER)
    node.catalog.tier_speed(DISK, FAST)
    node.catalog.tier_speed(OTHER, SLOW)
    for number, expected in enumerate((8, 8, 4), 1):
        keys = keys_of(f"chain {number}", 8)
        node.store(keys[:4])
        node.store(keys[4:], OTHER)
        answer = ask(node, keys, number)
        assert (answer.promoting, answer.skipped) == (expected, 8 - expected)


def test_a_tiers_delay_counts_once_where_chunks_alternate_between_tiers() -> None:
    node = node_with(DISK, OTHER)
    for tier in (DISK, OTHER):
        node.catalog.tier_speed(tier, TierSpeed(0.05, 1e-4 / PAGE))
    for number in range(1, 5):
        keys = keys_of(f"chain {number}", 40)  # 0.4 s to compute, 0.1 s to wait for the tiers
        node.store(keys[::2])
        node.store(keys[1::2], OTHER)
        assert ask(node, keys, number).skipped == 0


def test_memory_behind_a_slow_tier_counts_wherever_it_begins() -> None:
    """The last chunks of a piece are in the tier, and those of the next one in memory."""
    node = node_with(DISK, pages=4096)
    node.catalog.tier_speed(DISK, TierSpeed(0.0, 0.02 / PAGE))  # twice the price
    piece = Pace().leases
    for number in range(1, 5):
        keys = keys_of(f"chain {number}", piece + 90)
        node.save([*keys[: piece - 6], *keys[piece:]])
        node.store(keys[piece - 6 : piece])
        assert ask(node, keys, number).skipped == 0
        assert len(node.reads()) == 6


def test_the_price_of_chunks_is_a_sum_over_them() -> None:
    price = Price(2.0, 0.5)
    assert price.seconds(3, 6) == pytest.approx(sum(2.0 + 0.5 * n for n in (3, 4, 5)))
    assert price.seconds(4, 4) == price.seconds(4, 3) == 0.0


def test_a_wait_ends_when_the_chunks_could_have_been_computed() -> None:
    node = node_with(DISK)
    keys = keys_of("chain", 10)
    node.save(keys[:4])
    node.store(keys[4:])
    wait = Wait(SessionId("s#1"), LeaseId(1), 100.0, 2.0, 10, PRICE)
    ask(node, keys, 1)
    reading = node.catalog.reading(SessionId("s#1"), LeaseId(1))
    assert wait.left_s(reading, 100.01) == pytest.approx(0.05)  # 6 chunks, not measured yet
    assert wait._replace(price=None).left_s(reading, 100.01) == pytest.approx(1.99)
    assert wait._replace(most_s=0.03).left_s(reading, 100.01) == pytest.approx(0.02)
    node.catalog.tier_speed(DISK, FAST)
    ask(node, stored(node, "other", 4), 2)
    reading = node.catalog.reading(SessionId("s#1"), LeaseId(2))
    assert wait.left_s(reading, 100.0) == pytest.approx(1.25 * 0.04)


def test_a_judgement_changes_only_outside_of_the_band() -> None:
    judgement = Judgement()
    assert [judgement.take(ratio) for ratio in (1.05, 1.2, 1.2, 1.05)] == [True] * 4
    assert [judgement.take(ratio) for ratio in (2.0, 2.0, 2.0)] == [True, True, False]
    assert [judgement.take(ratio) for ratio in (1.05, 0.95, 0.89)] == [False, False, True]


def meter_of(batches: list[int], delay_s: float, byte_s: float, *, together: bool) -> SpeedMeter:
    """Measure batches of reads of a page, served in turn or together, with pauses between."""
    meter, now = SpeedMeter(), 0.0
    for count in batches:
        begun = [meter.begin(PAGE, now) for _ in range(count)]
        for at, read in enumerate(begun, 1):
            ends = now + delay_s + (count if together else at) * PAGE * byte_s
            meter.end(PAGE, read, ends, ok=True)
        now = ends + 5.0
    return meter


@pytest.mark.parametrize("together", [False, True])
def test_the_meter_finds_rate_and_delay(together: bool) -> None:
    meter = meter_of([1, 8, 3, 16, 2, 12], 0.005, 1e-6, together=together)
    assert meter.speed is not None
    for count in (8, 16, 32):  # a delay is believed only in part
        wanted = 0.005 + count * PAGE * 1e-6
        assert meter.speed.seconds(count * PAGE) == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("together", [False, True])
def test_the_meter_follows_a_step_within_few_reads(together: bool) -> None:
    batches = [8] * 8
    for before, after in ((1e-6, 1e-4), (1e-4, 1e-6)):
        meter = meter_of(batches, 0.0, before, together=together)
        begun = [meter.begin(PAGE, 1000.0) for _ in range(8)]
        for at, read in enumerate(begun, 1):
            meter.end(PAGE, read, 1000.0 + (8 if together else at) * PAGE * after, ok=True)
        assert meter.speed is not None
        assert meter.speed.seconds(8 * PAGE) == pytest.approx(8 * PAGE * after, rel=0.2)


def test_failed_reads_do_not_count() -> None:
    meter = meter_of([4, 8], 0.0, 1e-6, together=False)
    before = meter.speed
    for _ in range(5):
        meter.end(PAGE, meter.begin(PAGE, 2000.0), 2030.0, ok=False)
    assert meter.speed == before


def fail_reads(meter: SpeedMeter, count: int) -> None:
    """Have reads begin and fail, one after another."""
    for at in range(count):
        meter.end(PAGE, meter.begin(PAGE, 2000.0 + at), 2000.5 + at, ok=False)


@pytest.mark.parametrize("measured", [[], [4, 8]])
def test_failed_reads_leave_nothing_behind(measured: list[int]) -> None:
    meter = meter_of(measured, 0.0, 1e-6, together=False)
    rows = len(meter._busy)
    fail_reads(meter, 1000)
    assert len(meter._busy) <= rows + 1
    assert not meter._under_way


def test_reads_that_fail_do_not_push_measured_ones_out() -> None:
    failing, other = (meter_of([1, 8, 3, 16], 0.005, 1e-6, together=False) for _ in range(2))
    fail_reads(failing, 100)
    for meter in (failing, other):
        meter.end(PAGE, meter.begin(PAGE, 3000.0), 3000.005 + PAGE * 1e-6, ok=True)
    assert failing.speed == other.speed


def test_reads_that_fail_beside_others_do_not_make_a_tier_look_faster() -> None:
    """One read takes a second; every 0.1 s another one fails."""
    meter, now = SpeedMeter(), 0.0
    for _ in range(4):
        good, end = meter.begin(PAGE, now), now + 1.0
        while now < end - 0.05:
            failing = meter.begin(PAGE, now)
            now += 0.1
            meter.end(PAGE, failing, now, ok=False)
        now = end
        meter.end(PAGE, good, now, ok=True)
        now += 3.0
    assert meter.speed is not None
    assert meter.speed.seconds(PAGE) == pytest.approx(1.0, rel=0.01)
