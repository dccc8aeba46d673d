# SPDX-License-Identifier: Apache-2.0
"""Parts of the allocator: the units of a segment, slabs, and classes of slabs."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache

import msgspec

from kvhaven.errors import ArenaError
from kvhaven.types import PAGE_BYTES, Extent

LEVELS = 16
"""Slabs of a class are grouped by sixteenths of fullness; level 16 is full."""

_MIN_EXTENTS = 16
_MAX_WASTE = Fraction(1, 16)


class SlabId(msgspec.Struct, frozen=True):
    """Name of a slab: its segment, and the index of its first unit."""

    segment: int
    index: int


class ClassStats(msgspec.Struct, frozen=True):
    """Statistics of one extent size in bytes: used and free extents in its slabs, and slabs.

    `waste_bytes` counts the bytes behind the last extent of each slab.
    """

    length: int
    extents: int
    free: int
    slabs: int
    waste_bytes: int


class Slab:
    """Run of units that belongs to the class of `size`; hashed by identity."""

    __slots__ = (
        "end",
        "extents",
        "id",
        "level",
        "live",
        "size",
        "spare",
        "start",
        "units",
        "untouched",
        "waste",
    )

    def __init__(self, slab_id: SlabId, size: int, units: int, unit_bytes: int) -> None:
        self.id = slab_id
        self.size = size
        self.units = units
        self.extents = units * unit_bytes // size
        self.waste = units * unit_bytes % size
        self.start = slab_id.index * unit_bytes
        self.end = self.start + units * unit_bytes
        self.untouched = self.start  # offset of the first extent never allocated
        self.spare: list[int] = []  # offsets of freed extents
        self.live: dict[int, Extent] = {}  # by offset
        self.level = 0

    def check(self) -> None:
        """Audit the slab. Raises `AssertionError` that names the violated invariant."""
        size, end = self.size, self.start + self.extents * self.size
        assert self.live, f"{self.id} is empty but was not freed"
        assert self.level == len(self.live) * LEVELS // self.extents, f"{self.id}: wrong level"
        known = [*self.live, *self.spare]
        assert len(set(known)) == len(known), f"{self.id} has an extent twice"
        assert sorted(known) == list(range(self.start, self.untouched, size)), f"{self.id} leaks"
        assert self.untouched <= end, f"{self.id} overflows"
        for offset, extent in self.live.items():
            assert (extent.segment, extent.offset) == (self.id.segment, offset), (
                f"{extent} has a wrong place"
            )
            assert extent.length == size, f"{extent} is not of class {size}"


class SizeClass:
    """Slabs of one extent size, grouped by level of fullness."""

    __slots__ = ("levels", "mask", "size", "slabs")

    def __init__(self, size: int) -> None:
        self.size = size
        self.slabs = 0
        # Dictionaries are ordered sets here: the oldest slab of a level is filled first.
        self.levels: list[dict[Slab, None]] = [{} for _ in range(LEVELS + 1)]
        self.mask = 0  # bit n is set if level n has a slab; level 16 (full) is left out

    def add(self, slab: Slab) -> None:
        """Add an empty slab."""
        self.slabs += 1
        self.levels[0][slab] = None
        self.mask |= 1

    def remove(self, slab: Slab) -> None:
        """Remove a slab."""
        self.slabs -= 1
        self._take(slab)

    def move(self, slab: Slab, level: int) -> None:
        """Move a slab to the given level."""
        self._take(slab)
        slab.level = level
        self.levels[level][slab] = None
        if level < LEVELS:
            self.mask |= 1 << level

    def with_room(self) -> Iterator[Slab]:
        """Yield the slabs that are not full, fullest first."""
        for level in reversed(self.levels[:LEVELS]):
            yield from level

    def stats(self) -> ClassStats:
        """Return the statistics of the class."""
        slabs = [slab for level in self.levels for slab in level]
        used = sum(len(slab.live) for slab in slabs)
        free = sum(slab.extents for slab in slabs) - used
        waste = sum(slab.waste for slab in slabs)
        return ClassStats(self.size, used, free, len(slabs), waste)

    def check(self) -> None:
        """Audit levels and mask. Raises `AssertionError` that names the violated invariant."""
        mask = sum(1 << n for n in range(LEVELS) if self.levels[n])
        assert mask == self.mask, f"class {self.size}: mask {self.mask:b} is not {mask:b}"
        assert self.slabs == sum(map(len, self.levels)), f"class {self.size}: slabs miscounted"
        assert self.slabs, f"class {self.size} has no slabs but was not removed"

    def _take(self, slab: Slab) -> None:
        level = self.levels[slab.level]
        del level[slab]
        if not level:
            self.mask &= ~(1 << slab.level)


class SegmentUnits:
    """Units of one segment, and the slabs that own them.

    A segment has its final size from the beginning, and slabs have the shapes for that size. The
    `units` that may be assigned are those at its front; `grow` adds more.
    """

    __slots__ = (
        "_final",
        "_slab_bytes",
        "_taken",
        "free_units",
        "index",
        "owner",
        "shift",
        "units",
    )

    def __init__(self, index: int, size: int, slab_bytes: int) -> None:
        if size < PAGE_BYTES or slab_bytes < PAGE_BYTES:
            raise ArenaError(
                f"segment {index} of {size} bytes with slabs of {slab_bytes} bytes: too small; "
                f"both must be at least {PAGE_BYTES} bytes"
            )
        self.index = index
        unit = max(min(slab_bytes, size // 16), PAGE_BYTES)
        self.shift = unit.bit_length() - 1  # the largest power of two up to `unit`
        self._final = size >> self.shift
        self.units = 0
        self._slab_bytes = slab_bytes
        self._taken = bytearray()
        self.free_units = 0
        self.owner: dict[int, Slab] = {}  # by unit, for every unit of a slab

    @property
    def unit_bytes(self) -> int:
        """Size of a unit in bytes."""
        return 1 << self.shift

    def grow(self, usable_bytes: int) -> None:
        """Allow slabs in the first `usable_bytes` of the segment.

        Raises `ArenaError` for fewer bytes than before, or for more than the segment has.
        """
        units = usable_bytes >> self.shift
        if not self.units <= units <= self._final:
            raise ArenaError(
                f"segment {self.index} cannot have {usable_bytes} usable bytes: it has "
                f"{self.units} units of {self.unit_bytes} bytes, and at most {self._final}"
            )
        more, self.units = units - self.units, units
        self.free_units += more
        self._taken += bytes(more)

    def finalize(self) -> None:
        """Fix the present size: the segment will not grow; new slabs are shaped for it."""
        self._final = self.units

    def shapes(self, size: int) -> tuple[int, ...]:
        """Return how many units a slab of class `size` may have, best first; empty if too large."""
        return _shapes(size, self._final, 1 << self.shift, self._slab_bytes)

    def fits(self, size: int) -> bool:
        """Return whether an empty segment could hold a slab of class `size`."""
        shapes = self.shapes(size)
        return bool(shapes) and shapes[-1] <= self.units

    def assign(self, size: int, end_bytes: int | None = None) -> Slab | None:
        """Assign units to a new slab of class `size`; return None if no run of them is free.

        With `end_bytes`, only units that end at or before that offset are used.
        """
        if not self.free_units:
            return None
        end = None if end_bytes is None else end_bytes >> self.shift
        for units in self.shapes(size):
            # Short slabs are placed from the front and long ones from the back, so that short
            # slabs do not fragment the long runs.
            find = self._taken.find if units == 1 else self._taken.rfind
            first = find(bytes(units), 0, end) if units <= self.free_units else -1
            if first >= 0:
                slab = Slab(SlabId(self.index, first), size, units, 1 << self.shift)
                self._taken[first : first + units] = b"\1" * units
                self.owner.update(dict.fromkeys(range(first, first + units), slab))
                self.free_units -= units
                return slab
        return None

    def release(self, slab: Slab) -> None:
        """Free the units of an empty slab."""
        first, units = slab.id.index, slab.units
        self._taken[first : first + units] = bytes(units)
        for unit in range(first, first + units):
            del self.owner[unit]
        self.free_units += units

    def slabs(self) -> Iterator[Slab]:
        """Yield the slabs in order of address."""
        unit = 0
        while (unit := self._taken.find(1, unit)) >= 0:
            slab = self.owner[unit]
            yield slab
            unit += slab.units

    def longest_run(self) -> int:
        """Return the length of the longest free run in units."""
        return max(map(len, bytes(self._taken).split(b"\1")))

    def cheapest_run(
        self, units: int, near: SlabId, cost: Callable[[SlabId], float | None]
    ) -> tuple[float, tuple[SlabId, ...]] | None:
        """Return cost and slabs of the cheapest run of `units` units, including free ones.

        Considered are runs that contain or touch the slab `near`. `cost` returns the cost of
        emptying a slab, None for a slab that must stay. The result is None if every run contains
        such a slab.
        """
        best: tuple[float, tuple[SlabId, ...]] | None = None
        window: list[tuple[int, float, SlabId | None]] = []  # adjacent pieces: units, cost, slab
        length, total = 0, 0.0
        for piece, price, slab_id in self._pieces(near, units, cost):
            if price is None:
                window, length, total = [], 0, 0.0
                continue
            window.append((piece, price, slab_id))
            length, total = length + piece, total + price
            while length - window[0][0] >= units:
                length, total = length - window[0][0], total - window[0][1]
                del window[0]
            if length >= units and (best is None or total < best[0]):
                best = total, tuple(w[2] for w in window if w[2] is not None)
        return best

    def check(self) -> None:
        """Audit units and slabs. Raises `AssertionError` that names the violated invariant."""
        taken = bytearray(self.units)
        for slab in self.slabs():
            first, end = slab.id.index, slab.id.index + slab.units
            assert end <= self.units, f"{slab.id} reaches beyond the segment"
            assert not any(taken[first:end]), f"{slab.id} overlaps another slab"
            assert all(self.owner[n] is slab for n in range(first, end)), f"{slab.id}: wrong owner"
            taken[first:end] = b"\1" * slab.units
        assert taken == self._taken, f"segment {self.index}: taken units without a slab"
        assert len(self.owner) == sum(taken), f"segment {self.index}: owners without units"
        assert self.free_units == self.units - sum(taken), (
            f"segment {self.index}: free units are miscounted"
        )

    def _pieces(
        self, near: SlabId, units: int, cost: Callable[[SlabId], float | None]
    ) -> Iterator[tuple[int, float | None, SlabId | None]]:
        """Yield slabs and single free units by address: units, cost of emptying, slab.

        Covers the range from `units` units before the slab `near` to `units` units behind it.
        """
        unit = near.index
        end = min(self.units, unit + self.owner[unit].units + units)
        while unit > max(0, near.index - units):
            before = self.owner.get(unit - 1)
            unit -= before.units if before is not None else 1
        while unit < end:
            slab = self.owner.get(unit)
            if slab is None:
                yield 1, 0.0, None
                unit += 1
            else:
                yield slab.units, cost(slab.id), slab.id
                unit += slab.units


@lru_cache(maxsize=1024)
def _shapes(size: int, units: int, unit: int, slab_bytes: int) -> tuple[int, ...]:
    """Return how many units a slab may have in a segment of `units`, best first."""

    def waste(n: int) -> Fraction:
        return Fraction(n * unit % size, n * unit)

    one = -(-size // unit)  # units that hold one extent
    if one > units:
        return ()
    best = wanted = -(-max(slab_bytes, _MIN_EXTENTS * size) // unit)
    most = max(units // 4, one)
    if wanted > most:
        best = min(range(one, most + 1), key=lambda n: (waste(n), -n))
    allowed = max(_MAX_WASTE, waste(best))
    smaller = {best >> n for n in range(best.bit_length())}
    smaller.update(-(-n * size // unit) for n in range(1, _MIN_EXTENTS))
    fallback = sorted((n for n in smaller if one <= n < best), reverse=True)
    return (best, *(n for n in fallback if waste(n) <= allowed))
