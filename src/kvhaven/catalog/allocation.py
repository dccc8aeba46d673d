# SPDX-License-Identifier: Apache-2.0
"""What the catalog needs of an allocator (`kvhaven.arena.allocator` is the one there is)."""

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol, TypeVar

from kvhaven.types import Extent

S = TypeVar("S", bound=Hashable)
"""The allocator's name of a slab."""

Reach = Mapping[int, int]
"""The usable bytes at the front of each segment, by its index."""


def within(extent: Extent, reach: Reach) -> bool:
    """Whether an extent lies within reach."""
    return extent.offset + extent.length <= reach.get(extent.segment, 0)


class Allocator(Protocol[S]):
    """Hands out extents of the arena from slabs of equal extents; pure bookkeeping.

    What the catalog relies on: generations are never used twice, and an extent that was
    freed makes the next `allocate` of its length succeed, without `reach`.
    """

    @property
    def usable(self) -> Reach:
        """What may be handed out of each segment."""

    def grow(self, segment: int, usable_bytes: int) -> None:
        """Hand out extents in the first `usable_bytes` of a segment. Raises `ArenaError`."""

    def finalize(self, segment: int) -> None:
        """Note that a segment will not grow any more."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slabs can cover."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents that are handed out."""

    def fits(self, length: int) -> bool:
        """Whether an extent of `length` bytes could be had from an empty arena."""

    def allocate(self, length: int, reach: Reach | None = None) -> Extent | None:
        """Return a new extent of `length` bytes, within reach; None when there is no room."""

    def free(self, extent: Extent) -> None:
        """Take an extent back. Raises `ArenaError` when it is not handed out."""

    def slab_of(self, extent: Extent) -> S:
        """Return the slab in which an extent lies."""

    def room_near(
        self, slab: S, length: int, cost: Callable[[S], float | None]
    ) -> tuple[S, ...] | None:
        """Return the slabs to empty, about this one, so that `length` bytes can be had.

        Those of the least total cost; `cost` gives None for a slab that cannot be emptied. The
        answer is None when nothing there helps.
        """

    def check(self) -> None:
        """Audit the allocator itself. Raises AssertionError."""
