# SPDX-License-Identifier: Apache-2.0
"""One other node, seen from this one: its connections and threads, its state."""

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import xxhash

from kvhaven.catalog.announcer import Batch, Cursor
from kvhaven.errors import ProtocolError, TierError
from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.dial import dial
from kvhaven.peers.nixl import ChannelError, Hold, NixlRoute
from kvhaven.peers.view import PeerView
from kvhaven.peers.wire import (
    ANNOUNCE,
    FETCHED,
    FOLLOWING,
    HAS_REPLY,
    MOST_KEYS,
    PONG,
    TICKET,
    Absent,
    Announce,
    Credential,
    Fetch,
    Following,
    GetTicket,
    Has,
    Offer,
    PeerError,
    Ping,
    Progress,
    Pull,
    SilentPeerError,
    Stream,
    Ticket,
    Watch,
    unpack_digests,
)
from kvhaven.protocol import batches
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import DamagedShardError
from kvhaven.tiers.health import Breaker
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, TenantId

T = TypeVar("T")

_WATCH_S: Final = 1.0
"""Longest wait of a peer for changes that it could announce."""
_LONGEST: Final = 10
"""A shard may take this many times `deadline_s` in total, as long as bytes keep coming."""


class PeerStatus(msgspec.Struct, frozen=True):
    """State of a peer, for people. `error` is why it is away, or the last failure.

    `own`: the address leads to the service itself, which is ignored.
    """

    address: str
    node: str
    up: bool
    own: bool
    chunks_found: int
    shards_read: int
    shards_damaged: int
    error: str
    channel: str = "tcp"
    """How shards are read: `tcp` or `nixl`; `channel_reason` says why it is TCP."""
    channel_reason: str = ""
    chunks_announced: int = 0
    """Chunks that it has, by its announcements; `followed`: these are complete, so it is not asked
    where chunks are. `questions` are the lookups that it was asked."""
    followed: bool = False
    questions: int = 0


ChunkName = tuple[NamespaceDigest, TenantId, ChunkKey]
"""A chunk as one tenant's."""


class AwayError(PeerError):
    """A peer failed before the request was sent; the failure was counted then."""


class Peer:
    """One other node: its connections, the threads that use them, and its state.

    Pings and lookups have a thread, reads have `streams` threads, of which some ask while others
    receive; so a slow or silent peer delays only its own requests. `up`, `own`, `error` and the
    counters change on the event loop only, `_idle` under its lock.
    """

    def __init__(
        self,
        address: Address,
        node: str,
        token: bytes,
        deadline_s: float,
        streams: int,
        certificates: Certificates | None = None,
        route: NixlRoute | None = None,
    ) -> None:
        self.address = address
        self.title = f"peer {address}"
        self.up = False
        self.own = False
        """Whether the address is this node's own."""
        self.error = "not connected yet"
        self.route = route
        """The way over NIXL; None if this node reads over TCP alone."""
        self._negotiating = False
        self.node = ""
        self.found = self.read = self.damaged = self.questions = 0
        self.view = PeerView()
        self.breaker = Breaker(time.monotonic, threshold=3, pause_s=1.0, max_pause_s=30.0)
        self._self = node
        self._token = token
        self._certificates = certificates
        self._deadline_s = deadline_s
        self._most_idle = streams + 2
        self._control = TierExecutor(1)
        self._following = TierExecutor(1)
        self._followed: Stream | None = None
        """The connection on which the peer is asked for announcements, if it is."""
        self._data = TierExecutor(streams, per_core=streams)
        self._lock = threading.Lock()
        self._idle: dict[bool, list[Stream]] = {False: [], True: []}
        """Connections without a request, by whether they are for data alone."""
        self._in_use: set[Stream] = set()
        """Connections with a request; changed under the lock, as is the next."""
        self._left = False
        """Whether `break_off` was called."""

    @property
    def usable(self) -> bool:
        """Whether it may be asked."""
        return self.up and not self.own and self.breaker.closed

    @property
    def queued_reads(self) -> int:
        """Number of reads that wait for a thread."""
        return self._data.queued(Lane.READ)

    async def ping(self) -> str:
        """Verify that the peer answers; return its name. Raises `PeerError` or `TierError`."""
        return await self._control.run(Lane.READ, self._ping)

    async def has(
        self, namespace: NamespaceDigest, tenant: TenantId, keys: Sequence[ChunkKey]
    ) -> set[ChunkName]:
        """Ask which chunks it has. Raises `PeerError` or `TierError`."""
        ask = functools.partial(self._has, namespace, tenant, keys)
        return await self._control.run(Lane.WRITE, ask)  # behind pings

    async def follow(self) -> None:
        """Ask for what the peer announces next, and apply it to `view`.

        Ends within `_WATCH_S` if there is none. Raises `PeerError`, `ProtocolError` or `TierError`.
        """
        view = self.view
        source, cursor = view.source, view.cursor
        announce = await self._following.run(
            Lane.READ, functools.partial(self._watch, source, cursor)
        )
        if (view.source, view.cursor) != (source, cursor):
            return  # it was reset meanwhile
        added, removed = unpack_digests(announce.added), unpack_digests(announce.removed)
        cursor = Cursor(announce.seq, announce.part)
        view.apply(announce.source, Batch(cursor, announce.whole, announce.fresh, added, removed))

    async def tell(self, message: Offer | Pull | Progress) -> Following:
        """Tell it of a chain that this node computes, or wants.

        Raises `PeerError` or `TierError`.
        """
        return await self._control.run(Lane.WRITE, functools.partial(self._tell, message))

    async def fetch(self, shard: StoredShard, into: memoryview) -> Checksum | None:
        """Read a shard's payload; None if the peer does not have it.

        Raises `PeerError`, `TierError`, and `DamagedShardError` if the bytes do not have the
        checksum of the rank that computed them.
        """
        hold = Hold()
        try:
            return await self._data.run(
                Lane.READ, functools.partial(self._fetch, shard, into, hold)
            )
        finally:
            if hold.helper is not None and self.route is not None:
                await hold.ended(self.route.is_closed)

    async def negotiate(self) -> None:
        """Agree on NIXL with the peer if that is due; it is read over TCP meanwhile, and else."""
        if self.route is None or not self.route.due or self._negotiating:
            return
        self._negotiating = True
        try:
            with contextlib.suppress(PeerError, ProtocolError, TierError):  # the next ping tells
                await self._data.run(Lane.BACKGROUND, self._negotiate)
        finally:
            self._negotiating = False

    async def close(self, deadline_s: float) -> None:
        """End running requests within `deadline_s` seconds, and disconnect, for good."""
        self.up = False
        with self._lock:
            self._most_idle = 0
            if self._followed is not None:
                self._followed.shut_down()
        self.disconnect()
        executors = (self._control, self._data, self._following)
        await asyncio.gather(*(one.close(deadline_s) for one in executors))

    def break_off(self) -> None:
        """Disconnect for good, while the process goes on: running requests fail."""
        self.up = False
        with self._lock:
            self._most_idle = 0
            self._left = True
            for stream in self._in_use:
                stream.shut_down()
        self.disconnect()

    async def ended(self) -> None:
        """After `break_off`, wait until no thread uses a read's memory any more."""
        executors = (self._control, self._data, self._following)
        await asyncio.gather(*(one.end(self._no_member) for one in executors))

    # In threads

    def _ping(self) -> str:
        def ping(stream: Stream) -> None:
            stream.send(Ping(), self._deadline)
            stream.receive(PONG, self._deadline)

        self._with_stream(ping)
        return self.node

    def _has(
        self, namespace: NamespaceDigest, tenant: TenantId, keys: Sequence[ChunkKey]
    ) -> set[ChunkName]:
        self._require()
        self.questions += 1

        def ask(stream: Stream) -> set[ChunkName]:
            there: set[ChunkName] = set()
            for part in batches(keys, MOST_KEYS):
                stream.send(Has(namespace, b"".join(part), tenant), self._deadline)
                reply = stream.receive(HAS_REPLY, self._deadline).there
                if len(reply) != len(part):
                    raise ProtocolError(f"{self.title}: {len(reply)} answers to {len(part)} keys")
                there |= {
                    (namespace, tenant, key) for key, has in zip(part, reply, strict=True) if has
                }
            return there

        return self._with_stream(ask)

    def _watch(self, source: str, cursor: Cursor) -> Announce:
        self._require()
        wait_ms = int(_WATCH_S * 1000)

        def watch(stream: Stream) -> Announce:
            with self._lock:
                self._followed = stream if self._most_idle else None
            try:
                stream.send(Watch(source, max(0, cursor.seq), cursor.part, wait_ms), self._deadline)
                return stream.receive(ANNOUNCE, self._deadline + _WATCH_S)
            finally:
                with self._lock:
                    self._followed = None

        return self._with_stream(watch)

    def _tell(self, message: Offer | Pull | Progress) -> Following:
        self._require()

        def tell(stream: Stream) -> Following:
            stream.send(message, self._deadline)
            return stream.receive(FOLLOWING, self._deadline)

        return self._with_stream(tell)

    def _negotiate(self) -> None:
        self._require()
        route, deadline_s = self.route, self._deadline_s
        if route is not None:
            self._with_stream(lambda stream: route.negotiate(stream, deadline_s))

    def _fetch(self, shard: StoredShard, into: memoryview, hold: Hold) -> Checksum | None:
        self._require()
        route = self.route
        if route is not None and route.open:
            with contextlib.suppress(ChannelError):
                return self._with_stream(
                    lambda stream: route.read(stream, shard, into, self._deadline_s, hold)
                )

        def read(stream: Stream) -> Checksum | None:
            request = Fetch(
                shard.namespace, shard.key, shard.shard, shard.payload_bytes, shard.tenant
            )
            stream.send(request, self._deadline)
            answer = stream.receive(FETCHED, self._deadline)
            if isinstance(answer, Absent):
                return None
            if (answer.key, answer.shard) != (shard.key, shard.shard):
                raise ProtocolError(f"{self.title}: an answer to another request")
            hashed, payload = xxhash.xxh3_128(), into[: shard.payload_bytes]
            end = time.monotonic() + _LONGEST * self._deadline_s
            stream.receive_into(payload, end, silence_s=self._deadline_s, each=hashed.update)
            if hashed.digest() != answer.checksum:
                raise DamagedShardError(f"{self.title}: wrong bytes arrived", hashed.digest())
            return Checksum(answer.checksum)

        return self._with_stream(read, data=True)

    def disconnect(self) -> None:
        """Close the idle connections."""
        with self._lock:
            streams = [*self._idle[False], *self._idle[True]]
            self._idle = {False: [], True: []}
        for stream in streams:
            stream.close()

    def _require(self) -> None:
        """Raise `AwayError` for a request that waited for a thread while the peer failed."""
        if not self.usable:
            raise AwayError(f"{self.title} is away")

    @property
    def _no_member(self) -> str:
        return f"{self.title} is no peer any more"

    @property
    def _deadline(self) -> float:
        return time.monotonic() + self._deadline_s

    def _with_stream(self, work: Callable[[Stream], T], *, data: bool = False) -> T:
        """Do a request on an idle connection, or on a new one; `data`: it needs no encryption.

        A connection that was idle may have been closed meanwhile: then a new one is tried once.
        """
        data = data and self._certificates is not None and not self._certificates.encrypt_data
        with self._lock:
            stream = self._idle[data].pop() if self._idle[data] else None
        if stream is not None and stream.credential is not None and not stream.credential.valid:
            stream.close()
            self.disconnect()
            stream = None
        if stream is not None:
            try:
                return self._done(stream, self._on(stream, work), data=data)
            except SilentPeerError:  # it would be silent for as long again
                stream.close()
                raise
            except PeerError:
                stream.close()
                self.disconnect()
            except BaseException:  # after any error, the connection must not leak
                stream.close()
                raise
        if self._left:
            raise AwayError(self._no_member)
        stream = self._connect_for_data() if data else self._connect()
        try:
            return self._done(stream, self._on(stream, work), data=data)
        except BaseException:  # as above
            stream.close()
            raise

    def _on(self, stream: Stream, work: Callable[[Stream], T]) -> T:
        """Do a request on a connection that `break_off` can end meanwhile."""
        with self._lock:
            if self._left:
                raise AwayError(self._no_member)
            self._in_use.add(stream)
        try:
            return work(stream)
        except PeerError as error:
            if self._left:
                raise AwayError(self._no_member) from error
            raise
        finally:
            with self._lock:
                self._in_use.discard(stream)

    def _done(self, stream: Stream, result: T, *, data: bool) -> T:
        with self._lock:
            keep = len(self._idle[data]) < self._most_idle
            if keep:
                self._idle[data].append(stream)
        if not keep:
            stream.close()
        return result

    def _connect(self) -> Stream:
        stream, self.node = dial(
            self.address, self._self, self._token, self._certificates, self._deadline_s
        )
        return stream

    def _connect_for_data(self) -> Stream:
        """Return a connection without TLS if the peer has a ticket for it, else one with TLS."""

        def ask(stream: Stream) -> tuple[Ticket, Credential | None]:
            stream.send(GetTicket(), self._deadline)
            return stream.receive(TICKET, self._deadline), stream.credential

        ticket, credential = self._with_stream(ask)
        if not ticket.id:
            return self._connect()
        stream, _ = dial(self.address, self._self, b"", None, self._deadline_s, ticket)
        stream.credential = credential
        return stream
