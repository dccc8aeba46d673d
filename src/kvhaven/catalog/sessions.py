# SPDX-License-Identifier: Apache-2.0
"""Sessions, their members, and the leases they hold."""

from collections.abc import Iterator, Sequence

from kvhaven.catalog.actions import (
    Acquisition,
    LeaseId,
    MemberId,
    Prefix,
    SessionId,
)
from kvhaven.catalog.allocation import Reach
from kvhaven.catalog.entries import Entry, NamespaceState
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey, NamespaceDigest


class Lookup:
    """One question to a tier, and who waits for the answer."""

    __slots__ = ("keys", "namespace", "number", "waiting")

    def __init__(self, number: int, namespace: NamespaceState, keys: tuple[ChunkKey, ...]) -> None:
        self.number = number
        self.namespace = namespace
        self.keys = keys
        self.waiting: dict[Lease, None] = {}


class Lease:
    """What one ticket holds: chunks that are leased, and chunks it waits for.

    `waiting` maps the key of each chunk that is being promoted to its index in `slots`; the
    chunks in between are leased already, but are offered only when all before them are. While
    `lookups` are under way, it also waits to hear where the chunk behind the last slot is. While
    it is `growing`, more of what was asked for is taken in, piece by piece.
    """

    __slots__ = (
        "acked",
        "counted",
        "expected",
        "growing",
        "keys",
        "lease_id",
        "limited",
        "lookups",
        "namespace",
        "orphaned",
        "passed",
        "prefetch",
        "session",
        "slots",
        "sources",
        "waiting",
    )

    def __init__(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace: NamespaceState,
        keys: Sequence[ChunkKey],
        *,
        prefetch: bool = False,
    ) -> None:
        self.session = session  # its name: the object would make a cycle
        self.lease_id = lease_id
        self.slots: list[Entry] = []
        self.sources = bytearray()  # a `Source` for each
        self.waiting: dict[ChunkKey, int] = {}
        self.lookups: dict[Lookup, None] = {}
        self.growing = False
        self.namespace = namespace
        self.keys = keys  # what was asked for, as long as it is not final
        self.prefetch = prefetch  # nobody's: it holds no chunk for long
        self.passed = 0  # chunks before its slots, of a prefetch
        self.expected = False  # its scheduler was told that it is not final
        self.limited = False  # it goes on when what it waits for has come: too much at a time
        self.counted = 0  # how many of these are in the figures
        self.acked = 0  # ranks whose copy ended
        self.orphaned = False  # its scheduler is gone: nobody will hand it to other ranks

    @property
    def final(self) -> bool:
        """Whether it waits for nothing."""
        return not self.waiting and not self.lookups and not self.growing

    def answer(self, *, corrupt: bool) -> Acquisition:
        """Return the state of the lease: the prefix that can be loaded, and what is awaited.

        `corrupt` says that any chunk in use is; what follows one in the lease is not offered.
        """
        ready = min(self.waiting.values()) if self.waiting else len(self.slots)
        # To copy a long list is to touch all that is in it. A final one is never changed.
        slots = self.slots if self.final and ready == len(self.slots) else self.slots[:ready]
        if corrupt:
            ready = next((at for at, entry in enumerate(slots) if entry.corrupt), ready)
        awaited = len(self.waiting) + bool(self.lookups) + self.growing
        return Acquisition(self.lease_id, Prefix(slots, bytes(self.sources[:ready])), awaited)


class Member:
    """One process of a session: its scheduler (`rank` is None) or a rank.

    `shard_mask` is the bitmap of the shards that a rank has of every chunk of its namespace.
    `ready` is how much of each segment it can copy to and from; it only grows.
    """

    __slots__ = (
        "id",
        "lost",
        "namespace",
        "open",
        "rank",
        "ready",
        "session",
        "shard_mask",
        "void",
    )

    def __init__(
        self,
        member: MemberId,
        session: SessionId,
        rank: int | None,
        namespace: NamespaceDigest,
        shard_mask: int,
    ) -> None:
        self.id = member
        self.session = session
        self.rank = rank
        self.namespace = namespace
        self.shard_mask = shard_mask
        self.lost = False
        self.ready: dict[int, int] = {}  # by segment, in bytes
        self.open: dict[int, Entry] = {}  # by generation: the chunks it is writing to
        self.void: dict[int, Entry] = {}  # the same from before it was lost: they are given up


class Session:
    """One engine instance.

    `reach` is what all its ranks can copy to and from; None is all of the arena that there is.
    """

    __slots__ = ("gone_ranks", "id", "leases", "members", "reach", "world_size")

    def __init__(self, session: SessionId, world_size: int) -> None:
        self.id = session
        self.world_size = world_size
        self.members: dict[MemberId, Member] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.gone_ranks = 0  # bitmap of ranks that were here and are proven gone
        self.reach: Reach | None = {}

    def measure(self, usable: Reach) -> None:
        """Find out what all ranks can reach, of what may be handed out."""
        ranks = [member for member in self.members.values() if member.rank is not None]
        if len({member.rank for member in ranks}) < self.world_size:
            self.reach = {}
            return
        reach = {at: min(member.ready.get(at, 0) for member in ranks) for at in usable}
        self.reach = None if all(reach[at] >= usable[at] for at in usable) else reach

    def ended(self, lease: Lease) -> bool:
        """Whether no rank can still copy from the lease, or will be told to."""
        awaited = (1 << self.world_size) - 1 & ~lease.acked & ~self.gone_ranks
        if lease.orphaned:
            awaited &= self._present_ranks()
        return not awaited

    def _present_ranks(self) -> int:
        return sum(1 << m.rank for m in self.members.values() if m.rank is not None)


class Sessions:
    """Who is here. A session is forgotten when the last of its members is gone.

    `usable` is what may be handed out of each segment of the arena, at any time.
    """

    def __init__(self, usable: Reach) -> None:
        self._usable = usable
        self.sessions: dict[SessionId, Session] = {}
        self.members: dict[MemberId, Member] = {}

    def attach(
        self,
        session: SessionId,
        member: MemberId,
        rank: int | None,
        namespace: NamespaceDigest,
        world_size: int,
        shard_mask: int,
    ) -> None:
        """Take in a member, or take one back that was lost; see `Catalog.attach`."""
        known = self.members.get(member)
        if known is not None:
            if (known.session, known.rank) != (session, rank):
                raise KVHavenError(
                    f"member {member} is rank {known.rank} of session {known.session}; it cannot "
                    f"become rank {rank} of session {session}"
                )
            if (known.namespace, known.shard_mask) != (namespace, shard_mask):
                raise KVHavenError(
                    f"member {member} held shards {known.shard_mask:b} of namespace "
                    f"{known.namespace.hex()}; it cannot come back with {shard_mask:b} of "
                    f"{namespace.hex()}"
                )
            known.lost = False
            return
        if world_size < 1 or (rank is not None and not 0 <= rank < world_size):
            raise KVHavenError(
                f"rank {rank} of session {session} is not within a world of {world_size}"
            )
        home = self.sessions.get(session)
        if home is None:
            home = Session(session, world_size)
        if home.world_size != world_size:
            raise KVHavenError(
                f"session {session} has {home.world_size} ranks; member {member} expects "
                f"{world_size}"
            )
        newcomer = Member(member, session, rank, namespace, shard_mask)
        for other in home.members.values():
            _require_agreement(newcomer, other)
        self.sessions[session] = home
        self.members[member] = home.members[member] = newcomer
        if rank is not None:
            home.gone_ranks &= ~(1 << rank)
            home.measure(self._usable)

    def ready(self, member: Member, segment: int, usable_bytes: int) -> None:
        """Note how much of a segment a rank can copy to and from; see `Catalog.ready`."""
        member.ready[segment] = max(usable_bytes, member.ready.get(segment, 0))
        self.sessions[member.session].measure(self._usable)

    def grew(self) -> None:
        """Note that more of the arena may be handed out, which no rank is ready for yet."""
        for home in self.sessions.values():
            home.measure(self._usable)

    def reach(self, session: SessionId) -> Reach | None:
        """Return what the ranks of a session can reach; None: all, or there is no such session."""
        home = self.sessions.get(session)
        return home.reach if home is not None else None

    def session(self, session: SessionId) -> Session:
        """Return a session. Raises KVHavenError for one that is not here."""
        known = self.sessions.get(session)
        if known is None:
            raise KVHavenError(f"session {session} is not attached; attach its members first")
        return known

    def rank(self, member: MemberId) -> Member:
        """Return a rank that is connected. Raises KVHavenError for anyone else."""
        known = self.members.get(member)
        if known is None or known.lost:
            raise KVHavenError(f"member {member} is not attached; attach it first")
        if known.rank is None:
            raise KVHavenError(f"member {member} is a scheduler; only ranks write and load chunks")
        return known

    def gone(self, member: Member) -> Session:
        """Take out a member that is proven gone, and return its session."""
        home = self.sessions[member.session]
        del self.members[member.id]
        del home.members[member.id]
        others = [m for m in home.members.values() if m.rank == member.rank]
        if member.rank is not None and not others:
            home.gone_ranks |= 1 << member.rank
        home.measure(self._usable)
        if not home.members:
            del self.sessions[home.id]
        return home

    def lost(self) -> Iterator[Member]:
        """Yield the members whose connection closed and who are not proven gone."""
        return (m for m in self.members.values() if m.lost)


def _require_agreement(newcomer: Member, other: Member) -> None:
    """Refuse a member whom another one of its session contradicts."""
    common = other.shard_mask & newcomer.shard_mask
    if other.namespace != newcomer.namespace or (
        common and newcomer.shard_mask != other.shard_mask
    ):
        raise KVHavenError(
            f"member {newcomer.id} holds shards {newcomer.shard_mask:b} of namespace "
            f"{newcomer.namespace.hex()}, {other.id} of the same session {other.shard_mask:b} of "
            f"{other.namespace.hex()}; two ranks hold the same shards or none in common"
        )
    if other.rank == newcomer.rank and not other.lost:
        role = "a scheduler" if other.rank is None else f"a rank {other.rank}"
        raise KVHavenError(
            f"session {other.session} has {role} already, member {other.id}; a second one, "
            f"{newcomer.id}, is refused while that one is connected"
        )
