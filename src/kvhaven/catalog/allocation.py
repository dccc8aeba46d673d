# SPDX-License-Identifier: Apache-2.0
"""What the catalog needs of an allocator (`kvhaven.arena.allocator` is the one there is)."""

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

from kvhaven.types import Extent

S = TypeVar("S", bound=Hashable)
"""The allocator's name of a slab."""


class Allocator(Protocol[S]):
    """Hands out extents of the arena from slabs of equal extents; pure bookkeeping.

    What the catalog relies on: generations are never used twice, and an extent that was
    freed makes the next `allocate` of its length succeed.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bytes that slabs can cover."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents that are handed out."""

    def fits(self, length: int) -> bool:
        """Whether an extent of `length` bytes could be had from an empty arena."""

    def allocate(self, length: int) -> Extent | None:
        """Return a new extent of `length` bytes, or None when there is no room."""

    def free(self, extent: Extent) -> None:
        """Take an extent back. Raises `ArenaError` when it is not handed out."""

    def slab_of(self, extent: Extent) -> S:
        """Return the slab in which an extent lies."""

    def extents_in(self, slab: S) -> Iterable[Extent]:
        """Return the extents of a slab that are handed out."""

    def cheapest_room(self, length: int, cost: Callable[[S], float | None]) -> tuple[S, ...] | None:
        """Return the slabs to empty so that `length` bytes can be had, at the least cost.

        `cost` gives None for a slab that cannot be emptied; the answer is None when nothing
        helps, and empty when there is room already.
        """

    def check(self) -> None:
        """Audit the allocator itself. Raises AssertionError."""
