# SPDX-License-Identifier: Apache-2.0
"""Broken catalogs, each of which the simulated node must find."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import pytest

from kvhaven.arena.slabs import SegmentUnits, SlabId
from kvhaven.catalog import Catalog, leases
from kvhaven.catalog.actions import CommitResult, Grant, MemberId, TierName
from kvhaven.catalog.allocation import Reach
from kvhaven.catalog.announcer import Announcer, Batch, Cursor
from kvhaven.catalog.entries import Entry, NamespaceState, State, Tenant
from kvhaven.catalog.holdings import Place, Scope
from kvhaven.catalog.leases import Leases, Unpinning
from kvhaven.catalog.loans import Loan, Loans
from kvhaven.catalog.local_index import LocalTierIndex
from kvhaven.catalog.lookups import TierLookups
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Lease, Lookup, Member, Session, Sessions
from kvhaven.catalog.shared_index import SharedTierIndex
from kvhaven.catalog.tails import TailAges
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.errors import KVHavenError
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, Extent, NamespaceDigest, TenantId
from tests.simulation.catalog_history import simulate
from tests.simulation.catalog_model import ARENA_BYTES, PACE

Found = dict[ChunkKey, int]


def simulate_some() -> None:
    """Run the histories in which each breakage below must show; the model alone watches."""
    for seed in range(60):
        simulate(seed, 4000, audit_every=0)


def test_the_catalog_as_it_is_passes_where_broken_ones_fail() -> None:
    simulate_some()


def _break_announced_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Announcer.note

    def only_added(log: Announcer, entry: Entry, *, added: bool) -> None:
        if added:
            note(log, entry, added=added)

    monkeypatch.setattr(Announcer, "note", only_added)


def _break_announced_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce a change before it happened: what a snapshot shows is then taken back."""
    follow = Announcer.next

    def late(log: Announcer, entries: Any, cursor: Cursor, most: int) -> Batch:
        batch = follow(log, entries, cursor, most)
        return batch._replace(removed=[*batch.removed, *batch.added[:1]])

    monkeypatch.setattr(Announcer, "next", late)


def _break_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = property(lambda e: bool(e.writes or e.reading or e.writers))
    monkeypatch.setattr(Entry, "pinned", pinned)


def _break_write_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = property(lambda e: bool(e.leases or e.reading or e.writers))
    monkeypatch.setattr(Entry, "pinned", pinned)


def _break_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "_is_whole", lambda _, entry: bool(entry.bitmap))


def _break_visibility_of_the_last_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(_: Reservations, entry: Entry) -> bool:
        last = 1 << (entry.namespace.shards - 1)
        return entry.bitmap | last == entry.namespace.complete

    monkeypatch.setattr(Reservations, "_is_whole", nearly)


def _break_words_of_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(_: Reservations, entry: Entry) -> bool:
        return entry.bitmap == entry.namespace.complete

    monkeypatch.setattr(Reservations, "_is_whole", written)


def _break_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "_to_write", lambda *args: args[-1].shard_mask)


def _break_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grant what is missing of a rank's shards, where only a part of them is."""

    def missing(_: Reservations, entry: Entry, member: Member) -> int:
        lowest = member.shard_mask & -member.shard_mask
        return 0 if entry.bitmap & member.shard_mask else lowest

    monkeypatch.setattr(Reservations, "_to_write", missing)


def _adopt(monkeypatch: pytest.MonkeyPatch, joins: Callable[[int, int], bool]) -> None:
    """Let a save go on with what another one left, if the shards written and held are so."""
    reserve = Reservations.reserve

    def adopting(
        self: Reservations,
        member: MemberId,
        namespace: NamespaceState,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tail: int = 0,
    ) -> list[Grant | None]:
        known = self._sessions.members[member]
        ranks = [m for m in self._sessions.sessions[known.session].members.values() if m.shard_mask]
        for entry in (self._space.entries.get(key) for key in keys):
            if entry is None or entry.state is not State.RESERVED or entry.writers:
                continue
            if entry.namespace is namespace and joins(entry.bitmap, known.shard_mask):
                entry.owner = known.session, save
                missing = [m.rank for m in ranks if m.shard_mask & ~entry.bitmap]
                entry.awaited = sum(1 << rank for rank in missing if rank is not None)
        return reserve(self, member, namespace, parent, keys, save, tail)

    monkeypatch.setattr(Reservations, "reserve", adopting)


def _break_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    _adopt(monkeypatch, lambda written, held: not written & held)


def _break_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    _adopt(monkeypatch, lambda written, held: bool(held & ~written))


def _break_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "lost", Reservations.gone)


def _break_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_is_enough(_: Session, lease: Lease) -> bool:
        return bool(lease.acked)

    monkeypatch.setattr(Session, "ended", first_is_enough)


def _break_scheduler_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Reservations.lost

    def lose_all(self: Reservations, member: Member) -> None:
        lost(self, member)
        home = self._sessions.sessions[member.session]
        for lease in home.leases.values() if member.rank is None else ():
            for entry in lease.slots:
                if entry.key not in lease.waiting:
                    self._space.unlease(entry)
        home.leases.clear()

    monkeypatch.setattr(Reservations, "lost", lose_all)


def _break_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    read_done = Leases.read_done

    def trusting(self: Leases, *args: object) -> Entry | None:
        tier, key, extent, _ = args
        entry = self._space.held_at(extent)  # type: ignore[arg-type]
        assert entry is not None
        checksums = (Checksum(b"?" * 16),) * entry.namespace.shards
        return read_done(self, tier, key, extent, checksums)  # type: ignore[arg-type]

    monkeypatch.setattr(Leases, "read_done", trusting)


def _break_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*_: object) -> None:
        """Keep what a member left behind."""

    monkeypatch.setattr(Reservations, "gone", forgetful)


def _answer(monkeypatch: pytest.MonkeyPatch, change: Callable[[Lookup, Found], Found]) -> None:
    """Let answers of shared tiers be understood otherwise than they are given."""
    answered = SharedTierIndex.answered

    def changed(self: SharedTierIndex, number: int, found: Found | None, tail: int = 0) -> Lookup:
        if found is None:
            return answered(self, number, found, tail)
        return answered(self, number, change(self.lookups[number], dict(found)), tail)

    monkeypatch.setattr(SharedTierIndex, "answered", changed)


def _break_answers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the answer for a chunk as one for the next."""

    def shifted(lookup: Lookup, found: Found) -> Found:
        order = (*lookup.keys[1:], lookup.keys[0])
        return {key: found.get(other, 0) for key, other in zip(lookup.keys, order, strict=True)}

    _answer(monkeypatch, shifted)


def _break_answers_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a shard that is there as a sign of all."""

    def generous(lookup: Lookup, found: Found) -> Found:
        return {key: lookup.namespace.complete for key, bitmap in found.items() if bitmap}

    _answer(monkeypatch, generous)


def _break_failed_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it that what a tier did not tell of is there."""
    answered = SharedTierIndex.answered

    def trusting(self: SharedTierIndex, number: int, found: Found | None, tail: int = 0) -> Lookup:
        lookup = self.lookups[number]
        everything = dict.fromkeys(lookup.keys, lookup.namespace.complete)
        return answered(self, number, everything if found is None else found, tail)

    monkeypatch.setattr(SharedTierIndex, "answered", trusting)


def _break_missed_promotions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a chunk though the shared tier that it was to come from did not have it."""
    read_done = Leases.read_done

    def trusting(self: Leases, *args: object) -> Entry | None:
        tier, key, extent, checksums = args
        if checksums is None and tier in self._tiers.shared:
            entry = self._space.held_at(extent)  # type: ignore[arg-type]
            assert entry is not None
            checksums = (Checksum(b"?" * 16),) * entry.namespace.shards
        return read_done(self, tier, key, extent, checksums)  # type: ignore[arg-type]

    monkeypatch.setattr(Leases, "read_done", trusting)


def _break_age(monkeypatch: pytest.MonkeyPatch, *, present: bool) -> None:
    known = SharedTierIndex._known

    def ageless(self: SharedTierIndex, key: ChunkKey) -> object:
        answer = self.known.get(key)
        return answer if answer is not None and answer.present is present else known(self, key)

    monkeypatch.setattr(SharedTierIndex, "_known", ageless)


def _break_age_of_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_age(monkeypatch, present=False)


def _break_age_of_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    _break_age(monkeypatch, present=True)


def _break_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on believing in what a read did not find."""
    monkeypatch.setattr(SharedTierIndex, "forget", lambda _, __: 0)


def _break_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tier that is offline."""
    monkeypatch.setattr(TierLookups, "offline", lambda _, __: [])


def _break_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wake only the first of those who wait for an answer."""
    answered = TierLookups.answered

    def drowsy(
        self: TierLookups, tier: TierName, number: int, found: Found | None, tail: int
    ) -> Lookup:
        lookup = answered(self, tier, number, found, tail)
        for lease in tuple(lookup.waiting)[1:]:
            del lookup.waiting[lease]
        return lookup

    monkeypatch.setattr(TierLookups, "answered", drowsy)


def _break_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on waiting for word of what comes after a chunk that will not come."""
    monkeypatch.setattr(Leases, "_cut", Leases._let_go)


def _break_pins_of_waiting_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a chunk in memory for a write that was dropped."""
    monkeypatch.setattr(WriteBehind, "_unpin", lambda _, __: None)


def _break_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all who share a namespace for one."""
    part = Owners.part
    monkeypatch.setattr(Owners, "part", lambda self, digest, _=NO_TENANT: part(self, digest))


def _break_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grant what is asked for, whatever the quota."""
    monkeypatch.setattr(ResidentChunks, "_within_quota", lambda *args, **_: args[-1])


def _break_whose_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make room for a tenant among all chunks."""

    def shrink(self: ResidentChunks[object], tenant: Tenant, most_bytes: int, _: int) -> None:
        for policy in self.orders.classes.values():
            while tenant.memory_bytes > most_bytes and self._evict_some(policy, 1):
                pass

    monkeypatch.setattr(ResidentChunks, "_shrink", shrink)


def _break_lowered_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a tenant what it has when its quota is lowered."""
    monkeypatch.setattr(ResidentChunks, "enforce_quotas", lambda _: None)
    monkeypatch.setattr(ResidentChunks, "_begin_quota", lambda _, tenant: iter(()))


def _break_clear_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear everybody with one tenant."""
    clear = Place.clear
    everybody = Scope(None, None)
    monkeypatch.setattr(Place, "clear", lambda self, *_: clear(self, everybody, ()))


def _break_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what is cleared, and leave it in sight until it is dropped."""
    monkeypatch.setattr(Place, "clear", lambda *_: (0, 0))


def _break_leases_of_what_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lease whatever is resident, cleared or not."""
    lease_resident = Leases._lease_resident

    def trusting(self: Leases, lease: Lease, keys: Sequence[ChunkKey]) -> int:
        entry = self._space.entries.get(keys[0]) if keys else None
        if entry is not None and entry.state is State.RESIDENT and entry.holding.cleared:
            self._space.lease(entry)
            lease.slots.append(entry)
            lease.sources.append(0)
            return 1
        return lease_resident(self, lease, keys)

    monkeypatch.setattr(Leases, "_lease_resident", trusting)


def _break_reads_of_what_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe that a tier has what was cleared until it is deleted."""

    def holds(self: LocalTierIndex, key: ChunkKey, namespace: NamespaceState) -> bool:
        stored = self.stored.get(key)
        mine = stored is not None and stored.namespace is namespace
        return mine and stored is not None and stored.bitmap == namespace.complete

    monkeypatch.setattr(LocalTierIndex, "holds", holds)


def _break_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what was cleared from memory behind after the first piece."""
    sweep = ResidentChunks._sweep

    def lazy(self: ResidentChunks[SlabId]) -> Iterator[None]:
        yield from islice(sweep(self), 1)
        self._sweeping = False

    monkeypatch.setattr(ResidentChunks, "_sweep", lazy)


def _break_sweeps_of_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what was cleared from a tier behind after the first piece."""
    sweep = LocalTierIndex._sweep

    def lazy(self: LocalTierIndex) -> Iterator[None]:
        yield from islice(sweep(self), 1)
        self._sweeping = False

    monkeypatch.setattr(LocalTierIndex, "_sweep", lazy)


def _break_finalized_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on with a long lease whose scheduler was told that it is all."""
    halt, finalize = Leases._halt, Leases._finalize

    def greedy(self: Leases, home: Session, lease: Lease) -> None:
        monkeypatch.setattr(Leases, "_halt", lambda _, __: None)
        finalize(self, home, lease)
        monkeypatch.setattr(Leases, "_halt", halt)

    monkeypatch.setattr(Leases, "_finalize", greedy)


def _break_unpinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of the first piece of what a lease held."""
    unpin = Leases._unpin

    def lazy(self: Leases, tail: Unpinning) -> Iterator[None]:
        del tail.entries[tail.done + PACE.light :]
        yield from unpin(self, tail)

    monkeypatch.setattr(Leases, "_unpin", lazy)


def _break_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend a chunk without a pin."""
    lend = Loans.lend

    def careless(self: Loans, part: NamespaceState, key: ChunkKey) -> Loan | None:
        loan = lend(self, part, key)
        if loan is not None:
            self.returned(loan.number)
        return loan

    monkeypatch.setattr(Loans, "lend", careless)


def _break_tenants_of_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend a chunk to whoever knows its key."""

    def find(self: Loans, _: NamespaceState, key: ChunkKey) -> Entry | None:
        entry = self._space.find(key)
        return entry if entry is not None and entry.state is State.RESIDENT else None

    monkeypatch.setattr(Loans, "_find", find)


def _break_expectations_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SharedTierIndex.expect

    def keeping(
        self: SharedTierIndex, namespace: NamespaceState, keys: Sequence[ChunkKey]
    ) -> dict[ChunkKey, int]:
        known = {key: self.known[key] for key in keys if key in self.known}
        numbers = real(self, namespace, keys)
        for key, answer in known.items():
            self.known.append(key, answer)
        return numbers

    monkeypatch.setattr(SharedTierIndex, "expect", keeping)


def _break_expectations_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_ours(
        self: Catalog,
        tier: TierName,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> dict[ChunkKey, int]:
        part = self._owners.part(namespace, NO_TENANT)
        return self._tiers.presence(tier).expect(part, self._leases.absent(part, keys))

    monkeypatch.setattr(Catalog, "expected", all_ours)


def _break_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer and grant what is there, whether or not the engine's ranks are ready for it."""
    monkeypatch.setattr(Sessions, "reach", lambda _, __: None)


def _break_readiness_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heed readiness for saves and promotions alone."""
    monkeypatch.setattr(leases, "within", lambda _, __: True)


def _break_readiness_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it that all ranks are ready when one is."""

    def measure(self: Session, usable: Reach) -> None:
        ranks = [member for member in self.members.values() if member.rank is not None]
        self.reach = {at: max((m.ready.get(at, 0) for m in ranks), default=0) for at in usable}

    monkeypatch.setattr(Session, "measure", measure)


def _break_growth_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take ranks that were ready for ready for what has come since."""
    monkeypatch.setattr(Sessions, "grew", lambda _: None)


def _break_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out what is not allocated yet."""
    grow = SegmentUnits.grow
    monkeypatch.setattr(SegmentUnits, "grow", lambda self, _: grow(self, ARENA_BYTES))


def _break_age_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tails for ever."""
    monkeypatch.setattr(TailAges, "expired", lambda _, __: False)


def _break_use_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer what has expired, until it is dropped."""
    monkeypatch.setattr(ResidentChunks, "_is_over", lambda _, __: False)
    monkeypatch.setattr(ResidentChunks, "tick", lambda self, now: self.tails.tick(now))


def _break_order_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tails age like full chunks."""
    monkeypatch.setattr(Entry, "order", property(lambda entry: entry.extent.length))


def _break_withdrawals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have leases wait for ever for chunks of which the other node cannot tell."""

    def silent(self: Leases, tier: TierName, number: int) -> None:
        self._tiers.presence(tier).withdraw(number)

    monkeypatch.setattr(Leases, "withdraw", silent)


def _break_retention_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tails that another node will read be evicted first."""
    monkeypatch.setattr(ResidentChunks, "retain", lambda _, __: None)


def _break_loans_of_retained_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retain tails until their first shard was lent."""
    monkeypatch.setattr(ResidentChunks, "returned", ResidentChunks.end_retention)


def _break_end_of_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retain tails after their first use."""
    monkeypatch.setattr(ResidentChunks, "end_retention", lambda _, __: None)


def _break_arrival_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tails that arrive be evicted before a request has used them."""
    insert = ResidentChunks.insert

    def careless(self: ResidentChunks[SlabId], *args: Any, **more: Any) -> Entry:
        entry = insert(self, *args, **more)
        entry.retained = 0
        return entry

    monkeypatch.setattr(ResidentChunks, "insert", careless)


def _break_place_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer a tail behind a part of its chain."""
    lease_resident = Leases._lease_resident

    def early(self: Leases, lease: Lease, keys: Sequence[ChunkKey]) -> int:
        leased = lease_resident(self, lease, keys)
        if lease.tail is not None and leased < len(keys):
            self._add_tail(lease, lease.tail)
        return leased

    monkeypatch.setattr(Leases, "_lease_resident", early)


def _break_tiers_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write tails to tiers as full chunks."""
    publish = ResidentChunks.publish

    def generous(self: ResidentChunks[SlabId], entry: Entry) -> None:
        publish(self, entry)
        written.append(entry)

    def commit(self: Catalog, *args: object) -> CommitResult:
        result = original(self, *args)  # type: ignore[arg-type]
        while written:
            entry = written.pop()
            if entry.tail:
                self._tiers.computed(entry)
        return result

    written: list[Entry] = []
    original = Catalog.commit
    monkeypatch.setattr(ResidentChunks, "publish", generous)
    monkeypatch.setattr(Catalog, "commit", commit)


def _break_loans_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend tails as full chunks, whose shards are longer."""
    lend = Loans.lend

    def long(self: Loans, part: NamespaceState, key: ChunkKey) -> Loan | None:
        loan = lend(self, part, key)
        return loan and msgspec.structs.replace(loan, tail=0)

    monkeypatch.setattr(Loans, "lend", long)


def _break_reads_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read tails as full chunks."""
    insert = ResidentChunks.insert

    def full(self: ResidentChunks[SlabId], *args: Any) -> Entry:
        namespace, key, parent, extent, state, *_ = args
        if state is State.PROMOTING:
            return insert(self, namespace, key, parent, extent, state)
        return insert(self, *args)

    monkeypatch.setattr(ResidentChunks, "insert", full)


def _break_waits_for_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for a tail that another node computes."""
    monkeypatch.setattr(TierLookups, "wait", lambda *_: None)


def _break_copies_of_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write tails that came from another node to tiers."""

    def done(
        self: Catalog,
        tier: TierName,
        key: ChunkKey,
        extent: Extent,
        checksums: tuple[Checksum, ...] | None,
    ) -> None:
        entry = self._leases.read_done(tier, key, extent, checksums)
        if entry is not None:
            self._tiers.promoted(entry, tier)

    monkeypatch.setattr(Catalog, "tier_read_done", done)


def _break_age_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all chunks in memory for unused."""
    monkeypatch.setattr(ResidentChunks, "stamp_at", lambda self, _: self._clock)


def _break_age_in_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all chunks in local tiers for unused."""
    monkeypatch.setattr(LocalTierIndex, "unused_since", lambda self, _: self.stored.walk())


BREAKAGES = [
    _break_age_in_memory,
    _break_age_in_tiers,
    _break_announced_evictions,
    _break_announced_order,
    _break_age_of_tails,
    _break_use_of_tails,
    _break_order_of_tails,
    _break_withdrawals,
    _break_retention_of_tails,
    _break_loans_of_retained_tails,
    _break_end_of_retention,
    _break_arrival_of_tails,
    _break_place_of_tails,
    _break_tiers_of_tails,
    _break_loans_of_tails,
    _break_reads_of_tails,
    _break_waits_for_tails,
    _break_copies_of_tails,
    _break_loans,
    _break_tenants_of_loans,
    _break_readiness,
    _break_readiness_of_loads,
    _break_readiness_of_all,
    _break_growth_of_reach,
    _break_growth,
    _break_tenants,
    _break_quotas,
    _break_whose_quota,
    _break_lowered_quotas,
    _break_clear_of_a_tenant,
    _break_clear,
    _break_leases_of_what_was_cleared,
    _break_reads_of_what_was_cleared,
    _break_sweeps,
    _break_sweeps_of_tiers,
    _break_finalized_growth,
    _break_unpinning,
    _break_answers_keys,
    _break_answers_shards,
    _break_failed_answers,
    _break_missed_promotions,
    _break_age_of_absence,
    _break_age_of_presence,
    _break_misses,
    _break_offline,
    _break_expectations_after_a_miss,
    _break_expectations_of_tenants,
    _break_waking,
    _break_cuts,
    _break_pins_of_waiting_writes,
    _break_leases,
    _break_write_pins,
    _break_visibility,
    _break_visibility_of_the_last_shard,
    _break_words_of_twins,
    _break_twins,
    _break_parts,
    _break_saves,
    _break_splits,
    _break_quarantine,
    _break_acknowledgements,
    _break_scheduler_loss,
    _break_verification,
    _break_leak,
]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_model_finds_a_broken_catalog(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    # The model finds it, or the catalog or the allocator trips over its own mistake.
    with pytest.raises((AssertionError, KeyError, ValueError, KVHavenError)):
        simulate_some()
