# SPDX-License-Identifier: Apache-2.0
"""The catalog's face: every event that can happen to it, and what it wants done."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import cast

from kvhaven.catalog import audit, stats
from kvhaven.catalog.actions import (
    Acquisition,
    Action,
    CommitResult,
    Grant,
    LeaseId,
    MemberId,
    SessionId,
    TierName,
)
from kvhaven.catalog.allocation import Allocator, S
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Sessions
from kvhaven.catalog.stats import CatalogStats, TenantStats
from kvhaven.catalog.tier_spec import MEMORY, TierSpec
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.work import Pace, Work
from kvhaven.errors import KVHavenError
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, Extent, NamespaceDigest, TenantId

NO_SESSION = SessionId("")
"""The session of a prefetch that may use all of the arena."""


class Catalog:
    """Knows every chunk of the node: where it is, who holds it, and what may be reused.

    Calls are events; what is to be done about them is fetched with `take_actions`. There is
    no I/O, no clock, no thread and nothing random in it, so a history replays exactly. One
    thread calls it.

    `policy` is the pattern for one policy a size class. `pin_limit_bytes` bounds leased and
    promoting bytes together (default: half of the arena); `write_queue_bytes` bounds what
    waits to be written to each tier (default: a quarter, at most half of the arena). Both follow
    an arena that grows. `tiers` are asked in this order, the fastest first; with `fill_faster`,
    what was read from one is written to those before it.

    Every chunk belongs to a tenant, or to nobody. Who asks for it as another gets a miss. A tenant
    keeps to its quota of the arena (`memory_quotas`) and of each tier of our own (`disk_quotas`)
    by evicting its own chunks; where these cannot go, it gets nothing new.

    No event takes long, however many chunks there are: what concerns many of them is begun by the
    event, and done piece by piece by `work`, in between. `pace` says how large a piece is.
    """

    def __init__(
        self,
        allocator: Allocator[S],
        policy: EvictionPolicy,
        *,
        pin_limit_bytes: int | None = None,
        tiers: Sequence[TierSpec] = (),
        write_queue_bytes: int | None = None,
        fill_faster: bool = True,
        memory_quotas: Quotas = Quotas(),  # noqa: B008  it is frozen
        disk_quotas: Quotas = Quotas(),  # noqa: B008
        pace: Pace = Pace(),  # noqa: B008
    ) -> None:
        if any(spec.name == MEMORY for spec in tiers):
            raise KVHavenError(f"a tier cannot be named {MEMORY}: that is the arena; rename it")
        self._actions: list[Action] = []
        self._work = Work(pace)
        self._owners = Owners(memory_quotas, disk_quotas)
        self._space = ResidentChunks(allocator, policy, self._work)
        self._sessions = Sessions(allocator.usable)
        self._pin_limit_bytes = pin_limit_bytes
        self._write_queue_bytes = write_queue_bytes
        self._tiers = Tiers(
            tiers,
            self._queue_limit(),
            self._actions,
            self._space.free_if_idle,
            self._work,
            fill_faster=fill_faster,
        )
        self._leases = Leases(
            self._space,
            self._tiers,
            self._sessions,
            self._pin_limit(),
            self._actions,
            self._work,
        )
        self._reservations = Reservations(self._space, self._sessions, self._work)
        self._parts = (
            self._owners,
            self._space,
            self._sessions,
            self._tiers,
            self._leases,
            self._reservations,
        )

    # The arena

    def grew(self, segment: int, usable_bytes: int, *, last: bool = False) -> None:
        """Note that the first `usable_bytes` of a segment may be handed out; `last`: for good.

        No rank is ready for what is new (see `ready`).
        """
        self._space.allocator.grow(segment, usable_bytes)
        if last:
            self._space.allocator.finalize(segment)
        self._sessions.grew()
        self._leases.pin_limit = self._pin_limit()
        self._tiers.limit_queues(self._queue_limit())

    # Who is here

    def add_namespace(self, namespace: Namespace) -> None:
        """Make a namespace known; again is fine.

        Raises KVHavenError if it has no shards, or was known with another shard table.
        """
        self._owners.add(namespace)

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the namespaces that are known."""
        return tuple(part.namespace for part in self._owners.namespaces())

    def attach(
        self,
        session: SessionId,
        member: MemberId,
        rank: int | None,
        namespace: NamespaceDigest,
        world_size: int,
        shard_mask: int,
    ) -> None:
        """Take in a member of a session of `world_size` ranks; `rank` None is its scheduler.

        `shard_mask` is the bitmap of the shards that a rank has of every chunk, without a gap; 0
        for a scheduler. Two ranks of a session hold the same shards, whose bytes are equal then, or
        none in common. Sessions of one namespace may divide its shards differently.

        A member that was lost is back with this: nothing of it was reused meanwhile, and for
        what it had reserved it gets DISCARDED. Raises KVHavenError for an unknown namespace,
        a rank out of range, shards that the namespace does not have, that have a gap or overlap
        another rank's in part, another `world_size` or namespace than the session's, or a rank or
        scheduler that another connected member is already.
        """
        known = self._owners.part(namespace)
        gaps = shard_mask & (shard_mask + (shard_mask & -shard_mask))
        if bool(shard_mask) != (rank is not None) or shard_mask & ~known.complete or gaps:
            raise KVHavenError(
                f"rank {rank} (member {member}) holds shards {shard_mask:b} of namespace "
                f"{namespace.hex()}, whose chunks have {known.complete:b}; a rank holds some of "
                "these without a gap, a scheduler none"
            )
        self._sessions.attach(session, member, rank, namespace, world_size, shard_mask)

    def ready(self, member: MemberId, segment: int, usable_bytes: int) -> None:
        """Note that a rank can copy to and from the first `usable_bytes` of a segment.

        A session is offered and granted only what all its ranks are ready for, that is nothing
        at first. Less than before, again, or for an unknown member, changes nothing.
        """
        known = self._sessions.members.get(member)
        if known is not None:
            self._sessions.ready(known, segment, usable_bytes)

    def lost(self, member: MemberId) -> None:
        """Note that a connection closed, which proves nothing about the process.

        What it was writing is doomed and quarantined; leases that await its acknowledgement
        stay, and so do all leases when it is the scheduler.
        """
        known = self._sessions.members.get(member)
        if known is not None:
            known.lost = True
            self._reservations.lost(known)

    def gone(self, member: MemberId) -> None:
        """Note that a member maps nothing any more: its part of everything ends.

        Its acknowledgements count as given. With a scheduler, waiting ends, and a lease is
        over as soon as every rank that is still here has acknowledged it. A session without
        members is forgotten with all it held.
        """
        known = self._sessions.members.get(member)
        if known is None:
            return
        known.lost = True
        self._reservations.gone(known)
        home = self._sessions.gone(known)
        self._leases.gone(home, known)
        if not home.members:
            self._reservations.forget(home.id)

    def lost_members(self) -> Iterable[MemberId]:
        """Return the members whose connection closed and who are not proven gone."""
        return tuple(member.id for member in self._sessions.lost())

    # Loading

    def acquire(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
    ) -> Acquisition:
        """Lease the longest resident prefix of a tenant's chain, and promote what follows it.

        `keys` begins at the chain's head. Consecutive chunks behind the prefix that an online
        tier holds are promoted, as far as space and the pin limit go, and the ticket waits
        for them, and for those that are being promoted for others. A chunk in memory that the
        session's ranks are not ready for ends the prefix. Behind what is known to be
        anywhere, shared tiers are asked, and the ticket waits for their answers and for what
        comes of them. A long chain is leased piece by piece, and the ticket waits for that too.
        When it waits no more an `Update` says so. The same ticket again gets the present state. A
        ticket that got nothing, and waits for nothing, is not remembered.
        Raises KVHavenError for an unknown session or namespace.
        """
        return self._leases.acquire(session, lease_id, self._owners.part(namespace, tenant), keys)

    def finalize(self, session: SessionId, lease_id: LeaseId) -> Acquisition:
        """Stop waiting: return the final answer, the prefix that is ready now.

        Promotions go on and end up resident; no new ones follow for it. No `Update` follows.
        """
        return self._leases.finalize(session, lease_id)

    def prefetch(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        session: SessionId = NO_SESSION,
    ) -> int:
        """Touch, ask and promote as `acquire`, without a lease; return promotions begun at once.

        Chunks are promoted to places that all ranks of the session are ready for. Prefetches have
        their turns when nobody waits for anything. Where those of a session that are not done name
        too many chunks, a new one gets only what its first piece of work finds.
        """
        return self._leases.prefetch(session, self._owners.part(namespace, tenant), keys)

    def release(self, session: SessionId, lease_id: LeaseId) -> None:
        """End a lease that no rank was or will be told of; an unknown one is fine."""
        self._leases.release(session, lease_id)

    def loaded(self, session: SessionId, lease_id: LeaseId, member: MemberId) -> None:
        """Note that a rank's copy ended; with the last rank's the lease ends.

        Again, or for an unknown ticket or member, is fine. Raises KVHavenError for a member
        that is no rank of this session.
        """
        known = self._sessions.members.get(member)
        if known is not None:
            self._leases.loaded(session, lease_id, known)

    def checksums(self, key: ChunkKey, extent: Extent | None = None) -> tuple[Checksum, ...] | None:
        """Return the checksums of a resident chunk's shards, or None if it is not resident.

        With `extent`, only if it is there that it is resident: it may have been dropped and
        written anew since, and two computations of a chunk may differ in their last bits.
        """
        entry = self._resident(key, extent)
        if entry is None:
            return None
        return tuple(c for c in entry.checksums if c is not None)

    # Saving

    def reserve(
        self,
        member: MemberId,
        namespace: NamespaceDigest,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tenant: TenantId = NO_TENANT,
    ) -> list[Grant | None]:
        """Reserve space for a tenant's consecutive chunks; `parent` is the key before the first.

        `save` names, within the session, the save that this is a rank's part of; the ranks
        that ask for a chunk with the same `save` get the same extent. A grant is to write all
        shards of the rank, or, if another rank of the save was granted the same ones, none.
        None for a chunk means: this rank has no part in it. It is here, on its way, another
        save's, or committed by this rank already, or there is no space even after eviction, or
        the tenant's quota has none, or none is free of what the session's ranks are ready for.
        What another save left incomplete, and nobody writes any more, is dropped for this one.
        Raises KVHavenError for a member that is no connected rank, an unknown namespace, or
        another one than the member's.
        """
        part = self._owners.part(namespace, tenant)
        return self._reservations.reserve(member, part, parent, keys, save)

    def commit(
        self, member: MemberId, key: ChunkKey, generation: int, checksums: Sequence[Checksum]
    ) -> CommitResult:
        """Note that a member has done its part of a chunk; the last rank makes it visible.

        `checksums` are those of the shards it was granted, in the order of their bits.
        """
        result, entry = self._reservations.commit(member, key, generation, checksums)
        if entry is not None:
            self._tiers.computed(entry)
        return result

    def abort(self, member: MemberId, key: ChunkKey, generation: int) -> None:
        """Give up a reservation; this member's copy has provably ended. Unknown is fine.

        The space is free when every member that was granted it has committed or aborted.
        """
        self._reservations.abort(member, key, generation)

    # Tiers

    def tick(self, now: float) -> None:
        """Note the time, in seconds: what shared tiers answered grows old by it."""
        self._tiers.tick(now)

    def tier_looked_up(
        self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None
    ) -> None:
        """Answer a `TierLookup`: the bitmap of the shards that are there, for each chunk.

        A chunk that is left out is not there. None: there was no answer in time, or the tier
        failed; it is not asked for these chunks again for a moment. Nothing is taken on trust:
        an answer only decides what is read. Raises KVHavenError for what was not asked.
        """
        self._leases.looked_up(tier, number, found)

    def tier_read_done(
        self, tier: TierName, key: ChunkKey, extent: Extent, checksums: tuple[Checksum, ...] | None
    ) -> None:
        """Answer a `TierRead`: the verified checksums of all shards, or None if it failed.

        After a failure the chunk no longer counts as being in that tier, and tickets that
        wait for it take it from another, or are cut before it. Raises KVHavenError if there is
        no such read.
        """
        entry = self._leases.read_done(tier, key, extent, checksums)
        if entry is not None:
            self._tiers.promoted(entry, tier)

    def tier_write_done(
        self, tier: TierName, key: ChunkKey, ok: bool, taken_bytes: int | None = None
    ) -> None:
        """Answer a `TierWrite`: the chunk takes `taken_bytes` there; None: as uncompressed.

        Raises KVHavenError if there is no such write.
        """
        writes = self._tiers.writes_of(tier, key)
        entry = writes.done(key, ok=ok, taken_bytes=taken_bytes)
        if ok and not entry.children:
            # The head of the chain may have been written long before: it stays the newer.
            self._tiers.indexes[tier].touch(e.key for e in self._space.chain(entry))
        self._space.free_if_idle(entry)
        writes.pump()

    def tier_scanned(self, tier: TierName, *, ended: bool, complete: bool = True) -> None:
        """Note that a scan of a tier of our own begins, or has ended; `complete`: not by an error.

        What is cleared before a scan is complete, or while the tier is offline, is deleted when it
        is found until a scan that begins afterwards is complete. The scan of a tier that was
        opened anew begins before `tier_online` says that it is in use again. Raises
        KVHavenError for an unknown tier, and for a shared one.
        """
        self._tiers.own_index(tier).scan(begins=not ended, complete=complete)

    def tier_found(
        self,
        tier: TierName,
        namespace: NamespaceDigest,
        key: ChunkKey,
        shard_bit: int,
        bytes_: int,
        tenant: TenantId = NO_TENANT,
    ) -> None:
        """Count a shard that the start-up scan found, which takes `bytes_` there. Again is fine.

        Raises KVHavenError for an unknown tier, namespace or shard, and for a shared tier.
        """
        part = self._owners.part(namespace, tenant)
        index, entry = self._tiers.own_index(tier), self._tiers.writes[tier].writing.get(key)
        writing = entry is not None and entry.namespace is part
        index.found(part, key, shard_bit, bytes_, writing=writing)

    def tier_forgot(self, tier: TierName, key: ChunkKey) -> None:
        """Note that a tier lost a chunk by itself."""
        self._tiers.index(tier).forget(key)

    def tier_online(self, tier: TierName, online: bool) -> None:
        """Switch a tier: offline, it is not asked, read or written, and nobody waits for it."""
        self._tiers.set_online(tier, online)
        if not online:
            self._leases.tier_offline(tier)

    def tier_capacity(self, tier: TierName, capacity_bytes: int) -> None:
        """Change what fits into a tier of our own: its store shrank, or has room again."""
        self._tiers.own_index(tier).resize(capacity_bytes)

    # Dropping

    def discard(self, key: ChunkKey, extent: Extent | None = None) -> None:
        """Drop a resident chunk whose bytes failed verification; it is never offered again.

        With `extent`, only if it is resident there. Leases on it keep its space. What is being
        written of it to a tier is deleted when that write ends.
        """
        entry = self._resident(key, extent)
        if entry is not None:
            self._tiers.discard(entry)
            self._space.discard(entry)

    def clear(
        self,
        namespace: NamespaceDigest | None = None,
        tier: TierName | None = None,
        tenant: TenantId | None = None,
    ) -> tuple[int, int]:
        """Drop all chunks of a namespace (None: of all) from a tier (None: from all of our own).

        With `tenant`, only that tenant's; `NO_TENANT` is what belongs to nobody.
        `TierName("memory")` is the arena alone. A shared tier is only touched when it is named:
        writes to it end undone, and what it was heard to hold is forgotten; its store is the
        caller's to clear. Returns chunks and bytes dropped, a chunk in two places counted twice.
        All of it is out of sight now. Its space and its files follow piece by piece, and what is
        pinned when it is not any more. Raises KVHavenError for an unknown namespace or tier.
        """
        scope = Scope(namespace, tenant)
        parts = self._owners.parts_of(scope)
        chunks = bytes_ = 0
        if tier != MEMORY:
            names = tuple(self._tiers.own) if tier is None else (tier,)
            chunks, bytes_ = self._tiers.clear(names, scope, parts)
        if tier in (None, MEMORY):
            more = self._leases.clear(scope, parts)
            chunks, bytes_ = chunks + more[0], bytes_ + more[1]
        return chunks, bytes_

    # Quotas

    def limit_memory(self, tenant: TenantId, quota: int | None) -> None:
        """Give a tenant another quota of the arena in bytes; None is none at all.

        It gets nothing new beyond it from now on. What it has beyond goes piece by piece, and what
        somebody uses as soon as nobody does.
        """
        self._space.quota_changed(self._owners.limit_memory(tenant, quota))

    def limit_disk(self, tenant: TenantId, quota: int | None) -> None:
        """Give a tenant another quota of each tier of our own; see `limit_memory`."""
        self._tiers.quota_changed(self._owners.limit_disk(tenant, quota))

    # What comes of it

    def take_actions(self) -> list[Action]:
        """Return what is to be done since the last call, in order.

        Before, a tenant with more than its quota gives up what nobody uses any more.
        """
        if self._space.over:
            self._space.enforce_quotas()
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    @property
    def busy(self) -> bool:
        """Whether there is anything for `work` to do."""
        return self._work.pending

    def work(self, pieces: int = 1) -> bool:
        """Do so many pieces of what events have begun; return whether there are more.

        Each takes a millisecond or two. Call it, and do the actions that come of it, whenever
        there is nothing else to do. An error in it is a bug, and drops only what it belongs to: go
        on with the rest.
        """
        return self._work.run(pieces)

    def stats(self) -> CatalogStats:
        """Return the figures of this moment, without walking over all chunks."""
        survey = self.survey()
        while True:
            try:
                next(survey)
            except StopIteration as end:
                return cast(CatalogStats, end.value)

    def survey(self) -> Generator[None, None, CatalogStats]:
        """Gather the same piece by piece: there may be a great many tenants.

        The figures of different tenants may be of different moments then.
        """
        return stats.collect(*self._parts)

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """Return the figures of one tenant, which may have nothing."""
        return stats.of_tenant(self._owners, self._space, self._tiers, tenant)

    def unwritten(self) -> int:
        """Return how many chunks are, or wait to be, written to tiers that are online."""
        online = [w for w in self._tiers.writes.values() if w.index.online]
        return sum(len(writes.queue) + len(writes.writing) for writes in online)

    def check(self) -> None:
        """Audit every invariant. Raises AssertionError that names what is off."""
        audit.check(*self._parts, at_rest=not self._work.pending)

    def _pin_limit(self) -> int:
        half = self._space.allocator.capacity_bytes // 2
        return half if self._pin_limit_bytes is None else self._pin_limit_bytes

    def _queue_limit(self) -> int:
        capacity, wanted = self._space.allocator.capacity_bytes, self._write_queue_bytes
        return capacity // 4 if wanted is None else min(wanted, capacity // 2)

    def _resident(self, key: ChunkKey, extent: Extent | None) -> Entry | None:
        entry = self._space.entries.get(key)
        if entry is None or entry.state is not State.RESIDENT or entry.holding.cleared:
            return None
        return entry if extent in (None, entry.extent) else None
