# SPDX-License-Identifier: Apache-2.0
"""The allocator by example; `test_allocator_properties.py` drives it at random."""

import msgspec
import pytest

from kvhaven.arena.allocator import SlabAllocator, SlabId
from kvhaven.errors import ArenaError
from kvhaven.types import Extent

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def take(allocator: SlabAllocator, length: int) -> Extent:
    extent = allocator.allocate(length)
    assert extent is not None
    return extent


def fill(allocator: SlabAllocator, length: int) -> list[Extent]:
    extents = []
    while (extent := allocator.allocate(length)) is not None:
        extents.append(extent)
    return extents


def test_an_extent_is_whole_pages_and_the_whole_arena_can_be_used() -> None:
    allocator = SlabAllocator({0: 4 * MIB, 7: 4 * MIB})
    extents = fill(allocator, 16 * KIB - 1)
    assert {e.length for e in extents} == {16 * KIB}
    assert {e.segment for e in extents} == {0, 7}
    assert len(extents) == 8 * MIB // (16 * KIB)
    assert allocator.used_bytes == allocator.capacity_bytes == 8 * MIB
    allocator.check()


def test_a_generation_is_never_used_twice() -> None:
    allocator = SlabAllocator({0: 4 * MIB})
    first = take(allocator, 4096)
    allocator.free(first)
    again = take(allocator, 4096)
    assert (again.segment, again.offset) == (first.segment, first.offset)
    assert again.generation > first.generation


@pytest.mark.parametrize("another_lives", [True, False])
def test_freeing_twice_or_by_an_old_generation_is_refused(another_lives: bool) -> None:
    allocator = SlabAllocator({0: 4 * MIB})
    extent = take(allocator, 8192)
    if another_lives:
        take(allocator, 8192)
    allocator.free(extent)
    with pytest.raises(ArenaError, match="not allocated"):
        allocator.free(extent)
    successor = take(allocator, 8192)
    with pytest.raises(ArenaError, match="not allocated"):
        allocator.free(extent)
    allocator.free(successor)
    allocator.check()


@pytest.mark.parametrize(
    "change",
    [{"segment": 1}, {"offset": 4096}, {"offset": 1 << 50}, {"offset": -4096}, {"length": 4096}],
)
def test_freeing_what_was_never_given_out_is_refused(change: dict[str, int]) -> None:
    allocator = SlabAllocator({0: 4 * MIB})
    extent = take(allocator, 8192)
    with pytest.raises(ArenaError, match="not allocated"):
        allocator.free(msgspec.structs.replace(extent, **change))
    assert allocator.used_bytes == 8192


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_that_is_not_positive_is_refused(length: int) -> None:
    allocator = SlabAllocator({0: MIB})
    assert not allocator.fits(length)
    with pytest.raises(ArenaError, match="must be positive"):
        allocator.allocate(length)


def test_a_segment_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ArenaError, match="too small"):
        SlabAllocator({0: 4095})


def test_slabs_have_at_least_64_mib_and_16_extents() -> None:
    allocator = SlabAllocator({0: 64 * GIB})
    for length in (4096, 3 * MIB, 84_000_000):
        take(allocator, length)
    small, medium, large = allocator.stats().classes
    assert small.extents + small.free == 64 * MIB // 4096
    assert medium.extents + medium.free == 64 // 3
    assert large.extents + large.free >= 16


def test_an_extent_as_large_as_its_segment_fits_and_a_larger_one_does_not() -> None:
    allocator = SlabAllocator({0: 4 * MIB, 1: 8 * MIB})
    assert allocator.fits(8 * MIB)
    assert not allocator.fits(8 * MIB + 1)
    assert take(allocator, 8 * MIB) == Extent(1, 0, 8 * MIB, 1)
    assert allocator.allocate(8 * MIB) is None
    assert allocator.allocate(8 * MIB + 1) is None
    assert allocator.allocate(4 * MIB) is not None


def test_an_empty_slab_can_be_had_by_another_class() -> None:
    allocator = SlabAllocator({0: 16 * MIB})
    extents = fill(allocator, 64 * KIB)
    assert allocator.allocate(96 * KIB) is None
    slab = allocator.slab_of(extents[0])
    inside = allocator.extents_in(slab)
    assert extents[0] in inside
    for extent in inside:
        allocator.free(extent)
    assert slab not in set(allocator.slabs())
    assert allocator.extents_in(slab) == ()
    taken = take(allocator, 96 * KIB)
    assert allocator.slab_of(taken).segment == 0
    allocator.check()


def test_allocation_prefers_the_fullest_slab() -> None:
    allocator = SlabAllocator({0: GIB})
    slabs: dict[SlabId, list[Extent]] = {}
    for extent in fill(allocator, 4 * MIB):
        slabs.setdefault(allocator.slab_of(extent), []).append(extent)
    sparse, dense = list(slabs.values())[:2]
    for extent in sparse[1:] + dense[:2]:
        allocator.free(extent)
    for _ in range(2):
        assert allocator.slab_of(take(allocator, 4 * MIB)) == allocator.slab_of(dense[2])
    assert len(allocator.extents_in(allocator.slab_of(sparse[0]))) == 1


def test_slab_of_unused_space_is_an_error() -> None:
    allocator = SlabAllocator({0: 4 * MIB})
    for segment in (0, 1):
        with pytest.raises(ArenaError, match="outside of all slabs in use"):
            allocator.slab_of(Extent(segment, 0, 4096, 1))


def test_a_slab_is_named_by_its_first_unit_only() -> None:
    allocator = SlabAllocator({0: 16 * MIB})
    slab = allocator.slab_of(take(allocator, MIB))
    assert allocator.extents_in(slab)
    assert allocator.extents_in(SlabId(slab.segment, slab.index + 1)) == ()
    assert allocator.extents_in(SlabId(9, 0)) == ()


def test_when_no_run_is_long_enough_a_shorter_slab_without_more_waste_is_taken() -> None:
    allocator = SlabAllocator({0: GIB})
    singles = fill(allocator, MIB)
    doomed = allocator.slab_of(singles[0])
    for extent in allocator.extents_in(doomed):
        allocator.free(extent)
    assert len(fill(allocator, 32 * MIB)) == 2  # sixteen of them would need 512 MiB
    assert allocator.stats().waste_bytes == 0
    allocator.check()


def test_the_cheapest_room_is_neighbours_without_a_pinned_slab() -> None:
    allocator = SlabAllocator({0: 4 * GIB})
    fill(allocator, MIB)
    slabs = list(allocator.slabs())
    length = 100 * MIB  # three in five units waste 1/16; one or two, in two or four, too much
    assert allocator.allocate(length) is None
    price = dict.fromkeys(slabs, 10.0)
    price.update(dict.fromkeys(slabs[20:40], 1.0))
    pinned = set(slabs[::7])
    room = allocator.room_near(slabs[25], length, lambda s: None if s in pinned else price[s])
    assert room is not None
    assert not pinned & set(room)
    assert set(room) <= set(slabs[20:40])
    indices = [slab.index for slab in room]
    assert indices == list(range(indices[0], indices[0] + len(room)))
    for slab in room:
        for extent in allocator.extents_in(slab):
            allocator.free(extent)
    assert allocator.allocate(length) is not None
    allocator.check()


def test_no_room_can_be_made_where_every_run_has_a_pinned_slab() -> None:
    allocator = SlabAllocator({0: GIB})
    fill(allocator, MIB)
    slab = next(allocator.slabs())
    assert allocator.room_near(slab, 2 * MIB, lambda _: None) is None
    assert allocator.room_near(slab, 2 * GIB, lambda _: 1.0) is None


def test_statistics_add_up() -> None:
    allocator = SlabAllocator({0: 64 * MIB, 1: 32 * MIB})
    for length in (4096, 100_000, 100_000, 3 * MIB):
        take(allocator, length)
    stats = allocator.stats()
    free = sum(c.free * c.length for c in stats.classes)
    assert [c.length for c in stats.classes] == [4096, 102_400, 3 * MIB]
    assert [c.extents for c in stats.classes] == [1, 2, 1]
    assert stats.capacity_bytes == 96 * MIB
    assert stats.capacity_bytes == (
        stats.used_bytes + free + stats.waste_bytes + stats.unassigned_bytes
    )
    assert 0 < stats.largest_free_bytes <= stats.unassigned_bytes


# --- an arena that grows, and those who cannot reach all of it ----------------------------------


def test_what_is_not_usable_yet_is_not_handed_out() -> None:
    allocator = SlabAllocator({0: GIB}, usable={0: 256 * MIB})
    assert allocator.capacity_bytes == 256 * MIB
    assert len(fill(allocator, MIB)) == 256
    allocator.grow(0, 512 * MIB)
    more = fill(allocator, MIB)
    assert {e.offset // (256 * MIB) for e in more} == {1}
    assert len(more) == 256
    allocator.grow(0, GIB)
    assert len(fill(allocator, MIB)) == 512
    assert allocator.used_bytes == allocator.capacity_bytes == GIB
    allocator.check()


def test_growing_changes_no_shape_of_a_slab() -> None:
    """Else what is handed out first would have the waste of a small segment."""
    grown, whole = SlabAllocator({0: 64 * GIB}, usable={0: 4 * GIB}), SlabAllocator({0: 64 * GIB})
    grown.grow(0, 64 * GIB)
    for allocator in (grown, whole):
        for length in (4096, 3 * MIB, 84_000_000):
            take(allocator, length)
    assert grown.stats() == whole.stats()


def test_an_extent_that_is_too_large_so_far_fits_when_there_is_more() -> None:
    allocator = SlabAllocator({0: GIB}, usable={0: 256 * MIB})
    assert not allocator.fits(300 * MIB)
    assert allocator.allocate(300 * MIB) is None
    slab = allocator.slab_of(take(allocator, 4096))
    assert allocator.room_near(slab, 300 * MIB, lambda _: 1.0) is None
    allocator.grow(0, 512 * MIB)
    assert allocator.fits(300 * MIB)
    assert take(allocator, 300 * MIB).offset + 300 * MIB <= 512 * MIB


def test_an_arena_that_will_not_grow_is_used_for_what_it_is() -> None:
    """Slabs of the planned arena would waste too little to be shorter than what there is."""
    length = 33 * MIB
    allocator = SlabAllocator({0: 4 * GIB}, usable={0: 256 * MIB})
    assert not allocator.fits(length)
    allocator.finalize(0)
    assert allocator.fits(length)
    assert len(fill(allocator, length)) == 4
    allocator.check()


@pytest.mark.parametrize("usable", [255 * MIB, 0, GIB + 64 * MIB])
def test_an_arena_neither_shrinks_nor_outgrows_its_segment(usable: int) -> None:
    allocator = SlabAllocator({0: GIB}, usable={0: 256 * MIB})
    with pytest.raises(ArenaError, match=f"segment 0 cannot have {usable} usable bytes"):
        allocator.grow(0, usable)
    assert allocator.capacity_bytes == 256 * MIB


@pytest.mark.parametrize("length", [MIB, 20 * MIB])
def test_within_reach_nothing_beyond_it_is_handed_out(length: int) -> None:
    """Long slabs come from the end of a segment, so most of what there is lies beyond."""
    allocator = SlabAllocator({0: 4 * GIB})
    for extent in fill(allocator, length)[::2]:
        allocator.free(extent)
    reach = {0: 256 * MIB}
    while (found := allocator.allocate(length, reach)) is not None:
        assert found.offset + found.length <= reach[0]
    assert allocator.allocate(length) is not None
    allocator.check()


def test_within_reach_of_an_empty_arena_all_of_it_can_be_had() -> None:
    allocator = SlabAllocator({0: 4 * GIB})
    assert allocator.allocate(8 * MIB, {0: 0}) is None
    assert allocator.allocate(8 * MIB, {}) is None
    found = 0
    while allocator.allocate(8 * MIB, {0: 512 * MIB}) is not None:
        found += 1
    assert found == 512 // 8
    allocator.check()
