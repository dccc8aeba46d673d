# SPDX-License-Identifier: Apache-2.0
"""Chunks in the arena: their space, lookup, pins, aging and eviction."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic

from kvhaven.catalog.allocation import Allocator, Reach, S
from kvhaven.catalog.announcer import Announcer
from kvhaven.catalog.entries import Entry, NamespaceState, SlabUse, State, Tenant
from kvhaven.catalog.eviction_queues import EvictionQueues
from kvhaven.catalog.ghosts import Ghosts, Reason
from kvhaven.catalog.histograms import AGES, Histogram, Marks
from kvhaven.catalog.holdings import Place, Scope
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.slabs import Slabs
from kvhaven.catalog.tails import TailAges
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.catalog.work import Job, Work, consume
from kvhaven.errors import ArenaError
from kvhaven.maps import StripedDict
from kvhaven.types import ChunkKey, Extent

MOST_SLABS = 16
"""Maximum number of slabs of other classes considered when a class needs one, coldest first."""


class ResidentChunks(Generic[S]):
    """Every entry of the arena, and the only caller of the allocator.

    An extent returns to the allocator in one place (`free_if_idle`), and only when its entry is
    retired and has no pins. A tenant's usage is counted where extents are allocated, so no extent
    is ever allocated beyond a quota.

    A search for a victim is bounded: pinned chunks that it meets are moved out of its way, and if
    there are too many, the allocation fails this time.
    """

    def __init__(
        self,
        allocator: Allocator[S],
        policy: EvictionPolicy,
        work: Work,
        ghosts: Ghosts,
        announcer: Announcer | None = None,
    ) -> None:
        self.allocator = allocator
        self.entries = StripedDict[ChunkKey, Entry]()  # all but retired ones
        self.orphans = StripedDict[ChunkKey, int]()  # entry counts by absent parent
        self.slabs = Slabs[S]()  # with all entries, including retired ones
        self.place = Place(MEMORY)
        self.leased_bytes = 0
        self.promoting_bytes = 0
        self.promoting = 0
        self.last_generation = 0
        self.reserved_bytes = 0
        self.retired_bytes = 0
        self.retired_pinned_bytes = 0  # of these, leased or still filled by a read
        self.corrupt = 0  # damaged chunks that are still in use
        self.evictions = 0
        self.quota_evictions = 0  # evictions for a tenant's quota
        self.expired = 0  # tails dropped for their age
        self.cleared = 0  # chunks that were cleared
        self.ghosts = ghosts
        self.announcer = announcer
        self.now = 0.0  # in seconds
        self.residence = {reason: Histogram(AGES) for reason in ("space", "quota")}
        self.reuse_age = Histogram(AGES)
        self.quota_refusals = 0  # chunks that a tenant's quota had no room for
        self.orders = EvictionQueues(policy)
        self.tails = TailAges()
        self.over: dict[Tenant, None] = {}  # tenants above a lowered quota
        self._work = work
        self._patience = 0  # chunks that searches of this event may still pass over
        self._clock = 0
        self._sweeping = False
        self._births = Marks()  # of generations
        self._uses = Marks()  # of events
        self._why = Reason.EVICTED  # of the eviction under way

    @property
    def held(self) -> Iterator[Entry]:
        """Every entry, including retired ones. Entries must not change during the iteration."""
        for slab in self.slabs:
            yield from slab.entries.values()

    def held_at(self, extent: Extent) -> Entry | None:
        """Return the entry that owns an extent, retired or not."""
        try:
            slab = self.slabs.known.get(self.allocator.slab_of(extent))
        except ArenaError:
            return None
        return None if slab is None else slab.entries.get(extent.generation)

    def find(self, key: ChunkKey) -> Entry | None:
        """Return the visible chunk with this key; a cleared or expired one is retired first."""
        entry = self.entries.stripes[key[0]].get(key)
        if entry is not None and (entry.holding.cleared or self._is_over(entry)):
            self.expired += not entry.holding.cleared
            self.retire(entry)
            return None
        return entry

    def tick(self, now: float) -> None:
        """Set the time in seconds, and retire some of the tails that have expired."""
        self.tails.tick(now)
        self.now = max(self.now, now)
        self._births.mark(self.last_generation, self.now)
        self._uses.mark(self._clock, self.now)
        for _ in range(self._work.pace.heavy):
            key = self.tails.oldest_expired()
            if key is None:
                return
            entry = self.entries[key]
            if entry.pinned:
                self.tails.used(key)
            else:
                self.expired += 1
                self.retire(entry)

    def allocate(
        self, namespace: NamespaceState, count: int, reach: Reach | None = None
    ) -> list[Extent]:
        """Return up to `count` new extents for a namespace's chunks, evicting if needed.

        With `reach`, for a session that cannot use the whole arena yet, only free space within
        reach is used. Nothing is evicted then, because the victims may lie outside of the reach.
        """
        length, tenant = namespace.extent_bytes, namespace.tenant
        self._patience = self._work.pace.light
        if tenant.memory_quota is not None:
            evict = reach is None
            count = self._within_quota(tenant, tenant.memory_quota, length, count, evict=evict)
        extents: list[Extent] = []
        while len(extents) < count:
            extent = self.allocator.allocate(length, reach)
            if extent is not None:
                extents.append(extent)
            elif reach is not None or not self._make_room(length, count - len(extents)):
                break
        tenant.memory_bytes += len(extents) * length
        return extents

    def quota_changed(self, tenant: Tenant) -> None:
        """Apply the quota of a tenant; pinned chunks are evicted when their pins end."""
        if tenant.memory_quota is None:
            self.over.pop(tenant, None)
            return
        self.over[tenant] = None
        self._work.start(self._begin_quota(tenant))

    def enforce_quotas(self) -> None:
        """Evict evictable chunks of a tenant above its lowered quota.

        A call handles a piece for one tenant; the next call continues with the next tenant.
        """
        tenant = next(iter(self.over))
        del self.over[tenant]
        quota = tenant.memory_quota
        assert quota is not None, "over no quota"
        self._patience = self._work.pace.light
        self._shrink(tenant, quota, self._work.pace.heavy)
        if tenant.memory_bytes > quota:
            self.over[tenant] = None

    def insert(
        self,
        namespace: NamespaceState,
        key: ChunkKey,
        parent: ChunkKey | None,
        extent: Extent,
        state: State,
        tail: int = 0,
    ) -> Entry:
        """Add a chunk that is reserved or promoted, or a tail of so many stored tokens."""
        holding = self.place.holding(namespace)
        slab = self.slabs.enter(self.allocator.slab_of(extent), extent.length)
        entry = Entry(namespace, holding, key, parent, extent, slab, state, tail)
        entry.checksums = [None] * namespace.shards
        slab.entries[extent.generation] = entry
        self.last_generation = max(self.last_generation, extent.generation)
        self.slabs.use(slab, self._clock)
        self.entries[key] = entry
        self.place.enter(holding)
        if state is State.RESERVED:
            self.reserved_bytes += extent.length
        else:
            entry.reading = True
            self.promoting += 1
            self.promoting_bytes += extent.length
        entry.children = self.orphans.stripes[key[0]].pop(key, 0)
        self.adopt(parent)
        return entry

    def adopt(self, parent: ChunkKey | None) -> None:
        """Count a child of `parent`, so that the parent is not evicted before it."""
        if parent is not None:
            entry = self.entries.stripes[parent[0]].get(parent)
            if entry is not None:
                entry.children += 1
            else:
                self.orphans[parent] = (self.orphans.get(parent) or 0) + 1

    def disown(self, parent: ChunkKey | None) -> None:
        """Undo an `adopt`."""
        if parent is not None:
            entry = self.entries.stripes[parent[0]].get(parent)
            if entry is not None:
                entry.children -= 1
                return
            left = self.orphans[parent] - 1
            if left:
                self.orphans[parent] = left
            else:
                del self.orphans[parent]

    def publish(self, entry: Entry) -> None:
        """Make a chunk visible: all its shards are written and have checksums."""
        if entry.state is State.RESERVED:
            self.reserved_bytes -= entry.extent.length
            self.end_retention(entry)
        entry.state = State.RESIDENT
        self.ghosts.back(entry.key)
        entry.owner = None
        entry.writers = None
        entry.checksums = tuple(c for c in entry.checksums if c is not None)
        self.place.count(entry.holding, 1, entry.extent.length)
        if self.announcer is not None:
            self.announcer.note(entry, added=True)
        self.list(entry)
        # If it has a child in the arena, publishing the child puts the chain in order.
        if entry.children or entry.tail:
            self._stamp([entry])
        else:
            self.arrange([e for e in self.chain(entry) if e.listed])

    def list(self, entry: Entry) -> None:
        """Let a chunk age; whether it can be evicted is checked when space is needed."""
        if not entry.listed:
            entry.stamp = self._clock
            self.slabs.use(entry.slab, self._clock)
            self.orders.added(entry)
        if entry.tail:
            self.tails.used(entry.key)

    def observe_reuse(self, entry: Entry) -> None:
        """Count the time since a chunk's last use; once for each piece of a lease."""
        self.reuse_age.observe(self._uses.age(entry.stamp, self.now))

    def ages(self, entry: Entry) -> tuple[float, float]:
        """Return the seconds since a chunk came to memory, and since its last use there."""
        born = self._births.age(entry.extent.generation, self.now)
        return born, self._uses.age(entry.stamp, self.now)

    def stamp_at(self, time: float) -> int:
        """Return a stamp: chunks with this one, or a lower one, were not used after a time."""
        stamp = self._uses.value_at(time)
        return -1 if stamp is None else stamp

    def touch(self, entries: Sequence[Entry]) -> None:
        """Record a use of resident full chunks of one namespace, given from head to tail."""
        if entries:
            self._stamp(entries)
            self.orders.touched(entries[::-1])

    def touch_tail(self, entry: Entry) -> None:
        """Record a use of a resident tail."""
        self.end_retention(entry)
        self._stamp([entry])
        self.orders.touched([entry])
        self.tails.used(entry.key)

    def retain(self, tail: Entry) -> None:
        """Let a tail age as a full chunk until each of its shards was lent, or it was used.

        A new tail ages so until it is resident, or if it was promoted, until its first use.
        """
        self._retain(tail, tail.namespace.shards)

    def returned(self, entry: Entry) -> None:
        """Record that a shard was lent; of a tail that is retained, it may have been the last."""
        self._retain(entry, max(0, entry.retained - 1))

    def end_retention(self, entry: Entry) -> None:
        """Let a tail be evicted before all full chunks again; a full chunk stays as it is."""
        self._retain(entry, 0)

    def arrange(self, entries: Sequence[Entry]) -> None:
        """Put resident chunks of one namespace in order, given from tail to head; not a use."""
        if entries:
            self._stamp(entries)
            self.orders.arranged(entries)

    def chain(self, entry: Entry) -> Iterable[Entry]:
        """Yield a chunk and its ancestors in the arena, tail to head.

        A very long chain is cut: eviction passes over the rest when it grows old.
        """
        stripes, above = self.entries.stripes, entry
        for _ in range(self._work.pace.light // 2):
            yield above
            name = above.parent
            parent = stripes[name[0]].get(name) if name is not None else None
            if parent is None or parent.holding is not entry.holding:
                return  # keys contain the namespace: a foreign parent is a client's bug
            above = parent

    def lease(self, entry: Entry) -> None:
        """Add a pin to a resident chunk."""
        if not entry.leases:
            self.leased_bytes += entry.extent.length
        entry.leases += 1

    def unlease(self, entry: Entry) -> None:
        """End one pin of `lease`."""
        entry.leases -= 1
        if not entry.leases:
            self.leased_bytes -= entry.extent.length
            if entry.state is State.RETIRED:
                self.retired_pinned_bytes -= entry.extent.length
            self.free_if_idle(entry)

    def read_ended(self, entry: Entry) -> None:
        """Record that the tier does not write into the extent any more."""
        entry.reading = False
        self.promoting -= 1
        self.promoting_bytes -= entry.extent.length
        if entry.state is State.RETIRED:
            self.retired_pinned_bytes -= entry.extent.length
        self.free_if_idle(entry)

    def retire(self, entry: Entry) -> None:
        """Make a chunk invisible; its space is freed when it has no pins."""
        if entry.listed:
            self.orders.removed(entry)
        self._hide(entry)
        self.free_if_idle(entry)

    def discard(self, entry: Entry) -> None:
        """Retire a damaged chunk; its leases are offered nothing from this chunk on."""
        entry.corrupt = True
        self.corrupt += 1
        self.ghosts.left(entry.key, Reason.DAMAGED)
        self.retire(entry)

    def free_if_idle(self, entry: Entry) -> None:
        """Free the extent of a retired chunk if nothing can read or write it any more."""
        if entry.state is State.RETIRED and not entry.pinned:
            extent = entry.extent
            self.slabs.leave(entry.slab, extent.generation)
            self.retired_bytes -= extent.length
            self.corrupt -= entry.corrupt
            entry.namespace.tenant.memory_bytes -= extent.length
            self.allocator.free(extent)

    def evictable(self, entry: Entry) -> bool:
        """Return whether the space of a chunk can be freed immediately.

        True for a resident chunk without pins, and for a reservation whose writers have all
        committed while other shards never came.
        """
        return bool(entry.listed) and not entry.pinned

    def clear(self, scope: Scope, parts: Iterable[NamespaceState]) -> tuple[int, int]:
        """Make the chunks in a scope invisible; return the resident ones, and their bytes.

        They are retired piece by piece.
        """
        cleared = self.place.clear(scope, parts)
        self.cleared += cleared[0]
        if not self._sweeping:
            self._sweeping = True
            self._work.start_if_small(self._sweep(), self.place.leftover)
        return cleared

    def retire_all(self, unwanted: Callable[[Entry], bool]) -> Job:
        """Retire every visible chunk that is unwanted, as a job that visits the arena once."""
        pace, looked, retired = self._work.pace, 0, 0
        for entry in self._each():
            if looked >= pace.light or retired >= pace.heavy:
                yield
                looked = retired = 0
            looked += 1
            if entry.state is not State.RETIRED and unwanted(entry):
                self.retire(entry)
                retired += 1

    def _each(self) -> Iterator[Entry]:
        """Yield every chunk that is in the arena now; chunks may come and go meanwhile."""
        for slab in consume(self.slabs):
            yield from consume(slab.entries.values())

    def _sweep(self) -> Job:
        # Chunks cleared during a round may lie in slabs already visited, so rounds repeat.
        while self.place.leftover:
            for _ in self.retire_all(lambda entry: entry.holding.cleared):
                if not self.place.leftover:
                    break
                yield
        self._sweeping = False

    def _begin_quota(self, tenant: Tenant) -> Job:
        """Add a tenant's chunks to its own policies in their present order, and evict."""
        pace = self._work.pace
        if tenant.orders is None:
            tenant.orders = {}
            yield from self._begin_orders(tenant)
        while tenant in self.over and tenant.memory_quota is not None:
            before = tenant.memory_bytes
            self._patience = pace.light
            self._shrink(tenant, tenant.memory_quota, pace.heavy)
            if tenant.memory_bytes <= tenant.memory_quota:
                del self.over[tenant]
            elif tenant.memory_bytes == before:
                return  # the rest is in use: `enforce_quotas` continues later
            else:
                yield

    def _begin_orders(self, tenant: Tenant) -> Job:
        """Add a tenant's chunks to its own policies, in their present order."""
        pace, looked = self._work.pace, 0
        for keys in self.orders.walk():
            found = [e for e in map(self.entries.get, keys) if e is not None]
            own = [entry for entry in found if entry.namespace.tenant is tenant]
            for entry in own:
                self.orders.join(entry)
            looked += len(keys) + 5 * len(own)
            if looked >= pace.light:
                yield
                looked = 0
        for entry in self._each():  # a search for victims may have moved some behind the walk
            if entry.namespace.tenant is tenant:
                self.orders.join(entry)
            looked += 1
            if looked >= pace.light:
                yield
                looked = 0

    def _retain(self, entry: Entry, uses: int) -> None:
        moves = entry.listed and bool(entry.retained) != bool(uses)
        if moves:
            self.orders.removed(entry)
        entry.retained = uses
        if moves:
            self.orders.added(entry)

    def _stamp(self, entries: Sequence[Entry]) -> None:
        """Record the use of chunks of one size, and of their slabs."""
        self._clock = clock = self._clock + 1
        use = self.slabs.use
        last = None
        for entry in entries:
            entry.stamp = clock
            slab = entry.slab
            if slab is not last:
                last = slab
                use(slab, clock)

    def _within_quota(
        self, tenant: Tenant, quota: int, length: int, count: int, *, evict: bool
    ) -> int:
        """Return how many of `count` extents a tenant may have, evicting its own chunks first."""
        possible = min(count, quota // length) if self.allocator.fits(length) else 0
        if possible and evict:
            self._shrink(tenant, quota - possible * length, self._work.pace.heavy)
        allowed = max(0, min(possible, (quota - tenant.memory_bytes) // length))
        self.quota_refusals += count - allowed
        return allowed

    def _is_over(self, entry: Entry) -> bool:
        """Return whether a chunk is a tail that has expired and is not in use."""
        return entry.tail > 0 and self.tails.expired(entry.key) and not entry.pinned

    def _shrink(self, tenant: Tenant, most_bytes: int, most_chunks: int) -> None:
        """Evict a tenant's chunks down to `most_bytes`, as far as they are evictable.

        Victims are those that the policy proposes: tails first, then among several size classes
        those of the class with the least recently used one. Evicts at most `most_chunks`.
        """
        orders = tenant.orders or {}
        while most_chunks > 0 and (excess := tenant.memory_bytes - most_bytes) > 0:
            oldest = [e for policy in orders.values() if (e := self._oldest(policy)) is not None]
            if not oldest:
                return
            victim = min(oldest, key=lambda entry: (entry.order > 0, entry.stamp))
            wanted = -(-excess // victim.extent.length)
            count = 1 if len(orders) > 1 else min(most_chunks, wanted)
            before = self.evictions
            self._why = Reason.QUOTA
            evicted = self._evict_some(orders[victim.order], count)
            self._why = Reason.EVICTED
            self.quota_evictions += self.evictions - before  # without reservations
            if not evicted:
                return
            most_chunks -= evicted

    def _hide(self, entry: Entry) -> None:
        key, length = entry.key, entry.extent.length
        if entry.state is State.RESIDENT:
            self.place.count(entry.holding, -1, -length)
            if self.announcer is not None:
                self.announcer.note(entry, added=False)
        elif entry.state is State.RESERVED:
            self.reserved_bytes -= length
        if entry.tail:
            self.tails.drop(key)
        del self.entries.stripes[key[0]][key]
        if entry.children:
            self.orphans[key] = entry.children
        self.disown(entry.parent)
        self.place.leave(entry.holding)
        entry.state = State.RETIRED
        self.retired_bytes += length
        if entry.leases or entry.reading:
            self.retired_pinned_bytes += length

    def _make_room(self, length: int, count: int) -> bool:
        """Free up to `count` extents of a size class; return False if none could be freed.

        A class evicts its own tails, then its own oldest chunks. Another class gives up slabs if
        this class has nothing to evict, or if these slabs are colder throughout than this class's
        victim. Otherwise the first model to fill the arena would keep out all later ones.
        """
        if not self.allocator.fits(length):
            return False
        if self.tails and self._evict_some(self.orders.of(-length), count):
            return True
        policy = self.orders.of(length)
        oldest = self._oldest(policy)
        if self._empty_slabs(length, None if oldest is None else oldest.stamp):
            return True
        return oldest is not None and bool(self._evict_some(policy, count))

    def _evict_some(self, policy: EvictionPolicy, count: int) -> int:
        """Evict up to `count` chunks in a policy's order; return how many were evicted."""
        victims: list[Entry] = []
        passed: list[ChunkKey] = []
        stripes = self.entries.stripes
        for key in policy.candidates():
            entry = stripes[key[0]][key]
            if not self._can_go(entry):
                passed.append(key)
                if len(passed) > self._patience:
                    break
                continue
            # Its parent may become a leaf, so it is hidden before the search continues.
            self._count_victim(entry)
            victims.append(entry)
            if len(victims) == count:
                break
        for entry in victims:
            self.orders.evicted(entry)
            self.free_if_idle(entry)
        if victims or len(passed) > self._patience:
            policy.passed(passed)
        self._patience -= len(passed)
        return len(victims)

    def _count_victim(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT:
            self.evictions += 1
            quota = self._why is Reason.QUOTA
            age = self._births.age(entry.extent.generation, self.now)
            self.residence["quota" if quota else "space"].observe(age)
            if not entry.tail:
                self.ghosts.left(entry.key, self._why)
        self._hide(entry)

    def _can_go(self, entry: Entry) -> bool:
        """Return whether a chunk can be evicted by itself: a leaf without pins."""
        return not entry.children and entry.listed > 0 and not entry.pinned

    def _oldest(self, policy: EvictionPolicy) -> Entry | None:
        """Return the next victim in a policy's order, if the bounded search finds one."""
        passed: list[ChunkKey] = []
        oldest = None
        for key in policy.candidates():
            entry = self.entries[key]
            if self._can_go(entry):
                oldest = entry
                break
            passed.append(key)
            if len(passed) > self._patience:
                break
        if oldest is not None or len(passed) > self._patience:
            policy.passed(passed)
        self._patience -= len(passed)
        return oldest

    def _empty_slabs(self, length: int, before: int | None) -> bool:
        """Empty the coldest slabs of other classes that make room; only those older than `before`.

        The class itself evicts leaves, one by one. Returns False if that was not done, or not
        completely: with tiny chunks, a slab is emptied in several events.
        """
        known = self.slabs.known
        looked = 0

        def cost(slab: S) -> float | None:
            nonlocal looked
            use = known.get(slab)  # None: extents just allocated for this class have no entry
            if use is None or use.length == length or (before is not None and use.stamp >= before):
                return None
            looked += len(use.entries)
            if looked > most and looked > len(use.entries):
                return None
            return use.stamp if self._can_empty(use) else None

        most = 2 * self._work.pace.light
        for coldest in tuple(islice(self.slabs.coldest(but=length), MOST_SLABS)):
            if looked > most or (before is not None and coldest.stamp >= before):
                return False
            slabs = self.allocator.room_near(coldest.id, length, cost)
            if slabs is not None:
                return self._evict_slabs([known[slab] for slab in slabs])
            if not self._can_empty(coldest):
                self.slabs.use(coldest, self._clock)  # a pinned chunk counts as a use of its slab
        return False

    def _can_empty(self, slab: SlabUse[S]) -> bool:
        return all(self.evictable(entry) for entry in slab.entries.values())

    def _evict_slabs(self, slabs: Sequence[SlabUse[S]]) -> bool:
        """Evict the chunks of slabs, a bounded number per event; return whether all are gone.

        Youngest first, which mostly evicts children before their parents.
        """
        left = max(self._work.pace.heavy * 2, self._work.pace.light // 4)
        for slab in slabs:
            for entry in reversed(tuple(slab.entries.values())):
                if not left:
                    return False
                self._count_victim(entry)
                self.orders.evicted(entry)
                self.free_if_idle(entry)
                left -= 1
        return True
