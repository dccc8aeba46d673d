# SPDX-License-Identifier: Apache-2.0
"""Which chunk goes first when space is needed: the contract of eviction policies, and LRU."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvhaven.types import ChunkKey


class EvictionPolicy(Protocol):
    """Orders the chunks of one size class; it proposes, the catalog decides.

    The catalog passes over a proposal that is pinned, or that has children in the arena. A
    policy holds keys only: no sizes, no clock, nothing random, so that histories replay. A
    key is added once until it is removed or evicted, and touched only in between.
    """

    name: str
    """The word for it in the settings."""

    def fresh(self) -> "EvictionPolicy":
        """Return an empty policy of the same kind and settings, for another size class."""

    def added(self, key: ChunkKey) -> None:
        """Take in a chunk that can be evicted from now on."""

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Note one use of each of these, a chain from its tail to its head."""

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk because space was needed (a policy may keep a ghost of it)."""

    def removed(self, key: ChunkKey) -> None:
        """Forget a chunk that went for another reason (cleared, discarded)."""

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield every chunk once, the one to evict first first.

        Nothing is added, touched or taken away while the iterator is in use.
        """


class LRU:
    """Least recently used first. As chains are touched from tail to head, tails go first."""

    __slots__ = ("_order",)
    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def fresh(self) -> "LRU":
        """Return an empty LRU."""
        return LRU()

    def added(self, key: ChunkKey) -> None:
        """Put a chunk at the young end."""
        self._order[key] = None

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Move each to the young end, in the order given."""
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        del self._order[key]

    def removed(self, key: ChunkKey) -> None:
        """Forget a chunk."""
        del self._order[key]

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield from the old end."""
        return iter(self._order)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {LRU.name: LRU}
"""Every policy by its name in the settings. A new one is a class and a line here."""
