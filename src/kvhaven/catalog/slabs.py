# SPDX-License-Identifier: Apache-2.0
"""Index of the slabs of the arena: their chunks, and the order of their last use."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Generic

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import SlabUse


class Slabs(Generic[S]):
    """All slabs with entries, by extent length, least recently used first.

    Every entry of the arena, including retired ones, can be reached through them in parts of
    bounded size. The last use of a slab is known without reading its chunks.
    """

    def __init__(self) -> None:
        self.known: dict[S, SlabUse[S]] = {}
        self._orders: dict[int, OrderedDict[SlabUse[S], None]] = {}

    def enter(self, id_: S, length: int) -> SlabUse[S]:
        """Return the slab with this id, for extents of this length, to which an entry is added."""
        slab = self.known.get(id_)
        if slab is None:
            slab = self.known[id_] = SlabUse(id_, length)
            self.order(length)[slab] = None
        return slab

    def leave(self, slab: SlabUse[S], generation: int) -> None:
        """Remove an entry; a slab without entries is dropped."""
        del slab.entries[generation]
        if not slab.entries:
            del self.known[slab.id]
            del self._orders[slab.length][slab]

    def use(self, slab: SlabUse[S], stamp: int) -> None:
        """Record the use of an entry of a slab."""
        slab.stamp = stamp
        self._orders[slab.length].move_to_end(slab)

    def order(self, length: int) -> OrderedDict[SlabUse[S], None]:
        """Return the slabs with extents of this length, least recently used first."""
        order = self._orders.get(length)
        if order is None:
            order = self._orders[length] = OrderedDict()
        return order

    def coldest(self, but: int) -> Iterator[SlabUse[S]]:
        """Yield the slabs of all lengths except one, least recently used first."""
        others = [order for length, order in self._orders.items() if length != but]
        return merge(*others, key=lambda slab: slab.stamp)

    def __iter__(self) -> Iterator[SlabUse[S]]:
        for order in self._orders.values():
            yield from order
