# SPDX-License-Identifier: Apache-2.0
"""Membership: connections of members, their handshakes, their loss, and the end of quarantines.

The catalog decides which members there are.
"""

import asyncio
import logging
import os
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple

from kvhaven.catalog.actions import MemberId, SessionId
from kvhaven.catalog.sessions import RankDescription, Session
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
from kvhaven.types import NamespaceDigest

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
        engines: AttachedEngines,
        arena: Arena,
        saves: Saves,
        settings: RuntimeSettings,
    ) -> None:
        self._service = service
        self._driver = driver
        self._engines = engines
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
            self._driver.catalog.ready(member.id, SEGMENT, message.usable)

    def model_changed(self, member: AttachedProcess, model: ModelState) -> None:
        """Record the state of a rank's model and send it to the engine's scheduler.

        Raises `ProtocolError` for a scheduler.
        """
        if member.rank is None:
            raise ProtocolError("a scheduler sent ModelChanged; only ranks have a model")
        member.model = model
        scheduler = member.engine.scheduler
        if scheduler is not None and scheduler.connection is not None:
            scheduler.connection.send(RankModel(member.rank, model))

    def closed(self, connection: Connection) -> None:
        """Record that a connection closed, which proves nothing about its process."""
        waiting = self._waiting.pop(connection, None)
        if waiting is not None:
            waiting.timer.cancel()
        member = self._members.get(connection)
        if member is not None:
            self._disconnected(connection, member)
            with self._driver.event() as catalog:
                catalog.lost(member.id)

    def end_quarantines(self) -> Job:
        """Remove lost members whose mappings are proven gone, one per piece of the job."""
        for id_ in self._driver.catalog.lost_members():
            process = self._engines.process(id_)
            # It may have attached again since the job began.
            if process is not None and process.member.lost:
                self._end_quarantine(process)
            yield

    def _end_quarantine(self, process: AttachedProcess) -> None:
        """Remove a lost process if it maps nothing any more."""
        if not self._arena.is_mapped(process.lock_byte):
            with self._driver.event() as catalog:
                catalog.gone(process.id)
            self._engines.remove(process)
            logger.info("%s of %s is gone", process.member.role, process.session.id)

    # --- ranks ------------------------------------------------------------------------------

    def _attach_rank(self, connection: Connection, message: AttachRank) -> None:
        id_, digest = MemberId(message.member), NamespaceDigest(message.namespace)
        if self.draining and self._engines.process(id_) is None:
            raise DrainingError("the service is draining: it accepts no engine")
        known = any(found.digest == digest for found in self._driver.catalog.namespaces())
        description = RankDescription(
            message.world_size, digest, message.fields, message.shards, message.shared
        )
        with self._driver.event() as catalog:
            session = catalog.attach_rank(message.session, id_, message.rank, description)
        member = self._take(connection, session, id_)
        if session.namespace is not None and not known:
            self._tell_difference(session.id, session.namespace)
        self._saves.returned(member, message.holding)
        connection.send(
            Attached(message.id, self._arena.describe(member.lock_byte)), self._arena.descriptors
        )
        self.model_changed(member, message.model)
        if session.namespace is None:
            return
        for scheduler, waiting in tuple(self._waiting.items()):
            if not scheduler.closed and waiting.message.session == message.session:
                del self._waiting[scheduler]
                waiting.timer.cancel()
                self.attach(scheduler, waiting.message)

    def _tell_difference(self, engine: SessionId, new: Namespace) -> None:
        """Log how a new namespace differs from the most similar recent one of the same model."""
        known = reversed(self._driver.catalog.namespaces())
        others = (n for n in known if n.digest != new.digest)
        model = new.fields.get("model")
        newest = islice((n for n in others if n.fields.get("model") == model), _COMPARED)
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
        id_ = MemberId(message.member)
        with self._driver.event() as catalog:
            session = catalog.attach_scheduler(message.session, id_, message.world_size)
        if session is None:
            timer = asyncio.get_running_loop().call_later(
                message.wait_ms / 1000, self._give_up_waiting, connection
            )
            self._waiting[connection] = _Waiting(message, timer)
            return
        member = self._take(connection, session, id_)
        connection.send(
            Attached(
                message.id,
                self._arena.describe(member.lock_byte),
                session.digest,
                session.described.table,
                session.offsets,
            ),
            self._arena.descriptors,
        )
        for rank, other in member.engine.processes.items():
            if rank is not None:
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

    def _take(self, connection: Connection, session: Session, id_: MemberId) -> AttachedProcess:
        """Make this connection the only one of a member that has attached; return its process."""
        member = self._engines.attached(session, id_)
        role, old = member.member.role, member.connection
        if old is not None:
            logger.warning("%s of %s attached again before it was lost", role, session.id)
            self._disconnected(old, member)
            old.close()
        member.connection = connection
        self._members[connection] = member
        logger.info("%s of %s attached", role, session.id)
        return member

    def _disconnected(self, connection: Connection, member: AttachedProcess) -> None:
        del self._members[connection]
        member.connection = None
        logger.info("%s of %s disconnected", member.member.role, member.session.id)
