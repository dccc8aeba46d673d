# SPDX-License-Identifier: Apache-2.0
"""Who is attached: engines (sessions), their processes (members), and when these are gone."""

import itertools
import logging
from collections.abc import Iterator

from kvhaven.catalog.actions import MemberId, SessionId
from kvhaven.errors import KVHavenError
from kvhaven.protocol import AttachRank, AttachScheduler
from kvhaven.service.connection import Connection
from kvhaven.tiers.base import Namespace
from kvhaven.types import NamespaceDigest, Shard, ShardTable

logger = logging.getLogger(__name__)


class Member:
    """One process of an engine. It outlives its connection: it may come back on another.

    `lock_byte` is the byte of the arena's segments that it locks while it maps them.
    `handled` is the last reliable message that was handled, so that a repeated one is not;
    `admitted` says that the catalog knows the member.
    """

    def __init__(self, id_: MemberId, session: "Session", rank: int | None, lock_byte: int) -> None:
        self.id = id_
        self.session = session
        self.rank = rank
        self.lock_byte = lock_byte
        self.handled = 0
        self.unacknowledged = False
        self.admitted = False
        self.connection: Connection | None = None

    @property
    def role(self) -> str:
        """What people call it."""
        return "scheduler" if self.rank is None else f"rank {self.rank}"


class Session:
    """One engine: ready once every rank has said who it is and they all agree."""

    def __init__(
        self, id_: SessionId, world: int, namespace: bytes, fields: dict[str, str]
    ) -> None:
        self.id = id_
        self.world = world
        self.digest = NamespaceDigest(namespace)
        self.fields = fields
        self.shards: dict[int, Shard] = {}
        self.ranks: dict[int, Member] = {}
        self.scheduler: Member | None = None
        self.namespace: Namespace | None = None

    @property
    def table(self) -> ShardTable:
        """The shard table of a session that is ready."""
        assert self.namespace is not None, "asked before all ranks attached"
        return self.namespace.table

    @property
    def members(self) -> Iterator[Member]:
        """Everybody of this session who is not proven gone."""
        yield from self.ranks.values()
        if self.scheduler is not None:
            yield self.scheduler

    @property
    def connected(self) -> bool:
        """Whether any member has a connection."""
        return any(member.connection is not None for member in self.members)


class Sessions:
    """The registry. Members are matched to sessions by the engine's id.

    An engine that restarts under its old id gets a new session while the old one's members
    are lost but not yet proven gone.
    """

    def __init__(self) -> None:
        self._sessions: dict[SessionId, Session] = {}
        self._latest: dict[str, Session] = {}
        self._members: dict[MemberId, Member] = {}
        self._lock_bytes = itertools.count(1)
        self._incarnations = itertools.count(1)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def lost_members(self) -> list[Member]:
        """Members without a connection that may still map the arena."""
        return [member for member in self._members.values() if member.connection is None]

    def attach_rank(self, message: AttachRank, connection: Connection) -> Member:
        """Register a rank, or take back one that lost its connection.

        Raises `KVHavenError` when it disagrees with the session's other ranks, or when
        somebody else is that rank already.
        """
        if not 0 <= message.rank < message.world:
            raise KVHavenError(f"rank {message.rank} is not in 0..{message.world - 1}")
        known = self._members.get(MemberId(message.member))
        if known is not None:
            known.connection = connection
            return known
        session = self._session_for(message)
        holder = session.ranks.get(message.rank)
        if holder is not None:
            raise KVHavenError(
                f"rank {message.rank} of engine {message.session} is attached already; "
                "give each engine its own engine_id"
            )
        self._require_agreement(session, message)
        member = self._add(MemberId(message.member), session, message.rank, connection)
        session.ranks[message.rank] = member
        session.shards[message.rank] = message.shard
        if session.namespace is None and len(session.shards) == session.world:
            table = ShardTable(tuple(session.shards[rank] for rank in range(session.world)))
            session.namespace = Namespace(session.digest, session.fields, table)
        return member

    def attach_scheduler(self, message: AttachScheduler, connection: Connection) -> Member | None:
        """Register a scheduler, or take one back; None while its ranks have not come.

        Raises `KVHavenError` when the world's size differs or another scheduler is there.
        """
        known = self._members.get(MemberId(message.member))
        if known is not None:
            known.connection = connection
            return known
        session = self._latest.get(message.session)
        if session is None or session.namespace is None:
            return None
        if session.world != message.world:
            raise KVHavenError(
                f"the scheduler of engine {message.session} expects {message.world} ranks, "
                f"they say they are {session.world}"
            )
        if session.scheduler is not None:
            raise KVHavenError(
                f"engine {message.session} has a scheduler already; several independent "
                "schedulers over one set of ranks are not served"
            )
        session.scheduler = self._add(MemberId(message.member), session, None, connection)
        return session.scheduler

    def remove(self, member: Member) -> bool:
        """Forget a member that is proven gone; return whether its session ended with it."""
        session = member.session
        self._members.pop(member.id, None)
        if member.rank is None:
            session.scheduler = None
        else:
            session.ranks.pop(member.rank, None)
        if any(session.members):
            return False
        self._sessions.pop(session.id, None)
        for engine, latest in tuple(self._latest.items()):
            if latest is session:
                del self._latest[engine]
        return True

    def _session_for(self, message: AttachRank) -> Session:
        session = self._latest.get(message.session)
        if session is not None and not self._is_over(session, message):
            return session
        id_ = SessionId(f"{message.session}#{next(self._incarnations)}")
        session = Session(id_, message.world, message.namespace, dict(message.fields))
        self._sessions[id_] = session
        self._latest[message.session] = session
        return session

    @staticmethod
    def _is_over(session: Session, message: AttachRank) -> bool:
        """Whether `message` comes from a new engine under the old engine's id."""
        holder = session.ranks.get(message.rank)
        return not session.connected or (holder is not None and holder.connection is None)

    @staticmethod
    def _require_agreement(session: Session, message: AttachRank) -> None:
        if message.world != session.world:
            raise KVHavenError(
                f"rank {message.rank} says the engine has {message.world} ranks, "
                f"the others say {session.world}"
            )
        if message.namespace != session.digest:
            differing = sorted(
                name
                for name in session.fields.keys() | message.fields.keys()
                if session.fields.get(name) != message.fields.get(name)
            )
            raise KVHavenError(
                f"rank {message.rank} computes another KV than the other ranks: "
                f"they differ in {', '.join(differing) or 'the namespace'}"
            )

    def _add(
        self, id_: MemberId, session: Session, rank: int | None, connection: Connection
    ) -> Member:
        member = Member(id_, session, rank, next(self._lock_bytes))
        member.connection = connection
        self._members[id_] = member
        return member
