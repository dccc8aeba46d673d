# SPDX-License-Identifier: Apache-2.0
"""Index of a disk tier: the shards of each chunk, and their stored sizes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvhaven.errors import TierError
from kvhaven.maps import StripedDict
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.types import KEY_BYTES, PAGE_BYTES, ChunkKey, NamespaceDigest, TenantId

_DIGIT: Final = 32
_LARGEST: Final = (1 << _DIGIT) - 1


class _Space:
    """Chunks of one namespace, each encoded as one integer, which needs less memory than a list.

    The integer's 32-bit digits are the stored pages of each shard in the namespace's table,
    lowest digit first; 0 means absent.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks = StripedDict[bytes, int]()  # by key and tenant
        self.positions = {shard.id: at for at, shard in enumerate(namespace.table.shards)}

    def size(self, shard: StoredShard) -> int:
        """Return the stored size in bytes of a shard in the table; 0 if it is absent."""
        digits = (self.chunks.get(shard.key + shard.tenant) or 0) >> self.positions[
            shard.shard
        ] * _DIGIT
        return (digits & _LARGEST) * PAGE_BYTES

    def resize(self, shard: StoredShard, size: int) -> int:
        """Set a shard's stored size in bytes; return the difference to its former size."""
        grown = size - self.size(shard)
        shift = self.positions[shard.shard] * _DIGIT
        chunk = shard.key + shard.tenant
        digits = (self.chunks.get(chunk) or 0) + (grown // PAGE_BYTES << shift)
        if digits:
            self.chunks[chunk] = digits
        else:
            self.chunks.pop(chunk, 0)
        return grown


class Index:
    """Index of the shards of all namespaces. Used on the event loop only, so it needs no lock."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceDigest, _Space] = {}
        self._listings: list[set[StoredShard]] = []
        self.used_bytes = 0

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the registered namespaces."""
        return tuple(space.namespace for space in self._spaces.values())

    def namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """Return a namespace; None if it is not registered."""
        space = self._spaces.get(digest)
        return space.namespace if space else None

    def add_namespace(self, namespace: Namespace) -> None:
        """Register a namespace; shards that it already has are kept.

        Raises `TierError` if it is registered with another table.
        """
        known = self._spaces.setdefault(namespace.digest, _Space(namespace)).namespace
        if known.table != namespace.table:
            raise TierError(
                f"namespace {namespace.digest.hex()} is registered with another shard table: "
                f"{len(known.table.shards)} shards, of other names or sizes than the "
                f"{len(namespace.table.shards)} given now"
            )

    def fits(self, shard: StoredShard) -> bool:
        """Return whether the shard, with this size, is in its namespace's table."""
        space = self._spaces.get(shard.namespace)
        at = space.positions.get(shard.shard) if space else None
        if space is None or at is None:
            return False
        return space.namespace.table.shards[at].payload_bytes == shard.payload_bytes

    def size(self, shard: StoredShard) -> int:
        """Return a shard's stored size in bytes; 0 if it is absent."""
        return self._spaces[shard.namespace].size(shard) if self.fits(shard) else 0

    def __contains__(self, shard: StoredShard) -> bool:
        return self.size(shard) > 0

    def add(self, shard: StoredShard, size: int) -> None:
        """Record a shard with its stored `size` in bytes; ignored if it is not in the table."""
        if self.fits(shard):
            self.used_bytes += self._spaces[shard.namespace].resize(shard, size)

    def discard(self, shard: StoredShard) -> None:
        """Record that a shard is absent."""
        for forgotten in self._listings:
            forgotten.add(shard)
        if self.fits(shard):
            self.used_bytes += self._spaces[shard.namespace].resize(shard, 0)

    @contextlib.contextmanager
    def listing(self) -> Iterator[Callable[[Mapping[StoredShard, int]], dict[StoredShard, int]]]:
        """Guard a listing of files by a thread: it may find shards that are deleted meanwhile.

        Yields a function that takes the shards found, with their stored sizes, adds those that
        were not discarded since the listing began, and returns them.
        """
        forgotten: set[StoredShard] = set()
        self._listings.append(forgotten)

        def add(found: Mapping[StoredShard, int]) -> dict[StoredShard, int]:
            kept = {shard: size for shard, size in found.items() if shard not in forgotten}
            for shard, size in kept.items():
                self.add(shard, size)
            return kept

        try:
            yield add
        finally:
            self._listings = [other for other in self._listings if other is not forgotten]

    def shards(self, digest: NamespaceDigest) -> Iterator[StoredShard]:
        """Yield every shard of a namespace. The index must not change during the iteration."""
        space = self._spaces[digest]
        for chunk in space.chunks:
            key, tenant = ChunkKey(chunk[:KEY_BYTES]), TenantId(chunk[KEY_BYTES:])
            for shard in space.namespace.table.shards:
                stored = StoredShard(digest, key, shard.id, shard.payload_bytes, tenant)
                if space.size(stored):
                    yield stored
