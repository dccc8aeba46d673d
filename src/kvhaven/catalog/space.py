# SPDX-License-Identifier: Apache-2.0
"""The chunks in the arena: their space, how they are found, pinned, aged and evicted."""

from collections.abc import Iterable, Sequence
from typing import Generic

from kvhaven.catalog.allocation import Allocator, S
from kvhaven.catalog.entries import Entry, NamespaceState, State, Tenant
from kvhaven.catalog.orders import Orders
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.types import ChunkKey, Extent


class Space(Generic[S]):
    """Every entry of the arena, and the only caller of the allocator.

    An extent goes back to the allocator in one place (`free_if_idle`), and only when its
    entry is doomed and nothing pins it. What a tenant has of the arena is counted where extents
    are handed out, so no extent is ever handed out beyond a quota.
    """

    def __init__(self, allocator: Allocator[S], policy: EvictionPolicy) -> None:
        self.allocator = allocator
        self.entries: dict[ChunkKey, Entry] = {}  # all but the doomed
        self.held: dict[int, Entry] = {}  # by generation: all, the doomed too
        self.reserved: dict[int, Entry] = {}  # by generation: those in state RESERVED
        self.children: dict[ChunkKey, int] = {}  # entries whose parent has this key
        self.leased_bytes = 0
        self.promoting_bytes = 0
        self.doomed_bytes = 0
        self.evictions = 0
        self.quota_evictions = 0  # of these, those for the tenant's own quota
        self.quota_refusals = 0  # chunks for which a tenant's quota had no room
        self.orders = Orders(policy)
        self.over: set[Tenant] = set()  # who has more than a quota that was lowered
        self._clock = 0

    def allocate(self, namespace: NamespaceState, count: int) -> list[Extent]:
        """Return up to `count` new extents for a namespace's chunks, evicting if need be."""
        length, tenant = namespace.extent_bytes, namespace.tenant
        if tenant.memory_quota is not None:
            count = self._within_quota(tenant, tenant.memory_quota, length, count)
        extents: list[Extent] = []
        while len(extents) < count:
            extent = self.allocator.allocate(length)
            if extent is not None:
                extents.append(extent)
            elif not self._make_room(length, count - len(extents)):
                break
        tenant.memory_bytes += len(extents) * length
        return extents

    def quota_changed(self, tenant: Tenant) -> None:
        """Keep a tenant to its quota from now on; what is pinned goes when that ends."""
        if tenant.memory_quota is None:
            tenant.orders = None
            self.over.discard(tenant)
            return
        if tenant.orders is None:
            self.orders.begin(tenant, self.entries.values())
        self.over.add(tenant)
        self.enforce_quotas()

    def enforce_quotas(self) -> None:
        """Evict what tenants have beyond quotas that were lowered, as far as it can go now."""
        for tenant in tuple(self.over):
            quota = tenant.memory_quota
            assert quota is not None, "over no quota"
            self._shrink(tenant, quota)
            if tenant.memory_bytes <= quota:
                self.over.remove(tenant)

    def insert(
        self,
        namespace: NamespaceState,
        key: ChunkKey,
        parent: ChunkKey | None,
        extent: Extent,
        state: State,
    ) -> Entry:
        """Add a chunk that is being reserved or promoted."""
        entry = Entry(namespace, key, parent, extent, state)
        entry.checksums = [None] * namespace.shards
        self.entries[key] = entry
        self.held[extent.generation] = entry
        if state is State.RESERVED:
            self.reserved[extent.generation] = entry
        else:
            entry.reading = True
            self.promoting_bytes += extent.length
        self.adopt(parent)
        return entry

    def adopt(self, parent: ChunkKey | None) -> None:
        """Count a child of `parent`, so that the parent is not evicted before it."""
        if parent is not None:
            self.children[parent] = self.children.get(parent, 0) + 1

    def disown(self, parent: ChunkKey | None) -> None:
        """Take back an `adopt`."""
        if parent is not None:
            left = self.children[parent] - 1
            if left:
                self.children[parent] = left
            else:
                del self.children[parent]

    def show(self, entry: Entry) -> None:
        """Make a chunk visible: every shard of it is written and has its checksum."""
        if entry.state is State.RESERVED:
            del self.reserved[entry.extent.generation]
        entry.state = State.RESIDENT
        entry.owner = None
        entry.writers = None
        entry.checksums = tuple(c for c in entry.checksums if c is not None)
        entry.namespace.resident += 1
        self.list(entry)
        # Where a child is here or on its way, the child's turn brings the chain in order.
        if not self.children.get(entry.key):
            self.arrange([e for e in self.chain(entry) if e.listed])

    def list(self, entry: Entry) -> None:
        """Let a chunk age from now on; whether it can be evicted is asked when it is needed."""
        if not entry.listed:
            entry.listed = True
            entry.stamp = self._clock
            self.orders.added(entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note a use of resident chunks of one namespace, given from the head to the tail."""
        if not entries:
            return
        self._clock = clock = self._clock + 1
        for entry in entries:
            entry.stamp = clock
        self.orders.touched(entries[::-1])

    def arrange(self, entries: Sequence[Entry]) -> None:
        """Put resident chunks of one namespace in order, from the tail to the head: no use."""
        if not entries:
            return
        self._clock = clock = self._clock + 1
        for entry in entries:
            entry.stamp = clock
        self.orders.arranged(entries)

    def chain(self, entry: Entry) -> Iterable[Entry]:
        """Yield a chunk and those before it, tail to head, as far as they are in the arena."""
        entries = self.entries
        above = entry
        # Bounded, in case a client's bug makes parents go round in a circle.
        for _ in range(len(entries)):
            yield above
            parent = entries.get(above.parent) if above.parent is not None else None
            if parent is None or parent.namespace is not entry.namespace:
                return  # keys name their namespace: another one's is a client's bug
            above = parent

    def lease(self, entry: Entry) -> None:
        """Pin a resident chunk once more."""
        if not entry.leases:
            self.leased_bytes += entry.extent.length
        entry.leases += 1

    def unlease(self, entry: Entry) -> None:
        """End one pin of `lease`."""
        entry.leases -= 1
        if not entry.leases:
            self.leased_bytes -= entry.extent.length
            self.free_if_idle(entry)

    def read_ended(self, entry: Entry) -> None:
        """The tier does not write into the extent any more."""
        entry.reading = False
        self.promoting_bytes -= entry.extent.length
        self.free_if_idle(entry)

    def doom(self, entry: Entry) -> None:
        """Take a chunk out of sight; its space follows when nothing pins it."""
        if entry.listed:
            self.orders.removed(entry)
            entry.listed = False
        self._hide(entry)
        self.free_if_idle(entry)

    def free_if_idle(self, entry: Entry) -> None:
        """Give the extent of a doomed chunk back if nobody can read or write it any more."""
        if entry.state is State.DOOMED and not entry.pinned:
            del self.held[entry.extent.generation]
            self.doomed_bytes -= entry.extent.length
            entry.namespace.tenant.memory_bytes -= entry.extent.length
            self.allocator.free(entry.extent)

    def evictable(self, entry: Entry) -> bool:
        """Whether the space of a chunk can be had at once.

        True for a resident chunk that nothing pins, and for a reservation whose writers
        have all committed while other shards never came.
        """
        return entry.listed and not entry.pinned

    def _within_quota(self, tenant: Tenant, quota: int, length: int, count: int) -> int:
        """Return how many of `count` extents a tenant may have, evicting its own chunks first."""
        possible = min(count, quota // length) if self.allocator.fits(length) else 0
        if possible:
            self._shrink(tenant, quota - possible * length)
        allowed = max(0, min(possible, (quota - tenant.memory_bytes) // length))
        self.quota_refusals += count - allowed
        return allowed

    def _shrink(self, tenant: Tenant, most_bytes: int) -> None:
        """Evict a tenant's own chunks down to so many bytes, as far as they can go.

        Those that the policy names first; of several size classes the one used least lately.
        """
        orders = tenant.orders or {}
        while (excess := tenant.memory_bytes - most_bytes) > 0:
            oldest = [e for policy in orders.values() if (e := self._oldest(policy)) is not None]
            if not oldest:
                return
            length = min(oldest, key=lambda entry: entry.stamp).extent.length
            count = 1 if len(orders) > 1 else -(-excess // length)
            self.quota_evictions += self._evict_some(orders[length], count)

    def _hide(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT:
            entry.namespace.resident -= 1
        elif entry.state is State.RESERVED:
            del self.reserved[entry.extent.generation]
        del self.entries[entry.key]
        self.disown(entry.parent)
        entry.state = State.DOOMED
        self.doomed_bytes += entry.extent.length

    def _evict(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT:
            self.evictions += 1
        self.orders.evicted(entry)
        entry.listed = False
        self._hide(entry)
        self.free_if_idle(entry)

    def _make_room(self, length: int, count: int) -> bool:
        """Free up to `count` extents of a size class; False when nothing could be freed.

        A class evicts its own oldest chunks. Another class gives up slabs when this one has
        nothing to evict, or when they are colder throughout than what it would evict: else
        the first model to fill the arena would keep it from all that come later.
        """
        if not self.allocator.fits(length):
            return False
        policy = self.orders.of(length)
        oldest = self._oldest(policy)
        if oldest is None:
            return self._empty_slabs(length, None)
        if self._colder_elsewhere(length, oldest.stamp) and self._empty_slabs(length, oldest.stamp):
            return True
        return bool(self._evict_some(policy, count))

    def _evict_some(self, policy: EvictionPolicy, count: int) -> int:
        """Evict up to `count` chunks in a policy's order; return how many could go."""
        victims: list[Entry] = []
        passed: list[ChunkKey] = []
        for key in policy.candidates():
            entry = self.entries[key]
            if not self._can_go(entry):
                passed.append(key)
                continue
            # Its parent may be the next leaf, so it goes before the search goes on.
            self._count_victim(entry)
            victims.append(entry)
            if len(victims) == count:
                break
        for entry in victims:
            self.orders.evicted(entry)
            entry.listed = False
            self.free_if_idle(entry)
        if victims:
            policy.passed(passed)
        return len(victims)

    def _count_victim(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT:
            self.evictions += 1
        self._hide(entry)

    def _can_go(self, entry: Entry) -> bool:
        """Whether a chunk can be evicted by itself: a leaf that nothing pins."""
        return not self.children.get(entry.key) and self.evictable(entry)

    def _oldest(self, policy: EvictionPolicy) -> Entry | None:
        """Return what would be evicted next in a policy's order, if anything."""
        passed: list[ChunkKey] = []
        for key in policy.candidates():
            entry = self.entries[key]
            if self._can_go(entry):
                break
            passed.append(key)
        else:
            return None
        if passed:
            policy.passed(passed)
        return entry

    def _colder_elsewhere(self, length: int, stamp: int) -> bool:
        """Whether the slab of another class's oldest chunk was not used since `stamp`."""
        for other, policy in self.orders.classes.items():
            if other == length:
                continue
            entry = self._oldest(policy)
            if entry is not None and entry.stamp < stamp:
                age = self._age(self.allocator.slab_of(entry.extent))
                if age is not None and age < stamp:
                    return True
        return False

    def _age(self, slab: S) -> float | None:
        """Return the stamp of a slab's newest chunk; None when one of them cannot go."""
        newest = 0
        for extent in self.allocator.extents_in(slab):
            entry = self.held.get(extent.generation)
            # An extent without an entry is being allocated by the call that is under way.
            if entry is None or not self.evictable(entry):
                return None
            newest = max(newest, entry.stamp)
        return newest

    def _empty_slabs(self, length: int, before: int | None) -> bool:
        """Empty the coldest slabs of other classes that make room; only older ones than `before`.

        The class itself gives leaves, one by one.
        """

        def cost(slab: S) -> float | None:
            if any(e.length == length for e in self.allocator.extents_in(slab)):
                return None
            age = self._age(slab)
            return None if age is None or (before is not None and age >= before) else age

        slabs = self.allocator.cheapest_room(length, cost)
        if slabs is None:
            return False
        for slab in slabs:
            for extent in tuple(self.allocator.extents_in(slab)):
                self._evict(self.held[extent.generation])
        return True
