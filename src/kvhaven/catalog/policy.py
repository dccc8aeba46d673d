# SPDX-License-Identifier: Apache-2.0
"""Which chunk goes first when space is needed: the contract of eviction policies."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvhaven.types import ChunkKey


class EvictionPolicy(Protocol):
    """Orders the chunks of one size class; it proposes, the catalog decides.

    The catalog passes over a proposal that is pinned, or that has children in the arena. A
    policy holds keys only: no sizes, no clock, nothing random, so that histories replay. A
    key is added once until it is removed or evicted, and named by the other calls only in
    between. Every call, and every step of an iterator, costs O(1) for each key that it names. The
    service's loop stands still meanwhile, so that is not meant on average: `kvhaven.maps` has
    queues that never move all of their keys at once.
    """

    name: str
    """The word for it in the settings, in lower case."""

    def fresh(self) -> "EvictionPolicy":
        """Return an empty policy of the same kind and settings, for another size class."""

    def added(self, key: ChunkKey) -> None:
        """Take in a chunk that can be evicted from now on."""

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Note one use of each of these, a chain from its tail to its head."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Note that a chain has a new tail; its chunks are given from tail to head.

        That is no use of them. Where nothing else decides, they are to be proposed in this
        order from now on, and not before what was added earlier: a parent is of no less use
        than its child, and cannot go before it.
        """

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Note that these were proposed, in this order, and cannot go: others hold them.

        They are to make way for proposals that can go, or each search would begin with them
        again. Only called when one of those behind them could go, or may be able to: a search ends
        after so many.
        """

    def evicted(self, key: ChunkKey) -> None:
        """Forget a chunk because space was needed (a policy may keep a ghost of it)."""

    def removed(self, key: ChunkKey) -> None:
        """Forget a chunk that went for another reason (cleared, discarded)."""

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield every chunk once, the one to evict first first; looking changes nothing.

        Nothing is copied: mostly only the first few are asked for. Nothing is added, touched
        or taken away while the iterator is in use.
        """

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield every chunk in the order of `candidates`, some hundred at a time.

        Chunks are added, touched and taken away meanwhile: of what is touched or added, nothing is
        promised.
        """
