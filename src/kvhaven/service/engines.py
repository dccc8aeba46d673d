# SPDX-License-Identifier: Apache-2.0
"""Registry of attached engines (sessions) and their processes (members)."""

import itertools
import re
import time
from collections.abc import Iterator, Mapping
from typing import Final

from kvhaven.catalog.actions import MemberId, SessionId
from kvhaven.errors import IncompleteEngineError, KVHavenError
from kvhaven.keys import difference, differing_fields, of_content
from kvhaven.protocol import AttachRank, AttachScheduler, ModelState
from kvhaven.service.connection import Connection
from kvhaven.service.shards import Holdings, holdings, require_shards, united
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, NamespaceDigest, Shard, ShardTable

_MOST_TEXT: Final = 1 << 19
"""Most characters of a namespace's fields, which are kept until the service ends."""
_TOKENS: Final = re.compile("[0-9]{1,9}")


class AttachedProcess:
    """One process of an engine. It outlives its connection, and may attach again on another one.

    `lock_byte` is the byte of the arena's segments that the process locks while it maps them.
    `ready` is the number of bytes of the arena that a rank can copy to and from; 0 for a scheduler.
    `handled` is the number of the last reliable message that was handled, so that repeated ones are
    dropped. `granted` has the reservations that are neither committed nor aborted, by generation.
    """

    def __init__(
        self, id_: MemberId, session: "AttachedEngine", rank: int | None, lock_byte: int
    ) -> None:
        self.id = id_
        self.session = session
        self.rank = rank
        self.lock_byte = lock_byte
        self.ready = 0
        self.handled = 0
        self.unacknowledged = False
        self.granted: dict[int, ChunkKey] = {}
        self.model = ModelState()
        self.connection: Connection | None = None
        self.settings_taken = 0
        """Generation of the changed settings that a scheduler applies."""

    @property
    def role(self) -> str:
        """Name of its role for logs and status."""
        return "scheduler" if self.rank is None else f"rank {self.rank}"


class Traffic:
    """Counters of an engine since it attached.

    `asked_tokens` are those of prompts that were looked up, and `found_tokens` of these, in the
    engine itself, in memory or in a tier. Bytes are counted on each rank, those of loads when the
    rank has acknowledged them; the tail of a prompt counts as a chunk.
    """

    __slots__ = ("asked_tokens", "found_tokens", "loaded_bytes", "saved_bytes", "skipped_tokens")

    def __init__(self) -> None:
        self.asked_tokens = 0
        self.found_tokens = 0
        self.loaded_bytes = 0
        self.saved_bytes = 0
        self.skipped_tokens = 0


class AttachedEngine:
    """One engine (a session). It is complete when all its ranks have attached and agree.

    `holders` maps each rank (None: the scheduler) to its process, also after the process is gone:
    only the same process can attach in that role again. `since` is the time of the first attach, in
    seconds since 1970.
    """

    def __init__(self, id_: SessionId, first: AttachRank) -> None:
        self.id = id_
        self.since = time.time()
        self.traffic = Traffic()
        self.world_size = first.world_size
        self.digest = NamespaceDigest(first.namespace)
        self.fields = dict(first.fields)
        self.shared = first.shared
        self.shards: dict[int, tuple[Shard, ...]] = {}
        self.ranks: dict[int, AttachedProcess] = {}
        self.scheduler: AttachedProcess | None = None
        self.holders: dict[int | None, MemberId] = {}
        self.namespace: Namespace | None = None
        self._holdings: Holdings | None = None
        self.chunk_tokens = 0 if self.is_further_part else chunk_tokens_of(self.fields) or 0
        """Tokens of a chunk, for accounts; 0 if the engine does not name them.

        The tokens of a model with several parts count with its first part."""

    @property
    def is_further_part(self) -> bool:
        """Whether this holds a further part of a hybrid model's KV, such as its windows."""
        return self.fields.get("part", "full") != "full"

    @property
    def holdings(self) -> Holdings:
        """The shards of each rank, in a complete session."""
        assert self._holdings is not None, "not all ranks have attached"
        return self._holdings

    @property
    def table(self) -> ShardTable:
        """The shard table of a complete session."""
        return self.holdings.table

    @property
    def described(self) -> Namespace:
        """The namespace of a session that is complete, or was: it may be ending."""
        return Namespace(self.digest, self.fields, self.table)

    def bitmap(self, member: "AttachedProcess") -> int:
        """Return the shards of a member as bits of the table; 0 for a scheduler."""
        return 0 if member.rank is None else self.holdings.bitmaps[member.rank]

    def rank_bytes(self, rank: int) -> int:
        """Return the bytes of a chunk that a rank loads and saves."""
        return sum(shard.payload_bytes for shard in self.shards[rank])

    def complete(self, table: ShardTable) -> None:
        """Record that all ranks have attached; `table` has the shards of all of them."""
        self._holdings = holdings(self.shards, table)
        self.namespace = Namespace(self.digest, self.fields, table)

    @property
    def members(self) -> Iterator[AttachedProcess]:
        """The members that are not proven gone."""
        yield from self.ranks.values()
        if self.scheduler is not None:
            yield self.scheduler

    @property
    def connected(self) -> bool:
        """Whether any member has a connection."""
        return any(member.connection is not None for member in self.members)


class AttachedEngines:
    """Registry of sessions and members. Members belong to sessions by the engine's id.

    An engine that restarts under its old id gets a new session, even while members of the old
    session are lost but not yet proven gone.
    """

    def __init__(self) -> None:
        self._sessions: dict[SessionId, AttachedEngine] = {}
        self._latest: dict[str, AttachedEngine] = {}
        self._members: dict[MemberId, AttachedProcess] = {}
        self._lock_bytes = itertools.count(1)
        self.ever = 0
        """Number of sessions since the service started."""

    def __iter__(self) -> Iterator[AttachedEngine]:
        return iter(tuple(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, id_: SessionId) -> AttachedEngine | None:
        """Return a session, or None if it has no members left."""
        return self._sessions.get(id_)

    def lost_members(self) -> list[AttachedProcess]:
        """Return the members without a connection, which may still map the arena."""
        return [member for member in self._members.values() if member.connection is None]

    def known(self, message: AttachRank | AttachScheduler) -> AttachedProcess | None:
        """Return a member that attaches again and is not proven gone.

        Raises `KVHavenError` if it was another rank, or one with other KV: its chunks would get the
        names of what it was.
        """
        known = self._members.get(MemberId(message.member))
        if known is None:
            return None
        if known.rank != (message.rank if isinstance(message, AttachRank) else None):
            raise KVHavenError(
                f"process {message.member} is attached as {known.role} and cannot attach in "
                "another role"
            )
        if known.session.id.rpartition("#")[0] != message.session:
            raise KVHavenError(
                f"process {message.member} is attached to engine {known.session.id} and cannot "
                f"attach to {message.session}"
            )
        if isinstance(message, AttachRank):
            _require_agreement(known.session, message)
        return known

    def add_rank(self, message: AttachRank) -> AttachedProcess:
        """Register a rank that is not known yet.

        Raises `KVHavenError` if it disagrees with the session's other ranks
        (`IncompleteEngineError` if they differ only in the content of files), if its rank or its
        shards are not valid, if another process is attached as that rank, or if its namespace's
        fields are too long.
        """
        if not 0 <= message.rank < message.world_size:
            raise KVHavenError(f"rank {message.rank} is not in 0..{message.world_size - 1}")
        require_shards(message.rank, message.shards)
        text = sum(len(name) + len(value) for name, value in message.fields.items())
        if text > _MOST_TEXT:
            raise KVHavenError(
                f"the fields of rank {message.rank}'s namespace have {text} characters; "
                f"at most {_MOST_TEXT} are allowed"
            )
        session = self._session_for(message)
        if message.rank in session.ranks:
            raise KVHavenError(
                f"rank {message.rank} of engine {message.session} is attached already; "
                "give each engine its own engine_id"
            )
        _require_agreement(session, message)
        shards = session.shards | {message.rank: message.shards}
        table = united(shards, shared=session.shared)
        self._sessions[session.id] = self._latest[message.session] = session
        member = self._add(message.member, session, message.rank)
        session.ranks[message.rank] = member
        session.shards = shards
        if session.namespace is None and len(shards) == session.world_size:
            session.complete(table)
        return member

    def add_scheduler(self, message: AttachScheduler) -> AttachedProcess | None:
        """Register a scheduler that is not known yet; return None if ranks are still missing.

        Raises `KVHavenError` if its number of ranks differs or another scheduler is attached.
        """
        session = self._latest.get(message.session)
        if session is None or session.namespace is None:
            return None
        holder = session.holders.get(None)
        if holder not in {None, message.member}:
            if session.scheduler is None or session.scheduler.connection is None:
                return None  # that engine has ended; the ranks of the new one are still missing
            raise KVHavenError(
                f"engine {message.session} has a scheduler already; several independent "
                "schedulers over one set of ranks are not supported"
            )
        if session.world_size != message.world_size:
            raise KVHavenError(
                f"the scheduler of engine {message.session} expects {message.world_size} ranks, "
                f"but its ranks attached with world_size {session.world_size}"
            )
        session.scheduler = self._add(message.member, session, None)
        return session.scheduler

    def withdraw(self, member: AttachedProcess) -> None:
        """Remove a rank that was just added and cannot be served."""
        session = member.session
        assert member.rank is not None
        del session.shards[member.rank], session.holders[member.rank]
        session.namespace = None
        self.remove(member)

    def remove(self, member: AttachedProcess) -> None:
        """Remove a member that is proven gone; the last one removes its session."""
        session = member.session
        self._members.pop(member.id, None)
        if member.rank is None:
            session.scheduler = None
        else:
            session.ranks.pop(member.rank, None)
        if any(session.members):
            return
        self._sessions.pop(session.id, None)
        for engine, latest in tuple(self._latest.items()):
            if latest is session:
                del self._latest[engine]

    def _session_for(self, message: AttachRank) -> AttachedEngine:
        session = self._latest.get(message.session)
        if session is not None and not _is_over(session, message):
            return session
        self.ever += 1
        id_ = SessionId(f"{message.session}#{self.ever}")
        return AttachedEngine(id_, message)

    def _add(self, id_: str, session: AttachedEngine, rank: int | None) -> AttachedProcess:
        member = AttachedProcess(MemberId(id_), session, rank, next(self._lock_bytes))
        self._members[member.id] = member
        session.holders[rank] = member.id
        return member


def chunk_tokens_of(fields: Mapping[str, str]) -> int | None:
    """Return the tokens of a chunk, as the fields of a namespace name them."""
    return tokens_in(fields, "chunk_size")


def tokens_in(fields: Mapping[str, str], name: str) -> int | None:
    """Return the number of tokens in a field of a namespace; None if it has no plausible one."""
    size = fields.get(name, "")
    return int(size) if _TOKENS.fullmatch(size) else None


def _is_over(session: AttachedEngine, message: AttachRank) -> bool:
    """Return whether `message` comes from a new engine under the old engine's id."""
    if not session.connected:
        return True
    was = session.holders.get(message.rank)
    if was is None or was == message.member:
        return False
    holder = session.ranks.get(message.rank)
    return holder is None or holder.connection is None


def _require_agreement(session: AttachedEngine, message: AttachRank) -> None:
    if message.world_size != session.world_size:
        raise KVHavenError(
            f"rank {message.rank} attached with world_size {message.world_size}, "
            f"the other ranks with {session.world_size}; all ranks need the same"
        )
    if message.namespace != session.digest:
        differing = difference(session.fields, message.fields)
        names = differing_fields(session.fields, message.fields)
        # If only files differ, storage is faulty, or slow to show recent writes: a retry may help.
        files_only = bool(names) and all(map(of_content, names))
        raise (IncompleteEngineError if files_only else KVHavenError)(
            f"the namespace of rank {message.rank} differs from that of the other ranks in "
            f"{differing or 'its digest'}"
        )
    if message.shared != session.shared:
        raise KVHavenError(
            f"rank {message.rank} attached with shared={message.shared}, the other ranks with "
            f"shared={session.shared}; all ranks need the same"
        )
    known = session.shards.get(message.rank, message.shards)
    if message.shards != known:
        raise KVHavenError(
            f"rank {message.rank} held {ShardTable(known)} before; it cannot attach again with "
            f"{ShardTable(message.shards)}"
        )
