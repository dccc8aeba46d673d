# SPDX-License-Identifier: Apache-2.0
"""Index of a local tier: its chunks, and their eviction by capacity and quotas."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvhaven.catalog.actions import Action, TierDelete
from kvhaven.catalog.entries import Holding, NamespaceState, Tenant
from kvhaven.catalog.ghosts import Ghosts, Reason
from kvhaven.catalog.histograms import Marks
from kvhaven.catalog.holdings import Place, Scope, scopes_over
from kvhaven.catalog.tier_spec import TierFigures, TierSpec, TierTransfers
from kvhaven.catalog.work import Job, Pace, Work
from kvhaven.errors import KVHavenError
from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

DIVISION_S = 10.0
"""Interval in seconds to which the last use of a chunk in a tier is known."""
_NEVER = float("-inf")
_MOST_CLEARED = 1024
"""Maximum number of clears remembered for chunks that a scan may still find; beyond, all chunks
that it finds are deleted."""


class Share:
    """Chunks in a tier of a tenant that has, or had, a quota, in the order of use.

    Until the share is `complete`, chunks from before the tenant's first quota are added piece by
    piece. `passed` says that a scan found more of them meanwhile, which needs another round.
    """

    __slots__ = ("bytes", "complete", "order", "passed", "trimming")

    def __init__(self) -> None:
        self.bytes = 0
        self.order = OrderedMap[ChunkKey, None]()
        self.complete = True
        self.passed = False
        self.trimming = False


class Stored:
    """One chunk in a tier: a bitmap of its present shards, and their bytes including headers."""

    __slots__ = ("bitmap", "bytes", "holding", "namespace")

    def __init__(self, namespace: NamespaceState, holding: Holding) -> None:
        self.namespace = namespace
        self.holding = holding
        self.bitmap = 0
        self.bytes = 0


class LocalTierIndex(TierTransfers):
    """Chunks of one local tier in the order of their last use. See `TierState`.

    A chunk that is being read is never deleted: if it must be dropped, it becomes invisible
    immediately and is deleted when its last read has ended. A tenant with a quota makes room among
    its own chunks; if that is not enough, its further chunks are not written.

    Excess is deleted piece by piece, and at each write at least as much as the write takes.
    """

    def __init__(self, spec: TierSpec, actions: list[Action], work: Work, ghosts: Ghosts) -> None:
        super().__init__()
        self.spec = spec
        self.stored = OrderedMap[ChunkKey, Stored]()
        self.place = Place(spec.name)
        self.used_bytes = 0
        self.writing = Counter[Tenant]()  # `writing_bytes` by tenant
        self.kept = Counter[Tenant]()  # bytes of chunks that are being read: not deletable now
        self.shares: dict[Tenant, Share] = {}
        self.evictions = 0
        self.quota_evictions = 0  # of these, for a tenant's quota
        self._delete_later: dict[ChunkKey, NamespaceState] = {}
        self._actions = actions
        self._work = work
        self._ghosts = ghosts
        self._trimming = False
        self._sweeping = False
        self._scans = 0  # under way: one may begin before an older one has ended, or hangs for ever
        self._scanning = False  # since the last scan began, none has ended
        self._begun = 0
        self._complete = False  # since the last scan began, a scan was complete
        self._scanned = False
        self._cleared: dict[Scope, int] = {}  # with the number of scans begun before
        self._uses = Marks()  # of divisions of `stored`
        self._divide_at = _NEVER

    @property
    def pace(self) -> Pace:
        """Length of a piece of work on its chunks."""
        return self._work.pace

    def tick(self, now: float) -> None:
        """Set the time in seconds, so that it is known later which chunks were used since."""
        if now >= self._divide_at and not self._scanning:
            self._divide_at = now + DIVISION_S
            self._uses.mark(self.stored.divide(), now)

    def unused_since(self, time: float) -> Iterator[list[tuple[ChunkKey, Stored]]]:
        """Yield the chunks that were not used after a time, page by page, the oldest first.

        Left out are those that were used in the last `DIVISION_S` before it, or about then. What a
        scan finds may have been used meanwhile, in memory, so there are none for a time before a
        scan that found any has ended. Chunks may come and go between two pages.
        """
        division = self._uses.value_at(time)
        return iter(()) if division is None else self.stored.walk(division)

    def resize(self, capacity_bytes: int) -> None:
        """Set the capacity, and evict the excess."""
        if capacity_bytes != self.spec.capacity_bytes:
            self.spec = msgspec.structs.replace(self.spec, capacity_bytes=capacity_bytes)
            self.trim()

    def quota_changed(self, tenant: Tenant) -> None:
        """Apply the present quota of a tenant."""
        share = self.shares.get(tenant)
        if share is None and tenant.disk_quota is not None and self.stored:
            share = self.shares[tenant] = Share()
            share.complete = False
            self._work.start(self._gather(tenant, share))
        elif share is not None and share.complete:
            self._trim_tenant(tenant)

    def holds(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether every shard of the chunk is in the tier."""
        stored = self.stored.get(key)
        return (
            stored is not None
            and stored.namespace is namespace
            and stored.bitmap == namespace.complete
            and not stored.holding.cleared
        )

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Record a use of each chunk that is in the tier; a chain is given from tail to head."""
        if not self.stored:
            return
        keys = list(keys)
        self.stored.to_end(keys)
        if self.shares:
            self._touch_own(keys)

    def scan(self, *, begins: bool, complete: bool = True) -> None:
        """Record that a scan begins, or has ended, and whether it visited everything.

        When a clear is made, the tier may be offline or hold chunks that are not known yet. So a
        clear also applies to chunks that are found until a scan that began after it is complete. A
        clear made when everything is known does not: chunks found later were written since. If
        scans overlap, the older one belongs to an earlier opening of the tier and is never
        complete.
        """
        self._begun += begins
        self._scanning = begins
        self._scans = max(0, self._scans + (1 if begins else -1))
        self._complete = not begins and (self._complete or complete)
        self._scanned = self._complete and not self._scans
        if self._scanned:
            self._cleared = {s: begun for s, begun in self._cleared.items() if begun == self._begun}

    def set_online(self, online: bool) -> None:
        """Set whether the tier is in use. The scan of a reopened tier begins before this call."""
        super().set_online(online)
        if online and self._scanned:
            self._cleared = {}  # the tier itself owes the deletes, and no scan follows

    def found(
        self,
        namespace: NamespaceState,
        key: ChunkKey,
        bit: int,
        bytes_: int,
        *,
        writing: bool = False,
    ) -> None:
        """Count a shard that the scan found and that takes `bytes_`.

        The chunk is ordered before all that were used since start. A chunk that was cleared (see
        `scan`) is deleted, unless it was written again or is being written (`writing`). Raises
        `KVHavenError` for a shard that the namespace does not have.
        """
        if not 0 <= bit < namespace.shards:
            raise KVHavenError(
                f"shard {bit} of namespace {namespace.namespace.digest.hex()} does not exist; "
                f"there are {namespace.shards}"
            )
        stored = self.stored.get(key)
        if stored is None and self._delete_later.get(key) is namespace:
            return  # deleted when its last read has ended
        if stored is None and self._is_cleared(namespace):
            if not writing:
                self._delete_files(key, namespace)
            return
        if stored is None:
            stored = self._insert(namespace, key, oldest=True)
            if self._divide_at > _NEVER:
                self._uses, self._divide_at = Marks(), _NEVER
        if stored.namespace is not namespace or stored.holding.cleared:
            self.delete(key, namespace)
        elif not stored.bitmap >> bit & 1:
            stored.bitmap |= 1 << bit
            self._grow(key, stored, bytes_)
            self._trim_for(namespace)

    def has_room(self, namespace: NamespaceState) -> bool:
        """Return whether a chunk can be written at all, in addition to the writes under way."""
        bytes_, tenant = namespace.stored_bytes, namespace.tenant
        quota = tenant.disk_quota
        if quota is not None and bytes_ > quota - self.writing[tenant] - self.kept[tenant]:
            return False
        return self.writing_bytes + bytes_ <= self.spec.capacity_bytes

    def write_begins(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Make room for a chunk. A cleared chunk of the same key is deleted first.

        If that one is still being read, it is overwritten instead.
        """
        self._drop_cleared(key)
        if self._delete_later.get(key) is namespace:
            del self._delete_later[key]
        super().write_begins(key, namespace)
        self.writing[namespace.tenant] += namespace.stored_bytes
        self._trim_for(namespace)

    def write_ended(self, namespace: NamespaceState) -> None:
        """Remove a write from the bytes under way."""
        super().write_ended(namespace)
        self.writing[namespace.tenant] -= namespace.stored_bytes
        if not self.writing[namespace.tenant]:
            del self.writing[namespace.tenant]

    def unfinished(self, key: ChunkKey, namespace: NamespaceState) -> None:
        """Delete the possible remains of a failed write, which are not counted."""
        self.delete(key, namespace)

    def written(self, namespace: NamespaceState, key: ChunkKey, bytes_: int | None) -> None:
        """Count a chunk that was written completely and takes `bytes_`; None: as uncompressed.

        If another tenant has a chunk with this key (a client's bug), that one stays.
        """
        stored = self.stored.get(key)
        if stored is not None and stored.namespace is not namespace:
            self._delete_files(key, namespace)
            return
        if stored is None:
            stored = self._insert(namespace, key)
        stored.bitmap = namespace.complete
        whole = namespace.stored_bytes if bytes_ is None else bytes_
        self._grow(key, stored, whole - stored.bytes)
        self.touch((key,))
        self._trim_for(namespace)

    def forget(self, key: ChunkKey) -> int:
        """Remove a chunk from the index; return its bytes."""
        if key not in self.stored:
            return 0
        if key in self.reads:
            self._keep(key, -1)
        stored = self.stored.pop(key)
        self.used_bytes -= stored.bytes
        self.place.count(stored.holding, -1, -stored.bytes)
        self.place.leave(stored.holding)
        tenant = stored.namespace.tenant
        share = self.shares.get(tenant)
        if share is not None and key in share.order:
            share.bytes -= stored.bytes
            share.order.pop(key)
            if not share.order and share.complete:
                del self.shares[tenant]
        return stored.bytes

    def delete(self, key: ChunkKey, namespace: NamespaceState) -> int:
        """Request the deletion of a chunk, counted or not; return the bytes counted."""
        stored = self.stored.get(key)
        if stored is not None and stored.namespace is not namespace:
            self._delete_files(key, namespace)
            return 0
        if key in self.reads:
            self._delete_later[key] = namespace
        else:
            self._delete_files(key, namespace)
        return self.forget(key)

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Delete the chunks in a scope, piece by piece; return their number and bytes."""
        cleared = self.place.clear(scope, parts)
        if not (self.online and self._scanned):
            self._cleared[scope] = self._begun
        if len(self._cleared) > _MOST_CLEARED:
            self._cleared = {Scope(None, None): self._begun}
        if not self._sweeping:
            self._sweeping = True
            self._work.start_if_small(self._sweep(), self.place.leftover)
        return cleared

    def figures(self) -> TierFigures:
        """Return the present statistics."""
        return TierFigures(
            used_bytes=self.used_bytes,
            chunks=len(self.stored),
            evictions=self.evictions,
            quota_evictions=self.quota_evictions,
            scanned=self._scanned,
        )

    def read_begins(self, key: ChunkKey, bytes_: int) -> None:
        """Count a read that fills `bytes_` of the arena."""
        if key not in self.reads:
            self._keep(key, 1)
        super().read_begins(key, bytes_)

    def read_ended(self, key: ChunkKey, bytes_: int) -> None:
        """End a read; the last one makes a chunk deletable. Raises `KeyError` if there is none."""
        super().read_ended(key, bytes_)
        if key in self.reads:
            return
        self._keep(key, -1)
        namespace = self._delete_later.pop(key, None)
        if namespace is not None and key not in self.stored:
            self._delete_files(key, namespace)
        stored = self.stored.get(key)
        if stored is not None:
            self._trim_tenant(stored.namespace.tenant)
        self.trim()

    def trim(self) -> None:
        """Delete the oldest chunks, down to the watermark, if the capacity is exceeded."""
        excess = self.used_bytes + self.writing_bytes - self.spec.capacity_bytes
        if excess > 0 and self._trimming:
            self._evict(self.stored, excess)
        elif excess > 0:
            self._trimming = True
            self._work.start(self._trim())

    def _trim(self) -> Job:
        while self._evict(self.stored, self._above_watermark()) == self._work.pace.heavy:
            if self._above_watermark() > 0:
                yield
        self._trimming = False

    def _above_watermark(self) -> int:
        most = int(self.spec.watermark * self.spec.capacity_bytes)
        return self.used_bytes + self.writing_bytes - most

    def _trim_for(self, namespace: NamespaceState) -> None:
        """Apply a tenant's quota, and the capacity."""
        self._trim_tenant(namespace.tenant)
        self.trim()

    def _trim_tenant(self, tenant: Tenant) -> None:
        """Delete a tenant's oldest chunks until it is within its quota."""
        share = self.shares.get(tenant)
        if share is not None and not share.trimming and self._excess(tenant, share) > 0:
            share.trimming = True
            self._work.start(self._keep_to_quota(tenant, share))

    def _keep_to_quota(self, tenant: Tenant, share: Share) -> Job:
        evicted = self._work.pace.heavy
        while evicted == self._work.pace.heavy:
            evicted = self._evict(share.order, self._excess(tenant, share), Reason.QUOTA)
            self.quota_evictions += evicted
            if evicted == self._work.pace.heavy and self._excess(tenant, share) > 0:
                yield
        share.trimming = False

    def _excess(self, tenant: Tenant, share: Share) -> int:
        """Return the bytes of a tenant beyond its quota."""
        quota = tenant.disk_quota
        return 0 if quota is None else share.bytes + self.writing[tenant] - quota

    def _evict(
        self, order: Iterable[ChunkKey], excess: int, reason: Reason = Reason.EVICTED
    ) -> int:
        """Delete a piece of the first chunks of an order that are not being read; count them."""
        victims: list[ChunkKey] = []
        for key in order:
            if excess <= 0 or len(victims) == self._work.pace.heavy:
                break
            if key not in self.reads:
                victims.append(key)
                excess -= self.stored[key].bytes
        self.evictions += len(victims)
        for key in victims:
            self._ghosts.left(key, reason)
            self.delete(key, self.stored[key].namespace)
        return len(victims)

    def _sweep(self) -> Job:
        """Delete cleared chunks, in rounds: a round may miss chunks that are used meanwhile."""
        pace = self._work.pace
        looked = dropped = 0
        while self.place.leftover:
            for page in self.stored.walk():
                looked += len(page)
                dropped += sum(self._drop_cleared(key) for key, _ in page)
                if not self.place.leftover:
                    break
                if looked >= pace.light or dropped >= pace.heavy:
                    yield
                    looked = dropped = 0
        self._sweeping = False

    def _drop_cleared(self, key: ChunkKey) -> bool:
        """Delete a chunk if it is present and was cleared."""
        stored = self.stored.get(key)
        if stored is None or not stored.holding.cleared:
            return False
        self.delete(key, stored.namespace)
        return True

    def _gather(self, tenant: Tenant, share: Share) -> Job:
        """Find all chunks of a tenant, in the order of their last use, and apply its quota."""
        looked, known = 0, -1
        while share.passed or known < len(share.order):
            known, share.passed = len(share.order), False
            for page in self.stored.walk_back():
                looked += len(page)
                for key, stored in page:
                    if stored.namespace.tenant is tenant and key not in share.order:
                        share.order.prepend(key, None)
                        share.bytes += stored.bytes
                        looked += 5
                if looked >= self._work.pace.light:
                    yield
                    looked = 0
        share.complete = True
        if not share.order:
            del self.shares[tenant]
        self._trim_tenant(tenant)

    def _insert(self, namespace: NamespaceState, key: ChunkKey, *, oldest: bool = False) -> Stored:
        holding = self.place.holding(namespace)
        stored = Stored(namespace, holding)
        (self.stored.prepend if oldest else self.stored.append)(key, stored)
        self.place.enter(holding)
        self.place.count(holding, 1, 0)
        tenant = namespace.tenant
        share = self.shares.get(tenant)
        if share is None and tenant.disk_quota is not None:
            share = self.shares[tenant] = Share()
        if share is not None and oldest and not share.complete:
            share.passed = True  # it is older than those that are still to be added
        elif share is not None:
            (share.order.prepend if oldest else share.order.append)(key, None)
        return stored

    def _grow(self, key: ChunkKey, stored: Stored, bytes_: int) -> None:
        if key in self.reads:
            self.kept[stored.namespace.tenant] += bytes_
        stored.bytes += bytes_
        self.used_bytes += bytes_
        self.place.count(stored.holding, 0, bytes_)
        share = self.shares.get(stored.namespace.tenant)
        if share is not None and key in share.order:
            share.bytes += bytes_

    def _touch_own(self, keys: list[ChunkKey]) -> None:
        """Record a use of chunks of one tenant in the tenant's order."""
        first = next((s for key in keys if (s := self.stored.get(key)) is not None), None)
        share = None if first is None else self.shares.get(first.namespace.tenant)
        if first is None or share is None:
            return
        for key in keys if not share.complete else ():
            stored = self.stored.get(key)
            known = stored is None or key in share.order
            if stored is not None and not known and stored.namespace is first.namespace:
                share.order.append(key, None)
                share.bytes += stored.bytes
        share.order.to_end(keys)

    def _keep(self, key: ChunkKey, sign: int) -> None:
        """Add a present chunk to the bytes being read, or subtract it (negative sign)."""
        stored = self.stored.get(key)
        if stored is not None:
            tenant = stored.namespace.tenant
            self.kept[tenant] += sign * stored.bytes
            if not self.kept[tenant]:
                del self.kept[tenant]

    def _is_cleared(self, namespace: NamespaceState) -> bool:
        """Return whether a tenant's part of a namespace was cleared while files may still exist."""
        return bool(self._cleared) and not self._cleared.keys().isdisjoint(scopes_over(namespace))

    def _delete_files(self, key: ChunkKey, namespace: NamespaceState) -> None:
        space, tenant = namespace.namespace, namespace.tenant.id
        self._actions.append(TierDelete(self.spec.name, space, key, tenant))
