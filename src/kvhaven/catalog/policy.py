# SPDX-License-Identifier: Apache-2.0
"""The contract of eviction policies: which chunk to evict first when space is needed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvhaven.types import ChunkKey


class EvictionPolicy(Protocol):
    """Order of the chunks of one size class: the policy proposes, the catalog decides.

    The catalog skips proposals that are pinned or have children in the arena. A policy holds only
    keys: no sizes, no clock and no randomness, so that histories replay. A key is added once until
    it is removed or evicted, and the other calls name it only in between. Every call, and every
    step of an iterator, costs O(1) per key that it names. This is a worst-case bound, not an
    average, because the service's event loop is blocked meanwhile: `kvhaven.maps` has queues that
    never move all of their keys in one operation.
    """

    name: str
    """Name of the policy in the settings, in lower case."""

    def fresh(self) -> "EvictionPolicy":
        """Return an empty policy of the same kind and settings, for another size class."""

    def added(self, key: ChunkKey) -> None:
        """Add a chunk that can be evicted from now on."""

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        """Record one use of each chunk of a chain, given from tail to head."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        """Record that a chain has a new tail; its chunks are given from tail to head.

        This is not a use. Unless the policy has another criterion, it should propose them in this
        order from now on, and not before chunks that were added earlier: a parent is at least as
        useful as its child, and cannot be evicted before it.
        """

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        """Record that chunks in use were proposed, in this order: they cannot be evicted.

        They must make way for chunks that can be evicted, or each search would begin with them
        again. Called only when one of the chunks behind them could be evicted, or might be: a
        search ends after a bounded number.
        """

    def evicted(self, key: ChunkKey) -> None:
        """Remove a chunk because space was needed (a policy may keep a ghost of it)."""

    def removed(self, key: ChunkKey) -> None:
        """Remove a chunk for another reason (cleared, discarded)."""

    def candidates(self) -> Iterator[ChunkKey]:
        """Yield every chunk once, in the order of eviction; the iteration changes nothing.

        The keys must not be copied, because mostly only the first few are consumed. No chunk is
        added, touched or removed while the iterator is in use.
        """

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield every chunk in the order of `candidates`, some hundred at a time.

        Chunks may be added, touched and removed meanwhile; for those that are touched or added,
        nothing is guaranteed.
        """
