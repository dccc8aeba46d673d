# SPDX-License-Identifier: Apache-2.0
"""What one tier holds, as the catalog believes it, and what goes when it is full."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable

import msgspec

from kvhaven.catalog.actions import Action, TierDelete
from kvhaven.catalog.entries import NamespaceState, Tenant
from kvhaven.catalog.tierspec import Moves, TierFigures, TierSpec
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey


class Share:
    """What a tenant with a quota has in a tier: its chunks in the order of their last use."""

    __slots__ = ("bytes", "order")

    def __init__(self) -> None:
        self.bytes = 0
        self.order: OrderedDict[ChunkKey, None] = OrderedDict()


class Stored:
    """One chunk in a tier: which of its shards are there, and their bytes, headers included."""

    __slots__ = ("bitmap", "bytes", "namespace")

    def __init__(self, namespace: NamespaceState) -> None:
        self.namespace = namespace
        self.bitmap = 0
        self.bytes = 0


class TierIndex(Moves):
    """The chunks of one tier of our own in the order of their last use. See `TierState`.

    A chunk that is being read is never deleted: if it has to go meanwhile it is out of
    sight at once, and deleted when its last read has ended. A tenant that has a quota makes room
    among its own chunks; where that is not enough, nothing more of it is written.
    """

    def __init__(self, spec: TierSpec, actions: list[Action]) -> None:
        super().__init__()
        self.spec = spec
        self.online = True
        self.stored: OrderedDict[ChunkKey, Stored] = OrderedDict()
        self.used_bytes = 0
        self.writing = Counter[Tenant]()  # `writing_bytes` by tenant
        self.usage: dict[NamespaceState, tuple[int, int]] = {}  # chunks, bytes
        self.shares: dict[Tenant, Share] = {}  # of tenants with a quota that have chunks here
        self.evictions = 0
        self._delete_later: dict[ChunkKey, NamespaceState] = {}
        self._actions = actions

    def resize(self, capacity_bytes: int) -> None:
        """Take another capacity, and evict what no longer fits."""
        if capacity_bytes != self.spec.capacity_bytes:
            self.spec = msgspec.structs.replace(self.spec, capacity_bytes=capacity_bytes)
            self.trim()

    def quota_changed(self, tenant: Tenant) -> None:
        """Keep a tenant to its quota from now on."""
        if tenant.disk_quota is None:
            self.shares.pop(tenant, None)
            return
        if tenant not in self.shares:
            for key, stored in self.stored.items():
                if stored.namespace.tenant is tenant:
                    self._share(tenant).order[key] = None
                    self._share(tenant).bytes += stored.bytes
        self._trim_tenant(tenant)

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
                    if self.shares:
                        self._touch_own(key)

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
            share = self.shares.get(namespace.tenant)
            if share is not None:
                share.order.move_to_end(key, last=False)
        if stored.namespace is not namespace:
            self._delete_files(key, namespace)
        elif not stored.bitmap >> bit & 1:
            stored.bitmap |= 1 << bit
            self._grow(stored, bytes_)
            self._trim_for(namespace)

    def has_room(self, namespace: NamespaceState) -> bool:
        """Whether a chunk can be written at all, beside those under way."""
        bytes_, tenant = namespace.stored_bytes, namespace.tenant
        quota = tenant.disk_quota
        if quota is not None and bytes_ > quota - self.writing[tenant] - self._kept(tenant):
            return False
        return self.writing_bytes + bytes_ <= self.spec.capacity_bytes

    def write_begins(self, namespace: NamespaceState) -> None:
        """Make room for a chunk."""
        super().write_begins(namespace)
        self.writing[namespace.tenant] += namespace.stored_bytes
        self._trim_for(namespace)

    def write_ended(self, namespace: NamespaceState) -> None:
        """Count the bytes of a write no longer as under way."""
        super().write_ended(namespace)
        self.writing[namespace.tenant] -= namespace.stored_bytes
        if not self.writing[namespace.tenant]:
            del self.writing[namespace.tenant]

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Have what a failed write may have left deleted: it is not counted."""
        self.delete(key, namespace)

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Count a chunk that was written whole and takes `bytes_`; None: as uncompressed.

        Where a chunk of that name is another tenant's (a client's bug), that one stays.
        """
        stored = self.stored.get(key) or self._insert(namespace, key)
        if stored.namespace is not namespace:
            self._delete_files(key, namespace)
            return
        stored.bitmap = namespace.complete
        whole = namespace.stored_bytes if bytes_ is None else bytes_
        self._grow(stored, whole - stored.bytes)
        self.touch((key,))
        self._trim_for(namespace)

    def forget(self, key: ChunkKey) -> int:
        """Count a chunk no longer; return its bytes."""
        stored = self.stored.pop(key, None)
        if stored is None:
            return 0
        namespace = stored.namespace
        self.used_bytes -= stored.bytes
        chunks, bytes_ = self.usage.pop(namespace)
        if chunks > 1:
            self.usage[namespace] = chunks - 1, bytes_ - stored.bytes
        share = self.shares.get(namespace.tenant)
        if share is not None:
            share.bytes -= stored.bytes
            del share.order[key]
            if not share.order:
                del self.shares[namespace.tenant]
        return stored.bytes

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Have a chunk deleted, whether it is counted or not; return the bytes counted."""
        stored = self.stored.get(key)
        if stored is not None and stored.namespace is not namespace:
            self._delete_files(key, namespace)
            return 0
        if key in self.reads:
            self._delete_later[key] = namespace
        else:
            self._delete_files(key, namespace)
        return self.forget(key)

    def clear(self, parts: Collection[NamespaceState]) -> tuple[int, int]:
        """Delete the chunks of parts of namespaces; return how many, and their bytes."""
        chunks = bytes_ = 0
        for key, stored in tuple(self.stored.items()):
            if stored.namespace in parts:
                chunks += 1
                bytes_ += self.delete(key, stored.namespace)
        return chunks, bytes_

    def figures(self) -> TierFigures:
        """Return the figures of this moment."""
        return TierFigures(self.used_bytes, len(self.stored), self.evictions, self.usage)

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read; after the last one a chunk may go. Raises KeyError when there is none."""
        super().read_ended(key, bytes_)
        if key in self.reads:
            return
        namespace = self._delete_later.pop(key, None)
        if namespace is not None and key not in self.stored:
            self._delete_files(key, namespace)
        stored = self.stored.get(key)
        if stored is not None:
            self._trim_tenant(stored.namespace.tenant)
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
        chunks, bytes_ = self.usage.get(namespace, (0, 0))
        self.usage[namespace] = chunks + 1, bytes_
        if namespace.tenant.disk_quota is not None:
            self._share(namespace.tenant).order[key] = None
        return stored

    def _grow(self, stored: Stored, bytes_: int) -> None:
        namespace = stored.namespace
        stored.bytes += bytes_
        self.used_bytes += bytes_
        chunks, total = self.usage[namespace]
        self.usage[namespace] = chunks, total + bytes_
        share = self.shares.get(namespace.tenant)
        if share is not None:
            share.bytes += bytes_

    def _share(self, tenant: Tenant) -> Share:
        return self.shares.setdefault(tenant, Share())

    def _touch_own(self, key: ChunkKey) -> None:
        share = self.shares.get(self.stored[key].namespace.tenant)
        if share is not None:
            share.order.move_to_end(key)

    def _kept(self, tenant: Tenant) -> int:
        """Return the bytes of a tenant's chunks that are being read: they cannot go now."""
        reading = (self.stored.get(key) for key in self.reads)
        return sum(s.bytes for s in reading if s is not None and s.namespace.tenant is tenant)

    def _trim_for(self, namespace: NamespaceState) -> None:
        """Keep to a tenant's quota, and to the capacity."""
        self._trim_tenant(namespace.tenant)
        self.trim()

    def _trim_tenant(self, tenant: Tenant) -> None:
        """Delete a tenant's oldest chunks until it keeps to its quota."""
        quota, share = tenant.disk_quota, self.shares.get(tenant)
        if quota is None or share is None:
            return
        excess = share.bytes + self.writing[tenant] - quota
        victims = []
        for key in share.order:
            if excess <= 0:
                break
            if key not in self.reads:
                victims.append(key)
                excess -= self.stored[key].bytes
        self.evictions += len(victims)
        for key in victims:
            self.delete(key, self.stored[key].namespace)

    def _delete_files(self, key: ChunkKey, namespace: NamespaceState) -> None:
        digest, tenant = namespace.namespace.digest, namespace.tenant.id
        self._actions.append(TierDelete(self.spec.name, digest, key, tenant))
