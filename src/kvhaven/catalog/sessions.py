# SPDX-License-Identifier: Apache-2.0
"""Sessions from their first rank's attach on, their members, and the leases they hold."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from kvhaven.catalog.actions import (
    Acquisition,
    LeaseId,
    MemberId,
    Prefix,
    SessionId,
)
from kvhaven.catalog.allocation import Reach
from kvhaven.catalog.entries import Entry, NamespaceState
from kvhaven.catalog.shards import Holdings, holdings, require_shards, united
from kvhaven.catalog.worth import Price
from kvhaven.errors import IncompleteEngineError, KVHavenError
from kvhaven.keys import difference, differing_fields, of_content
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, NamespaceDigest, Shard, ShardTable

_MOST_TEXT: Final = 1 << 19
"""Most characters of a namespace's fields, which are kept until the service ends."""


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


class RankDescription(msgspec.Struct, frozen=True):
    """A rank's description of its engine and of the shards that it has of every chunk.

    `fields` are those of the namespace. `shared` is whether ranks of the engine may hold the same
    shards, with equal bytes.
    """

    world_size: int
    namespace: NamespaceDigest
    fields: dict[str, str]
    shards: tuple[Shard, ...]
    shared: bool = False


class Member:
    """One process of a session: its scheduler (`rank` is None) or a rank.

    `shard_mask` is the bitmap of the shards that a rank has of every chunk of its namespace; 0
    until the session is complete. `ready` is the part of each segment that it can copy to and from;
    it only grows.
    """

    __slots__ = ("id", "lost", "open", "rank", "ready", "session", "shard_mask", "void")

    def __init__(self, member: MemberId, session: SessionId, rank: int | None) -> None:
        self.id = member
        self.session = session
        self.rank = rank
        self.shard_mask = 0
        self.lost = False
        self.ready: dict[int, int] = {}  # by segment, in bytes
        self.open: dict[int, Entry] = {}  # chunks that it writes, by generation
        self.void: dict[int, Entry] = {}  # such chunks from before it was lost, given up

    @property
    def role(self) -> str:
        """Name of its role for logs and status."""
        return "scheduler" if self.rank is None else f"rank {self.rank}"


class Session:
    """One engine instance. It is complete when all its ranks have attached and agree.

    `engine` is the engine's id, and `first` the description by its first rank. `members` are those
    that are not proven gone. `shards` maps each rank to its shards, and `holders` each rank (None:
    the scheduler) to its process, also after the process is gone: only the same process can attach
    in that role again. `namespace` and `holdings` are None until the session is complete. `reach`
    is the part of the arena that all its ranks can copy to and from; None is all of it.
    """

    __slots__ = (
        "digest",
        "engine",
        "fields",
        "gone_ranks",
        "holders",
        "holdings",
        "id",
        "leases",
        "members",
        "namespace",
        "own",
        "reach",
        "shards",
        "shared",
        "world_size",
    )

    def __init__(self, session: SessionId, engine: str, first: RankDescription) -> None:
        self.id = session
        self.engine = engine
        self.world_size = first.world_size
        self.digest = first.namespace
        self.fields = first.fields
        self.shared = first.shared
        self.shards: dict[int, tuple[Shard, ...]] = {}
        self.holders: dict[int | None, MemberId] = {}
        self.namespace: Namespace | None = None
        self.holdings: Holdings | None = None
        self.members: dict[MemberId, Member] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.own = False  # of the service itself, without members
        self.gone_ranks = 0  # bitmap of former ranks that are proven gone
        self.reach: Reach | None = {}

    @property
    def described(self) -> Namespace:
        """The namespace of a complete session."""
        assert self.namespace is not None, "not all ranks have attached"
        return self.namespace

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each rank's first shard in an extent, in a complete session."""
        assert self.holdings is not None, "not all ranks have attached"
        return self.holdings.offsets

    def rank_bytes(self, rank: int) -> int:
        """Return the bytes of a chunk that a rank loads and saves."""
        return sum(shard.payload_bytes for shard in self.shards[rank])

    def member_as(self, rank: int | None) -> Member | None:
        """Return the member in a role that is not proven gone."""
        return next((m for m in self.members.values() if m.rank == rank), None)

    def complete(self, namespace: Namespace) -> None:
        """Record that all ranks have attached; `namespace` has the shards of all of them."""
        self.namespace = namespace
        self.holdings = holdings(self.shards, namespace.table)
        for member in self.members.values():
            if member.rank is not None:
                member.shard_mask = self.holdings.bitmaps[member.rank]

    def measure(self, usable: Reach) -> None:
        """Compute the part of the usable arena that all ranks can reach."""
        if self.own:
            self.reach = None
            return
        ranks = [member for member in self.members.values() if member.rank is not None]
        if len(ranks) < self.world_size:
            self.reach = {}
            return
        reach = {at: min(member.ready.get(at, 0) for member in ranks) for at in usable}
        self.reach = None if all(reach[at] >= usable[at] for at in usable) else reach

    def ended(self, lease: Lease) -> bool:
        """Return whether no rank can still copy from the lease, or will be told to."""
        return not (1 << self.world_size) - 1 & ~lease.acked & ~self.gone_ranks


class Sessions:
    """All sessions and members. A session is removed when the last of its members is gone.

    An engine that restarts under its old id gets a new session, even while members of the old
    session are lost but not yet proven gone. `usable` is a live view of the bytes of each segment
    that may be allocated. `register` is called with the namespace of a session that becomes
    complete, and raises `KVHavenError` to refuse it.
    """

    def __init__(self, usable: Reach, register: Callable[[Namespace], None]) -> None:
        self._usable = usable
        self._register = register
        self._latest: dict[str, Session] = {}
        self._begun = 0
        self.sessions: dict[SessionId, Session] = {}
        self.members: dict[MemberId, Member] = {}

    def known(
        self, engine: str, member: MemberId, rank: int | None, description: RankDescription | None
    ) -> Member | None:
        """Return a member that attaches again and is not proven gone.

        Raises `KVHavenError` if it was another rank, or one with other KV: its chunks would get the
        names of what it was.
        """
        known = self.members.get(member)
        if known is None:
            return None
        if known.rank != rank:
            raise KVHavenError(
                f"process {member} is attached as {known.role} and cannot attach in another role"
            )
        home = self.sessions[known.session]
        if home.engine != engine:
            raise KVHavenError(
                f"process {member} is attached to engine {home.id} and cannot attach to {engine}"
            )
        if rank is not None and description is not None:
            _require_agreement(home, rank, description)
        return known

    def add_rank(
        self, engine: str, member: MemberId, rank: int, description: RankDescription
    ) -> Session:
        """Add a rank that is not known yet; see `Catalog.attach_rank`."""
        if not 0 <= rank < description.world_size:
            raise KVHavenError(f"rank {rank} is not in 0..{description.world_size - 1}")
        require_shards(rank, description.shards)
        text = sum(len(name) + len(value) for name, value in description.fields.items())
        if text > _MOST_TEXT:
            raise KVHavenError(
                f"the fields of rank {rank}'s namespace have {text} characters; "
                f"at most {_MOST_TEXT} are allowed"
            )
        home = self._latest.get(engine)
        if home is None or _is_over(home, member, rank):
            home = Session(SessionId(f"{engine}#{self._begun + 1}"), engine, description)
        if home.member_as(rank) is not None:
            raise KVHavenError(
                f"rank {rank} of engine {engine} is attached already; "
                "give each engine its own engine_id"
            )
        _require_agreement(home, rank, description)
        shards = home.shards | {rank: description.shards}
        namespace = Namespace(home.digest, home.fields, united(shards, shared=home.shared))
        complete = len(shards) == home.world_size
        if complete:
            self._register(namespace)
        # Nothing is refused from here on.
        if home.id not in self.sessions:
            self._begun += 1
            self.sessions[home.id] = self._latest[engine] = home
        home.shards = shards
        self._add(home, member, rank)
        home.gone_ranks &= ~(1 << rank)
        if complete:
            home.complete(namespace)
        home.measure(self._usable)
        return home

    def add_scheduler(self, engine: str, member: MemberId, world_size: int) -> Session | None:
        """Add a scheduler that is not known yet; see `Catalog.attach_scheduler`."""
        home = self._latest.get(engine)
        if home is None or home.namespace is None:
            return None
        if home.holders.get(None, member) != member:
            scheduler = home.member_as(None)
            if scheduler is None or scheduler.lost:
                return None  # that engine has ended; the ranks of the new one are still missing
            raise KVHavenError(
                f"engine {engine} has a scheduler already; several independent "
                "schedulers over one set of ranks are not supported"
            )
        if home.world_size != world_size:
            raise KVHavenError(
                f"the scheduler of engine {engine} expects {world_size} ranks, "
                f"but its ranks attached with world_size {home.world_size}"
            )
        self._add(home, member, None)
        return home

    def add_own(self, session: SessionId) -> None:
        """Add a session of the service itself; it is never removed."""
        if session not in self.sessions:
            nothing = RankDescription(1, NamespaceDigest(b""), {}, ())
            home = self.sessions[session] = Session(session, "", nothing)
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
        """Return a connected rank of a complete session.

        Raises `KVHavenError` for any other member.
        """
        known = self.members.get(member)
        if known is None or known.lost:
            raise KVHavenError(f"member {member} is not attached; attach it first")
        if known.rank is None:
            raise KVHavenError(f"member {member} is a scheduler; only ranks write and load chunks")
        if self.sessions[known.session].namespace is None:
            raise KVHavenError(
                f"session {known.session} is not complete; attach its other ranks first"
            )
        return known

    def gone(self, member: Member) -> Session:
        """Remove a member that is proven gone, and return its session."""
        home = self.sessions[member.session]
        del self.members[member.id]
        del home.members[member.id]
        if member.rank is not None:
            home.gone_ranks |= 1 << member.rank
        home.measure(self._usable)
        if not home.members:
            del self.sessions[home.id]
            if self._latest.get(home.engine) is home:
                del self._latest[home.engine]
        return home

    def lost(self) -> Iterator[Member]:
        """Yield the members whose connection closed and that are not proven gone."""
        return (m for m in self.members.values() if m.lost)

    def _add(self, home: Session, member: MemberId, rank: int | None) -> None:
        self.members[member] = home.members[member] = Member(member, home.id, rank)
        home.holders[rank] = member


def _is_over(home: Session, member: MemberId, rank: int) -> bool:
    """Return whether a rank belongs to a new engine under the old engine's id."""
    holder_id = home.holders.get(rank)
    if holder_id == member:
        return False
    if all(each.lost for each in home.members.values()):
        return True
    if holder_id is None:
        return False
    holder = home.member_as(rank)
    return holder is None or holder.lost


def _require_agreement(home: Session, rank: int, description: RankDescription) -> None:
    """Refuse a rank that contradicts the other ranks of its session, or itself before."""
    if description.world_size != home.world_size:
        raise KVHavenError(
            f"rank {rank} attached with world_size {description.world_size}, "
            f"the other ranks with {home.world_size}; all ranks need the same"
        )
    if description.namespace != home.digest:
        differing = difference(home.fields, description.fields)
        names = differing_fields(home.fields, description.fields)
        # If only files differ, storage is faulty, or slow to show recent writes: a retry may help.
        files_only = bool(names) and all(map(of_content, names))
        raise (IncompleteEngineError if files_only else KVHavenError)(
            f"the namespace of rank {rank} differs from that of the other ranks in "
            f"{differing or 'its digest'}"
        )
    if description.shared != home.shared:
        raise KVHavenError(
            f"rank {rank} attached with shared={description.shared}, the other ranks with "
            f"shared={home.shared}; all ranks need the same"
        )
    known = home.shards.get(rank, description.shards)
    if description.shards != known:
        raise KVHavenError(
            f"rank {rank} held {ShardTable(known)} before; it cannot attach again with "
            f"{ShardTable(description.shards)}"
        )
