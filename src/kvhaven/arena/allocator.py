# SPDX-License-Identifier: Apache-2.0
"""Allocator of the arena: slabs of equal extents, one class per extent size.

A segment is divided into units (the slab size; a power of two, and at most a sixteenth of the
segment). A slab is a run of units that belongs to one class. It holds at least 16 extents and is at
least `slab_bytes` long, so that its tail (the bytes behind the last extent) is at most 1/16 of it.
There are two exceptions:

- in a small segment a slab is at most a quarter of the segment, unless one extent needs more; the
  length with the smallest tail is chosen then;
- if no free run is long enough, a shorter one is taken, provided that its tail is at most 1/16 too
  (or no worse than that of the best length).

Allocation prefers fuller slabs, so that others become empty. The units of an empty slab become free
for any class.

A segment may grow: only its first bytes are `usable` at first. Its units and the shapes of its
slabs are those of its final size, so growing moves nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import msgspec

from kvhaven.arena.slabs import LEVELS, ClassStats, SegmentUnits, SizeClass, Slab, SlabId
from kvhaven.errors import ArenaError
from kvhaven.types import PAGE_BYTES, Extent

__all__ = ["AllocatorStats", "ClassStats", "SlabAllocator", "SlabId"]

_MOST_LOOKED_AT = 64
"""Maximum number of a class's slabs, of possibly thousands, searched for room within a reach."""


class AllocatorStats(msgspec.Struct, frozen=True):
    """Usage and fragmentation of the arena in bytes.

    `capacity = used + free in slabs + waste + unassigned`. `largest_free_bytes` is the longest run
    that belongs to no class: the longest extent of a new class that fits without eviction.
    """

    capacity_bytes: int
    used_bytes: int
    waste_bytes: int
    unassigned_bytes: int
    largest_free_bytes: int
    classes: tuple[ClassStats, ...]


class SlabAllocator:
    """Allocator of all segments; pure bookkeeping, not thread-safe.

    `segments` maps a segment's index to its size in bytes. `slab_bytes` is the minimum length of a
    slab (smaller in small segments, see the module). `usable` maps each segment to the number of
    bytes at its beginning that may be allocated (default: all). Raises `ArenaError` for a segment
    smaller than a page.
    """

    def __init__(
        self,
        segments: Mapping[int, int],
        slab_bytes: int = 64 << 20,
        *,
        usable: Mapping[int, int] | None = None,
    ) -> None:
        self._segments = {
            index: SegmentUnits(index, size, slab_bytes) for index, size in segments.items()
        }
        self.usable: dict[int, int] = {}
        for index, bytes_ in (segments if usable is None else usable).items():
            self.grow(index, bytes_)
        self._classes: dict[int, SizeClass] = {}
        self._generation = 0
        self._used_bytes = 0
        self.waste_bytes = 0
        """Bytes behind the last extent of each slab, which no extent can use."""

    def grow(self, segment: int, usable_bytes: int) -> None:
        """Allow allocation in the first `usable_bytes` of a segment.

        Raises `ArenaError` for fewer bytes than before, or for more than the segment has.
        """
        self._segments[segment].grow(usable_bytes)
        self.usable[segment] = usable_bytes

    def finalize(self, segment: int) -> None:
        """Fix the size of a segment at its usable bytes: it will not grow any more."""
        self._segments[segment].finalize()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slabs can cover: the usable bytes without an incomplete last unit."""
        return sum(s.units * s.unit_bytes for s in self._segments.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated extents."""
        return self._used_bytes

    def fits(self, length: int) -> bool:
        """Return whether an empty arena could hold an extent of `length` bytes."""
        return length > 0 and any(s.fits(_class_size(length)) for s in self._segments.values())

    def allocate(self, length: int, reach: Mapping[int, int] | None = None) -> Extent | None:
        """Return a new extent of `length` bytes, rounded up to whole pages.

        None means that the class has no room and no free run fits another slab: the caller has to
        evict (see `room_near`). With `reach`, only slabs within the first so many bytes of each
        segment are used. None may then be returned although there is room, because not every slab
        is searched. Generations only increase and are never reused. Raises `ArenaError` if the
        length is not positive.
        """
        size = -(-length // PAGE_BYTES) * PAGE_BYTES
        if size <= 0:
            raise ArenaError(f"extent of {length} bytes: invalid length; it must be positive")
        slab = self._slab_with_room(size, reach)
        if slab is None:
            return None
        slab_class = self._classes[size]
        spare = slab.spare
        if spare:
            offset = spare.pop()
        else:
            offset = slab.untouched
            slab.untouched = offset + size
        self._generation = generation = self._generation + 1
        extent = Extent(slab.id.segment, offset, size, generation)
        slab.live[offset] = extent
        self._used_bytes += size
        level = len(slab.live) * LEVELS // slab.extents
        if level != slab.level:
            slab_class.move(slab, level)
        return extent

    def free(self, extent: Extent) -> None:
        """Free an extent; freeing the last extent of a slab frees the slab too.

        Raises `ArenaError` if it is not allocated: freed before, or of an old generation.
        """
        slab = self._slab(extent)
        offset = extent.offset
        if slab is None or slab.live.get(offset) != extent:
            raise ArenaError(f"{extent} is not allocated: it was freed before, or never allocated")
        live = slab.live
        del live[offset]
        size = extent.length
        self._used_bytes -= size
        slab_class = self._classes[size]
        if not live:
            self._release(slab, slab_class)
            return
        slab.spare.append(offset)
        level = len(live) * LEVELS // slab.extents
        if level != slab.level:
            slab_class.move(slab, level)

    def slab_of(self, extent: Extent) -> SlabId:
        """Return the slab of an extent. Raises `ArenaError` if no slab lies there."""
        segment = self._segments.get(extent.segment)
        slab = None if segment is None else segment.owner.get(extent.offset >> segment.shift)
        if slab is None:
            raise ArenaError(f"{extent} lies outside of all slabs in use")
        return slab.id

    def extents_in(self, slab: SlabId) -> tuple[Extent, ...]:
        """Return the allocated extents of a slab, oldest first; empty if the slab is not in use."""
        segment = self._segments.get(slab.segment)
        found = segment.owner.get(slab.index) if segment is not None else None
        return tuple(found.live.values()) if found is not None and found.id == slab else ()

    def slabs(self) -> Iterator[SlabId]:
        """Yield the slabs that belong to a class, in order of address."""
        for segment in self._segments.values():
            for slab in segment.slabs():
                yield slab.id

    def room_near(
        self, slab: SlabId, length: int, cost: Callable[[SlabId], float | None]
    ) -> tuple[SlabId, ...] | None:
        """Return the slabs to empty for an extent of `length` bytes, at the least total cost.

        The slabs are adjacent, apart from free units between them, so emptying them is sufficient;
        emptying others may not be, because slabs differ in length. Only runs that contain or touch
        `slab` are considered. `cost` returns the cost of emptying a slab, None for a slab that
        cannot be emptied (leased, quarantined). The result is None if no such run exists.
        """
        segment = self._segments[slab.segment]
        shapes = segment.shapes(_class_size(length))
        found = segment.cheapest_run(shapes[-1], slab, cost) if shapes else None  # the shortest
        return None if found is None else found[1]

    def stats(self) -> AllocatorStats:
        """Return usage and fragmentation of the arena."""
        classes = tuple(c.stats() for _, c in sorted(self._classes.items()))
        segments = self._segments.values()
        return AllocatorStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            waste_bytes=self.waste_bytes,
            unassigned_bytes=sum(s.free_units * s.unit_bytes for s in segments),
            largest_free_bytes=max((s.longest_run() * s.unit_bytes for s in segments), default=0),
            classes=classes,
        )

    def check(self) -> None:
        """Audit every invariant. Raises `AssertionError` that names the violated one."""
        used = 0
        counted: dict[int, int] = {}
        generations: set[int] = set()
        for segment in self._segments.values():
            segment.check()
            for slab in segment.slabs():
                slab.check()
                slab_class = self._classes[slab.size]
                assert slab in slab_class.levels[slab.level], f"{slab.id} is missing from its level"
                counted[slab.size] = counted.get(slab.size, 0) + 1
                used += slab.size * len(slab.live)
                generations.update(e.generation for e in slab.live.values())
        for size, slab_class in self._classes.items():
            slab_class.check()
            assert counted.get(size) == slab_class.slabs, f"slabs of class {size} are miscounted"
        waste = sum(c.stats().waste_bytes for c in self._classes.values())
        assert waste == self.waste_bytes, f"{waste} bytes are waste, {self.waste_bytes} are counted"
        extents = sum(c.stats().extents for c in self._classes.values())
        assert used == self._used_bytes, f"{used} bytes are used, {self._used_bytes} are counted"
        assert len(generations) == extents, "two extents have the same generation"
        assert max(generations, default=0) <= self._generation, "a generation was never issued"

    def _slab(self, extent: Extent) -> Slab | None:
        segment = self._segments.get(extent.segment)
        return segment.owner.get(extent.offset >> segment.shift) if segment is not None else None

    def _slab_with_room(self, size: int, reach: Mapping[int, int] | None) -> Slab | None:
        """Return the fullest slab of a class that has room, or a new one; None without either."""
        slab_class = self._classes.get(size)
        if slab_class is not None and slab_class.mask:
            if reach is None:
                return next(iter(slab_class.levels[slab_class.mask.bit_length() - 1]))
            for slab in islice(slab_class.with_room(), _MOST_LOOKED_AT):
                if slab.end <= reach.get(slab.id.segment, 0):
                    return slab
        for index, segment in self._segments.items():
            new = segment.assign(size, None if reach is None else reach.get(index, 0))
            if new is not None:
                if slab_class is None:
                    slab_class = self._classes[size] = SizeClass(size)
                slab_class.add(new)
                self.waste_bytes += new.waste
                return new
        return None

    def _release(self, slab: Slab, slab_class: SizeClass) -> None:
        slab_class.remove(slab)
        self.waste_bytes -= slab.waste
        if not slab_class.slabs:
            del self._classes[slab.size]
        self._segments[slab.id.segment].release(slab)


def _class_size(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES
