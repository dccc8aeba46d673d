# SPDX-License-Identifier: Apache-2.0
"""Sessions, their members, and the leases they hold."""

from collections.abc import Iterator, Sequence

from kvhaven.catalog.actions import (
    Acquisition,
    Leased,
    MemberId,
    SessionId,
    Source,
    Ticket,
)
from kvhaven.catalog.entries import Entry, NamespaceState
from kvhaven.catalog.presence import Lookup
from kvhaven.errors import KVHavenError
from kvhaven.types import ChunkKey, NamespaceDigest


class Lease:
    """What one ticket holds: chunks that are leased, and chunks it waits for.

    `waiting` maps the key of each chunk that is being promoted to its index in `slots`; the
    chunks in between are leased already, but are offered only when all before them are. While
    `lookups` are under way, it also waits to hear where the chunk behind the last slot is.
    """

    __slots__ = (
        "acked",
        "counted",
        "keys",
        "limited",
        "lookups",
        "namespace",
        "orphaned",
        "session",
        "slots",
        "sources",
        "ticket",
        "waiting",
    )

    def __init__(self, session: SessionId, ticket: Ticket) -> None:
        self.session = session  # its name: the object would make a cycle
        self.ticket = ticket
        self.slots: list[Entry] = []
        self.sources: list[Source] = []
        self.waiting: dict[ChunkKey, int] = {}
        self.lookups: list[Lookup] = []
        self.namespace: NamespaceState | None = None
        self.keys: Sequence[ChunkKey] = ()  # what was asked for, as long as it is not final
        self.limited = False  # it goes on when what it waits for has come: too much at a time
        self.counted = 0  # how many of these are in the figures
        self.acked = 0  # ranks whose copy ended
        self.orphaned = False  # its scheduler is gone: nobody will hand it to other ranks

    @property
    def final(self) -> bool:
        """Whether it waits for nothing."""
        return not self.waiting and not self.lookups

    def answer(self) -> Acquisition:
        """Return the state of the lease: the prefix that can be loaded, and what is awaited."""
        ready = min(self.waiting.values()) if self.waiting else len(self.slots)
        chunks = []
        for entry, source in zip(self.slots[:ready], self.sources, strict=False):
            if entry.corrupt:
                break
            chunks.append(Leased(entry.key, entry.extent, source))
        awaited = len(self.waiting) + bool(self.lookups)
        return Acquisition(self.ticket, tuple(chunks), awaited)


class Member:
    """One process of a session: its scheduler (`rank` is None) or a rank.

    `holds` is the bitmap of the shards that a rank has of every chunk of its namespace.
    """

    __slots__ = ("holds", "id", "lost", "namespace", "open", "rank", "session")

    def __init__(
        self,
        member: MemberId,
        session: SessionId,
        rank: int | None,
        namespace: NamespaceDigest,
        holds: int,
    ) -> None:
        self.id = member
        self.session = session
        self.rank = rank
        self.namespace = namespace
        self.holds = holds
        self.lost = False
        self.open: dict[int, Entry] = {}  # by generation: the chunks it may be writing to


class Session:
    """One engine instance."""

    __slots__ = ("gone_ranks", "id", "leases", "members", "world")

    def __init__(self, session: SessionId, world: int) -> None:
        self.id = session
        self.world = world
        self.members: dict[MemberId, Member] = {}
        self.leases: dict[Ticket, Lease] = {}
        self.gone_ranks = 0  # bitmap of ranks that were here and are proven gone

    def ended(self, lease: Lease) -> bool:
        """Whether no rank can still copy from the lease, or will be told to."""
        awaited = (1 << self.world) - 1 & ~lease.acked & ~self.gone_ranks
        if lease.orphaned:
            awaited &= self._present_ranks()
        return not awaited

    def _present_ranks(self) -> int:
        return sum(1 << m.rank for m in self.members.values() if m.rank is not None)


class Sessions:
    """Who is here. A session is forgotten when the last of its members is gone."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self.members: dict[MemberId, Member] = {}

    def attach(
        self,
        session: SessionId,
        member: MemberId,
        rank: int | None,
        namespace: NamespaceDigest,
        world: int,
        holds: int,
    ) -> None:
        """Take in a member, or take one back that was lost; see `Catalog.attach`."""
        known = self.members.get(member)
        if known is not None:
            if (known.session, known.rank) != (session, rank):
                raise KVHavenError(
                    f"member {member} is rank {known.rank} of session {known.session}; it cannot "
                    f"become rank {rank} of session {session}"
                )
            if (known.namespace, known.holds) != (namespace, holds):
                raise KVHavenError(
                    f"member {member} held shards {known.holds:b} of namespace "
                    f"{known.namespace.hex()}; it cannot come back with {holds:b} of "
                    f"{namespace.hex()}"
                )
            known.lost = False
            return
        if world < 1 or (rank is not None and not 0 <= rank < world):
            raise KVHavenError(f"rank {rank} of session {session} is not within a world of {world}")
        home = self.sessions.get(session)
        if home is None:
            home = Session(session, world)
        if home.world != world:
            raise KVHavenError(
                f"session {session} has {home.world} ranks, but member {member} says {world}"
            )
        newcomer = Member(member, session, rank, namespace, holds)
        for other in home.members.values():
            _require_agreement(newcomer, other)
        self.sessions[session] = home
        self.members[member] = home.members[member] = newcomer
        if rank is not None:
            home.gone_ranks &= ~(1 << rank)

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
        if not home.members:
            del self.sessions[home.id]
        return home

    def lost(self) -> Iterator[Member]:
        """Yield the members whose connection closed and who are not proven gone."""
        return (m for m in self.members.values() if m.lost)


def _require_agreement(newcomer: Member, other: Member) -> None:
    """Refuse a member whom another one of its session contradicts."""
    common = other.holds & newcomer.holds
    if other.namespace != newcomer.namespace or (common and newcomer.holds != other.holds):
        raise KVHavenError(
            f"member {newcomer.id} holds shards {newcomer.holds:b} of namespace "
            f"{newcomer.namespace.hex()}, {other.id} of the same session {other.holds:b} of "
            f"{other.namespace.hex()}; two ranks hold the same shards or none in common"
        )
    if other.rank == newcomer.rank and not other.lost:
        role = "a scheduler" if other.rank is None else f"a rank {other.rank}"
        raise KVHavenError(
            f"session {other.session} has {role} already, member {other.id}; a second one, "
            f"{newcomer.id}, is refused while that one is connected"
        )
