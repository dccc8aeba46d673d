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
from kvhaven.catalog.worth import Price
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey, NamespaceDigest


class Lookup:
    """One lookup in a shared tier, and the leases that wait for its result."""

    __slots__ = ("keys", "namespace", "number", "waiting")

    def __init__(self, number: int, namespace: NamespaceState, keys: tuple[ChunkKey, ...]) -> None:
        self.number = number
        self.namespace = namespace
        self.keys = keys
        self.waiting: dict[Lease, None] = {}


class Lease:
    """Chunks that are leased, and chunks that the lease waits for.

    `waiting` maps the key of each chunk that is being promoted to its index in `slots`. Chunks
    behind it may be leased already, but are offered only when all before them are. While `lookups`
    are under way, the lease also waits for the place of the chunk behind the last slot. While it is
    `growing`, more of the requested chunks are added, piece by piece.
    """

    __slots__ = (
        "acked",
        "counted",
        "expected",
        "growing",
        "judged",
        "keys",
        "lease_id",
        "limited",
        "lookups",
        "namespace",
        "orphaned",
        "passed",
        "prefetch",
        "price",
        "session",
        "since",
        "skipped",
        "slots",
        "sources",
        "tail",
        "taken",
        "tried",
        "waiting",
    )

    def __init__(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace: NamespaceState,
        keys: Sequence[ChunkKey],
        *,
        tail: ChunkKey | None = None,
        prefetch: bool = False,
        since: float = 0.0,
        price: Price | None = None,
    ) -> None:
        self.session = session  # the id, because the object would form a cycle
        self.lease_id = lease_id
        self.since = since  # time of the request
        self.slots: list[Entry] = []
        self.sources = bytearray()  # per slot: 0 for memory, else the number of the tier
        self.waiting: dict[ChunkKey, int] = {}
        self.lookups: dict[Lookup, None] = {}
        self.growing = False
        self.namespace = namespace
        self.keys = keys  # requested chunks, until the lease is final
        self.tail = tail  # the requested tail behind them
        self.prefetch = prefetch  # without an owner: it pins no chunk for long
        self.passed = 0  # of a prefetch: chunks before its slots
        self.expected = False  # the last answer to its scheduler was not final
        self.limited = False  # cut short by a read limit: it continues when its reads have ended
        self.counted = 0  # number of its chunks in the statistics
        self.acked = 0  # bitmap of ranks whose copy ended
        self.orphaned = False  # its scheduler is gone: no further rank will learn of it
        self.price = price  # the time to compute its chunks; None: it reads whatever there is
        self.judged = 0  # bitmap of the tiers that were judged for it
        self.taken = 0  # chunks before this index are worth reading
        self.skipped = 0  # chunks in tiers that are not
        self.tried = False  # of a prefetch: it reads whatever there is

    @property
    def final(self) -> bool:
        """Whether the lease waits for nothing."""
        return not self.waiting and not self.lookups and not self.growing

    def answer(self, *, corrupt: bool) -> Acquisition:
        """Return the state of the lease: the prefix that can be loaded, and the pending chunks.

        `corrupt` says that some chunk in use is corrupt; the prefix then ends before such a chunk.
        """
        ready = min(self.waiting.values()) if self.waiting else len(self.slots)
        # Copying a long list touches all its entries. The list of a final lease never changes.
        slots = self.slots if self.final and ready == len(self.slots) else self.slots[:ready]
        if corrupt:
            ready = next((at for at, entry in enumerate(slots) if entry.corrupt), ready)
        awaited = len(self.waiting) + bool(self.lookups) + self.growing
        prefix = Prefix(slots, bytes(self.sources[:ready]))
        return Acquisition(self.lease_id, prefix, awaited, self.skipped)


class Member:
    """One process of a session: its scheduler (`rank` is None) or a rank.

    `shard_mask` is the bitmap of the shards that a rank has of every chunk of its namespace.
    `ready` is the part of each segment that it can copy to and from; it only grows.
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
        self.open: dict[int, Entry] = {}  # chunks that it writes, by generation
        self.void: dict[int, Entry] = {}  # such chunks from before it was lost, given up


class Session:
    """One engine instance.

    `reach` is the part of the arena that all its ranks can copy to and from; None is all of it.
    """

    __slots__ = ("gone_ranks", "id", "leases", "members", "own", "reach", "world_size")

    def __init__(self, session: SessionId, world_size: int) -> None:
        self.id = session
        self.world_size = world_size
        self.members: dict[MemberId, Member] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.own = False  # of the service itself, without members
        self.gone_ranks = 0  # bitmap of former ranks that are proven gone
        self.reach: Reach | None = {}

    def measure(self, usable: Reach) -> None:
        """Compute the part of the usable arena that all ranks can reach."""
        if self.own:
            self.reach = None
            return
        ranks = [member for member in self.members.values() if member.rank is not None]
        if len({member.rank for member in ranks}) < self.world_size:
            self.reach = {}
            return
        reach = {at: min(member.ready.get(at, 0) for member in ranks) for at in usable}
        self.reach = None if all(reach[at] >= usable[at] for at in usable) else reach

    def ended(self, lease: Lease) -> bool:
        """Return whether no rank can still copy from the lease, or will be told to."""
        awaited = (1 << self.world_size) - 1 & ~lease.acked & ~self.gone_ranks
        if lease.orphaned:
            awaited &= self._present_ranks()
        return not awaited

    def _present_ranks(self) -> int:
        return sum(1 << m.rank for m in self.members.values() if m.rank is not None)


class Sessions:
    """All sessions and members. A session is removed when the last of its members is gone.

    `usable` is a live view of the bytes of each segment that may be allocated.
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
        """Add a member, or restore one that was lost; see `Catalog.attach`."""
        known = self.members.get(member)
        if known is not None:
            if (known.session, known.rank) != (session, rank):
                raise KVHavenError(
                    f"member {member} is rank {known.rank} of session {known.session}; it cannot "
                    f"become rank {rank} of session {session}. Use a new member id."
                )
            if (known.namespace, known.shard_mask) != (namespace, shard_mask):
                raise KVHavenError(
                    f"member {member} held shards {known.shard_mask:b} of namespace "
                    f"{known.namespace.hex()}; it cannot reattach with shards {shard_mask:b} of "
                    f"namespace {namespace.hex()}"
                )
            known.lost = False
            return
        if world_size < 1 or (rank is not None and not 0 <= rank < world_size):
            raise KVHavenError(
                f"rank {rank} of session {session} is out of range for a world of {world_size}"
            )
        home = self.sessions.get(session)
        if home is None:
            home = Session(session, world_size)
        if home.world_size != world_size:
            raise KVHavenError(
                f"session {session} has {home.world_size} ranks, but member {member} expects "
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

    def add_own(self, session: SessionId) -> None:
        """Add a session of the service itself; it is never removed."""
        if session not in self.sessions:
            home = self.sessions[session] = Session(session, 1)
            home.own = True
            home.measure(self._usable)

    def ready(self, member: Member, segment: int, usable_bytes: int) -> None:
        """Record the part of a segment that a rank can copy to and from; see `Catalog.ready`."""
        member.ready[segment] = max(usable_bytes, member.ready.get(segment, 0))
        self.sessions[member.session].measure(self._usable)

    def grew(self) -> None:
        """Record that more of the arena may be allocated, which no rank is ready for yet."""
        for home in self.sessions.values():
            home.measure(self._usable)

    def reach(self, session: SessionId) -> Reach | None:
        """Return the reach of a session's ranks; None: all of the arena, or an unknown session."""
        home = self.sessions.get(session)
        return home.reach if home is not None else None

    def session(self, session: SessionId) -> Session:
        """Return a session. Raises `KVHavenError` if it is not attached."""
        known = self.sessions.get(session)
        if known is None:
            raise KVHavenError(f"session {session} is not attached; attach its members first")
        return known

    def rank(self, member: MemberId) -> Member:
        """Return a connected rank. Raises `KVHavenError` for any other member."""
        known = self.members.get(member)
        if known is None or known.lost:
            raise KVHavenError(f"member {member} is not attached; attach it first")
        if known.rank is None:
            raise KVHavenError(f"member {member} is a scheduler; only ranks write and load chunks")
        return known

    def gone(self, member: Member) -> Session:
        """Remove a member that is proven gone, and return its session."""
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
        """Yield the members whose connection closed and that are not proven gone."""
        return (m for m in self.members.values() if m.lost)


def _require_agreement(newcomer: Member, other: Member) -> None:
    """Refuse a member that contradicts another one of its session."""
    common = other.shard_mask & newcomer.shard_mask
    if other.namespace != newcomer.namespace or (
        common and newcomer.shard_mask != other.shard_mask
    ):
        raise KVHavenError(
            f"member {newcomer.id} holds shards {newcomer.shard_mask:b} of namespace "
            f"{newcomer.namespace.hex()}, member {other.id} of the same session holds shards "
            f"{other.shard_mask:b} of {other.namespace.hex()}; ranks of a session have one "
            "namespace, and hold the same shards or none in common"
        )
    if other.rank == newcomer.rank and not other.lost:
        role = "a scheduler" if other.rank is None else f"a rank {other.rank}"
        raise KVHavenError(
            f"session {other.session} has {role} already, member {other.id}; member {newcomer.id} "
            "is refused while that one is connected"
        )
