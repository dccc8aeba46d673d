# SPDX-License-Identifier: Apache-2.0
"""The node service: puts its parts together, hands each message to the one it is for."""

import asyncio
import logging
import socket
import uuid
from collections import deque
from collections.abc import Callable, Coroutine

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import Action, TierName, Update
from kvhaven.catalog.policies import make_policy
from kvhaven.config import Settings
from kvhaven.errors import ProtocolError
from kvhaven.protocol import (
    Abort,
    Ack,
    Acquire,
    AttachRank,
    AttachScheduler,
    Clear,
    ClientMessage,
    Commit,
    Flush,
    Limit,
    Loaded,
    ModelChanged,
    Prefetch,
    Ready,
    Reliable,
    Reserve,
    Status,
    StatusReply,
)
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.service.attaching import Attaching
from kvhaven.service.connection import Connection, Listener
from kvhaven.service.ladder import specs_of
from kvhaven.service.loads import Loads
from kvhaven.service.people import People
from kvhaven.service.saves import Saves
from kvhaven.service.sessions import Member, Sessions
from kvhaven.service.status import describe
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.turns import Job, Turns
from kvhaven.service.verify import Verifier
from kvhaven.tenants import quotas_of
from kvhaven.tiers.base import Tier

logger = logging.getLogger(__name__)

_QUARANTINE_POLL_S = 0.05
_HEALTH_POLL_S = 1.0
_DRAIN_POLL_S = 0.005
_MOST_ACTIONS = 1024
"""Actions that may wait to be done before the catalog's own work waits for them."""


class Service:
    """One node's service. Everything runs on one event loop; only tiers have threads.

    Whatever may take long has its turns (see `Turns`): messages, what the catalog wants done, and
    the catalog's own work.
    """

    def __init__(self, settings: Settings, arena: Arena, tiers: dict[TierName, Tier]) -> None:
        self.id = uuid.uuid4().hex
        self.tiers = tiers
        self.sessions = Sessions()
        self.arena = arena
        self.catalog = Catalog(
            SlabAllocator({SEGMENT: arena.size}, usable={SEGMENT: arena.usable}),
            make_policy(settings.cache_policy),
            tiers=specs_of(settings, tiers),
            write_queue_bytes=settings.write_queue_bytes,
            fill_faster=settings.fill_faster_tiers,
            memory_quotas=quotas_of(settings.tenant_memory),
            disk_quotas=quotas_of(settings.tenant_disk),
        )
        self._turns = Turns(self._act)
        self._actions: deque[Action] = deque()
        self._acting = self._working = False
        self.verifier = Verifier(self.catalog, arena, settings.verify_memory)
        self._stop_deadline_s = settings.stop_deadline_s
        self._runner = TierRunner(
            self.catalog,
            tiers,
            arena.memory,
            self._act,
            lookup_s=settings.promote_deadline_ms / 1000,
        )
        self._loads = Loads(
            self.catalog,
            self.sessions,
            self.verifier,
            self._turns,
            spawn=self._spawn,
            changed=self._act,
        )
        self._saves = Saves(self.catalog, self._turns)
        self._people = People(self.catalog, tiers, self._runner, self._act, self._spawn)
        self._attaching = Attaching(
            self.id, self.catalog, self.sessions, arena, self._runner, self._saves
        )
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: Listener, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then let everybody go, and store what is not stored yet."""
        self.arena.grow(self._grown)
        await asyncio.gather(*(tier.start() for tier in self.tiers.values()))
        self._runner.check_health()
        self._spawn(self._every(_QUARANTINE_POLL_S, self._attaching.end_quarantines))
        self._spawn(self._every(_HEALTH_POLL_S, self._runner.check_health))
        listener.start(self._accept)
        await stop.wait()
        listener.close()
        self.arena.stop_growing()
        # Closed first: engines would go on bringing more to store.
        for connection in tuple(self._connections):
            connection.close()
        await self._end()

    @property
    def pieces(self) -> int:
        """How much was done since the start, in pieces of a millisecond at most."""
        return self._turns.pieces

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do, tiers aside."""
        return self._turns.idle and not self.catalog.busy

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._stop_deadline_s
        # What was cleared is not to be there again after a restart.
        while not self.idle and loop.time() < end:  # noqa: ASYNC110  whatever makes it idle
            await asyncio.sleep(_DRAIN_POLL_S)
        left = await self._people.flush(max(0.0, end - loop.time()))
        if left:
            logger.warning("stopped with %d writes to tiers undone; they are later misses", left)
        for task in self._tasks:
            task.cancel()
        await self._runner.close(max(0.1, end - loop.time()))
        self.verifier.close()

    # --- connections ------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> None:
        self._connections.add(
            Connection(
                sock,
                self._turns,
                on_message=self._on_message,
                on_batch=self._on_batch,
                on_closed=self._on_closed,
            )
        )

    def _on_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._attaching.closed(connection)
        self._people.closed(connection)
        self._act()

    def _on_batch(self, connection: Connection) -> None:
        member = self._attaching.member(connection)
        if member is not None and member.unacknowledged:
            member.unacknowledged = False
            connection.send(Ack(member.handled))
        self._act()

    def _on_message(self, connection: Connection, message: ClientMessage) -> Job | None:
        self.catalog.tick(asyncio.get_running_loop().time())
        member = self._attaching.member(connection)
        if not connection.greeted:
            self._attaching.greet(connection, message)
        elif isinstance(message, AttachRank | AttachScheduler):
            self._attaching.attach(connection, message)
        elif isinstance(message, Status):
            return self._status(connection, message)
        elif isinstance(message, Clear):
            self._people.clear(connection, message)
        elif isinstance(message, Limit):
            self._people.limit(connection, message)
        elif isinstance(message, Flush):
            self._people.answer_flush(connection, message)
        elif member is None:
            raise ProtocolError(f"{type(message).__name__} before attaching")
        else:
            return self._on_member_message(connection, member, message)
        return None

    def _on_member_message(
        self, connection: Connection, member: Member, message: ClientMessage
    ) -> Job | None:
        if isinstance(message, Acquire):
            self._loads.acquire(member, message)
        elif isinstance(message, Prefetch):
            self._loads.prefetch(member, message)
        elif isinstance(message, Reserve):
            return self._saves.reserve(connection, member, message)
        elif isinstance(message, Reliable):
            return self._on_reliable(member, message)
        else:
            raise ProtocolError(f"{type(message).__name__} was not expected")
        return None

    def _on_reliable(self, member: Member, message: Reliable) -> Job:
        """Handle what must not get lost; it counts as handled when that is done, not before."""
        if message.seq > member.handled:
            if isinstance(message, Commit):
                yield from self._saves.commit(member, message)
            elif isinstance(message, Abort):
                yield from self._saves.abort(member, message)
            elif isinstance(message, Loaded):
                yield from self._loads.loaded(member, message)
            elif isinstance(message, Ready):
                self._attaching.ready(member, message)
            elif isinstance(message, ModelChanged):
                self._attaching.model_changed(member, message.model)
            else:
                yield from self._loads.release(member, message)
            member.handled = message.seq
        member.unacknowledged = True

    def _status(self, connection: Connection, message: Status) -> Job:
        status = yield from describe(
            self.id, self.catalog, self.arena, self.verifier, self.sessions, self.tiers
        )
        connection.send(StatusReply(message.id, status))

    # --- in the background ------------------------------------------------------------------

    def _grown(self) -> None:
        """Tell the catalog and the ranks that the arena has grown, or will not grow any more."""
        self.catalog.grew(SEGMENT, self.arena.usable, last=not self.arena.allocating)
        self._attaching.announce_growth()
        self._act()

    def _act(self) -> None:
        """Do what the catalog wants done since the last time, and have it go on with its work."""
        self._actions += self.catalog.take_actions()
        if self._actions and not self._acting:
            self._acting = True
            self._turns.start(self._do_actions())
        if self.catalog.busy and not self._working:
            self._working = True
            self._turns.add(self._do_work())
        self._people.acted()

    def _do_actions(self) -> Job:
        try:
            while self._actions:
                try:
                    self._do_action(self._actions.popleft())
                except Exception:  # the others are done all the same
                    logger.exception("an action of the catalog failed")
                yield
        finally:
            self._acting = False

    def _do_action(self, action: Action) -> None:
        if isinstance(action, Update):
            self._loads.updated(action)
        else:
            self._runner.run(action)

    def _do_work(self) -> Job:
        try:
            while self.catalog.busy:
                try:
                    if len(self._actions) < _MOST_ACTIONS:
                        self.catalog.work()
                except Exception:  # the catalog has dropped that job: the others go on
                    logger.exception("a job of the catalog failed")
                yield
        finally:
            self._working = False

    async def _every(self, seconds: float, look: Callable[[], Job | None]) -> None:
        """Look after something again and again; a failure of it ends nothing."""
        while True:
            await asyncio.sleep(seconds)
            try:
                for _ in look() or ():
                    await asyncio.sleep(0)
                self._act()
            except Exception:  # nobody else would look after the service any more
                logger.exception("looking after the service failed")

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the service failed", exc_info=task.exception())
