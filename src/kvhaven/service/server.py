# SPDX-License-Identifier: Apache-2.0
"""The node service: listens, and turns messages into the catalog's events."""

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import Coroutine

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog, TierSpec
from kvhaven.catalog.actions import (
    Acquisition,
    MemberId,
    SessionId,
    Ticket,
    TierName,
    Update,
)
from kvhaven.catalog.policy import POLICIES
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError, ProtocolError
from kvhaven.protocol import (
    VERSION,
    Abort,
    Ack,
    Acquire,
    Acquired,
    Attached,
    AttachRank,
    AttachScheduler,
    Clear,
    Cleared,
    ClientMessage,
    Commit,
    Flush,
    Flushed,
    Granted,
    Hello,
    Loaded,
    Prefetch,
    Refused,
    Reliable,
    Reserve,
    Status,
    StatusReply,
    Welcome,
    split_keys,
)
from kvhaven.service.arena import Arena
from kvhaven.service.connection import Connection, peer_uid
from kvhaven.service.sessions import Member, Sessions
from kvhaven.service.status import describe
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.verify import Verifier
from kvhaven.tiers.base import Tier
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest

logger = logging.getLogger(__name__)

_QUARANTINE_POLL_S = 0.05
_HEALTH_POLL_S = 1.0


class Service:
    """One node's service. Everything runs on one event loop; only tiers have threads."""

    def __init__(self, settings: Settings, arena: Arena, tiers: dict[TierName, Tier]) -> None:
        self.id = uuid.uuid4().hex
        self.settings = settings
        self.arena = arena
        self.tiers = tiers
        self.sessions = Sessions()
        self.catalog = Catalog(
            SlabAllocator(arena.sizes),
            POLICIES[settings.cache_policy.lower()](),
            tiers=[TierSpec(name, tier.health().capacity_bytes) for name, tier in tiers.items()],
            write_queue_bytes=settings.write_queue_size,
        )
        self.runner = TierRunner(self.catalog, tiers, arena.memory, self._act)
        self.verifier = Verifier(self.catalog, arena, settings.verify_memory)
        self._connections: dict[Connection, Member | None] = {}
        self._deadlines: dict[tuple[SessionId, Ticket], asyncio.TimerHandle] = {}
        self._waiting_schedulers: list[tuple[Connection, AttachScheduler, asyncio.TimerHandle]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then flush and let everybody go."""
        loop = asyncio.get_running_loop()
        for tier in self.tiers.values():
            await tier.start()
        self.runner.check_health()
        self._spawn(self._watch_quarantine())
        self._spawn(self._watch_health())
        loop.add_reader(listener, self._accept, listener)
        await stop.wait()
        loop.remove_reader(listener)
        left = await self._flush(self.settings.stop_deadline_s)
        if left:
            logger.warning("stopped with %d writes to tiers undone; they are later misses", left)
        for task in self._tasks:
            task.cancel()
        for connection in tuple(self._connections):
            connection.close()
        await self.runner.close(self.settings.stop_deadline_s)
        self.verifier.close()

    # --- connections ------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            logger.warning("could not accept a connection: %s", error)
            return
        if peer_uid(sock) != os.geteuid():
            logger.warning("refused a connection of user %d", peer_uid(sock))
            sock.close()
            return
        connection = Connection(
            sock, on_message=self._on_message, on_batch=self._on_batch, on_closed=self._on_closed
        )
        self._connections[connection] = None

    def _on_closed(self, connection: Connection) -> None:
        member = self._connections.pop(connection, None)
        self._waiting_schedulers = [
            entry for entry in self._waiting_schedulers if entry[0] is not connection
        ]
        if member is None or member.connection is not connection:
            return
        member.connection = None
        if member.session.namespace is not None:
            self.catalog.lost(member.id)
        logger.info("%s of %s disconnected", member.role, member.session.id)
        self._act()

    def _on_batch(self, connection: Connection) -> None:
        member = self._connections.get(connection)
        if member is not None and member.unacknowledged:
            member.unacknowledged = False
            connection.send(Ack(member.handled))
        self._act()

    def _on_message(self, connection: Connection, message: ClientMessage) -> None:
        if not connection.greeted:
            self._greet(connection, message)
        elif isinstance(message, AttachRank):
            self._attach_rank(connection, message)
        elif isinstance(message, AttachScheduler):
            self._attach_scheduler(connection, message)
        elif isinstance(message, Status):
            connection.send(StatusReply(message.id, describe(self)))
        elif isinstance(message, Clear):
            self._clear(connection, message)
        elif isinstance(message, Flush):
            self._spawn(self._answer_flush(connection, message))
        else:
            member = self._connections.get(connection)
            if member is None:
                raise ProtocolError(f"{type(message).__name__} before attaching")
            self._on_member_message(connection, member, message)

    def _greet(self, connection: Connection, message: ClientMessage) -> None:
        if not isinstance(message, Hello):
            raise ProtocolError(f"the first message is Hello, not {type(message).__name__}")
        if message.version != VERSION:
            raise ProtocolError(f"wire version {message.version}; this service speaks {VERSION}")
        connection.greeted = True
        connection.send(Welcome(self.id, os.getpid()))

    def _on_member_message(
        self, connection: Connection, member: Member, message: ClientMessage
    ) -> None:
        if isinstance(message, Reliable):
            if message.seq > member.handled:
                self._on_reliable(member, message)
                member.handled = message.seq
            member.unacknowledged = True
        elif isinstance(message, Acquire):
            self._acquire(connection, member, message)
        elif isinstance(message, Prefetch):
            self.catalog.prefetch(member.session.digest, split_keys(message.keys))
        elif isinstance(message, Reserve):
            self._reserve(connection, member, message)
        else:
            raise ProtocolError(f"{type(message).__name__} was not expected")

    # --- attaching --------------------------------------------------------------------------

    def _attach_rank(self, connection: Connection, message: AttachRank) -> None:
        try:
            member = self.sessions.attach_rank(message, connection)
            if member.session.namespace is not None:
                self._admit(member)
        except KVHavenError as error:
            logger.warning("refused a rank: %s", error)
            connection.send(Refused(message.id, str(error)))
            return
        self._connections[connection] = member
        connection.send(
            Attached(message.id, self.arena.describe(member.lock_byte)), self.arena.descriptors
        )
        logger.info("%s of %s attached", member.role, member.session.id)
        waiting, self._waiting_schedulers = self._waiting_schedulers, []
        for scheduler, request, timer in waiting:
            timer.cancel()
            self._attach_scheduler(scheduler, request)

    def _admit(self, member: Member) -> None:
        """Make a session's ranks known to the catalog, now that it is complete."""
        session = member.session
        assert session.namespace is not None
        self.catalog.add_namespace(session.namespace)
        self.runner.add_namespace(session.namespace)
        for rank in session.ranks.values():
            if rank is member or not rank.admitted:
                self.catalog.attach(session.id, rank.id, rank.rank, session.digest, session.world)
                rank.admitted = True

    def _attach_scheduler(self, connection: Connection, message: AttachScheduler) -> None:
        try:
            member = self.sessions.attach_scheduler(message, connection)
        except KVHavenError as error:
            logger.warning("refused a scheduler: %s", error)
            connection.send(Refused(message.id, str(error)))
            return
        if member is None:
            timer = asyncio.get_running_loop().call_later(
                message.wait_ms / 1000, self._give_up_waiting, connection, message
            )
            self._waiting_schedulers.append((connection, message, timer))
            return
        session = member.session
        self.catalog.attach(session.id, member.id, None, session.digest, session.world)
        self._connections[connection] = member
        connection.send(
            Attached(
                message.id,
                self.arena.describe(member.lock_byte),
                session.digest,
                session.table,
            ),
            self.arena.descriptors,
        )

    def _give_up_waiting(self, connection: Connection, message: AttachScheduler) -> None:
        self._waiting_schedulers = [
            entry for entry in self._waiting_schedulers if entry[0] is not connection
        ]
        connection.send(
            Refused(
                message.id,
                f"not all {message.world} ranks of engine {message.session} attached to this "
                "service; ranks on another node need a service of their own there",
            )
        )

    # --- leases -----------------------------------------------------------------------------

    def _acquire(self, connection: Connection, member: Member, message: Acquire) -> None:
        session, ticket = member.session.id, Ticket(message.ticket)
        acquisition = self.catalog.acquire(
            session, ticket, member.session.digest, split_keys(message.keys)
        )
        if acquisition.promoting:
            connection.send(Acquired(message.ticket, False, [], b""))
            self._deadlines[session, ticket] = asyncio.get_running_loop().call_later(
                message.wait_ms / 1000, self._settle, member, ticket
            )
        else:
            self._answer(member, acquisition)

    def _settle(self, member: Member, ticket: Ticket) -> None:
        self._deadlines.pop((member.session.id, ticket), None)
        self._answer(member, self.catalog.settle(member.session.id, ticket))
        self._act()

    def _answer(self, member: Member, acquisition: Acquisition) -> None:
        """Send a final answer, after the check of resident shards that the settings ask for."""
        if self.verifier.blocks_answers and acquisition.chunks:
            self._spawn(self._answer_verified(member, acquisition))
            return
        self.verifier.sample(acquisition, member.session.table)
        self._send_answer(member, acquisition.ticket, acquisition)

    async def _answer_verified(self, member: Member, acquisition: Acquisition) -> None:
        good = await self.verifier.verify(acquisition, member.session.table)
        self._send_answer(
            member,
            acquisition.ticket,
            Acquisition(acquisition.ticket, acquisition.chunks[:good], 0),
        )
        self._act()

    def _send_answer(self, member: Member, ticket: Ticket, acquisition: Acquisition) -> None:
        if not acquisition.chunks:
            self.catalog.release(member.session.id, ticket)
        if member.connection is not None:
            member.connection.send(
                Acquired(
                    ticket,
                    True,
                    [(chunk.extent.segment, chunk.extent.offset) for chunk in acquisition.chunks],
                    bytes(chunk.source for chunk in acquisition.chunks),
                )
            )

    # --- saves ------------------------------------------------------------------------------

    def _reserve(self, connection: Connection, member: Member, message: Reserve) -> None:
        session = member.session
        if member.rank is None or session.namespace is None:
            connection.send(Granted(message.id, [None] * len(split_keys(message.keys))))
            return
        offset = session.table.offsets[member.rank]
        grants = self.catalog.reserve(
            member.id,
            session.digest,
            ChunkKey(message.parent) if message.parent else None,
            split_keys(message.keys),
        )
        connection.send(
            Granted(
                message.id,
                [
                    None
                    if grant is None
                    else (
                        grant.extent.segment,
                        grant.extent.offset + offset,
                        grant.extent.generation,
                    )
                    for grant in grants
                ],
            )
        )

    def _on_reliable(self, member: Member, message: Reliable) -> None:
        if isinstance(message, Commit):
            for key, generation, checksum in message.shards:
                self.catalog.commit(member.id, ChunkKey(key), generation, Checksum(checksum))
        elif isinstance(message, Abort):
            for key, generation in message.shards:
                self.catalog.abort(member.id, ChunkKey(key), generation)
        elif isinstance(message, Loaded):
            for ticket in message.tickets:
                self.catalog.loaded(member.session.id, Ticket(ticket), member.id)
        else:
            for ticket in message.tickets:
                timer = self._deadlines.pop((member.session.id, Ticket(ticket)), None)
                if timer is not None:
                    timer.cancel()
                self.catalog.release(member.session.id, Ticket(ticket))

    # --- people's requests ------------------------------------------------------------------

    def _clear(self, connection: Connection, message: Clear) -> None:
        if message.tier and message.tier != "memory" and message.tier not in self.tiers:
            known = ", ".join(["memory", *self.tiers])
            connection.send(
                Refused(message.id, f"no tier {message.tier!r} here; there are {known}")
            )
            return
        chunks, bytes_ = self.catalog.clear(
            NamespaceDigest(message.namespace) if message.namespace else None,
            TierName(message.tier) if message.tier else None,
        )
        connection.send(Cleared(message.id, chunks, bytes_))

    async def _answer_flush(self, connection: Connection, message: Flush) -> None:
        connection.send(Flushed(message.id, await self._flush(message.wait_ms / 1000)))

    async def _flush(self, deadline_s: float) -> int:
        """Wait until nothing is queued for a tier; return what is left at the deadline."""
        end = asyncio.get_running_loop().time() + deadline_s
        while (left := self._writes_left()) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        return left

    def _writes_left(self) -> int:
        self._act()
        return sum(
            tier.queued_writes + tier.outstanding_writes
            for tier in self.catalog.stats().tiers.values()
            if tier.online
        )

    # --- in the background ------------------------------------------------------------------

    def _act(self) -> None:
        """Do what the catalog wants done since the last time."""
        for action in self.catalog.take_actions():
            if isinstance(action, Update):
                self._on_update(action)
            else:
                self.runner.run(action)

    def _on_update(self, update: Update) -> None:
        key = (update.session, update.acquisition.ticket)
        timer = self._deadlines.pop(key, None)
        if timer is not None:
            timer.cancel()
        for session in self.sessions:
            if session.id == update.session and session.scheduler is not None:
                self._answer(session.scheduler, update.acquisition)

    async def _watch_quarantine(self) -> None:
        """End the quarantine of members whose mappings are proven gone."""
        while True:
            await asyncio.sleep(_QUARANTINE_POLL_S)
            for member in self.sessions.lost_members():
                if self.arena.is_mapped(member.lock_byte):
                    continue
                if member.admitted:
                    self.catalog.gone(MemberId(member.id))
                logger.info("%s of %s is gone", member.role, member.session.id)
                self.sessions.remove(member)
            self._act()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_POLL_S)
            self.runner.check_health()
            self._act()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
