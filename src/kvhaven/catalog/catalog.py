# SPDX-License-Identifier: Apache-2.0
"""Public interface of the catalog: events in, actions out."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

from kvhaven.catalog import audit, stats, unused
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
from kvhaven.catalog.announcer import Announcer, Batch, Cursor
from kvhaven.catalog.chunk_state import ChunkState, chunk_state
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.ghosts import Ghosts
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.leases import Leases, Reading
from kvhaven.catalog.loans import Loan
from kvhaven.catalog.misses import Gap, gap_at
from kvhaven.catalog.owners import Owners
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Member, RankDescription, Session, Sessions
from kvhaven.catalog.stats import CatalogStats, CatalogTotals, NamespaceStats, TenantStats
from kvhaven.catalog.tier_spec import MEMORY, StoreOn, TierSpec, WriteMode
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.unused import Counting
from kvhaven.catalog.work import Job, Pace, Work
from kvhaven.catalog.worth import Price, TierSpeed
from kvhaven.errors import KVHavenError
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, Extent, NamespaceDigest, TenantId

NO_SESSION = SessionId("")
"""Session of a prefetch that may use the whole arena."""


class Catalog:
    """State of every chunk of the node: its place, its pins, and whether its space may be reused.

    Each method is an event; `take_actions` returns the resulting actions. The catalog has no I/O,
    clock, threads or randomness, so a history replays exactly. It is called from one thread.

    `policy` is the prototype of the policies, one per size class. `pin_limit_bytes` limits leased
    and promoting bytes together (default: half of the arena). `write_queue_bytes` limits the chunks
    that wait to be written to each tier (default: a quarter of the arena; maximum: half). Both
    follow an arena that grows. `tiers` are in the order of lookups, fastest first. With
    `fill_faster`, a chunk that was read from a tier is written to those before it.

    Every chunk belongs to one tenant, or to none. A request for it by another tenant is a miss. A
    tenant is kept to its quota of the arena (`memory_quotas`) and of each local tier
    (`disk_quotas`) by evicting its own chunks; if these cannot be evicted, it gets no new space.

    No event takes long, however many chunks exist: work on many chunks is begun by the event, and
    done piece by piece by `work`, between events. `pace` sets the length of a piece.

    With an `announcer`, other nodes can follow which chunks are in the arena (see `announced`).
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
        announcer: Announcer | None = None,
    ) -> None:
        if any(spec.name == MEMORY for spec in tiers):
            raise KVHavenError(
                f"a tier cannot be named {MEMORY}: that name means the arena; rename the tier"
            )
        self._actions: list[Action] = []
        self._work = Work(pace)
        self._owners = Owners(memory_quotas, disk_quotas)
        self._ghosts = Ghosts()
        self._space = ResidentChunks(allocator, policy, self._work, self._ghosts, announcer)
        self._sessions = Sessions(allocator.usable, self._owners.add)
        self._pin_limit_bytes = pin_limit_bytes
        self._write_queue_bytes = write_queue_bytes
        self._tiers = Tiers(
            tiers,
            self._queue_limit(),
            self._actions,
            self._space.free_if_idle,
            self._work,
            self._ghosts,
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
        """Record that the first `usable_bytes` of a segment may be allocated; `last`: for good.

        No rank is ready for the new part (see `ready`).
        """
        self._space.allocator.grow(segment, usable_bytes)
        if last:
            self._space.allocator.finalize(segment)
        self._sessions.grew()
        self._leases.pin_limit = self._pin_limit()
        self._tiers.limit_queues(self._queue_limit())

    # Namespaces, sessions and members

    def add_namespace(self, namespace: Namespace) -> None:
        """Register a namespace; repeated calls are allowed.

        Raises `KVHavenError` if it has no shards, or was registered with another shard table.
        """
        self._owners.add(namespace)

    def namespace(self, digest: NamespaceDigest) -> Namespace:
        """Return a registered namespace. Raises `KVHavenError` for an unknown one."""
        return self._owners.part(digest, NO_TENANT).namespace

    def extent_bytes(self, digest: NamespaceDigest) -> int:
        """Return the bytes of a chunk in the arena. Raises `KVHavenError` if it is unknown."""
        return self._owners.part(digest, NO_TENANT).extent_bytes

    def namespaces(self) -> tuple[Namespace, ...]:
        """Return the registered namespaces."""
        return tuple(part.namespace for part in self._owners.namespaces())

    def attach_rank(
        self, engine: str, member: MemberId, rank: int, description: RankDescription
    ) -> Session:
        """Add a rank to the session of its engine, and return the session, for reading only.

        The first rank begins the session, whose id contains a number of its own. The last one
        completes it: its namespace, with the shards of all ranks, is registered. Two ranks hold
        either the same shards, with equal bytes (`shared`), or none in common. Sessions of one
        namespace may divide its shards differently.

        A member that was lost returns with this call; one that was not is lost first. None of its
        memory was reused meanwhile, and commits of its earlier reservations return DISCARDED.

        Raises `KVHavenError`, and changes nothing, for a rank that contradicts the session's other
        ranks (`IncompleteEngineError` if they differ only in the content of files) or itself
        before; for a rank or shards that are not valid; a rank that another process is attached as;
        fields that are too long; or a namespace that was registered with another shard table.
        """
        known = self._sessions.known(engine, member, rank, description)
        if known is None:
            return self._sessions.add_rank(engine, member, rank, description)
        return self._restore(known)

    def attach_scheduler(self, engine: str, member: MemberId, world_size: int) -> Session | None:
        """Add a scheduler, or restore it, as `attach_rank`; return None if ranks are missing.

        Raises `KVHavenError` if its number of ranks differs, or if another scheduler is attached.
        """
        known = self._sessions.known(engine, member, None, None)
        if known is None:
            return self._sessions.add_scheduler(engine, member, world_size)
        return self._restore(known)

    def _restore(self, member: Member) -> Session:
        if not member.lost:
            self.lost(member.id)
        member.lost = False
        return self._sessions.sessions[member.session]

    def ready(self, member: MemberId, segment: int, usable_bytes: int) -> None:
        """Record that a rank can copy to and from the first `usable_bytes` of a segment.

        A session is offered and granted only places that all its ranks are ready for, initially
        none. A smaller or repeated value, or an unknown member, changes nothing.
        """
        known = self._sessions.members.get(member)
        if known is not None:
            self._sessions.ready(known, segment, usable_bytes)

    def lost(self, member: MemberId) -> None:
        """Record that a connection closed, which proves nothing about the process.

        Chunks that the member was writing are retired and quarantined. Leases that await its
        acknowledgement stay, and so do all leases of the session if it is the scheduler.
        """
        known = self._sessions.members.get(member)
        if known is not None:
            known.lost = True
            self._reservations.lost(known)

    def gone(self, member: MemberId) -> None:
        """Record that a member provably maps nothing any more, and end its part in everything.

        Its acknowledgements count as given. Without the scheduler no lease waits any longer, and a
        lease ends as soon as every present rank has acknowledged it. A session without members is
        removed with all its reservations and leases.
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
        """Return the members whose connection closed and that are not proven gone."""
        return tuple(member.id for member in self._sessions.lost())

    # Loading

    def acquire(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
        price: Price | None = None,
    ) -> Acquisition:
        """Lease the longest resident prefix of a tenant's chain, and promote the chunks behind it.

        `keys` begins at the head of the chain. The consecutive chunks behind the prefix that an
        online tier holds are promoted, as far as space and the pin limit allow. The lease waits for
        them, and for chunks that are already being promoted for other leases. A chunk in memory
        that the session's ranks are not ready for ends the prefix. Behind the last chunk in a known
        place, shared tiers are asked, and the lease waits for their answers and the resulting
        promotions. A long chain is leased piece by piece, and the lease waits for that too.

        `tail` is the key of the tail behind the chain, which may be empty. If all chunks are leased
        or promoted and the tail is resident, it is leased as the chunk behind them.

        With `price`, the time to compute the chunks, chunks in tiers are promoted only if reading
        them is predicted to be worth its time (see `worth`).

        When the wait ends, an `Update` reports it. A repeated call with the same lease id returns
        the present state. A lease without chunks that waits for nothing is not stored. Raises
        `KVHavenError` for an unknown session or namespace.
        """
        part = self._owners.part(namespace, tenant)
        return self._leases.acquire(session, lease_id, part, keys, tail, price)

    def reading(self, session: SessionId, lease_id: LeaseId) -> Reading | None:
        """Return which chunks of a lease came from tiers, or will; None for an unknown lease."""
        return self._leases.reading(session, lease_id)

    def finalize(self, session: SessionId, lease_id: LeaseId) -> Acquisition:
        """End the wait of a lease: return the final answer, the prefix that is ready now.

        Its promotions continue and become resident, but no new ones follow. No `Update` follows.
        """
        return self._leases.finalize(session, lease_id)

    def prefetch(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        session: SessionId = NO_SESSION,
    ) -> int:
        """Touch, look up and promote as `acquire`, without a lease; return the promotions begun.

        The result counts the promotions that began during the call. Chunks are promoted to places
        that all ranks of the session are ready for. After its first piece of work a prefetch
        continues only when no request waits for other work. If the unfinished prefetches of the
        session name too many chunks, a new one gets only what its first piece finds.
        """
        return self._leases.prefetch(session, self._owners.part(namespace, tenant), keys)

    def release(self, session: SessionId, lease_id: LeaseId) -> None:
        """End a lease that was not and will not be reported to a rank; ignore an unknown one."""
        self._leases.release(session, lease_id)

    def loaded(self, session: SessionId, lease_id: LeaseId, member: MemberId) -> int:
        """Record that a rank's copy ended; the last rank's copy ends the lease.

        Returns the number of chunks that the rank could copy. Repeated calls, and unknown leases or
        members, are ignored: 0. Raises `KVHavenError` for a member that is not a rank of this
        session.
        """
        known = self._sessions.members.get(member)
        return 0 if known is None else self._leases.loaded(session, lease_id, known)

    def gap(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        at: int,
        tenant: TenantId = NO_TENANT,
    ) -> Gap:
        """Return why a tenant's chain ends before its chunk `at`; changes nothing.

        The cost is that of a few lookups, however long the chain is.
        """
        # A tenant without chunks has no part any more, but its chunks are still remembered.
        known = self._owners.known_part(namespace, NO_TENANT) is not None
        part = self._owners.part(namespace, tenant) if known else None
        return gap_at(self._space, self._tiers, self._ghosts, part, keys, at)

    def open_session(self, session: SessionId) -> None:
        """Add a session of the service itself, without members; it stays.

        It may lease all chunks, and its leases end by `release` alone. Repeated calls are allowed.
        """
        self._sessions.add_own(session)

    def place_of(
        self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId = NO_TENANT
    ) -> TierName | None:
        """Return the first place in which a tenant's chunk is known to be; None if there is none.

        Of shared tiers, only cached lookup results count.
        """
        part = self._owners.known_part(namespace, tenant)
        if part is None:
            return None
        if self._leases.loans.has(part, key):
            return MEMORY
        index = self._tiers.source(key, part)
        return None if index is None else index.spec.name

    def chunk(
        self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId = NO_TENANT
    ) -> ChunkState:
        """Return the places of a tenant's chunk, and its use in memory."""
        part = self._owners.known_part(namespace, tenant)
        return chunk_state(self._space, self._tiers, part, key)

    def located(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT
    ) -> bytes:
        """Return a byte for each of a tenant's chunks, as in `protocol.Located`; change nothing.

        It is a hint: a lease may find another state.
        """
        part = self._owners.known_part(namespace, tenant)
        elsewhere = 2 if any(index.online for index in self._tiers.shared.values()) else 0
        if part is None:
            return bytes([elsewhere]) * len(keys)
        resident, source = self._leases.loans.which(part, keys), self._tiers.source
        return bytes(
            1 if has or source(key, part) is not None else elsewhere
            for key, has in zip(keys, resident, strict=True)
        )

    def push(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tier: TierName,
        tenant: TenantId = NO_TENANT,
    ) -> int:
        """Queue writes of a tenant's resident chunks to a tier; return how many are resident.

        Raises `KVHavenError` for an unknown tier.
        """
        self._tiers.index(tier)
        part = self._owners.known_part(namespace, tenant)
        found = [] if part is None else [k for k in keys if self._leases.loans.has(part, k)]
        for key in found:
            entry = self._space.entries[key]
            if not entry.tail:
                self._tiers.writes[tier].offer(entry)
        return len(found)

    def checksums(self, key: ChunkKey, extent: Extent | None = None) -> tuple[Checksum, ...] | None:
        """Return the checksums of a resident chunk's shards, or None if it is not resident.

        With `extent`, only if it is resident there: it may have been dropped and written again
        since, and two computations of a chunk may differ in their last bits.
        """
        entry = self._resident(key, extent)
        if entry is None:
            return None
        return tuple(c for c in entry.checksums if c is not None)

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT
    ) -> list[bool]:
        """Return whether each chunk is resident as this tenant's; False for unknown namespaces."""
        part = self._owners.known_part(namespace, tenant)
        return [part is not None and self._leases.loans.has(part, key) for key in keys]

    def announced(self, cursor: Cursor, most: int) -> Batch:
        """Return what a follower at `cursor` has to hear next, about `most` digests.

        A chunk that was cleared counts as there until its space is freed. Raises `KVHavenError`
        without an announcer.
        """
        announcer = self._space.announcer
        if announcer is None:
            raise KVHavenError("this catalog has no announcer; pass one to it")
        return announcer.next(self._space.entries, cursor, most)

    def lend(
        self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId = NO_TENANT
    ) -> Loan | None:
        """Pin a resident chunk for a reader within the service.

        This is no use of the chunk: peers fetch a chain from its head, and the policy would then
        propose heads before tails. Returns None if it is not resident as this tenant's, or if loans
        and leases already pin as much as they may. The reader ends every loan with `returned`.
        """
        part = self._owners.known_part(namespace, tenant)
        return None if part is None else self._leases.loans.lend(part, key)

    def retain_tail(
        self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId = NO_TENANT
    ) -> int:
        """Return the stored tokens of a resident tail of this tenant, 0 if there is none.

        Another node will read it: until each of its shards was lent, or it was used, it is evicted
        no sooner than a full chunk.
        """
        part = self._owners.known_part(namespace, tenant)
        return 0 if part is None else self._leases.loans.retain_tail(part, key)

    def is_being_saved(
        self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId = NO_TENANT
    ) -> bool:
        """Return whether ranks are writing this chunk of a tenant now."""
        part = self._owners.known_part(namespace, tenant)
        return part is not None and self._reservations.open(part, key)

    def returned(self, loan: int) -> None:
        """Record that nothing reads a loan's extent any more. A second call changes nothing."""
        self._leases.loans.returned(loan)

    # Saving

    @property
    def refused_saves(self) -> tuple[int, int]:
        """Chunks that saves got no space for since start: for their tenant's quota, and others."""
        return self._reservations.no_quota, self._reservations.no_space

    def reserve(
        self,
        member: MemberId,
        namespace: NamespaceDigest,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> list[Grant | None]:
        """Reserve space for a tenant's consecutive chunks; `parent` is the key before the first.

        `save` numbers, within the session, the save that this call is a rank's part of; ranks that
        reserve a chunk with the same `save` get the same extent. A grant covers all shards of the
        rank, or none if another rank of the save was granted the same shards.

        None for a chunk means that this rank has no part in it, because it is resident, being
        promoted, or being written by another save; because this rank has already committed it; or
        because there is no space even after eviction, within the tenant's quota, or in places that
        all ranks of the session are ready for. An incomplete chunk of another save is dropped if no
        member writes it any more.

        With `tail`, the chunks are tails, of which so many tokens are stored: they are not written
        to tiers, are evicted before all full chunks of their size, and are dropped after
        `tails.KEEP_S` seconds without use.

        Raises `KVHavenError` for a member that is not a connected rank, an unknown namespace, or a
        namespace other than the member's.
        """
        part = self._owners.part(namespace, tenant)
        return self._reservations.reserve(member, part, parent, keys, save, tail)

    def commit(
        self, member: MemberId, key: ChunkKey, generation: int, checksums: Sequence[Checksum]
    ) -> CommitResult:
        """Record that a member has done its part of a chunk; the last commit makes it visible.

        `checksums` are those of the shards that it was granted, in the order of their bits.
        """
        result, entry = self._reservations.commit(member, key, generation, checksums)
        if entry is not None and not entry.tail:
            self._tiers.computed(entry)
        return result

    def abort(self, member: MemberId, key: ChunkKey, generation: int) -> None:
        """Give up a reservation; this member's copy has provably ended. Ignore an unknown one.

        The space is freed when every member that was granted it has committed or aborted.
        """
        self._reservations.abort(member, key, generation)

    # Tiers

    def tick(self, now: float) -> None:
        """Set the time in seconds, by which lookup results of shared tiers and tails expire."""
        self._tiers.tick(now)
        self._space.tick(now)

    def tier_looked_up(
        self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None, tail: int = 0
    ) -> None:
        """Answer a `TierLookup`: the bitmap of the shards that are present, by chunk.

        A chunk that is left out is absent. None means that the tier failed, or did not answer in
        time; these chunks are not looked up again for a moment. An answer is not trusted: it only
        decides which chunks are read. For a tail that was `expected`, `tail` is the number of its
        stored tokens. Raises `KVHavenError` for a lookup that is not pending.
        """
        self._leases.looked_up(tier, number, found, tail)

    def expected(
        self,
        tier: TierName,
        namespace: NamespaceDigest,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> dict[ChunkKey, int]:
        """Expect a chain that another node computes, and promote each chunk when it has arrived.

        `tail` is the key of the tail behind `keys`. Returns the number of a pending lookup in
        `tier`, a shared one, for each chunk that is in no known place, and for such a tail; too
        many are left out. A lease that reaches such a chunk waits for it. The
        caller answers each of these lookups once, by `tier_looked_up`: when the chunk can be read,
        or will not come, and within a bounded time even if the other node is silent. Raises
        `KVHavenError` for an unknown tier or namespace, and for a local tier.
        """
        part, index = self._owners.part(namespace, tenant), self._tiers.presence(tier)
        wanted = keys if tail is None else [*keys, tail]
        numbers = index.expect(part, self._leases.absent(part, wanted))
        self._leases.prefetch(NO_SESSION, part, keys, tail)
        return numbers

    def is_looked_up(self, key: ChunkKey) -> bool:
        """Return whether a lookup of a chunk is pending in any shared tier."""
        return any(key in index.pending for index in self._tiers.shared.values())

    def withdrawn(self, tier: TierName, number: int) -> None:
        """End a lookup of `expected` without an answer: the other node cannot tell.

        Leases that wait for it go on as if the chunk had never been expected, and look it up.
        Raises `KVHavenError` for a lookup that is not pending.
        """
        self._leases.withdraw(tier, number)

    def arrived(
        self,
        tier: TierName,
        namespace: NamespaceDigest,
        key: ChunkKey,
        tenant: TenantId = NO_TENANT,
        tail: int = 0,
    ) -> None:
        """Record that a chunk without a lookup of `expected` is in a shared tier now.

        With `tail`, it is a tail of which so many tokens are stored. Leases that wait for a lookup
        of the chunk continue; if that lookup says later that it is absent, this changes nothing.
        Raises `KVHavenError` for an unknown tier or namespace, and for a local tier.
        """
        part = self._owners.part(namespace, tenant)
        self._leases.arrived(tier, part, key, tail)

    def tier_read_done(
        self, tier: TierName, key: ChunkKey, extent: Extent, checksums: tuple[Checksum, ...] | None
    ) -> None:
        """Answer a `TierRead`: the verified checksums of all shards, or None if the read failed.

        After a failure the chunk counts as absent from that tier. Leases that wait for it read it
        from another tier, or are cut before it. Raises `KVHavenError` if there is no such read.
        """
        entry = self._leases.read_done(tier, key, extent, checksums)
        if entry is not None and not entry.tail:
            self._tiers.promoted(entry, tier)

    def tier_write_done(
        self, tier: TierName, key: ChunkKey, ok: bool, taken_bytes: int | None = None
    ) -> None:
        """Answer a `TierWrite`: the chunk takes `taken_bytes` in the tier; None: as uncompressed.

        Raises `KVHavenError` if there is no such write.
        """
        writes = self._tiers.writes_of(tier, key)
        entry = writes.done(key, ok=ok, taken_bytes=taken_bytes)
        if ok and not entry.children:
            # The head may have been written long before, but must stay newer than its tail.
            self._tiers.indexes[tier].touch(e.key for e in self._space.chain(entry))
        self._space.free_if_idle(entry)
        writes.pump()

    def tier_scanned(self, tier: TierName, *, ended: bool, complete: bool = True) -> None:
        """Record that a scan of a local tier begins, or ended; `complete`: not by an error.

        Chunks that are cleared before a scan is complete, or while the tier is offline, are deleted
        when they are found, until a scan that begins after the clear is complete. The scan of a
        reopened tier begins before `tier_online` reports the tier as online. Raises `KVHavenError`
        for an unknown tier, and for a shared one.
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
        """Count a shard found by the start-up scan, with `bytes_` in the tier; may be repeated.

        Raises `KVHavenError` for an unknown tier, namespace or shard, and for a shared tier.
        """
        part = self._owners.part(namespace, tenant)
        index, entry = self._tiers.own_index(tier), self._tiers.writes[tier].writing.get(key)
        writing = entry is not None and entry.namespace is part
        index.found(part, key, shard_bit, bytes_, writing=writing)

    def tier_forgot(self, tier: TierName, key: ChunkKey) -> None:
        """Record that a tier lost a chunk on its own."""
        self._tiers.index(tier).forget(key)

    def tier_online(self, tier: TierName, online: bool) -> None:
        """Switch a tier: offline, it has no lookups, reads or writes, and no lease waits for it."""
        self._tiers.set_online(tier, online)
        if not online:
            self._leases.tier_offline(tier)

    def tier_speed(self, tier: TierName, speed: TierSpeed) -> None:
        """Record the measured speed of a tier."""
        self._tiers.index(tier).speed = speed

    def switch_tier(
        self, tier: TierName, mode: WriteMode | None = None, store_on: StoreOn | None = None
    ) -> None:
        """Set how a tier is written from now on; None: unchanged. `OFF` drops waiting writes.

        Raises `KVHavenError` for an unknown tier.
        """
        self._tiers.switch(tier, mode, store_on)

    def fill_faster(self, fill: bool) -> None:
        """Set whether chunks that are read from a tier are written to those before it."""
        self._tiers.fill_faster = fill

    def limit_queues(self, bytes_: int) -> None:
        """Set the limit of the chunks that wait to be written to each tier."""
        self._write_queue_bytes = bytes_
        self._tiers.limit_queues(self._queue_limit())

    def believe(self, seconds: float) -> None:
        """Set how long lookup results of shared tiers are cached."""
        for presence in self._tiers.shared.values():
            presence.believe(seconds)

    def tier_capacity(self, tier: TierName, capacity_bytes: int) -> None:
        """Set the capacity of a local tier, when its store shrank or has room again."""
        self._tiers.own_index(tier).resize(capacity_bytes)

    # Dropping

    def discard(self, key: ChunkKey, extent: Extent | None = None) -> None:
        """Drop a resident chunk whose bytes failed verification; it is never offered again.

        With `extent`, only if it is resident there. Leases on it keep its space. Writes of it to a
        tier that are under way are deleted when they end.
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
        """Drop the chunks of a namespace (None: of all) from a tier (None: arena and local tiers).

        With `tenant`, only that tenant's; `NO_TENANT` means the chunks without a tenant.
        `TierName("memory")` is the arena alone. A shared tier is only affected if it is named:
        writes to it are cancelled and its lookup results dropped, while the caller clears its
        store. Returns the number of dropped chunks and their bytes; a chunk in two places counts
        twice.

        All of these chunks are invisible on return. Space and files are freed piece by piece, and
        pinned chunks when their pins end. Raises `KVHavenError` for an unknown namespace or tier.
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

    def usage(
        self,
        namespace: NamespaceDigest | None = None,
        tier: TierName | None = None,
        tenant: TenantId | None = None,
    ) -> tuple[int, int]:
        """Return the chunks and bytes that `clear` would drop with these arguments.

        Raises `KVHavenError` for an unknown namespace or tier, and for a shared tier.
        """
        scope = Scope(namespace, tenant)
        parts = self._owners.parts_of(scope)
        places = [] if tier not in (None, MEMORY) else [self._space.place]
        if tier is None:
            places += [index.place for index in self._tiers.own.values()]
        elif tier != MEMORY:
            places.append(self._tiers.own_index(tier).place)
        found = [place.usage(scope, parts) for place in places]
        return sum(chunks for chunks, _ in found), sum(bytes_ for _, bytes_ in found)

    def drop_unused(
        self,
        older_than_s: float,
        namespace: NamespaceDigest | None = None,
        tier: TierName | None = None,
        tenant: TenantId | None = None,
        *,
        dry_run: bool = False,
    ) -> Counting:
        """Return a job that drops the chunks of `clear` without a use in the last `older_than_s` s.

        The caller runs it piece by piece, as `work` does with the catalog's own jobs. Its result is
        the number of chunks and their bytes; with `dry_run`, it only counts. Chunks that are in use
        stay, as do those of offline tiers. The last use is known to a second in memory and to
        `DIVISION_S` in tiers, and chunks of which it is not known stay. Raises `KVHavenError` for
        an unknown namespace or tier, for one that is offline, and for a shared tier, whose chunks
        other nodes use, too.
        """
        scope = Scope(namespace, tenant)
        self._owners.parts_of(scope)
        named = () if tier in (None, MEMORY) else (self._tiers.own_index(tier),)
        if any(not index.online for index in named):
            raise KVHavenError(f"tier {tier} is offline: its chunks cannot be dropped")
        return unused.drop(
            self._space,
            tuple(self._tiers.own.values()) if tier is None else named,
            scope,
            self._space.now - older_than_s,
            resident=tier in (None, MEMORY),
            dry_run=dry_run,
        )

    # Quotas

    def limit_memory(self, tenant: TenantId, quota: int | None) -> None:
        """Set the quota of a tenant in the arena in bytes; None removes it.

        From now on the tenant gets no space beyond it. Chunks in excess are evicted piece by piece,
        and pinned ones when their pins end.
        """
        self._space.quota_changed(self._owners.limit_memory(tenant, quota))

    def limit_disk(self, tenant: TenantId, quota: int | None) -> None:
        """Set the quota of a tenant in each local tier in bytes; see `limit_memory`."""
        self._tiers.quota_changed(self._owners.limit_disk(tenant, quota))

    def set_quotas(self, memory: Quotas | None = None, disk: Quotas | None = None) -> None:
        """Replace all quotas in the arena, or in each local tier; None: unchanged.

        They apply to tenants piece by piece, and to new tenants immediately.
        """
        self._owners.set_quotas(memory, disk)
        self._work.start(self._apply_quotas(memory is not None, disk is not None))

    def _apply_quotas(self, memory: bool, disk: bool) -> Job:
        for done, tenant in enumerate(self._owners.settle_quotas(memory, disk), 1):
            if memory:
                self._space.quota_changed(tenant)
            if disk:
                self._tiers.quota_changed(tenant)
            if done % self._work.pace.heavy == 0:
                yield

    # Actions, work and statistics

    def take_actions(self) -> list[Action]:
        """Return the actions since the last call, in order.

        Before that, a tenant above its quota gives up chunks that are not in use any more.
        """
        if self._space.over:
            self._space.enforce_quotas()
        actions = self._actions.copy()
        self._actions.clear()
        return actions

    @property
    def busy(self) -> bool:
        """Whether `work` has anything to do."""
        return self._work.pending

    def work(self, pieces: int = 1) -> bool:
        """Do up to `pieces` pieces of unfinished work; return whether more is left.

        Each takes a millisecond or two. Call it, and execute the resulting actions, whenever the
        service is idle. An exception is a bug and drops only the job that raised it: continue with
        the rest.
        """
        return self._work.run(pieces)

    def stats(self) -> CatalogStats:
        """Return the present statistics, without visiting all chunks."""
        survey = self.survey()
        while True:
            try:
                next(survey)
            except StopIteration as end:
                return cast(CatalogStats, end.value)

    def survey(self) -> Generator[None, None, CatalogStats]:
        """Collect the statistics piece by piece, as there may be very many tenants.

        The statistics of different tenants may then be of different moments.
        """
        return stats.collect(*self._parts)

    def totals(self) -> CatalogTotals:
        """Return the totals; the cost does not depend on chunks, namespaces and tenants."""
        return stats.totals_of(*self._parts[1:])

    def tenants_after(self, last: bytes) -> Iterator[tuple[TenantId, TenantStats]]:
        """Yield known tenants with an id above `last`, in ascending order, with their statistics.

        Between two items, events may happen, and tenants may come and go.
        """
        return stats.tenants_after(self._owners, self._space, self._tiers, last)

    def namespaces_after(self, last: bytes) -> Iterator[tuple[NamespaceDigest, NamespaceStats]]:
        """Yield namespaces with a digest above `last`, as `tenants_after` does."""
        return stats.namespaces_after(self._owners, self._space, self._tiers, last)

    def tenant_stats(self, tenant: TenantId) -> TenantStats:
        """Return the statistics of one tenant, which may have no chunks."""
        return stats.of_tenant(self._owners, self._space, self._tiers, tenant)

    def unwritten(self) -> int:
        """Return the number of chunks that are being, or wait to be, written to online tiers."""
        online = [w for w in self._tiers.writes.values() if w.index.online]
        return sum(len(writes.queue) + len(writes.writing) for writes in online)

    def check(self) -> None:
        """Audit every invariant. Raises `AssertionError` that names the violated one."""
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
