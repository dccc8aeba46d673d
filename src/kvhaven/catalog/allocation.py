# SPDX-License-Identifier: Apache-2.0
"""Allocator interface of the catalog, implemented by `kvhaven.arena.allocator`."""

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, TypeVar

from kvhaven.types import Extent

S = TypeVar("S", bound=Hashable)
"""The allocator's identifier of a slab."""

Reach = Mapping[int, int]
"""Usable bytes at the front of each segment, by the segment's index."""


def within(extent: Extent, reach: Reach) -> bool:
    """Return whether an extent lies within reach."""
    return extent.offset + extent.length <= reach.get(extent.segment, 0)


class Allocator(Protocol[S]):
    """Allocator of arena extents from slabs of equal extents; pure bookkeeping.

    The catalog relies on two guarantees: generations are never reused, and after an extent is freed
    the next `allocate` of its length without `reach` succeeds.
    """

    @property
    def usable(self) -> Reach:
        """Bytes of each segment that may be allocated."""

    def grow(self, segment: int, usable_bytes: int) -> None:
        """Allow allocation in the first `usable_bytes` of a segment. Raises `ArenaError`."""

    def finalize(self, segment: int) -> None:
        """Fix the size of a segment: it will not grow any more."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slabs can cover."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all allocated extents."""

    @property
    def waste_bytes(self) -> int:
        """Bytes that no extent can use: those behind the last extent of each slab."""

    def fits(self, length: int) -> bool:
        """Return whether an empty arena could hold an extent of `length` bytes."""

    def allocate(self, length: int, reach: Reach | None = None) -> Extent | None:
        """Return a new extent of `length` bytes within reach; None if there is no room."""

    def free(self, extent: Extent) -> None:
        """Free an extent. Raises `ArenaError` if it is not allocated."""

    def slab_of(self, extent: Extent) -> S:
        """Return the slab of an extent."""

    def room_near(
        self, slab: S, length: int, cost: Callable[[S], float | None]
    ) -> tuple[S, ...] | None:
        """Return the slabs around `slab` to empty for an extent of `length` bytes.

        The slabs with the least total cost; `cost` returns None for a slab that cannot be emptied.
        The result is None if no such slabs exist there.
        """

    def check(self) -> None:
        """Audit the allocator. Raises `AssertionError`."""
