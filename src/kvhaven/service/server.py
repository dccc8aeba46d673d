# SPDX-License-Identifier: Apache-2.0
"""The node service: connects its parts, and dispatches each message."""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import Action, SessionId, TierName, Update
from kvhaven.catalog.announcer import Announcer
from kvhaven.catalog.policies import make_policy
from kvhaven.config import Settings
from kvhaven.errors import KVHavenError, ProtocolError
from kvhaven.peers.addresses import parse_address, read_token, require_secret
from kvhaven.peers.certificates import read_certificates
from kvhaven.peers.listener import ListenerStatus, PeerListener
from kvhaven.peers.nixl import NixlChannel, TcpOnly
from kvhaven.peers.tier import PeerTier
from kvhaven.protocol import (
    Abort,
    Ack,
    Acquire,
    AttachRank,
    AttachScheduler,
    Clear,
    ClientMessage,
    Commit,
    EndChain,
    Flush,
    Limit,
    List,
    Loaded,
    Locate,
    ModelChanged,
    Observe,
    OfferChain,
    Prefetch,
    PullChain,
    Ready,
    Refused,
    Reliable,
    Reserve,
    SettingsTaken,
    Snapshot,
    Status,
    StatusReply,
    Steer,
)
from kvhaven.service.accounts import Accounts
from kvhaven.service.admin import Admin
from kvhaven.service.arena import SEGMENT, Arena
from kvhaven.service.connection import Connection, Listener
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngines, AttachedProcess
from kvhaven.service.expected_chains import ExpectedChains
from kvhaven.service.jobs import Jobs
from kvhaven.service.lending import ArenaLender
from kvhaven.service.loads import Loads
from kvhaven.service.membership import Membership
from kvhaven.service.nixl_setup import make_channel
from kvhaven.service.offered_chains import OfferedChains
from kvhaven.service.pins import OWN_SESSION, Pins
from kvhaven.service.runtime_settings import RuntimeSettings
from kvhaven.service.saves import Saves
from kvhaven.service.snapshot import Observation
from kvhaven.service.status import ChainStatus, describe
from kvhaven.service.steering import INTERNAL_ERROR, Steering
from kvhaven.service.stored_chains import StoredChains
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.tier_setup import specs_of
from kvhaven.service.turns import AnyJob, Job
from kvhaven.service.verify import Verifier
from kvhaven.tenants import quotas_of
from kvhaven.tiers.base import Tier

logger = logging.getLogger(__name__)

_QUARANTINE_POLL_S = 0.05
_HEALTH_POLL_S = 1.0
_STALL_POLL_S = 0.1
_DRAIN_POLL_S = 0.005
_FAREWELL_S = 1.0
_UNKNOWN: Final[Mapping[str, str]] = {}


class _Chains:
    """The chains of a service, as its listener wants them: those of both directions."""

    def __init__(self, expected: ExpectedChains, offered: OfferedChains) -> None:
        self.offered = expected.offered
        self.progressed = expected.progressed
        self.pulled = offered.pulled


class Service:
    """The service of one node. It runs on one event loop.

    Only tiers, checksum verification, the allocation of the arena and a change of the settings file
    use threads. Work that may take long runs in turns (see `Turns`): messages, the catalog's
    actions, and its own jobs.
    `origins` tell observers where settings come from; `file` is the settings file, if there is one.
    """

    def __init__(
        self,
        settings: Settings,
        arena: Arena,
        tiers: dict[TierName, Tier],
        origins: Mapping[str, str] = _UNKNOWN,
        file: Path | None = None,
    ) -> None:
        self.tiers = tiers
        self.sessions = AttachedEngines()
        self.arena = arena
        self._announcer = (
            None if settings.peer_listen is None else Announcer(tenants=settings.peer_tenants)
        )
        self.driver = Driver(_catalog(settings, arena, tiers, self._announcer))
        self.verifier = Verifier(self.driver, arena, settings.verify_memory)
        self._stop_deadline_s = settings.stop_deadline_s
        self.runner = TierRunner(
            self.driver, tiers, arena.memory, lookup_s=settings.promote_deadline_ms / 1000
        )
        peers = tiers.get(TierName(PeerTier.name))
        self._peers = peers if isinstance(peers, PeerTier) else None
        self.id = uuid.uuid4().hex if self._peers is None else self._peers.node
        stall_s = settings.pd_stall_ms / 1000
        self._expected = ExpectedChains(self.driver, self._peers, stall_s, self._spawn)
        self._offered = OfferedChains(self.driver, self._peers, self._attached, self._spawn)
        self._stored = StoredChains(self.driver, self.runner, stall_s, self._spawn)
        self.accounts = Accounts([str(name) for name in tiers])
        self.loads = Loads(self.driver, self.sessions, self.verifier, self._spawn, self.accounts)
        self._saves = Saves(self.driver, self._offered.saved, self.accounts)
        self.settings = RuntimeSettings(
            settings, origins, file, self.driver, self.runner, self.verifier, self.sessions
        )
        self.pins = Pins(self.driver, self.settings)
        self.jobs = Jobs(self._spawn)
        self._admin = Admin(self.driver, tiers, self.runner, self._spawn)
        self._membership = Membership(
            self.id, self.driver, self.sessions, arena, self._saves, self.settings
        )
        self._steering = Steering(
            self.driver,
            self.settings,
            self.runner,
            self.verifier,
            self._admin,
            self.sessions,
            self._membership,
            self._saves,
            self.pins,
            self.jobs,
            self._spawn,
        )
        self._observation = Observation(
            self.id,
            self.settings,
            self.driver.catalog,
            arena,
            self.verifier,
            self.sessions,
            tiers,
            self.accounts,
            self.runner,
            self.pins,
            self.jobs,
            lambda: self._membership.draining,
            lambda: self._protocol_errors,
        )
        self._connections: set[Connection] = set()
        self._protocol_errors = 0
        self._observers: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._settings = settings
        self._peer_listener: PeerListener | None = None
        self.driver.start(self._perform)

    async def run(self, listener: Listener, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then close all connections and finish writes to tiers.

        Raises `ConfigError` if the peer plane cannot listen.
        """
        channel = make_channel(self._settings, self.arena)
        if self._peers is not None:
            self._peers.use(channel)
        peers = self._peer_listener = self._listen_to_peers(channel)
        channel.start()
        self.arena.grow(self._grown)
        await asyncio.gather(*(tier.start() for tier in self.tiers.values()))
        self.runner.check_health()
        self._spawn(self._every(_QUARANTINE_POLL_S, self._membership.end_quarantines))
        self._spawn(self._observation.measure_lag())
        self._spawn(self._every(_HEALTH_POLL_S, self.runner.check_health))
        self._spawn(self._every(_STALL_POLL_S, self._expected.end_silent))
        listener.start(self._accept)
        await stop.wait()
        listener.close()
        if peers is not None:
            peers.close()
        self.arena.stop_growing()
        for observer in self._observers:
            observer.send(
                Snapshot(0, self._observation.snapshot(self._chains, self._plane, stopping=True))
            )
            observer.finish()
        # First, because connected engines would continue to save chunks.
        for connection in self._connections - self._observers:
            connection.close()
        channel.close()
        await self._end()
        await self._await_observers()

    def _listen_to_peers(self, channel: NixlChannel | TcpOnly) -> PeerListener | None:
        if self._settings.peer_listen is None:
            return None
        address = parse_address(self._settings.peer_listen, "peer_listen")
        token = read_token(self._settings.peer_token_file)
        certificates = read_certificates(self._settings)
        require_secret(address, secret=bool(token) or certificates is not None)
        assert self._announcer is not None, "made for the listener"
        lender = ArenaLender(self.driver, self.arena, self._announcer)
        tenants = self._settings.peer_tenants
        chains = _Chains(self._expected, self._offered)
        listener = PeerListener(
            address, self.id, token, lender, chains, certificates, channel, tenants=tenants
        )
        logger.info("peers: listening at %s, port %d", address, listener.port)
        return listener

    @property
    def catalog(self) -> Catalog:
        """The catalog, for queries only; events go through `driver`."""
        return self.driver.catalog

    async def _await_observers(self) -> None:
        """Wait until the observers have read their last snapshot and closed, for a short time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _FAREWELL_S
        while self._connections and loop.time() < end:  # noqa: ASYNC110  no event signals it
            await asyncio.sleep(_DRAIN_POLL_S)
        for connection in tuple(self._connections):
            connection.close()

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._stop_deadline_s
        # Finish clears, so that cleared chunks do not return after a restart.
        while not self.driver.idle and loop.time() < end:  # noqa: ASYNC110  no event signals idle
            await asyncio.sleep(_DRAIN_POLL_S)
        left = await self._admin.flush(max(0.0, end - loop.time()))
        if left:
            logger.warning(
                "stopped with %d unfinished writes to tiers, which are later misses", left
            )
        for task in self._tasks:
            task.cancel()
        await self.runner.close(max(0.1, end - loop.time()))
        self.verifier.close()

    # --- connections ------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> None:
        self._connections.add(
            Connection(
                sock,
                self.driver.turns,
                on_message=self._on_message,
                on_batch=self._on_batch,
                on_closed=self._on_closed,
            )
        )

    def _on_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._protocol_errors += connection.broken
        self._observers.discard(connection)
        self._membership.closed(connection)
        self._admin.closed(connection)

    def _on_batch(self, connection: Connection) -> None:
        member = self._membership.member(connection)
        if member is not None and member.unacknowledged:
            member.unacknowledged = False
            connection.send(Ack(member.handled))

    def _on_message(self, connection: Connection, message: ClientMessage) -> AnyJob | None:
        with self.driver.event():
            return self._handle(connection, message)

    def _handle(self, connection: Connection, message: ClientMessage) -> AnyJob | None:
        member = self._membership.member(connection)
        if not connection.greeted:
            self._membership.greet(connection, message)
        elif isinstance(message, AttachRank | AttachScheduler):
            self._membership.attach(connection, message)
        elif isinstance(message, Status):
            return self._status(connection, message)
        elif isinstance(message, Clear | Limit | Flush):
            with _failures_refused(connection, message.id):
                self._handle_admin(connection, message)
        elif isinstance(message, Observe | Steer | List):
            return self._handle_api(connection, message)
        elif member is None:
            raise ProtocolError(f"the client sent {type(message).__name__} before it attached")
        else:
            return self._on_member_message(connection, member, message)
        return None

    def _handle_admin(self, connection: Connection, message: Clear | Limit | Flush) -> None:
        if isinstance(message, Clear):
            self._admin.clear(connection, message)
        elif isinstance(message, Limit):
            self._admin.limit(connection, message)
        else:
            self._admin.answer_flush(connection, message)

    def _handle_api(self, connection: Connection, message: Observe | Steer | List) -> AnyJob | None:
        if isinstance(message, Steer):
            return self._steering.handle(connection, message)
        if isinstance(message, List):
            return self._list(connection, message)
        self._observers.add(connection)
        self.runner.check_health(scan=False)  # lookups use what it will show as online
        snapshot = self._observation.snapshot(self._chains, self._plane)
        following, sample = 0, b""
        if message.sample >= 0:
            now = asyncio.get_running_loop().time()
            following, sample = self.loads.reuse.since(message.sample, now)
        connection.send(Snapshot(message.id, snapshot, sample, following))
        return None

    def _on_member_message(
        self, connection: Connection, member: AttachedProcess, message: ClientMessage
    ) -> Job | None:
        if isinstance(message, Acquire):
            self.loads.acquire(member, message)
        elif isinstance(message, Prefetch):
            self.loads.prefetch(member, message)
        elif isinstance(message, Locate):
            return self.loads.locate(member, message)
        elif isinstance(message, SettingsTaken):
            self.settings.taken(member, message.generation)
        elif isinstance(message, OfferChain | EndChain | PullChain):
            self._on_chain(member, message)
        elif isinstance(message, Reserve):
            return self._saves.reserve(connection, member, message)
        elif isinstance(message, Reliable):
            return self._on_reliable(member, message)
        else:
            raise ProtocolError(f"unexpected message {type(message).__name__} from a member")
        return None

    def _on_chain(
        self, member: AttachedProcess, message: OfferChain | EndChain | PullChain
    ) -> None:
        if member.rank is not None:
            raise ProtocolError("a rank announced a chain; only schedulers do")
        if isinstance(message, OfferChain):
            self._offered.offer(member.session.id, member.session.digest, message)
        elif isinstance(message, PullChain):
            if not self._expected.pull(member.session.digest, message):
                self._stored.pull(member.session.digest, message)
        else:
            self._offered.request_ended(member.session.id, message.id)

    def _attached(self, session: SessionId) -> bool:
        """Return whether the scheduler of a session is connected."""
        known = self.sessions.get(session)
        scheduler = known.scheduler if known is not None else None
        return scheduler is not None and scheduler.connection is not None

    def _on_reliable(self, member: AttachedProcess, message: Reliable) -> Job:
        """Handle a reliable message once. It counts as handled when its job is done, not before."""
        if message.seq > member.handled:
            if isinstance(message, Commit):
                yield from self._saves.commit(member, message)
            elif isinstance(message, Abort):
                yield from self._saves.abort(member, message)
            elif isinstance(message, Loaded):
                yield from self.loads.loaded(member, message)
            elif isinstance(message, Ready):
                self._membership.ready(member, message)
            elif isinstance(message, ModelChanged):
                self._membership.model_changed(member, message.model)
            else:
                yield from self.loads.release(member, message)
            member.handled = message.seq
        member.unacknowledged = True

    def _status(self, connection: Connection, message: Status) -> Job:
        self.runner.check_health(scan=False)  # lookups use what this status will show as online
        status = yield from describe(
            self.id,
            self.catalog,
            self.arena,
            self.verifier,
            self.sessions,
            self.tiers,
            self._chains,
            self._plane,
        )
        connection.send(StatusReply(message.id, status))

    def _list(self, connection: Connection, message: List) -> AnyJob:
        with _failures_refused(connection, message.id):
            connection.send((yield from self._observation.rows(message)))

    @property
    def _plane(self) -> ListenerStatus:
        return ListenerStatus() if self._peer_listener is None else self._peer_listener.status()

    @property
    def _chains(self) -> ChainStatus:
        return ChainStatus(
            open=len(self._offered) + len(self._expected) + len(self._stored),
            offered=self._offered.offered,
            refused=self._offered.refused,
            expected=self._expected.accepted,
            completed=self._expected.completed,
            stalled=self._expected.stalled,
            pulled=self._expected.pulled,
        )

    # --- background -------------------------------------------------------------------------

    def _grown(self) -> None:
        """Inform the catalog and the ranks that the arena has grown, or has its final size."""
        with self.driver.event() as catalog:
            catalog.grew(SEGMENT, self.arena.usable, last=not self.arena.allocating)
        self.driver.turns.start(self._membership.announce_growth())

    def _perform(self, action: Action) -> None:
        if isinstance(action, Update) and action.session == OWN_SESSION:
            self.pins.updated(action.acquisition)
        elif isinstance(action, Update):
            self.loads.updated(action)
        else:
            self.runner.run(action)

    async def _every(self, seconds: float, look: Callable[[], Job | None]) -> None:
        """Call `look` periodically, and finish the job that it returns; log its failures."""
        while True:
            await asyncio.sleep(seconds)
            try:
                for _ in look() or ():
                    await asyncio.sleep(0)
            except Exception:  # the periodic call must continue
                logger.exception("a periodic check of the service failed")

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the service failed", exc_info=task.exception())


@contextmanager
def _failures_refused(connection: Connection, id_: int) -> Iterator[None]:
    """Refuse a request that fails; its connection remains. Raises `ProtocolError`."""
    try:
        yield
    except ProtocolError:
        raise
    except KVHavenError as error:
        connection.send(Refused(id_, str(error)))
    except Exception:  # a bug must not end the other requests of the connection
        logger.exception("a request of an operator failed")
        connection.send(Refused(id_, INTERNAL_ERROR))


def _catalog(
    settings: Settings, arena: Arena, tiers: dict[TierName, Tier], announcer: Announcer | None
) -> Catalog:
    return Catalog(
        SlabAllocator({SEGMENT: arena.size}, usable={SEGMENT: arena.usable}),
        make_policy(settings.cache_policy),
        tiers=specs_of(settings, tiers),
        write_queue_bytes=settings.write_queue_bytes,
        fill_faster=settings.fill_faster_tiers,
        memory_quotas=quotas_of(settings.tenant_memory),
        disk_quotas=quotas_of(settings.tenant_disk),
        announcer=announcer,
    )
