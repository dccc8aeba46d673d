# SPDX-License-Identifier: Apache-2.0
"""Audit of the catalog's invariants, which hold after every event, by independent recounting."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from kvhaven.catalog.actions import SessionId
from kvhaven.catalog.allocation import S, within
from kvhaven.catalog.entries import Entry, Holding, Listed, Shelf, State, Tenant
from kvhaven.catalog.holdings import Place
from kvhaven.catalog.leases import MOST_PREFETCHED, Leases, named
from kvhaven.catalog.local_index import LocalTierIndex
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Lease, Member, Sessions
from kvhaven.catalog.shared_index import LOOKUP_SHARDS, MOST_KNOWN, MOST_PENDING, SharedTierIndex
from kvhaven.catalog.tier_spec import WriteMode
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.writebehind import OUTSTANDING_BYTES, OUTSTANDING_CHUNKS, WriteBehind


def check(
    owners: Owners,
    space: ResidentChunks[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
    reservations: Reservations,
    *,
    at_rest: bool,
) -> None:
    """Raise `AssertionError` that names the first violated invariant.

    Some hold only `at_rest`: when no job is left unfinished.
    """
    space.allocator.check()
    _check_space(space)
    _check_slabs(space)
    _check_corrupt(space)
    for entry in space.held:
        _check_entry(entry, space)
    _check_aging(owners, space)
    _check_quotas(owners, space, at_rest=at_rest)
    _check_place(
        space.place,
        [(e.holding, e.state is State.RESIDENT, e.extent.length) for e in space.entries.values()],
        owners,
        at_rest=at_rest,
    )
    _check_writers(space, sessions, reservations, at_rest=at_rest)
    _check_leases(space, sessions, leases, at_rest=at_rest)
    for own in tiers.own.values():
        _check_index(own, owners, at_rest=at_rest)
    for writes_to in tiers.writes.values():
        _check_writes(writes_to, space, at_rest=at_rest)
    check_lookups(sessions, tiers, leases, at_rest=at_rest)
    reads = sum(sum(i.reads.values()) for i in tiers.indexes.values())
    reading = sum(e.reading for e in space.held)
    assert reading == space.promoting, (
        f"{reading} promotions are under way, {space.promoting} counted"
    )
    assert reads == reading, f"{reads} tier reads are under way, but {reading} extents are filled"
    filling = sum(i.reading_bytes for i in tiers.indexes.values())
    assert filling == space.promoting_bytes, f"tiers fill {filling} bytes"
    writes = Counter(e.extent.generation for w in tiers.writes.values() for e in w.writing.values())
    for waiting in tiers.writes.values():
        pinned = [e for e, _, pins in (*waiting.queue, *waiting.dropping) if pins]
        writes.update(e.extent.generation for e in pinned)
    for entry in space.held:
        wanted = writes.get(entry.extent.generation, 0)
        assert entry.writes == wanted, f"{_name(entry)} counts {entry.writes} writes, not {wanted}"
        assert not (entry.tail and wanted), f"{_name(entry)}, a tail, is written to a tier"


def _name(entry: Entry) -> str:
    return f"chunk {entry.key.hex()[:16]} ({entry.state.value}, {entry.extent})"


def _check_space(space: ResidentChunks[S]) -> None:
    """Check that each allocated extent belongs to one entry, and that no two overlap."""
    held = list(space.held)
    used = sum(e.extent.length for e in held)
    allocator = space.allocator
    assert used == allocator.used_bytes, (
        f"entries hold {used} bytes, the allocator {allocator.used_bytes}"
    )
    assert used <= allocator.capacity_bytes, f"{used} bytes exceed the arena's capacity"
    places = sorted((e.extent.segment, e.extent.offset, e.extent.length) for e in held)
    for one, two in pairwise(places):
        apart = one[0] != two[0] or one[1] + one[2] <= two[1]
        assert apart, f"extents {one} and {two} overlap"
    for entry in space.held:
        assert within(entry.extent, allocator.usable), f"{_name(entry)} lies in unusable memory"
    live = {e.extent.generation for e in space.entries.values()}
    retired = {e.extent.generation for e in held if e.state is State.RETIRED}
    assert live | retired == {e.extent.generation for e in held}, "an extent belongs to no chunk"
    assert not live & retired, "a retired chunk is visible"
    for state, counted in (
        (State.RETIRED, space.retired_bytes),
        (State.RESERVED, space.reserved_bytes),
    ):
        total = sum(e.extent.length for e in held if e.state is state)
        assert total == counted, f"{total} bytes are {state.value}, {counted} counted"
    pinned = sum(
        e.extent.length for e in held if e.state is State.RETIRED and (e.leases or e.reading)
    )
    assert pinned == space.retired_pinned_bytes, (
        f"{pinned} retired bytes are leased or read, {space.retired_pinned_bytes} counted"
    )


def _check_corrupt(space: ResidentChunks[S]) -> None:
    corrupt = sum(e.corrupt for e in space.held)
    assert corrupt == space.corrupt, f"{corrupt} chunks in use are corrupt, {space.corrupt} counted"


def _check_slabs(space: ResidentChunks[S]) -> None:
    """Check that each slab knows its entries, and that slabs are in the order of their last use."""
    for name, slab in space.slabs.known.items():
        assert slab.entries, f"slab {name} is empty but was not dropped"
        for generation, entry in slab.entries.items():
            assert entry.extent.generation == generation, f"{_name(entry)} has a wrong generation"
            assert entry.slab is slab, f"{_name(entry)} refers to another slab"
            assert space.allocator.slab_of(entry.extent) == name, (
                f"{_name(entry)} lies in another slab"
            )
            assert entry.stamp <= slab.stamp, f"{_name(entry)} is younger than its slab"
    for length in {slab.length for slab in space.slabs}:
        order = [slab.stamp for slab in space.slabs.order(length)]
        assert order == sorted(order), f"the slabs of {length} bytes are not in order"


def _check_place(
    place: Place,
    entries: Iterable[tuple[Holding, bool, int]],
    owners: Owners,
    *,
    at_rest: bool,
) -> None:
    """Check the counts of holdings and shelves: complete chunks, their bytes, all entries."""
    counts = defaultdict[Holding, list[int]](lambda: [0, 0, 0])
    for holding, whole, bytes_ in entries:
        counted = counts[holding]
        counted[0] += whole
        counted[1] += bytes_ * whole
        counted[2] += 1
    known = {h for p in owners.parts() if (h := p.holdings.get(place.name)) is not None}
    shelves = defaultdict[Shelf, list[int]](lambda: [0, 0, 0])
    for holding in known | counts.keys():
        found = [holding.chunks, holding.bytes, holding.entries]
        assert counts[holding] == found, f"{place.name}: a holding is miscounted: {found}"
        shelf = shelves[holding.shelf]
        shelf[:] = map(int.__add__, shelf, found)
    for shelf_, expected in shelves.items():
        found = [shelf_.chunks, shelf_.bytes, shelf_.entries]
        assert expected == found, f"{place.name}: a shelf counts {found}, not {expected}"
        current = shelf_ in place.shelves.values()
        assert current != shelf_.cleared, f"{place.name}: a shelf was not detached, or lost"
    shown = place.shelves.values()
    totals = sum(shelf.chunks for shelf in shown), sum(shelf.bytes for shelf in shown)
    assert totals == (place.chunks, place.bytes), (
        f"{place.name}: shelves have {totals} chunks and bytes, "
        f"{(place.chunks, place.bytes)} counted"
    )
    leftover = sum(h.entries for h in counts if h.cleared)
    assert leftover == place.leftover, (
        f"{place.name}: cleared entries are miscounted, {leftover} are left"
    )
    assert not (at_rest and leftover), f"{place.name}: cleared entries were not dropped"


def _check_entry(entry: Entry, space: ResidentChunks[S]) -> None:
    name, complete = _name(entry), entry.namespace.complete
    assert space.held_at(entry.extent) is entry, f"{name} is indexed under another extent"
    assert entry.extent.length == entry.namespace.extent_bytes, f"{name} has a wrong length"
    if entry.state is State.RETIRED:
        assert entry.pinned, f"{name} leaks: nothing pins it"
        return
    assert space.entries.get(entry.key) is entry, f"{name} is visible twice"
    assert not entry.corrupt, f"{name} is corrupt and visible"
    if entry.state is State.RESIDENT:
        assert entry.bitmap == complete, f"{name} is visible with shards {entry.bitmap:b}"
        sums = sum(c is not None for c in entry.checksums)
        assert sums == entry.namespace.shards, f"{name} is visible with {sums} checksums"
        assert entry.listed, f"{name} can never be evicted"
        assert not entry.awaited, f"{name} is visible before ranks {entry.awaited:b} committed"
        assert not entry.writers, f"{name} is visible and still being written"
        assert not entry.reading, f"{name} is visible and still being filled"
    elif entry.state is State.RESERVED:
        unfinished = entry.awaited or entry.bitmap != complete
        assert unfinished, f"{name} is complete but not visible"
        assert entry.listed or entry.writers, (
            f"{name} leaks: no member writes it, and it does not age"
        )
        assert entry.owner is not None, f"{name} has no owner"
        assert not entry.leases, f"{name} is leased before it is visible"
        assert not entry.reading, f"{name} is written and filled by a read"
    else:
        assert entry.reading, f"{name} is promoting without a read"
        assert not entry.leases, f"{name} is leased before it is verified"
        assert not entry.listed, f"{name} ages while it is being filled"


def _check_aging(owners: Owners, space: ResidentChunks[S]) -> None:
    """Check that the policies and the counts of children match the entries."""
    children = Counter(e.parent for e in space.entries.values() if e.parent is not None)
    for entry in space.entries.values():
        found = children.pop(entry.key, 0)
        assert found == entry.children, f"{_name(entry)} counts {entry.children} children"
    assert children == dict(space.orphans.items()), "orphans are miscounted"
    listed = [e for e in space.entries.values() if e.listed]
    _check_orders(space.orders.classes, listed, "all")
    tails = {e.key for e in listed if e.tail}
    assert len(tails) == len(space.tails), "the ages of tails are miscounted"
    assert all(key in space.tails for key in tails), "a tail has no age"
    own = defaultdict[Tenant, list[Entry]](list)
    for entry in listed:
        if entry.listed is Listed.TENANT:
            own[entry.namespace.tenant].append(entry)
    for tenant in owners.tenants():
        if tenant.orders is not None:
            _check_orders(tenant.orders, own[tenant], f"tenant {tenant.id.hex()}")


def _check_orders(orders: dict[int, EvictionPolicy], listed: list[Entry], of: str) -> None:
    """Check that each policy proposes the aging chunks of its size class once each."""
    assert {e.order for e in listed} <= orders.keys(), f"{of}: a class has no policy"
    for order_, policy in orders.items():
        order = list(policy.candidates())
        assert len(set(order)) == len(order), f"policy {policy.name} proposes a chunk twice"
        known = {e.key for e in listed if e.order == order_}
        assert known == set(order), f"{of}: policy {policy.name} does not know class {order_}"


def _check_quotas(owners: Owners, space: ResidentChunks[S], *, at_rest: bool) -> None:
    """Check that chunks belong to their tenants, and that tenants are within their quotas."""
    for entry in space.held:
        part = owners.part(entry.namespace.namespace.digest, entry.namespace.tenant.id)
        assert entry.namespace is part, f"{_name(entry)} belongs to an unregistered part"
    held = Counter[Tenant]()
    for entry in space.held:
        held[entry.namespace.tenant] += entry.extent.length
    classes = (e for e in space.entries.values() if e.listed is Listed.CLASS)
    unordered = {e.namespace.tenant for e in classes}
    for tenant in owners.tenants():
        name, quota = f"tenant {tenant.id.hex()}", tenant.memory_quota
        assert held[tenant] == tenant.memory_bytes, f"{name} has {held[tenant]} bytes of memory"
        same = quota == owners.memory.of(tenant.id) or not at_rest
        assert same, f"{name} has a wrong quota of memory"
        same = tenant.disk_quota == owners.disk.of(tenant.id) or not at_rest
        assert same, f"{name} has a wrong quota of disk"
        assert quota is None or tenant.orders is not None, (
            f"{name} has a quota but no eviction order"
        )
        ordered = tenant.orders is None or tenant not in unordered
        assert ordered or not at_rest, f"{name} has chunks outside of its eviction order"
        within = quota is None or held[tenant] <= quota or tenant in space.over
        assert within, f"{name} has {held[tenant]} bytes of memory; its quota is {quota}"


def _check_writers(
    space: ResidentChunks[S], sessions: Sessions, reservations: Reservations, *, at_rest: bool
) -> None:
    everyone = [*reservations.leaving, *sessions.members.values()]
    opened = {(m.id, g): m for m in everyone for g in (*m.open, *m.void)}
    writing = {(m, e.extent.generation) for e in space.held for m in e.writers or ()}
    differ = opened.keys() ^ writing
    assert not differ, f"members and chunks disagree on writers: {differ}"
    for entry in space.held:
        taken = entry.bitmap
        for writer, shards in (entry.writers or {}).items():
            known = opened[writer, entry.extent.generation]
            assert within(entry.extent, known.ready), f"{_name(entry)}: {writer} is not ready"
            assert shards in {0, known.shard_mask}, (
                f"{_name(entry)}: {writer} writes only some of its shards"
            )
            assert not taken & shards, f"{_name(entry)} has two writers of a shard of {writer}"
            taken |= shards
            awaited = entry.state is State.RETIRED or _awaits(entry, known)
            assert awaited, f"{_name(entry)} was committed by {writer}, which still writes it"
    for member in sessions.members.values():
        assert sessions.sessions[member.session].members.get(member.id) is member
        assert not (member.lost and member.open), f"member {member.id} is lost and has open chunks"
    void = [e for m in everyone for e in m.void.values() if e.state is not State.RETIRED]
    assert not (at_rest and void), f"{_name(void[0])} has a lost writer"
    for entry in (e for e in space.held if e.state is State.RESERVED):
        owner = entry.owner[0] if entry.owner is not None else None
        known_owner = owner in sessions.sessions or not at_rest
        assert known_owner, f"{_name(entry)} belongs to a removed session"
    for home in sessions.sessions.values():
        complete = home.namespace is not None
        assert complete == (len(home.shards) == home.world_size and not home.own), (
            f"session {home.id} is complete, or is not, with the shards of {len(home.shards)} ranks"
        )
        for member in home.members.values():
            assert home.holders.get(member.rank) == member.id, f"{member.id} has another's role"
            held = member.rank is not None and complete
            assert bool(member.shard_mask) == held, f"{member.id} holds {member.shard_mask:b}"
    empty = [s for s in sessions.sessions.values() if not (s.members or s.own)]
    assert not empty, "a session has no members"
    assert not (at_rest and reservations.leaving), "members have not left"


def _awaits(entry: Entry, member: Member) -> bool:
    """Return whether a chunk's reservation awaits the commit of a member of its session."""
    own = entry.owner is not None and entry.owner[0] == member.session
    return own and member.rank is not None and bool(entry.awaited >> member.rank & 1)


def _check_leases(
    space: ResidentChunks[S], sessions: Sessions, leases: Leases, *, at_rest: bool
) -> None:
    """Check that pins match the leases, within the limit, and that each wait has a reason."""
    pins: Counter[int] = Counter()
    waiting: dict[Entry, list[Lease]] = {}
    homes = {*sessions.sessions.values(), *leases.leaving}
    for session in homes:
        ranks = [member for member in session.members.values() if member.rank is not None]
        for lease_id, lease in session.leases.items():
            name = f"lease {lease_id} of session {session.id}"
            assert (lease.session, lease.lease_id) == (session.id, lease_id), (
                f"{name} is indexed under another id"
            )
            empty = lease.final and not lease.slots
            assert not (at_rest and empty), f"{name} is empty but was not removed"
            assert len(lease.slots) == len(lease.sources), f"{name} lacks a source"
            assert not (at_rest and lease.growing), f"{name} is growing without a job"
            if session not in leases.leaving:
                begun = lease.orphaned or lease.acked
                assert not (begun and session.ended(lease)), (
                    f"{name} leaks: no member can be using it"
                )
                assert lease.final or not lease.orphaned, f"{name} waits without a scheduler"
            for index, entry in enumerate(lease.slots):
                if entry.key in lease.waiting:
                    assert lease.waiting[entry.key] == index, f"{name} waits at the wrong place"
                    if at_rest or entry in leases.waiters:  # otherwise it is notified later
                        assert entry.reading, f"{name} waits for {_name(entry)}"
                        waiting.setdefault(entry, []).append(lease)
                else:
                    unready = [m.id for m in ranks if not within(entry.extent, m.ready)]
                    assert not unready, f"{name}: {unready} are not ready for {_name(entry)}"
                    assert entry.bitmap == entry.namespace.complete, f"{name}: {_name(entry)}"
                    assert not entry.reading, (
                        f"{name} holds a chunk that is being filled: {_name(entry)}"
                    )
                    pins[entry.extent.generation] += 1
    pins.update(entry.extent.generation for entry in leases.loans.open.values())
    for tail in leases.unpinning:
        pins.update(entry.extent.generation for entry in tail.entries[tail.done :])
    for entry in space.held:
        wanted = pins.pop(entry.extent.generation, 0)
        assert entry.leases == wanted, f"{_name(entry)}: leases are miscounted"
    assert not pins, "a lease pins an extent that was freed"
    assert waiting.keys() == leases.waiters.keys(), "leases and promotions disagree"
    for entry, known in leases.waiters.items():
        same = sorted(map(id, known)) == sorted(map(id, waiting[entry]))
        assert same, f"leases and promotions disagree on {_name(entry)}"
    leased = sum(e.extent.length for e in space.held if e.leases)
    filling = sum(e.extent.length for e in space.held if e.reading)
    assert leased == space.leased_bytes, f"{leased} bytes are leased, {space.leased_bytes} counted"
    assert filling == space.promoting_bytes, f"{filling} bytes are promoting"
    assert leased + filling <= leases.pin_limit, f"{leased + filling} bytes exceed the pin limit"
    few = filling <= leases.promotion_limit or sum(e.reading for e in space.held) == 1
    assert few, f"{filling} promoting bytes leave no room for resident chunks"
    assert not (at_rest and (leases.unpinning or leases.leaving)), "ended leases still pin chunks"


def _check_index(index: LocalTierIndex, owners: Owners, *, at_rest: bool) -> None:
    name, spec = index.spec.name, index.spec
    used = sum(s.bytes for _, s in index.stored.items())
    assert used == index.used_bytes, f"tier {name} has {used} bytes, {index.used_bytes} counted"
    entries = [(s.holding, True, s.bytes) for _, s in index.stored.items()]
    _check_place(index.place, entries, owners, at_rest=at_rest)
    assert index.writing.total() == index.writing_bytes, (
        f"tier {name}: writes of tenants are miscounted"
    )
    tenants = {stored.namespace.tenant for _, stored in index.stored.items()}
    limited = {tenant for tenant in tenants if tenant.disk_quota is not None}
    assert index.shares.keys() >= limited, f"tier {name}: a tenant has no share"
    kept = Counter[Tenant]()
    for key in index.reads:
        stored = index.stored.get(key)
        if stored is not None:
            kept[stored.namespace.tenant] += stored.bytes
    assert +kept == index.kept, f"tier {name}: bytes being read are miscounted"
    for tenant in index.shares:
        _check_share(index, tenant, at_rest=at_rest)
    most = max(spec.capacity_bytes, index.writing_bytes + kept.total())
    fits = used + index.writing_bytes <= most
    assert fits or not at_rest, f"tier {name} exceeds its capacity"


def _check_share(index: LocalTierIndex, tenant: Tenant, *, at_rest: bool) -> None:
    name, share = f"tier {index.spec.name}, tenant {tenant.id.hex()}", index.shares[tenant]
    own = {k: s for k, s in index.stored.items() if s.namespace.tenant is tenant}
    listed = set(share.order)
    assert listed <= own.keys(), f"{name}: its share has chunks of others"
    assert share.complete or not at_rest, f"{name}: its share is not complete"
    used = sum(own[key].bytes for key in listed)
    assert used == share.bytes, f"{name} has {used} bytes, {share.bytes} counted"
    if share.complete:
        order = [key for key in index.stored if key in own]
        assert list(share.order) == order, f"{name}: the order is wrong, or chunks are missing"
    writing, quota = index.writing[tenant], tenant.disk_quota
    most = max(quota or 0, writing + index.kept[tenant])
    within = quota is None or used + writing <= most
    assert within or not at_rest, f"{name} exceeds its quota of {quota} bytes"


def _check_writes(writes: WriteBehind, space: ResidentChunks[S], *, at_rest: bool) -> None:
    name = writes.index.spec.name
    queued = sum(e.extent.length for e, *_ in writes.queue)
    assert queued == writes.queued_bytes, f"tier {name}: queued bytes are miscounted, {queued} wait"
    fits = queued <= writes.limit_bytes or not at_rest
    assert fits, f"tier {name}: the write queue exceeds its limit"
    off = writes.mode is WriteMode.OFF
    assert not (off and writes.queue), f"tier {name} has writes although they are off"
    outstanding = [e.extent.length for e in writes.writing.values()]
    assert sum(outstanding) == writes.outstanding_bytes, f"tier {name}: writes are miscounted"
    within = len(outstanding) <= OUTSTANDING_CHUNKS or sum(outstanding) <= OUTSTANDING_BYTES
    assert within, f"tier {name} has {len(outstanding)} writes under way"
    stored = sum(e.namespace.stored_bytes for e in writes.writing.values())
    assert stored == writes.index.writing_bytes, f"tier {name}: bytes being written are miscounted"
    assert writes.cancelled <= writes.writing.keys(), (
        f"tier {name} cancels a write that is not under way"
    )
    dropping = writes.voids or writes.later_voids or writes.dropping
    assert not (at_rest and dropping), f"tier {name} has writes left to drop"
    for key, entry in writes.writing.items():
        assert space.held_at(entry.extent) is entry, f"{_name(entry)} is written after it was freed"
        assert entry.key == key, f"tier {name}: {_name(entry)} is indexed under another key"


def check_lookups(sessions: Sessions, tiers: Tiers, leases: Leases, *, at_rest: bool) -> None:
    """Raise `AssertionError` that names the first violated invariant."""
    homes = {*sessions.sessions.values(), *leases.leaving}
    everyone = [lease for home in homes for lease in home.leases.values()]
    for lease in (*everyone, *leases.prefetches):
        _check_lease(lease, tiers, prefetch=lease in leases.prefetches, at_rest=at_rest)
    for prefetch in leases.prefetches:
        assert not prefetch.slots, "a prefetch pins chunks"
        assert prefetch.lookups or prefetch.growing, "a prefetch waits for nothing"
    chunks = Counter[SessionId]()
    for prefetch in leases.prefetches:
        chunks[prefetch.session] += named(prefetch)
    assert chunks == leases.prefetched, "chunks named by prefetches are miscounted"
    assert max(chunks.values(), default=0) <= MOST_PREFETCHED, "too many prefetches wait"
    known = {id(lease) for lease in (*everyone, *leases.prefetches)}
    for presence in tiers.shared.values():
        _check_presence(presence, known)
    for name, tier in tiers.indexes.items():
        few = tier.reading_bytes <= leases.tier_limit(tier) or sum(tier.reads.values()) == 1
        assert few, f"tier {name} fills {tier.reading_bytes} bytes"


def _check_lease(lease: Lease, tiers: Tiers, *, prefetch: bool, at_rest: bool) -> None:
    name = f"lease {lease.lease_id} of session {lease.session}"
    assert len(set(map(id, lease.lookups))) == len(lease.lookups), f"{name} waits twice"
    if lease.lookups:
        # A prefetch does not keep its earlier chunks, so it may look up any of its chunks.
        wanted = () if prefetch else lease.keys[len(lease.slots) :]
        for lookup in lease.lookups:
            assert lease in lookup.waiting, f"{name} waits for a lookup that will not notify it"
            right = not wanted or wanted[0] in lookup.keys
            assert right, f"{name} waits for a lookup of other chunks"
            owners = [p for p in tiers.shared.values() if lookup.number in p.lookups]
            asked = any(p.lookups[lookup.number] is lookup and p.online for p in owners)
            told = not at_rest  # it is notified of the end of a lookup in its turn
            assert asked or told, (
                f"{name} waits for a lookup that is not pending, or whose tier is offline"
            )


def _check_presence(presence: SharedTierIndex, known: set[int]) -> None:
    name = presence.spec.name
    pending = {key: lookup for lookup in presence.lookups.values() for key in lookup.keys}
    assert pending == presence.pending, f"tier {name}: chunks in lookups are miscounted"
    keys = sum(len(lookup.keys) for lookup in presence.lookups.values())
    assert keys == len(pending), f"tier {name}: a chunk is in two pending lookups"
    assert keys <= MOST_PENDING, f"tier {name} has {keys} chunks in pending lookups"
    assert len(presence.known) <= MOST_KNOWN, f"tier {name}: too many results are cached"
    for lookup in presence.lookups.values():
        most = max(1, LOOKUP_SHARDS // lookup.namespace.shards)
        assert len(lookup.keys) <= most, f"tier {name}: a lookup has too many chunks"
        strangers = [lease for lease in lookup.waiting if id(lease) not in known]
        assert not strangers, f"tier {name}: an ended lease waits for a lookup"
    for answer in presence.known.values():
        latest = presence.now + presence.spec.lookup_ttl_s
        assert answer.until <= latest, f"tier {name}: a result is cached until {answer.until} s"
