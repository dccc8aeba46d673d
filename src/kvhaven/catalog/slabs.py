# SPDX-License-Identifier: Apache-2.0
"""Which chunks lie in which slab of the arena, and which slab was not used for longest."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Generic

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import SlabUse


class Slabs(Generic[S]):
    """All slabs with entries, by the length of their extents, those unused for longest first.

    Through them every entry of the arena is found, the doomed ones too, in parts of a bounded
    size. What the slab of a chunk is worth is known without a look at its other chunks.
    """

    def __init__(self) -> None:
        self.known: dict[S, SlabUse[S]] = {}
        self._orders: dict[int, OrderedDict[SlabUse[S], None]] = {}

    def enter(self, id_: S, length: int) -> SlabUse[S]:
        """Return a slab of extents of this length, which gets another entry."""
        slab = self.known.get(id_)
        if slab is None:
            slab = self.known[id_] = SlabUse(id_, length)
            self.order(length)[slab] = None
        return slab

    def leave(self, slab: SlabUse[S], generation: int) -> None:
        """Take an entry out; a slab without entries is given up."""
        del slab.entries[generation]
        if not slab.entries:
            del self.known[slab.id]
            del self._orders[slab.length][slab]

    def use(self, slab: SlabUse[S], stamp: int) -> None:
        """Note that an entry of a slab was used."""
        slab.stamp = stamp
        self._orders[slab.length].move_to_end(slab)

    def order(self, length: int) -> OrderedDict[SlabUse[S], None]:
        """Return the slabs of extents of a length, those unused for longest first."""
        order = self._orders.get(length)
        if order is None:
            order = self._orders[length] = OrderedDict()
        return order

    def coldest(self, but: int) -> Iterator[SlabUse[S]]:
        """Yield the slabs of all lengths but one, those unused for longest first."""
        others = [order for length, order in self._orders.items() if length != but]
        return merge(*others, key=lambda slab: slab.stamp)

    def __iter__(self) -> Iterator[SlabUse[S]]:
        for order in self._orders.values():
            yield from order
