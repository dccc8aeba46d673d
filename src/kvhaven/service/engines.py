# SPDX-License-Identifier: Apache-2.0
"""Connections and counters of attached engines (sessions) and their processes (members)."""

import itertools
import re
import time
from collections.abc import Iterator, Mapping
from typing import Final

from kvhaven.catalog.actions import MemberId, SessionId
from kvhaven.catalog.sessions import Member, Session
from kvhaven.protocol import ModelState
from kvhaven.service.connection import Connection
from kvhaven.types import ChunkKey

_TOKENS: Final = re.compile("[0-9]{1,9}")


class AttachedProcess:
    """One process of an engine. It outlives its connection, and may attach again on another one.

    `member` is its state in the catalog, which only the catalog changes. `lock_byte` is the byte of
    the arena's segments that the process locks while it maps them. `handled` is the number of the
    last reliable message that was handled, so that repeated ones are dropped. `granted` has the
    reservations that are neither committed nor aborted, by generation.
    """

    def __init__(self, member: Member, engine: "AttachedEngine", lock_byte: int) -> None:
        self.member = member
        self.engine = engine
        self.lock_byte = lock_byte
        self.handled = 0
        self.unacknowledged = False
        self.granted: dict[int, ChunkKey] = {}
        self.model = ModelState()
        self.connection: Connection | None = None
        self.settings_taken = 0
        """Generation of the changed settings that a scheduler applies."""

    @property
    def id(self) -> MemberId:
        """Id of the member."""
        return self.member.id

    @property
    def rank(self) -> int | None:
        """Rank of the member; None for a scheduler."""
        return self.member.rank

    @property
    def session(self) -> Session:
        """Session of the member."""
        return self.engine.session


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
    """What the service adds to a session of the catalog: counters, and the connected processes.

    `processes` are those of the session's members, by rank (None: the scheduler). `since` is the
    time of the first attach, in seconds since 1970.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.since = time.time()
        self.traffic = Traffic()
        self.processes: dict[int | None, AttachedProcess] = {}
        further = session.fields.get("part", "full") != "full"
        self.chunk_tokens = 0 if further else chunk_tokens_of(session.fields) or 0
        """Tokens of a chunk, for accounts; 0 if the engine does not name them.

        The tokens of a model with several parts count with its first part."""

    @property
    def scheduler(self) -> AttachedProcess | None:
        """The process of the scheduler."""
        return self.processes.get(None)


class AttachedEngines:
    """Registry of attached engines and their processes, by the catalog's sessions and members."""

    def __init__(self) -> None:
        self._engines: dict[SessionId, AttachedEngine] = {}
        self._processes: dict[MemberId, AttachedProcess] = {}
        self._lock_bytes = itertools.count(1)
        self.ever = False
        """Whether an engine has attached since the service started."""

    def __iter__(self) -> Iterator[AttachedEngine]:
        return iter(tuple(self._engines.values()))

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, id_: SessionId) -> AttachedEngine | None:
        """Return an engine, or None if its session has no members left."""
        return self._engines.get(id_)

    def process(self, id_: MemberId) -> AttachedProcess | None:
        """Return the process of a member, or None if it is not attached."""
        return self._processes.get(id_)

    def attached(self, session: Session, id_: MemberId) -> AttachedProcess:
        """Return the process of a member that has attached, for the first time or again."""
        known = self._processes.get(id_)
        if known is not None:
            return known
        self.ever = True
        engine = self._engines.get(session.id)
        if engine is None:
            engine = self._engines[session.id] = AttachedEngine(session)
        process = AttachedProcess(session.members[id_], engine, next(self._lock_bytes))
        self._processes[id_] = engine.processes[process.rank] = process
        return process

    def remove(self, process: AttachedProcess) -> None:
        """Remove a process that is proven gone; the last one removes its engine."""
        del self._processes[process.id], process.engine.processes[process.rank]
        if not process.engine.processes:
            del self._engines[process.session.id]


def chunk_tokens_of(fields: Mapping[str, str]) -> int | None:
    """Return the tokens of a chunk, as the fields of a namespace name them."""
    return tokens_in(fields, "chunk_size")


def tokens_in(fields: Mapping[str, str], name: str) -> int | None:
    """Return the number of tokens in a field of a namespace; None if it has no plausible one."""
    size = fields.get(name, "")
    return int(size) if _TOKENS.fullmatch(size) else None
