# SPDX-License-Identifier: Apache-2.0
"""Peer tier: the memory of other nodes, as a shared tier that is only read."""

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import xxhash

from kvhaven.errors import ProtocolError, TierError, TierMissError
from kvhaven.peers.addresses import Address, resolve
from kvhaven.peers.wire import (
    MOST_KEYS,
    Absent,
    Chunk,
    Fetch,
    Has,
    HasReply,
    PeerError,
    Ping,
    Pong,
    SilentPeerError,
    Stream,
    greet,
)
from kvhaven.protocol import batches
from kvhaven.tiers.base import Namespace, StoredShard, TierAudit, TierHealth
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import DamagedShardError
from kvhaven.tiers.health import Breaker
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, TenantId

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PING_S: Final = 1.0
"""Interval of pings, and of attempts to reach peers that are away."""
_RESOLVE_S: Final = 5.0
_LONGEST: Final = 10
"""A shard may take this many times `deadline_s` in total, as long as bytes keep coming."""
_MOST_KNOWN: Final = 100_000
"""Chunks whose peer is remembered."""


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


_ChunkName = tuple[NamespaceDigest, TenantId, ChunkKey]


class _AwayError(PeerError):
    """A peer failed before the request was sent; the failure was counted then."""


class _Peer:
    """One other node: its connections, the threads that use them, and its state.

    Pings and lookups have a thread, reads have `streams` threads. So a peer that is slow or silent
    holds up only what is asked of it. `up`, `dropped` and the counters change on the event loop
    only, `_idle` under its lock.
    """

    def __init__(
        self, address: Address, node: str, token: bytes, deadline_s: float, streams: int
    ) -> None:
        self.address = address
        self.title = f"peer {address}"
        self.up = False
        self.own = False
        """Whether the address is this node's own."""
        self.error = "not connected yet"
        self.node = ""
        self.found = self.read = self.damaged = 0
        self.breaker = Breaker(time.monotonic, threshold=3, pause_s=1.0, max_pause_s=30.0)
        self._self = node
        self._token = token
        self._deadline_s = deadline_s
        self._most_idle = streams + 1
        self._control = TierExecutor(1)
        self._data = TierExecutor(streams, per_core=streams)
        self._lock = threading.Lock()
        self._idle: list[Stream] = []

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
    ) -> set[_ChunkName]:
        """Ask which chunks it has. Raises `PeerError` or `TierError`."""
        ask = functools.partial(self._has, namespace, tenant, keys)
        return await self._control.run(Lane.WRITE, ask)  # behind pings

    async def fetch(self, shard: StoredShard, into: memoryview) -> Checksum | None:
        """Read a shard's payload; None if the peer does not have it.

        Raises `PeerError`, `TierError`, and `DamagedShardError` if the bytes do not have the
        checksum of the rank that computed them.
        """
        return await self._data.run(Lane.READ, functools.partial(self._fetch, shard, into))

    async def close(self, deadline_s: float) -> None:
        """End running requests within `deadline_s` seconds, and disconnect, for good."""
        self.up = False
        with self._lock:
            self._most_idle = 0
        self.disconnect()
        await asyncio.gather(self._control.close(deadline_s), self._data.close(deadline_s))

    # In threads

    def _ping(self) -> str:
        def ping(stream: Stream) -> None:
            stream.send(Ping(), self._deadline)
            stream.receive(Pong, self._deadline)

        self._with_stream(ping)
        return self.node

    def _has(
        self, namespace: NamespaceDigest, tenant: TenantId, keys: Sequence[ChunkKey]
    ) -> set[_ChunkName]:
        self._require()

        def ask(stream: Stream) -> set[_ChunkName]:
            there: set[_ChunkName] = set()
            for part in batches(keys, MOST_KEYS):
                stream.send(Has(namespace, b"".join(part), tenant), self._deadline)
                reply = stream.receive(HasReply, self._deadline).there
                if len(reply) != len(part):
                    raise ProtocolError(f"{self.title}: {len(reply)} answers to {len(part)} keys")
                there |= {
                    (namespace, tenant, key) for key, has in zip(part, reply, strict=True) if has
                }
            return there

        return self._with_stream(ask)

    def _fetch(self, shard: StoredShard, into: memoryview) -> Checksum | None:
        self._require()

        def read(stream: Stream) -> Checksum | None:
            request = Fetch(
                shard.namespace, shard.key, shard.shard, shard.payload_bytes, shard.tenant
            )
            stream.send(request, self._deadline)
            answer = stream.receive(Chunk | Absent, self._deadline)  # type: ignore[arg-type]  # a union
            if isinstance(answer, Absent):
                return None
            hashed, payload = xxhash.xxh3_128(), into[: shard.payload_bytes]
            end = time.monotonic() + _LONGEST * self._deadline_s
            stream.receive_into(payload, end, silence_s=self._deadline_s, each=hashed.update)
            if hashed.digest() != answer.checksum:
                raise DamagedShardError(f"{self.title}: wrong bytes arrived", hashed.digest())
            return Checksum(answer.checksum)

        return self._with_stream(read)

    def disconnect(self) -> None:
        """Close the idle connections."""
        with self._lock:
            streams, self._idle = self._idle, []
        for stream in streams:
            stream.close()

    def _require(self) -> None:
        """Raise `_AwayError` for a request that waited for a thread while the peer failed."""
        if not self.usable:
            raise _AwayError(f"{self.title} is away")

    @property
    def _deadline(self) -> float:
        return time.monotonic() + self._deadline_s

    def _with_stream(self, work: Callable[[Stream], T]) -> T:
        """Do a request on an idle connection, or on a new one.

        A connection that was idle may have been closed meanwhile: then a new one is tried once.
        """
        with self._lock:
            stream = self._idle.pop() if self._idle else None
        if stream is not None:
            try:
                return self._done(stream, work(stream))
            except SilentPeerError:  # it would be silent for as long again
                stream.close()
                raise
            except PeerError:
                stream.close()
                self.disconnect()
            except BaseException:
                stream.close()
                raise
        stream = self._connect()
        try:
            return self._done(stream, work(stream))
        except BaseException:
            stream.close()
            raise

    def _done(self, stream: Stream, result: T) -> T:
        with self._lock:
            keep = len(self._idle) < self._most_idle
            if keep:
                self._idle.append(stream)
        if not keep:
            stream.close()
        return result

    def _connect(self) -> Stream:
        deadline = self._deadline
        try:
            sock = socket.create_connection(
                (self.address.host, self.address.port), timeout=self._deadline_s
            )
        except (OSError, UnicodeError) as error:  # no DNS name may be like that
            reason = getattr(error, "strerror", None) or str(error)
            raise PeerError(f"{self.title} cannot be reached: {reason}") from error
        stream = Stream(sock, self.title)
        try:
            self.node = greet(stream, self._self, self._token, deadline)
        except BaseException:
            stream.close()
            raise
        return stream


class PeerTier:
    """Tier over the memory of other nodes' services. `Tier` documents the methods.

    A lookup asks all peers that answer, concurrently. A read goes to the peer that had the chunk,
    then to the others. Bytes are verified against the checksums of the ranks that computed them,
    in the thread that receives them. Nothing is written: each node keeps what its engines compute,
    and what it read. A peer that fails three times in a row is left out for a while.

    `node` is this service's name, different at each start: an address that leads back here is
    ignored. `deadline_s` is the longest silence of a peer. `streams` is the number of shards that
    are read concurrently from one peer.
    """

    name = "peer"
    shared = True

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        token: bytes,
        deadline_s: float = 1.0,
        streams: int = 2,
    ) -> None:
        self.node = uuid.uuid4().hex
        self._addresses = tuple(addresses)
        self._token = token
        self._deadline_s = deadline_s
        self._streams = streams
        self._peers: dict[Address, _Peer] = {}
        self._where: dict[_ChunkName, _Peer] = {}
        self._names = TierExecutor(1)
        self._resolved: dict[Address, list[Address]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._epoch = 0
        self._reads = self._misses = self._errors = self._rejected = 0
        self._last_error = ""

    def peers(self) -> list[PeerStatus]:
        """Return the state of every peer."""
        return [
            PeerStatus(
                str(peer.address),
                peer.node,
                peer.usable,
                peer.own,
                peer.found,
                peer.read,
                peer.damaged,
                "this node itself" if peer.own else peer.error,
            )
            for peer in self._peers.values()
        ]

    async def start(self) -> None:
        """Connect to the peers, in the background after `deadline_s` seconds."""
        tried = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(tried), name="kvhaven-peers-keeper")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._deadline_s):
                await tried.wait()

    async def close(self, deadline_s: float) -> None:
        """Disconnect."""
        if self._keeper is not None:
            self._keeper.cancel()
        closing = [peer.close(deadline_s) for peer in self._peers.values()]
        await asyncio.gather(self._names.close(deadline_s), *closing)
        if self._keeper is not None:  # what it waited for has ended now, or is abandoned
            await asyncio.wait([self._keeper], timeout=deadline_s)

    async def add_namespace(self, namespace: Namespace) -> None:
        """Do nothing: peers know their own namespaces."""

    async def scan(
        self,
        tenant: TenantId | None = None,  # noqa: ARG002 - the contract's
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield nothing: what peers hold changes by the second, so they are asked."""
        nothing: tuple[tuple[Namespace, Mapping[StoredShard, int]], ...] = ()
        for each in nothing:
            yield each

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Ask all peers for the chunks of these shards."""
        wanted: dict[tuple[NamespaceDigest, TenantId], dict[ChunkKey, None]] = {}
        for shard in shards:
            wanted.setdefault((shard.namespace, shard.tenant), {})[shard.key] = None
        usable = self._usable()
        there: set[_ChunkName] = set()
        answered = False
        for (namespace, tenant), keys in wanted.items():
            asked = [self._ask(peer, namespace, tenant, tuple(keys)) for peer in usable]
            for peer, found in zip(usable, await asyncio.gather(*asked), strict=True):
                if found is None:
                    continue
                answered = True
                there |= found
                peer.found += len(found)
                if len(self._where) > _MOST_KNOWN:
                    self._where.clear()
                self._where.update(dict.fromkeys(found, peer))
        if shards and not answered:
            raise TierError(f"no peer answered: {self._last_error}")
        return [(shard.namespace, shard.tenant, shard.key) in there for shard in shards]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read from the peer that had the chunk, or from any other that has it."""
        best = self._where.get((shard.namespace, shard.tenant, shard.key))
        peers = sorted(self._usable(), key=lambda peer: peer is not best)
        if not peers:
            raise TierError(f"no peer can be reached: {self._last_error}")
        failure: Exception | None = None
        try:
            for peer in peers:
                try:
                    checksum = await peer.fetch(shard, into)
                except DamagedShardError as error:
                    peer.damaged += 1
                    self._rejected += 1
                    failure = error
                    self._failed(peer, error)
                except (PeerError, ProtocolError, TierError) as error:
                    failure = error
                    self._failed(peer, error)
                else:
                    peer.breaker.succeeded()
                    if checksum is not None:
                        peer.read += 1
                        self._reads += 1
                        return checksum
            self._where.pop((shard.namespace, shard.tenant, shard.key), None)
            self._misses += 1
            if failure is not None and not isinstance(failure, DamagedShardError):
                raise TierError(str(failure)) from failure
            raise TierMissError(f"no peer has {shard.key.hex()}") from failure
        finally:
            # An exception holds this frame, which must not hold it: the service runs no GC.
            del failure

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Raise `TierError`: other nodes' memory is not written."""
        del shard, payload, checksum
        raise TierError("peers are only read")

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Forget which peer had these chunks; their nodes keep them."""
        for shard in shards:
            self._where.pop((shard.namespace, shard.tenant, shard.key), None)

    def health(self) -> TierHealth:
        """Return the counters; the tier is online while a peer answers."""
        return TierHealth(
            online=bool(self._usable()),
            capacity_bytes=None,
            used_bytes=0,
            epoch=self._epoch,
            queued_reads=sum(peer.queued_reads for peer in self._peers.values()),
            reads=self._reads,
            misses=self._misses,
            errors=self._errors,
            rejected=self._rejected,
            last_error=self._last_error,
        )

    async def check(self) -> TierAudit:
        """Return an empty audit: nothing is stored here."""
        return TierAudit(0, 0)

    def _usable(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.usable]

    async def _ask(
        self, peer: _Peer, namespace: NamespaceDigest, tenant: TenantId, keys: tuple[ChunkKey, ...]
    ) -> set[_ChunkName] | None:
        """Return the chunks that a peer has; None if it does not answer."""
        try:
            there = await peer.has(namespace, tenant, keys)
        except (PeerError, ProtocolError, TierError) as error:
            self._failed(peer, error)
            return None
        peer.breaker.succeeded()
        return there

    def _failed(self, peer: _Peer, error: Exception) -> None:
        if isinstance(error, _AwayError):
            return
        self._errors += 1
        self._last_error = peer.error = str(error)
        if peer.breaker.failed():
            _log.warning("%s: left out for a while: %s", peer.title, error)

    # Membership

    async def _keep(self, tried: asyncio.Event) -> None:
        """Resolve names, and find out which peers answer, until cancelled."""
        resolved = -_RESOLVE_S
        while True:
            if time.monotonic() - resolved >= _RESOLVE_S:
                resolved = time.monotonic()
                await self._resolve()
            await asyncio.gather(*map(self._look_after, tuple(self._peers.values())))
            tried.set()
            await asyncio.sleep(_PING_S)

    async def _resolve(self) -> None:
        """Add peers for new addresses, and drop those of names that no longer have them."""
        found: dict[Address, None] = {}
        for address in self._addresses:
            try:
                there = await self._names.run(Lane.READ, functools.partial(resolve, address))
                self._resolved[address] = there
            except (OSError, TierError) as error:
                # Its members stay while the name service is away.
                self._last_error = f"{address} cannot be resolved: {error}"
            found |= dict.fromkeys(self._resolved.get(address, ()))
        for address in [one for one in found if one not in self._peers]:
            self._peers[address] = _Peer(
                address, self.node, self._token, self._deadline_s, self._streams
            )
        for address in [one for one in self._peers if one not in found]:
            await self._peers.pop(address).close(self._deadline_s)

    async def _look_after(self, peer: _Peer) -> None:
        if peer.own:
            return
        probing = peer.breaker.take_probe()
        if not (probing or peer.breaker.closed):
            return
        try:
            node = await peer.ping()
        except Exception as error:  # noqa: BLE001  this peer is away; the others are kept
            if not isinstance(error, PeerError | ProtocolError | TierError):
                _log.exception("%s: a ping failed unexpectedly", peer.title)
            if peer.up or str(error) != peer.error:
                _log.warning("%s: away: %s", peer.title, error)
            self._last_error = peer.error = str(error)
            peer.up = False
            peer.disconnect()
        else:
            if not peer.up:
                self._epoch += 1
                _log.info("%s: connected, node %s", peer.title, node[:8])
            peer.own = node == self.node
            peer.up, peer.error = True, ""
        if probing:
            peer.breaker.probed(success=peer.up)
