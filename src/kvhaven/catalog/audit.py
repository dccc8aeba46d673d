# SPDX-License-Identifier: Apache-2.0
"""Audits the catalog: what must hold after every event, counted anew from the ground up."""

from collections import Counter
from itertools import pairwise

from kvhaven.catalog.allocation import S
from kvhaven.catalog.audit_lookups import check_lookups
from kvhaven.catalog.entries import Entry, NamespaceState, State, Tenant
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.sessions import Lease, Member, Sessions
from kvhaven.catalog.space import Space
from kvhaven.catalog.tierindex import TierIndex
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.tierspec import WriteMode
from kvhaven.catalog.writebehind import OUTSTANDING_BYTES, OUTSTANDING_CHUNKS, WriteBehind
from kvhaven.types import ChunkKey


def check(
    owners: Owners,
    space: Space[S],
    sessions: Sessions,
    tiers: Tiers,
    leases: Leases,
) -> None:
    """Raise AssertionError that names the first invariant that does not hold."""
    space.allocator.check()
    _check_space(space)
    for entry in space.held.values():
        _check_entry(entry, space)
    _check_aging(owners, space)
    _check_quotas(owners, space)
    _check_writers(space, sessions)
    _check_leases(space, sessions, leases)
    for own in tiers.own.values():
        _check_index(own)
    for writes_to in tiers.writes.values():
        _check_writes(writes_to, space)
    check_lookups(sessions, tiers, leases)
    reads = sum(sum(i.reads.values()) for i in tiers.indexes.values())
    reading = sum(e.reading for e in space.held.values())
    assert reads == reading, f"{reads} tier reads are under way, but {reading} extents are filled"
    filling = sum(i.reading_bytes for i in tiers.indexes.values())
    assert filling == space.promoting_bytes, f"tiers fill {filling} bytes"
    writes = Counter(e.extent.generation for w in tiers.writes.values() for e in w.writing.values())
    for through in (w for w in tiers.writes.values() if w.pins):
        writes.update(e.extent.generation for e in through.queue)
    for entry in space.held.values():
        wanted = writes.get(entry.extent.generation, 0)
        assert entry.writes == wanted, f"{_name(entry)} counts {entry.writes} writes, not {wanted}"


def _name(entry: Entry) -> str:
    return f"chunk {entry.key.hex()[:16]} ({entry.state.value}, {entry.extent})"


def _check_space(space: Space[S]) -> None:
    """Every extent that is handed out belongs to one entry, and no two overlap."""
    used = sum(e.extent.length for e in space.held.values())
    allocator = space.allocator
    assert used == allocator.used_bytes, f"entries hold {used} bytes, not {allocator.used_bytes}"
    assert used <= allocator.capacity_bytes, f"{used} bytes are more than the arena has"
    places = sorted(
        (e.extent.segment, e.extent.offset, e.extent.length) for e in space.held.values()
    )
    for one, two in pairwise(places):
        apart = one[0] != two[0] or one[1] + one[2] <= two[1]
        assert apart, f"extents {one} and {two} overlap"
    live = {e.extent.generation for e in space.entries.values()}
    doomed = {g for g, e in space.held.items() if e.state is State.DOOMED}
    assert live | doomed == space.held.keys(), "an extent is held by no chunk"
    assert not live & doomed, "a doomed chunk is in sight"
    reserved = {g for g, e in space.held.items() if e.state is State.RESERVED}
    assert reserved == space.reserved.keys(), "the list of reservations is off"
    total = sum(space.held[g].extent.length for g in doomed)
    assert total == space.doomed_bytes, f"{total} bytes are doomed, not {space.doomed_bytes}"


def _check_entry(entry: Entry, space: Space[S]) -> None:
    name, complete = _name(entry), entry.namespace.complete
    assert space.held.get(entry.extent.generation) is entry, f"{name} is filed under another name"
    assert entry.extent.length == entry.namespace.extent_bytes, f"{name} has a wrong length"
    if entry.state is State.DOOMED:
        assert entry.pinned, f"{name} leaks: nothing pins it"
        return
    assert space.entries.get(entry.key) is entry, f"{name} is in sight twice"
    assert not entry.corrupt, f"{name} is corrupt and in sight"
    if entry.state is State.RESIDENT:
        assert entry.bitmap == complete, f"{name} is visible with shards {entry.bitmap:b}"
        sums = sum(c is not None for c in entry.checksums)
        assert sums == entry.namespace.shards, f"{name} is visible with {sums} checksums"
        assert entry.listed, f"{name} can never be evicted"
        assert not entry.awaited, f"{name} is visible before ranks {entry.awaited:b} committed"
        assert not entry.writers, f"{name} is visible and still written"
        assert not entry.reading, f"{name} is visible and still read into"
    elif entry.state is State.RESERVED:
        unfinished = entry.awaited or entry.bitmap != complete
        assert unfinished, f"{name} is complete but not visible"
        assert entry.listed or entry.writers, f"{name} leaks: nobody writes it, and it does not age"
        assert entry.owner is not None, f"{name} is nobody's"
        assert not entry.leases, f"{name} is leased before it is visible"
        assert not entry.reading, f"{name} is written and read into"
    else:
        assert entry.reading, f"{name} is promoted by no read"
        assert not entry.leases, f"{name} is leased before it is verified"
        assert not entry.listed, f"{name} ages while it is filled"


def _check_aging(owners: Owners, space: Space[S]) -> None:
    """The policies and the counts of children are in step with the entries."""
    children = Counter(e.parent for e in space.entries.values() if e.parent is not None)
    assert children == space.children, "the counts of children are off"
    listed = [e for e in space.entries.values() if e.listed]
    _check_orders(space.orders.classes, listed, "all")
    for tenant in owners.tenants():
        own = [e for e in listed if e.namespace.tenant is tenant]
        if tenant.orders is not None:
            _check_orders(tenant.orders, own, f"tenant {tenant.id.hex()}")
    for part in owners.parts():
        resident = sum(
            e.state is State.RESIDENT for e in space.entries.values() if e.namespace is part
        )
        name = f"namespace {part.namespace.digest.hex()} of tenant {part.tenant.id.hex()}"
        assert resident == part.resident, f"{name}: {resident} are resident"


def _check_orders(orders: dict[int, EvictionPolicy], listed: list[Entry], of: str) -> None:
    """Each policy proposes what ages in its size class, each once."""
    assert {e.extent.length for e in listed} <= orders.keys(), f"{of}: a class has no policy"
    for length, policy in orders.items():
        order = list(policy.candidates())
        assert len(set(order)) == len(order), f"policy {policy.name} proposes a chunk twice"
        known = {e.key for e in listed if e.extent.length == length}
        assert known == set(order), f"{of}: policy {policy.name} does not know class {length}"


def _check_quotas(owners: Owners, space: Space[S]) -> None:
    """Tenants are told apart, and have what is counted, within their quotas."""
    for entry in space.held.values():
        part = owners.part(entry.namespace.namespace.digest, entry.namespace.tenant.id)
        assert entry.namespace is part, f"{_name(entry)} belongs to a part that nobody finds"
    held = Counter[Tenant]()
    for entry in space.held.values():
        held[entry.namespace.tenant] += entry.extent.length
    for tenant in owners.tenants():
        name, quota = f"tenant {tenant.id.hex()}", tenant.memory_quota
        assert held[tenant] == tenant.memory_bytes, f"{name} has {held[tenant]} bytes of memory"
        assert quota == owners.memory.of(tenant.id), f"{name} has another quota of memory"
        assert tenant.disk_quota == owners.disk.of(tenant.id), f"{name} has another quota of disk"
        assert (quota is None) == (tenant.orders is None), f"{name} has no order, or needs none"
        within = quota is None or held[tenant] <= quota or tenant in space.over
        assert within, f"{name} has {held[tenant]} bytes of memory, and may have {quota}"


def _check_writers(space: Space[S], sessions: Sessions) -> None:
    opened = {(m.id, g) for m in sessions.members.values() for g in m.open}
    writing = {(m, g) for g, e in space.held.items() for m in e.writers or ()}
    assert opened == writing, f"members and chunks disagree on who writes: {opened ^ writing}"
    for entry in space.held.values():
        taken = entry.bitmap
        for writer, shards in (entry.writers or {}).items():
            known = sessions.members[writer]
            assert shards in {0, known.holds}, f"{_name(entry)}: {writer} writes a part of its part"
            assert not taken & shards, f"{_name(entry)} has two writers of a shard of {writer}"
            taken |= shards
            awaited = entry.state is State.DOOMED or _awaits(entry, known)
            assert awaited, f"{_name(entry)} was committed by {writer}, who writes it"
    for member in sessions.members.values():
        assert sessions.sessions[member.session].members.get(member.id) is member
        in_sight = [e for e in member.open.values() if e.state is not State.DOOMED]
        assert not (member.lost and in_sight), f"{_name(in_sight[0])} has a lost writer"
    for entry in space.reserved.values():
        owner = entry.owner[0] if entry.owner is not None else None
        assert owner in sessions.sessions, f"{_name(entry)} belongs to a forgotten session"
    assert all(s.members for s in sessions.sessions.values()), "a session has no members"


def _awaits(entry: Entry, member: Member) -> bool:
    """Whether a member is of the session that a chunk is reserved for, and has not committed."""
    own = entry.owner is not None and entry.owner[0] == member.session
    return own and member.rank is not None and bool(entry.awaited >> member.rank & 1)


def _check_leases(space: Space[S], sessions: Sessions, leases: Leases) -> None:
    """Pins are what the leases say, within the limit; nobody waits for nothing."""
    pins: Counter[int] = Counter()
    waiting: dict[ChunkKey, list[Lease]] = {}
    for session in sessions.sessions.values():
        for ticket, lease in session.leases.items():
            name = f"lease {ticket} of session {session.id}"
            assert (lease.session, lease.ticket) == (session.id, ticket), f"{name} is misfiled"
            assert lease.slots or lease.lookups, f"{name} is empty but remembered"
            assert len(lease.slots) == len(lease.sources), f"{name} has lost a source"
            begun = lease.orphaned or lease.acked
            assert not (begun and session.ended(lease)), f"{name} leaks: nobody can be using it"
            assert lease.final or not lease.orphaned, f"{name} waits for nobody"
            for index, entry in enumerate(lease.slots):
                if entry.key in lease.waiting:
                    assert lease.waiting[entry.key] == index, f"{name} waits at the wrong place"
                    assert entry.state is State.PROMOTING, f"{name} waits for {_name(entry)}"
                    waiting.setdefault(entry.key, []).append(lease)
                else:
                    assert entry.bitmap == entry.namespace.complete, f"{name}: {_name(entry)}"
                    assert not entry.reading, f"{name} holds what is being filled: {_name(entry)}"
                    pins[entry.extent.generation] += 1
    for generation, entry in space.held.items():
        assert entry.leases == pins.pop(generation, 0), f"{_name(entry)}: leases are miscounted"
    assert not pins, "a lease is on an extent that was given away"
    assert waiting.keys() == leases.waiters.keys(), "tickets and promotions disagree"
    for key, known in leases.waiters.items():
        same = sorted(map(id, known)) == sorted(map(id, waiting[key]))
        assert same, f"tickets and promotions disagree on {key.hex()}"
    leased = sum(e.extent.length for e in space.held.values() if e.leases)
    filling = sum(e.extent.length for e in space.held.values() if e.reading)
    assert leased == space.leased_bytes, f"{leased} bytes are leased, not {space.leased_bytes}"
    assert filling == space.promoting_bytes, f"{filling} bytes are promoting"
    assert leased + filling <= leases.pin_limit, f"{leased + filling} bytes exceed the pin limit"


def _check_index(index: TierIndex) -> None:
    name, spec = index.spec.name, index.spec
    used = sum(s.bytes for s in index.stored.values())
    assert used == index.used_bytes, f"tier {name} has {used} bytes, not {index.used_bytes}"
    usage: dict[NamespaceState, tuple[int, int]] = {}
    for stored in index.stored.values():
        chunks, bytes_ = usage.get(stored.namespace, (0, 0))
        usage[stored.namespace] = chunks + 1, bytes_ + stored.bytes
    assert usage == index.usage, f"tier {name}: the figures by namespace are off"
    assert index.writing.total() == index.writing_bytes, f"tier {name}: writes of tenants are off"
    tenants = {part.tenant for part in usage}
    limited = {tenant for tenant in tenants if tenant.disk_quota is not None}
    assert index.shares.keys() == limited, f"tier {name}: shares of the wrong tenants"
    for tenant in limited:
        _check_share(index, tenant)
    kept = sum(s.bytes for k, s in index.stored.items() if k in index.reads)
    most = max(spec.capacity_bytes, index.writing_bytes + kept)
    assert used + index.writing_bytes <= most, f"tier {name} holds more than its capacity"


def _check_share(index: TierIndex, tenant: Tenant) -> None:
    name, share = f"tier {index.spec.name}, tenant {tenant.id.hex()}", index.shares[tenant]
    own = {k: s for k, s in index.stored.items() if s.namespace.tenant is tenant}
    assert own.keys() == share.order.keys(), f"{name}: other chunks are its share"
    used = sum(stored.bytes for stored in own.values())
    assert used == share.bytes, f"{name} has {used} bytes, not {share.bytes}"
    assert list(share.order) == [k for k in index.stored if k in own], f"{name}: the order is off"
    kept = sum(stored.bytes for key, stored in own.items() if key in index.reads)
    writing, quota = index.writing[tenant], tenant.disk_quota
    assert quota is not None
    assert used + writing <= max(quota, writing + kept), f"{name} has more than {quota} bytes"


def _check_writes(writes: WriteBehind, space: Space[S]) -> None:
    name = writes.index.spec.name
    queued = sum(e.extent.length for e in writes.queue)
    assert queued == writes.queued_bytes, f"tier {name}: {queued} bytes wait to be written"
    assert queued <= writes.limit_bytes, f"tier {name}: more waits to be written than may"
    off = writes.index.spec.write is WriteMode.OFF
    assert not (off and (writes.queue or writes.writing)), f"tier {name} is written to"
    outstanding = [e.extent.length for e in writes.writing.values()]
    assert sum(outstanding) == writes.outstanding_bytes, f"tier {name}: writes are miscounted"
    within = len(outstanding) <= OUTSTANDING_CHUNKS or sum(outstanding) <= OUTSTANDING_BYTES
    assert within, f"tier {name} was given {len(outstanding)} writes at once"
    stored = sum(e.namespace.stored_bytes for e in writes.writing.values())
    assert stored == writes.index.writing_bytes, f"tier {name}: bytes to come are miscounted"
    assert writes.cancelled <= writes.writing.keys(), f"tier {name} cancels what it does not write"
    for key, entry in writes.writing.items():
        assert space.held.get(entry.extent.generation) is entry, f"{_name(entry)} is written freed"
        assert entry.key == key, f"tier {name}: {_name(entry)} is filed under another key"
