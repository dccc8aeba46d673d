# SPDX-License-Identifier: Apache-2.0
"""Hands out extents of the arena: slabs of equal extents, one class per extent size.

A segment is divided into units (the slab size; a power of two, and at most a sixteenth of
the segment). A slab is a run of units that belongs to one class. It holds at least 16
extents and is at least `slab_bytes` long, so that its tail (what is left behind the last
extent) is at most 1/16 of it. Two exceptions:

- in a small segment a slab is at most a quarter of the segment, unless one extent needs
  more; then the length with the smallest tail is chosen;
- when no free run is long enough, a shorter one is taken, if its tail is at most 1/16 too (or
  no worse than that of the best length).

Allocation prefers fuller slabs, so that others can empty. A slab that is empty goes back to
the free units, and any class may have them.

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
"""Slabs of a class that are searched for room within a reach; a class may have thousands."""


class AllocatorStats(msgspec.Struct, frozen=True):
    """How full and how fragmented the arena is, in bytes.

    `capacity = used + free in slabs + waste + unassigned`. `largest_free_bytes` is the longest
    run that no class has: the longest extent of a new class that can be had without eviction.
    """

    capacity_bytes: int
    used_bytes: int
    waste_bytes: int
    unassigned_bytes: int
    largest_free_bytes: int
    classes: tuple[ClassStats, ...]


class SlabAllocator:
    """The allocator of all segments; pure bookkeeping, not thread-safe.

    `segments` maps a segment's index to its size in bytes; `slab_bytes` is the least length
    of a slab (smaller in small segments, see the module). `usable` are the bytes of each
    segment that may be handed out, from its beginning (default: all). Raises ArenaError for a
    segment smaller than a page.
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

    def grow(self, segment: int, usable_bytes: int) -> None:
        """Hand out extents in the first `usable_bytes` of a segment from now on.

        Raises ArenaError for fewer than before, or for more than the segment has.
        """
        self._segments[segment].grow(usable_bytes)
        self.usable[segment] = usable_bytes

    def finalize(self, segment: int) -> None:
        """Note that a segment will not grow any more: that is its size."""
        self._segments[segment].finalize()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slabs can cover: what is usable without an incomplete last unit."""
        return sum(s.units * s.unit_bytes for s in self._segments.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated extents."""
        return self._used_bytes

    def fits(self, length: int) -> bool:
        """Whether an extent of `length` bytes could be had from an empty arena."""
        return length > 0 and any(s.fits(_class_size(length)) for s in self._segments.values())

    def allocate(self, length: int, reach: Mapping[int, int] | None = None) -> Extent | None:
        """Return a new extent of `length` bytes, rounded up to whole pages.

        None means that its class has no room and there is no free run for another slab:
        something must be evicted (see `room_near`). With `reach`, only from slabs in the
        first so many bytes of each segment; None may be the answer then although there is room:
        not every slab is looked at. Generations only ever grow and are never used twice. Raises
        ArenaError for a length that is not positive.
        """
        size = -(-length // PAGE_BYTES) * PAGE_BYTES
        if size <= 0:
            raise ArenaError(f"an extent of {length} bytes was asked for; it must be positive")
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
        """Take an extent back; the last one of a slab gives the slab back too.

        Raises ArenaError when it is not allocated: freed before, or of an old generation.
        """
        slab = self._slab(extent)
        offset = extent.offset
        if slab is None or slab.live.get(offset) != extent:
            raise ArenaError(f"{extent} is not allocated: it was freed before, or never given out")
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
        """Return the slab in which an extent lies; ArenaError when no slab is there."""
        segment = self._segments.get(extent.segment)
        slab = None if segment is None else segment.owner.get(extent.offset >> segment.shift)
        if slab is None:
            raise ArenaError(f"{extent} lies in no slab that is in use")
        return slab.id

    def extents_in(self, slab: SlabId) -> tuple[Extent, ...]:
        """Return the allocated extents of a slab, oldest first; none for one not in use."""
        segment = self._segments.get(slab.segment)
        found = segment.owner.get(slab.index) if segment is not None else None
        return tuple(found.live.values()) if found is not None and found.id == slab else ()

    def slabs(self) -> Iterator[SlabId]:
        """Yield the slabs that belong to a class, in the order of their addresses."""
        for segment in self._segments.values():
            for slab in segment.slabs():
                yield slab.id

    def room_near(
        self, slab: SlabId, length: int, cost: Callable[[SlabId], float | None]
    ) -> tuple[SlabId, ...] | None:
        """Return the slabs to empty so that `length` bytes can be had, at the least total cost.

        They lie side by side, with the free units between them, so emptying them is enough;
        emptying any others may not be, as slabs differ in length. Only runs that a slab is in, or
        touches, are looked at. `cost` gives what it costs to empty a slab, None for one that cannot
        be emptied (leased, quarantined). The answer is None when nothing there helps.
        """
        segment = self._segments[slab.segment]
        shapes = segment.shapes(_class_size(length))
        found = segment.cheapest_run(shapes[-1], slab, cost) if shapes else None  # the shortest
        return None if found is None else found[1]

    def stats(self) -> AllocatorStats:
        """Return how full and how fragmented everything is."""
        classes = tuple(c.stats() for _, c in sorted(self._classes.items()))
        segments = self._segments.values()
        return AllocatorStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            waste_bytes=sum(c.waste_bytes for c in classes),
            unassigned_bytes=sum(s.free_units * s.unit_bytes for s in segments),
            largest_free_bytes=max((s.longest_run() * s.unit_bytes for s in segments), default=0),
            classes=classes,
        )

    def check(self) -> None:
        """Audit every invariant; AssertionError names the one that does not hold."""
        used = 0
        counted: dict[int, int] = {}
        generations: set[int] = set()
        for segment in self._segments.values():
            segment.check()
            for slab in segment.slabs():
                slab.check()
                slab_class = self._classes[slab.size]
                assert slab in slab_class.levels[slab.level], f"{slab.id} is in no level"
                counted[slab.size] = counted.get(slab.size, 0) + 1
                used += slab.size * len(slab.live)
                generations.update(e.generation for e in slab.live.values())
        for size, slab_class in self._classes.items():
            slab_class.check()
            assert counted.get(size) == slab_class.slabs, f"slabs of class {size} are miscounted"
        extents = sum(c.stats().extents for c in self._classes.values())
        assert used == self._used_bytes, f"{used} bytes are used, {self._used_bytes} counted"
        assert len(generations) == extents, "two extents have one generation"
        assert max(generations, default=0) <= self._generation, "a generation from the future"

    def _slab(self, extent: Extent) -> Slab | None:
        segment = self._segments.get(extent.segment)
        return segment.owner.get(extent.offset >> segment.shift) if segment is not None else None

    def _slab_with_room(self, size: int, reach: Mapping[int, int] | None) -> Slab | None:
        """Return the fullest slab of a class that has room, or a new one; None: there is none."""
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
                return new
        return None

    def _release(self, slab: Slab, slab_class: SizeClass) -> None:
        slab_class.remove(slab)
        if not slab_class.slabs:
            del self._classes[slab.size]
        self._segments[slab.id.segment].release(slab)


def _class_size(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES
