# SPDX-License-Identifier: Apache-2.0
"""What a disk tier believes to hold: a bitmap of shards for each chunk, and the bytes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from kvhaven.errors import TierError
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.header import stored_bytes
from kvhaven.types import KEY_BYTES, ChunkKey, NamespaceDigest, TenantId


class _Space:
    """One namespace's chunks. A shard's bit is its position in the namespace's table."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunks: dict[bytes, int] = {}  # by tenant and key
        self.positions = {shard.id: at for at, shard in enumerate(namespace.table.shards)}


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

    def __contains__(self, shard: StoredShard) -> bool:
        space = self._spaces.get(shard.namespace)
        if space is None or not self.fits(shard):
            return False
        chunk = shard.tenant + shard.key
        return bool(space.chunks.get(chunk, 0) >> space.positions[shard.shard] & 1)

    def add(self, shard: StoredShard) -> None:
        """Note that a shard is there; one that is not of the table is none."""
        if shard in self or not self.fits(shard):
            return
        space = self._spaces[shard.namespace]
        bit = 1 << space.positions[shard.shard]
        chunk = shard.tenant + shard.key
        space.chunks[chunk] = space.chunks.get(chunk, 0) | bit
        self.used_bytes += stored_bytes(shard.payload_bytes)

    def discard(self, shard: StoredShard) -> None:
        """Note that a shard is not there."""
        for forgotten in self._listings:
            forgotten.add(shard)
        if shard not in self:
            return
        space = self._spaces[shard.namespace]
        chunk = shard.tenant + shard.key
        left = space.chunks[chunk] & ~(1 << space.positions[shard.shard])
        if left:
            space.chunks[chunk] = left
        else:
            del space.chunks[chunk]
        self.used_bytes -= stored_bytes(shard.payload_bytes)

    @contextlib.contextmanager
    def listing(self) -> Iterator[Callable[[Iterable[StoredShard]], list[StoredShard]]]:
        """Enclose the listing of files by a thread, which may name what is deleted meanwhile.

        Yields a function that takes what was found, adds all of it that was not discarded
        since the listing began, and returns that.
        """
        forgotten: set[StoredShard] = set()
        self._listings.append(forgotten)

        def add(found: Iterable[StoredShard]) -> list[StoredShard]:
            kept = [shard for shard in found if shard not in forgotten]
            for shard in kept:
                self.add(shard)
            return kept

        try:
            yield add
        finally:
            self._listings = [other for other in self._listings if other is not forgotten]

    def shards(self, digest: NamespaceDigest) -> Iterator[StoredShard]:
        """Yield every shard of a namespace. The index must not change meanwhile."""
        space = self._spaces[digest]
        for chunk, bits in space.chunks.items():
            tenant, key = TenantId(chunk[:-KEY_BYTES]), ChunkKey(chunk[-KEY_BYTES:])
            for at, shard in enumerate(space.namespace.table.shards):
                if bits >> at & 1:
                    yield StoredShard(digest, key, shard.id, shard.payload_bytes, tenant)
