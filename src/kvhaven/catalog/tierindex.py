# SPDX-License-Identifier: Apache-2.0
"""What one tier holds, as the catalog believes it, and what goes when it is full."""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from kvhaven.catalog.actions import Action, TierDelete
from kvhaven.catalog.entries import NamespaceState
from kvhaven.catalog.tierspec import TierFigures, TierSpec
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey, NamespaceDigest


class Stored:
    """One chunk in a tier: which of its shards are there, and their bytes, headers included."""

    __slots__ = ("bitmap", "bytes", "namespace")

    def __init__(self, namespace: NamespaceState) -> None:
        self.namespace = namespace
        self.bitmap = 0
        self.bytes = 0


class TierIndex:
    """The chunks of one tier of our own in the order of their last use. See `TierState`.

    A chunk that is being read is never deleted: if it has to go meanwhile it is out of
    sight at once, and deleted when its last read has ended.
    """

    def __init__(self, spec: TierSpec, actions: list[Action]) -> None:
        self.spec = spec
        self.online = True
        self.stored: OrderedDict[ChunkKey, Stored] = OrderedDict()
        self.used_bytes = 0
        self.reading_bytes = 0
        self.writing_bytes = 0  # of writes that are under way
        self.usage: dict[NamespaceDigest, tuple[int, int]] = {}  # chunks, bytes
        self.reads: dict[ChunkKey, int] = {}
        self.evictions = 0
        self._delete_later: dict[ChunkKey, NamespaceDigest] = {}
        self._actions = actions

    def resize(self, capacity_bytes: int) -> None:
        """Take another capacity, and evict what no longer fits."""
        if capacity_bytes != self.spec.capacity_bytes:
            self.spec = msgspec.structs.replace(self.spec, capacity_bytes=capacity_bytes)
            self.trim()

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Whether every shard of the chunk is there."""
        stored = self.stored.get(key)
        return (
            stored is not None
            and stored.namespace is namespace
            and stored.bitmap == namespace.complete
        )

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use of each chunk that is there; a chain is given from tail to head."""
        stored = self.stored
        if stored:
            for key in keys:
                if key in stored:
                    stored.move_to_end(key)

    def found(self, namespace: NamespaceState, key: ChunkKey, bit: int, bytes_: int) -> None:
        """Count a shard that the scan found and that takes `bytes_`.

        It is older than anything used since start. Raises KVHavenError for a shard that the
        namespace does not have.
        """
        if not 0 <= bit < namespace.shards:
            raise KVHavenError(
                f"shard {bit} of namespace {namespace.namespace.digest.hex()} does not exist; "
                f"there are {namespace.shards}"
            )
        stored = self.stored.get(key)
        if stored is None:
            stored = self._insert(namespace, key)
            self.stored.move_to_end(key, last=False)
        if not stored.bitmap >> bit & 1:
            stored.bitmap |= 1 << bit
            self._grow(stored, bytes_)
            self.trim()

    def has_room(self, bytes_: int) -> bool:
        """Whether a write of so many bytes can fit at all, beside those under way."""
        return self.writing_bytes + bytes_ <= self.spec.capacity_bytes

    def write_begins(self, bytes_: int) -> None:
        """Make room for a write."""
        self.writing_bytes += bytes_
        self.trim()

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Have what a failed write may have left deleted: it is not counted."""
        self.delete(key, namespace)

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Count a chunk that was written whole and takes `bytes_`; None: as uncompressed."""
        stored = self.stored.get(key) or self._insert(namespace, key)
        stored.bitmap = namespace.complete
        whole = namespace.stored_bytes if bytes_ is None else bytes_
        self._grow(stored, whole - stored.bytes)
        self.stored.move_to_end(key)
        self.trim()

    def forget(self, key: ChunkKey) -> int:
        """Count a chunk no longer; return its bytes."""
        stored = self.stored.pop(key, None)
        if stored is None:
            return 0
        digest = stored.namespace.namespace.digest
        self.used_bytes -= stored.bytes
        chunks, bytes_ = self.usage[digest]
        self.usage[digest] = chunks - 1, bytes_ - stored.bytes
        return stored.bytes

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Have a chunk deleted, whether it is counted or not; return the bytes counted."""
        digest = namespace.namespace.digest
        if key in self.reads:
            self._delete_later[key] = digest
        else:
            self._actions.append(TierDelete(self.spec.name, digest, key))
        return self.forget(key)

    def clear(self, namespace: NamespaceState | None) -> tuple[int, int]:
        """Delete a namespace's chunks (all, for None); return how many, and their bytes."""
        chunks = bytes_ = 0
        for key, stored in tuple(self.stored.items()):
            if namespace is None or stored.namespace is namespace:
                chunks += 1
                bytes_ += self.delete(key, stored.namespace)
        return chunks, bytes_

    def figures(self) -> TierFigures:
        """Return the figures of this moment."""
        return TierFigures(self.used_bytes, len(self.stored), self.evictions, self.usage)

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Keep a chunk for a read, which fills so many bytes of the arena."""
        self.reading_bytes += bytes_
        self.reads[key] = self.reads.get(key, 0) + 1

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read; raises KeyError when there is none."""
        left = self.reads[key] - 1
        self.reading_bytes -= bytes_
        if left:
            self.reads[key] = left
            return
        del self.reads[key]
        digest = self._delete_later.pop(key, None)
        if digest is not None and key not in self.stored:
            self._actions.append(TierDelete(self.spec.name, digest, key))
        self.trim()

    def trim(self) -> None:
        """Delete the oldest chunks, down to the watermark, if there is more than fits."""
        total = self.used_bytes + self.writing_bytes
        if total <= self.spec.capacity_bytes:
            return
        excess = total - int(self.spec.watermark * self.spec.capacity_bytes)
        victims = []
        for key, stored in self.stored.items():
            if excess <= 0:
                break
            if key not in self.reads:
                victims.append((key, stored.namespace))
                excess -= stored.bytes
        self.evictions += len(victims)
        for key, namespace in victims:
            self.delete(key, namespace)

    def _insert(self, namespace: NamespaceState, key: ChunkKey) -> Stored:
        stored = self.stored[key] = Stored(namespace)
        digest = namespace.namespace.digest
        chunks, bytes_ = self.usage.get(digest, (0, 0))
        self.usage[digest] = chunks + 1, bytes_
        return stored

    def _grow(self, stored: Stored, bytes_: int) -> None:
        digest = stored.namespace.namespace.digest
        stored.bytes += bytes_
        self.used_bytes += bytes_
        chunks, total = self.usage[digest]
        self.usage[digest] = chunks, total + bytes_
