# SPDX-License-Identifier: Apache-2.0
"""Reservations of chunks that ranks write, from the grant to the last commit."""

from collections.abc import Iterable, Sequence

from kvhaven.catalog.actions import CommitResult, Grant, MemberId, SessionId
from kvhaven.catalog.allocation import S, within
from kvhaven.catalog.entries import Entry, NamespaceState, SaveId, State
from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Member, Sessions
from kvhaven.catalog.work import Job, Work, consume
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey

MOST_OPEN = 1 << 14
"""Maximum number of chunks that a member may be writing; beyond, it gets no grants."""


class Reservations:
    """Chunks that ranks are writing.

    A reservation belongs to one save of one session, whose ranks join it one by one; all shards of
    a chunk come from that save. The part of each rank is to write all its shards. If several ranks
    hold the same shards, the first one writes them; the others write nothing, but must commit as
    well. The reason is that a rank may distrust the computed KV (a load failed on it, so all ranks
    computed from wrong KV). By not committing it keeps the chunk invisible, whichever rank writes
    its shards.

    When all ranks that joined have committed but others never joined, no rank can be writing. The
    chunk then ages like a resident one, and is dropped when another save reserves it. Another save
    does not complete it, because the missing ranks may have distrusted it.
    """

    def __init__(self, space: ResidentChunks[S], sessions: Sessions, work: Work) -> None:
        self._space = space
        self._sessions = sessions
        self._work = work
        # Members that are gone, while their parts end. A new member may have the same id by then.
        self.leaving: set[Member] = set()
        self.commits = 0
        self.refused = 0
        self.no_space = 0
        """Absent chunks that a save got no space for; only rank 0 of an engine counts."""
        self.no_quota = 0
        """The same, for the quota of their tenant."""

    def reserve(
        self,
        member_id: MemberId,
        namespace: NamespaceState,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
        save: int,
        tail: int = 0,
    ) -> list[Grant | None]:
        """Grant a member its part of the chunks; see `Catalog.reserve`."""
        member = self._sessions.rank(member_id)
        digest = self._sessions.sessions[member.session].digest
        if digest != namespace.namespace.digest:
            raise KVHavenError(
                f"member {member_id} computes namespace {digest.hex()}; it cannot "
                f"write chunks of namespace {namespace.namespace.digest.hex()}"
            )
        find, owner = self._space.find, (member.session, save)
        grants: list[Grant | None] = []
        missing: dict[ChunkKey, int] = {}
        for index, key in enumerate(keys):
            entry = find(key)
            grant = None
            if entry is None:
                missing.setdefault(key, index)
            elif (
                entry.state is State.RESERVED
                and entry.namespace is namespace
                and entry.tail == tail
            ):
                if entry.owner == owner:
                    grant = self._join(entry, member)
                elif not entry.writers:
                    self._space.retire(entry)
                    missing.setdefault(key, index)
            grants.append(grant)
        if missing:
            self._reserve_new(member, namespace, owner, [parent, *keys], missing, grants, tail)
        return grants

    def commit(
        self, member_id: MemberId, key: ChunkKey, generation: int, checksums: Sequence[Checksum]
    ) -> tuple[CommitResult, Entry | None]:
        """Record that a part is done; RESIDENT comes with the entry that is visible now."""
        member = self._sessions.members.get(member_id)
        entry = self._close(member, key, generation)
        if member is None or member.rank is None or entry is None or entry.writers is None:
            self.refused += 1
            return CommitResult.REFUSED, None
        shards = entry.writers[member_id]
        if len(checksums) != shards.bit_count():
            self.refused += 1
            self._give_up(entry, member_id)
            return CommitResult.REFUSED, None
        del entry.writers[member_id]
        if entry.holding.cleared and entry.state is not State.RETIRED:
            self._space.retire(entry)
            return CommitResult.DISCARDED, None
        if entry.state is State.RETIRED:
            self._space.free_if_idle(entry)
            return CommitResult.DISCARDED, None
        self.commits += len(checksums)
        entry.bitmap |= shards
        entry.awaited &= ~(1 << member.rank)
        if shards:  # shards of a rank are consecutive
            first = (shards & -shards).bit_length() - 1
            entry.checksums[first : first + len(checksums)] = checksums  # type: ignore[index]  # still a list
        if self._is_whole(entry):
            self._space.publish(entry)
            return CommitResult.RESIDENT, entry
        if not entry.writers:
            self._space.list(entry)
        return CommitResult.WAITING, None

    def open(self, part: NamespaceState, key: ChunkKey) -> bool:
        """Return whether this chunk is reserved: ranks write it, or some have and others do not."""
        entry = self._space.find(key)
        reserved = entry is not None and entry.state is State.RESERVED
        return reserved and entry is not None and entry.namespace is part

    def abort(self, member_id: MemberId, key: ChunkKey, generation: int) -> None:
        """End a member's part without a commit: the reservation is retired."""
        entry = self._close(self._sessions.members.get(member_id), key, generation)
        if entry is not None:
            self._give_up(entry, member_id)

    def lost(self, member: Member) -> None:
        """Retire the chunks that a member was writing; their space stays while it may write."""
        member.void.update(member.open)
        member.open = {}
        self._work.start(self._retire(consume(member.void.values())))

    def gone(self, member: Member) -> None:
        """End all parts of a member that cannot write any more."""
        member.void.update(member.open)
        member.open = {}
        self.leaving.add(member)
        self._work.start(self._give_up_all(member))

    def forget(self, session: SessionId) -> None:
        """Drop the incomplete reservations of a session without members."""
        last = self._space.last_generation  # a new session may get the same id

        def left(entry: Entry) -> bool:
            owner = entry.owner
            return owner is not None and owner[0] == session and entry.extent.generation <= last

        if self._space.reserved_bytes:
            self._work.start(self._space.retire_all(left))

    def _retire(self, entries: Iterable[Entry]) -> Job:
        """Retire reservations that are still visible."""
        heavy = self._work.pace.heavy
        for done, entry in enumerate(entries):
            if done and done % heavy == 0:
                yield
            if entry.state is State.RESERVED:
                self._space.retire(entry)

    def _give_up_all(self, member: Member) -> Job:
        heavy = self._work.pace.heavy
        for done, generation in enumerate(tuple(member.void)):
            if done and done % heavy == 0:
                yield
            self._give_up(member.void.pop(generation), member.id)
        self.leaving.remove(member)

    def _close(self, member: Member | None, key: ChunkKey, generation: int) -> Entry | None:
        """Remove a chunk from the open chunks of a member, and return it, or None if not found."""
        if member is None:
            return None
        for known in (member.open, member.void):
            entry = known.get(generation)
            if entry is not None and entry.key == key:
                del known[generation]
                if known is member.void and entry.state is State.RESERVED:
                    self._space.retire(entry)
                return entry
        return None

    def _give_up(self, entry: Entry, member_id: MemberId) -> None:
        if entry.writers is not None:
            entry.writers.pop(member_id, None)
        if entry.state is State.RETIRED:
            self._space.free_if_idle(entry)
        else:
            self._space.retire(entry)

    @staticmethod
    def _is_whole(entry: Entry) -> bool:
        """Return whether every shard is written and every rank has committed."""
        return not entry.awaited and entry.bitmap == entry.namespace.complete

    def _join(self, entry: Entry, member: Member) -> Grant | None:
        """Grant a rank its part of a chunk that its save has reserved, unless it had it before."""
        awaited = member.rank is not None and entry.awaited >> member.rank & 1
        if not awaited or member.id in (entry.writers or ()) or not _room(member):
            return None
        if not within(entry.extent, member.ready):
            return None  # it replaced a rank after the reservation
        return self._open(entry, member, self._to_write(entry, member))

    @staticmethod
    def _to_write(entry: Entry, member: Member) -> int:
        """Return all shards of a rank, or none if another rank has begun to write them."""
        taken = entry.bitmap
        for shards in (entry.writers or {}).values():
            taken |= shards
        return 0 if taken & member.shard_mask else member.shard_mask

    @staticmethod
    def _open(entry: Entry, member: Member, shards: int) -> Grant:
        if entry.writers is None:
            entry.writers = {member.id: shards}
        else:
            entry.writers[member.id] = shards
        member.open[entry.extent.generation] = entry
        return Grant(entry.key, entry.extent, shards)

    def _reserve_new(
        self,
        member: Member,
        namespace: NamespaceState,
        owner: SaveId,
        chain: Sequence[ChunkKey | None],
        missing: dict[ChunkKey, int],
        grants: list[Grant | None],
        tail: int,
    ) -> None:
        """Reserve absent chunks from the head on; those without space stay None."""
        space = self._space
        ranks = (1 << self._sessions.sessions[member.session].world_size) - 1
        # Their parents must not be evicted to make room for them.
        parents = [p for i in missing.values() if (p := chain[i]) is not None]
        for parent in parents:
            space.adopt(parent)
        wanted = min(len(missing), _room(member))
        over_quota = space.quota_refusals
        extents = space.allocate(namespace, wanted, self._sessions.reach(member.session))
        if member.rank == 0:
            skipped, over_quota = len(missing) - len(extents), space.quota_refusals - over_quota
            self.no_quota += min(skipped, over_quota)
            self.no_space += max(0, skipped - over_quota)
        if len(extents) < wanted and namespace.tenant.memory_quota is not None:
            for key in list(missing)[len(extents) : wanted]:
                space.ghosts.left(key, Reason.QUOTA)
        for (key, index), extent in zip(missing.items(), extents, strict=False):
            # Tails are evicted before all full chunks, so they need not keep their parents.
            above = None if tail else chain[index]
            entry = space.insert(namespace, key, above, extent, State.RESERVED, tail)
            entry.owner, entry.awaited = owner, ranks
            grants[index] = self._open(entry, member, member.shard_mask)
        for parent in parents:
            space.disown(parent)


def _room(member: Member) -> int:
    """Return how many more chunks a member may be writing."""
    return max(0, MOST_OPEN - len(member.open) - len(member.void))
