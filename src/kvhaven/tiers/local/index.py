# SPDX-License-Identifier: Apache-2.0
"""What a disk tier believes to hold: each chunk's shards, and their bytes."""

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
    """One namespace's chunks, each as one number, which takes less memory than a collection.

    Its digits of 32 bits are the pages that each shard of the namespace's table takes, the first
    one lowest; 0: it is not there.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks = StripedDict[bytes, int]()  # by key and tenant
        self.positions = {shard.id: at for at, shard in enumerate(namespace.table.shards)}

    def size(self, shard: StoredShard) -> int:
        """Return the bytes that a shard of the table takes; 0 when it is not there."""
        digits = (self.chunks.get(shard.key + shard.tenant) or 0) >> self.positions[
            shard.shard
        ] * _DIGIT
        return (digits & _LARGEST) * PAGE_BYTES

    def resize(self, shard: StoredShard, size: int) -> int:
        """Note the bytes that a shard takes; return by how many that is more than before."""
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
    """The shards of all namespaces. Used on the event loop only, so it needs no lock."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceDigest, _Space] = {}
        self._listings: list[set[StoredShard]] = []
        self.used_bytes = 0

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the namespaces that were added."""
        return tuple(space.namespace for space in self._spaces.values())

    def namespace(self, digest: NamespaceDigest) -> Namespace | None:
        """Return a namespace, if it was added."""
        space = self._spaces.get(digest)
        return space.namespace if space else None

    def add_namespace(self, namespace: Namespace) -> None:
        """Make room for a namespace's shards; those it has already stay.

        Raises `TierError` when it is known with another table.
        """
        known = self._spaces.setdefault(namespace.digest, _Space(namespace)).namespace
        if known.table != namespace.table:
            raise TierError(
                f"namespace {namespace.digest.hex()} has {len(known.table.shards)} shards of "
                f"other names or sizes than the {len(namespace.table.shards)} given now"
            )

    def fits(self, shard: StoredShard) -> bool:
        """Return whether the shard, with this size, is of its namespace's table."""
        space = self._spaces.get(shard.namespace)
        at = space.positions.get(shard.shard) if space else None
        if space is None or at is None:
            return False
        return space.namespace.table.shards[at].payload_bytes == shard.payload_bytes

    def size(self, shard: StoredShard) -> int:
        """Return the bytes that a shard takes; 0 when it is not there."""
        return self._spaces[shard.namespace].size(shard) if self.fits(shard) else 0

    def __contains__(self, shard: StoredShard) -> bool:
        return self.size(shard) > 0

    def add(self, shard: StoredShard, size: int) -> None:
        """Note that a shard is there and takes `size` bytes; one not of the table is none."""
        if self.fits(shard):
            self.used_bytes += self._spaces[shard.namespace].resize(shard, size)

    def discard(self, shard: StoredShard) -> None:
        """Note that a shard is not there."""
        for forgotten in self._listings:
            forgotten.add(shard)
        if self.fits(shard):
            self.used_bytes += self._spaces[shard.namespace].resize(shard, 0)

    @contextlib.contextmanager
    def listing(self) -> Iterator[Callable[[Mapping[StoredShard, int]], dict[StoredShard, int]]]:
        """Enclose the listing of files by a thread, which may name what is deleted meanwhile.

        Yields a function that takes what was found, with its sizes, adds all of it that was not
        discarded since the listing began, and returns that.
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
        """Yield every shard of a namespace. The index must not change meanwhile."""
        space = self._spaces[digest]
        for chunk in space.chunks:
            key, tenant = ChunkKey(chunk[:KEY_BYTES]), TenantId(chunk[KEY_BYTES:])
            for shard in space.namespace.table.shards:
                stored = StoredShard(digest, key, shard.id, shard.payload_bytes, tenant)
                if space.size(stored):
                    yield stored
