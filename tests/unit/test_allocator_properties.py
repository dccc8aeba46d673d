# SPDX-License-Identifier: Apache-2.0
"""The allocator against a plain model, by random histories."""

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.types import PAGE_BYTES, Extent, align_up

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

sizes = st.one_of(
    st.sampled_from([1, 4096, 4097, 12 * KIB, 64 * KIB, 68 * KIB, 300 * KIB, MIB, 3 * MIB]),
    st.integers(1, 5 * MIB),
)


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates, frees and empties slabs; `live` is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Extent] = []
        self.generation = 0

    @initialize(
        segments=st.dictionaries(
            st.integers(0, 9), st.integers(PAGE_BYTES, 8 * MIB), min_size=1, max_size=3
        ),
        slab_bytes=st.sampled_from([64 * KIB, 100_000, MIB, 64 * MIB]),
        part=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def begin(self, segments: dict[int, int], slab_bytes: int, part: float) -> None:
        self.segments = segments
        self.usable = {index: int(size * part) for index, size in segments.items()}
        self.allocator = SlabAllocator(segments, slab_bytes, usable=self.usable)

    @rule(part=st.floats(0, 1))
    def grow(self, part: float) -> None:
        for index, size in self.segments.items():
            self.usable[index] += int((size - self.usable[index]) * part)
            self.allocator.grow(index, self.usable[index])

    @rule(length=sizes, part=st.floats(0, 1))
    def allocate_within_reach(self, length: int, part: float) -> None:
        reach = {index: int(size * part) for index, size in self.usable.items()}
        extent = self.allocator.allocate(length, reach)
        if extent is not None:
            assert extent.offset + extent.length <= reach[extent.segment]
            self.generation = extent.generation
            self.live.append(extent)

    @rule(length=sizes)
    def allocate(self, length: int) -> None:
        fits = self.allocator.fits(length)
        extent = self.allocator.allocate(length)
        if extent is None:
            assert self.live or not fits
            return
        assert fits
        assert extent.length == align_up(length)
        assert extent.generation > self.generation
        self.generation = extent.generation
        self.live.append(extent)

    @rule(length=sizes)
    def fill(self, length: int) -> None:
        for _ in range(200):
            self.allocate(length)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.live) - 1))
        step = data.draw(st.integers(1, 5))
        for extent in self.live[first::step]:
            self.allocator.free(extent)
        del self.live[first::step]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), length=sizes)
    def make_room(self, data: st.DataObject, length: int) -> None:
        pinned_by = data.draw(st.integers(2, 9))
        near = data.draw(st.sampled_from(list(self.allocator.slabs())))
        room = self.allocator.room_near(
            near, length, lambda s: None if s.index % pinned_by == 0 else 1.0
        )
        if room is None:
            return
        for slab in room:
            assert slab.index % pinned_by
            for extent in self.allocator.extents_in(slab):
                self.allocator.free(extent)
                self.live.remove(extent)
        made = self.allocator.allocate(length)
        assert made is not None
        self.allocator.free(made)
        self.generation = made.generation

    @precondition(lambda self: self.live)
    @rule()
    def free_all(self) -> None:
        for extent in self.live:
            self.allocator.free(extent)
        self.live.clear()
        assert list(self.allocator.slabs()) == []
        assert self.allocator.stats().unassigned_bytes == self.allocator.capacity_bytes

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        assert self.allocator.used_bytes == sum(e.length for e in self.live)
        assert self.allocator.used_bytes <= self.allocator.capacity_bytes
        assert set(self.extents_by_slab()) == set(self.live)
        for extent in self.live:
            assert extent.offset % PAGE_BYTES == 0
            assert 0 <= extent.offset <= self.usable[extent.segment] - extent.length
        by_place = sorted(self.live, key=lambda e: (e.segment, e.offset))
        for one, other in pairwise(by_place):
            assert one.segment != other.segment or one.offset + one.length <= other.offset

    def extents_by_slab(self) -> Iterator[Extent]:
        for slab in self.allocator.slabs():
            for extent in self.allocator.extents_in(slab):
                assert self.allocator.slab_of(extent) == slab
                yield extent


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(
    segment=st.integers(4, 64).map(lambda n: n * GIB),
    lengths=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=6),
)
def test_waste_is_at_most_a_sixteenth(segment: int, lengths: list[int]) -> None:
    """Here no class is too large for 16 extents in a quarter of the segment."""
    allocator = SlabAllocator({0: segment})
    for _ in range(3):
        for length in lengths:
            for _ in range(20):
                allocator.allocate(length)
    stats = allocator.stats()
    assigned = stats.capacity_bytes - stats.unassigned_bytes
    assert stats.waste_bytes * 16 <= assigned
    allocator.check()
