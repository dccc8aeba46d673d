# SPDX-License-Identifier: Apache-2.0
"""Writing chunks: who may fill which shard, and when nobody can any more."""

from collections.abc import Sequence

from kvhaven.catalog.actions import CommitResult, Grant, MemberId, SessionId
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, NamespaceState, State
from kvhaven.catalog.sessions import Member, Sessions
from kvhaven.catalog.space import Space
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey


class Reservations:
    """Chunks that ranks are writing.

    A reservation belongs to a session, whose ranks join it one by one and fill one extent.
    When all who joined have committed and shards are still missing, nobody can be writing:
    it ages like a resident chunk, and a rank of any session may join and complete it.
    """

    def __init__(self, space: Space[S], sessions: Sessions) -> None:
        self._space = space
        self._sessions = sessions
        self.commits = 0
        self.refused = 0

    def reserve(
        self,
        member_id: MemberId,
        namespace: NamespaceState,
        parent: ChunkKey | None,
        keys: Sequence[ChunkKey],
    ) -> list[Grant | None]:
        """Grant space for this member's shards; see `Catalog.reserve`."""
        member, rank = self._sessions.rank(member_id)
        if rank >= namespace.shards:
            raise KVHavenError(
                f"rank {rank} (member {member_id}) has no shard in namespace "
                f"{namespace.namespace.digest.hex()}, whose chunks have {namespace.shards}"
            )
        entries = self._space.entries
        grants: list[Grant | None] = []
        missing: dict[ChunkKey, int] = {}
        for index, key in enumerate(keys):
            entry = entries.get(key)
            if entry is None:
                missing.setdefault(key, index)
                grants.append(None)
            else:
                grants.append(self._join(entry, member, rank, namespace))
        if missing:
            self._reserve_new(member, rank, namespace, [parent, *keys], missing, grants)
        return grants

    def commit(
        self, member_id: MemberId, key: ChunkKey, generation: int, checksum: Checksum
    ) -> tuple[CommitResult, Entry | None]:
        """Note that a shard is written; with RESIDENT comes the entry that is visible now."""
        entry = self._close(member_id, key, generation)
        if entry is None or entry.writers is None:
            self.refused += 1
            return CommitResult.REFUSED, None
        bit = entry.writers.pop(member_id)
        if entry.state is State.DOOMED:
            self._space.free_if_idle(entry)
            return CommitResult.DISCARDED, None
        self.commits += 1
        entry.bitmap |= 1 << bit
        entry.checksums[bit] = checksum  # type: ignore[index]  # a list until it is resident
        if entry.bitmap == entry.namespace.complete:
            self._space.show(entry)
            return CommitResult.RESIDENT, entry
        if not entry.writers:
            self._space.list(entry)
        return CommitResult.WAITING, None

    def abort(self, member_id: MemberId, key: ChunkKey, generation: int) -> None:
        """End a member's part without its shard: the reservation is doomed."""
        entry = self._close(member_id, key, generation)
        if entry is not None:
            self._give_up(entry, member_id)

    def lost(self, member: Member) -> None:
        """Doom what a member was writing; the space stays as long as it may still write."""
        for entry in tuple(member.open.values()):
            if entry.state is not State.DOOMED:
                self._space.doom(entry)

    def gone(self, member: Member) -> None:
        """End all parts of a member that cannot write any more."""
        for entry in member.open.values():
            self._give_up(entry, member.id)
        member.open.clear()

    def forget(self, session: SessionId) -> None:
        """Drop the incomplete reservations of a session without members."""
        for entry in tuple(self._space.reserved.values()):
            if entry.owner == session:
                self._space.doom(entry)

    def _close(self, member_id: MemberId, key: ChunkKey, generation: int) -> Entry | None:
        """Take a chunk out of what a member has open, if it is there."""
        member = self._sessions.members.get(member_id)
        entry = member.open.get(generation) if member is not None else None
        if member is None or entry is None or entry.key != key:
            return None
        del member.open[generation]
        return entry

    def _give_up(self, entry: Entry, member_id: MemberId) -> None:
        if entry.writers is not None:
            entry.writers.pop(member_id, None)
        if entry.state is State.DOOMED:
            self._space.free_if_idle(entry)
        else:
            self._space.doom(entry)

    def _join(
        self, entry: Entry, member: Member, rank: int, namespace: NamespaceState
    ) -> Grant | None:
        """Let a rank write its shard of a chunk that is reserved, if it may."""
        if (
            entry.state is not State.RESERVED
            or entry.namespace is not namespace
            or entry.bitmap >> rank & 1
        ):
            return None
        writers = entry.writers or {}
        if writers and (entry.owner != member.session or rank in writers.values()):
            return None
        entry.owner = member.session
        return self._open(entry, member, rank)

    def _open(self, entry: Entry, member: Member, rank: int) -> Grant:
        if entry.writers is None:
            entry.writers = {}
        entry.writers[member.id] = rank
        member.open[entry.extent.generation] = entry
        return Grant(entry.key, entry.extent)

    def _reserve_new(
        self,
        member: Member,
        rank: int,
        namespace: NamespaceState,
        chain: Sequence[ChunkKey | None],
        missing: dict[ChunkKey, int],
        grants: list[Grant | None],
    ) -> None:
        """Reserve what is absent, from the head on; what there is no space for stays None."""
        space = self._space
        # The chunks before them must not be what is evicted for them.
        parents = [p for p in (chain[i] for i in missing.values()) if p in space.entries]
        for parent in parents:
            space.adopt(parent)
        extents = space.allocate(namespace.extent_bytes, len(missing))
        for (key, index), extent in zip(missing.items(), extents, strict=False):
            entry = space.insert(namespace, key, chain[index], extent, State.RESERVED)
            entry.owner = member.session
            grants[index] = self._open(entry, member, rank)
        for parent in parents:
            space.disown(parent)
