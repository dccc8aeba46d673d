# SPDX-License-Identifier: Apache-2.0
"""Membership: handshakes of connections, their loss, and members that are proven gone."""

import asyncio
import logging
import os
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple

from kvhaven.catalog.actions import SessionId
from kvhaven.errors import IncompleteEngineError, KVHavenError, ProtocolError
from kvhaven.keys import difference, differing_fields
from kvhaven.protocol import (
    OBSERVE,
    STEER,
    TENANTS,
    VERSION,
    Attached,
    AttachRank,
    AttachScheduler,
    ClientMessage,
    Grown,
    Hello,
    ModelState,
    RankModel,
    Ready,
    Refused,
    Welcome,
)
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.service.connection import Connection
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngines, AttachedProcess
from kvhaven.service.runtime_settings import RuntimeSettings
from kvhaven.service.saves import Saves
from kvhaven.service.turns import Job
from kvhaven.tiers.base import Namespace

FEATURES: Final = TENANTS | OBSERVE | STEER
_COMPARED: Final = 8
"""Most namespaces of a model that a new one is compared with."""

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A scheduler whose ranks have not all attached yet."""

    message: AttachScheduler
    timer: asyncio.TimerHandle


class DrainingError(KVHavenError):
    """Refusal of an engine while the service is draining."""


class Membership:
    """Assignment of connections to members.

    A member has one connection at a time. If it attaches on a new one, the old one is closed
    first, and messages in its buffers are never read: the client sends them again, or has given
    them up.
    """

    def __init__(
        self,
        service: str,
        driver: Driver,
        sessions: AttachedEngines,
        arena: Arena,
        saves: Saves,
        settings: RuntimeSettings,
    ) -> None:
        self._service = service
        self._driver = driver
        self._sessions = sessions
        self._arena = arena
        self._saves = saves
        self._settings = settings
        self._members: dict[Connection, AttachedProcess] = {}
        self._waiting: dict[Connection, _Waiting] = {}
        self.draining = False
        """Refuse engines that are not attached yet."""

    def member(self, connection: Connection) -> AttachedProcess | None:
        """Return the member of a connection; None before it has attached."""
        return self._members.get(connection)

    def greet(self, connection: Connection, message: ClientMessage) -> None:
        """Answer the first message of a connection.

        Raises `ProtocolError`, which closes the connection, if it is not a Hello, or if its wire
        version differs; in that case a refusal is sent first.
        """
        if not isinstance(message, Hello):
            raise ProtocolError(f"the first message was {type(message).__name__}; expected Hello")
        if message.version != VERSION:
            reason = f"wire version {message.version} was offered; this service speaks {VERSION}"
            connection.send(Refused(0, f"{reason}: install the same KVHaven on both sides"))
            raise ProtocolError(reason)
        connection.greet()
        connection.send(Welcome(self._service, os.getpid(), features=FEATURES))

    def attach(self, connection: Connection, message: AttachRank | AttachScheduler) -> None:
        """Attach a process, or refuse it with the reason."""
        if connection in self._members or connection in self._waiting:
            raise ProtocolError("a second attach message on a connection; expected one")
        try:
            if isinstance(message, AttachRank):
                self._attach_rank(connection, message)
            else:
                self._attach_scheduler(connection, message)
        except KVHavenError as error:
            logger.warning("refused a process of engine %s: %s", message.session, error)
            passing = isinstance(error, IncompleteEngineError | DrainingError)
            connection.send(Refused(message.id, str(error), passing))

    def announce_growth(self) -> Job:
        """Send the allocated size of the arena to all ranks, one per piece of the job."""
        for connection, member in tuple(self._members.items()):
            if member.rank is not None:
                # As it is now: of two jobs, the later one must not be contradicted by the other.
                connection.send(Grown(SEGMENT, self._arena.usable))
            yield

    def ready(self, member: AttachedProcess, message: Ready) -> None:
        """Record the part of the arena that a rank can copy to and from.

        A message about an older mapping is ignored: the service considered that rank gone, and the
        rank is mapping the arena again. Raises `ProtocolError` for a scheduler.
        """
        if member.rank is None:
            raise ProtocolError("a scheduler sent Ready; only ranks copy chunks")
        if message.lock_byte == member.lock_byte and message.segment == SEGMENT:
            member.ready = max(member.ready, message.usable)
            self._driver.catalog.ready(member.id, SEGMENT, member.ready)

    def model_changed(self, member: AttachedProcess, model: ModelState) -> None:
        """Record the state of a rank's model and send it to the engine's scheduler.

        Raises `ProtocolError` for a scheduler.
        """
        if member.rank is None:
            raise ProtocolError("a scheduler sent ModelChanged; only ranks have a model")
        member.model = model
        scheduler = member.session.scheduler
        if scheduler is not None and scheduler.connection is not None:
            scheduler.connection.send(RankModel(member.rank, model))

    def closed(self, connection: Connection) -> None:
        """Record that a connection closed, which proves nothing about its process."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
        member = self._members.pop(connection, None)
        if member is not None:
            member.connection = None
            with self._driver.event() as catalog:
                catalog.lost(member.id)
            logger.info("%s of %s disconnected", member.role, member.session.id)

    def end_quarantines(self) -> Job:
        """Remove lost members whose mappings are proven gone, one per piece of the job."""
        for member in self._sessions.lost_members():
            lost = member.connection is None  # it may have attached again since the job began
            if lost and not self._arena.is_mapped(member.lock_byte):
                with self._driver.event() as catalog:
                    catalog.gone(member.id)
                self._sessions.remove(member)
                logger.info("%s of %s is gone", member.role, member.session.id)
            yield

    # --- ranks ------------------------------------------------------------------------------

    def _attach_rank(self, connection: Connection, message: AttachRank) -> None:
        member = self._sessions.known(message)
        if member is None:
            if self.draining:
                raise DrainingError("the service is draining: it accepts no engine")
            member = self._sessions.add_rank(message)
            if member.session.namespace is not None:
                self._admit_session(member)
        self._take(connection, member)
        self._saves.returned(member, message.holding)
        connection.send(
            Attached(message.id, self._arena.describe(member.lock_byte)), self._arena.descriptors
        )
        self.model_changed(member, message.model)
        if member.session.namespace is None:
            return
        for scheduler, waiting in tuple(self._waiting.items()):
            if not scheduler.closed and waiting.message.session == message.session:
                del self._waiting[scheduler]
                waiting.timer.cancel()
                self.attach(scheduler, waiting.message)

    def _admit_session(self, newcomer: AttachedProcess) -> None:
        """Attach the ranks of a complete session to the catalog.

        Raises `KVHavenError` if the catalog refuses the namespace; the last rank is then withdrawn.
        """
        session = newcomer.session
        assert session.namespace is not None
        self._tell_difference(session.id, session.namespace)
        try:
            self._driver.catalog.add_namespace(session.namespace)
        except KVHavenError:
            self._sessions.withdraw(newcomer)
            raise
        for rank in session.ranks.values():
            self._attach_to_catalog(rank)
            if rank.connection is None and rank is not newcomer:
                self._driver.catalog.lost(rank.id)

    def _tell_difference(self, engine: SessionId, new: Namespace) -> None:
        """Log how a new namespace differs from the most similar recent one of the same model."""
        known = self._driver.catalog.namespaces()
        if any(found.digest == new.digest for found in known):
            return
        model = new.fields.get("model")
        newest = islice((n for n in reversed(known) if n.fields.get("model") == model), _COMPARED)
        alike = [(len(differing_fields(new.fields, n.fields)), n.digest, n.fields) for n in newest]
        if alike:
            _, digest, fields = min(alike, key=itemgetter(0, 1))
            logger.info(
                "engine %s shares nothing with namespace %s of the same model: they differ in %s",
                engine,
                digest.hex()[:16],
                difference(new.fields, fields),
            )

    # --- schedulers -------------------------------------------------------------------------

    def _attach_scheduler(self, connection: Connection, message: AttachScheduler) -> None:
        member = self._sessions.known(message)
        if member is None:
            member = self._sessions.add_scheduler(message)
        if member is None:
            timer = asyncio.get_running_loop().call_later(
                message.wait_ms / 1000, self._give_up_waiting, connection
            )
            self._waiting[connection] = _Waiting(message, timer)
            return
        self._take(connection, member)
        session = member.session
        connection.send(
            Attached(
                message.id,
                self._arena.describe(member.lock_byte),
                session.digest,
                session.table,
                session.holdings.offsets,
            ),
            self._arena.descriptors,
        )
        for rank, other in session.ranks.items():
            connection.send(RankModel(rank, other.model))
        self._settings.attached(member)

    def _give_up_waiting(self, connection: Connection) -> None:
        message = self._waiting.pop(connection).message
        reason = (
            f"not all {message.world_size} ranks of engine {message.session} attached to this "
            f"service within {message.wait_ms / 1000:g} s; ranks on another node need their own "
            "service there"
        )
        logger.warning("refused a scheduler: %s", reason)
        connection.send(Refused(message.id, reason, passing=True))

    # --- both -------------------------------------------------------------------------------

    def _take(self, connection: Connection, member: AttachedProcess) -> None:
        """Make this connection the member's only one."""
        session = member.session
        if member.connection is not None:
            logger.warning("%s of %s attached again before it was lost", member.role, session.id)
            member.connection.close()
        if session.namespace is not None:
            self._attach_to_catalog(member)
        member.connection = connection
        self._members[connection] = member
        logger.info("%s of %s attached", member.role, session.id)

    def _attach_to_catalog(self, member: AttachedProcess) -> None:
        session = member.session
        shard_mask = session.bitmap(member)
        self._driver.catalog.attach(
            session.id, member.id, member.rank, session.digest, session.world_size, shard_mask
        )
        self._driver.catalog.ready(member.id, SEGMENT, member.ready)
