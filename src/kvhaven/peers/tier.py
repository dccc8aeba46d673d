# SPDX-License-Identifier: Apache-2.0
"""Peer tier: the memory of other nodes, as a shared tier that is only read."""

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from kvhaven.errors import ConfigError, ProtocolError, TierError, TierMissError
from kvhaven.keys import announced_digest
from kvhaven.peers.addresses import Address, parse_address, resolve
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.nixl import KIND, NixlChannel, TcpOnly
from kvhaven.peers.peer import AwayError, ChunkName, Peer, PeerStatus
from kvhaven.peers.wire import (
    PeerError,
)
from kvhaven.tiers.base import Namespace, StoredShard, TierAudit, TierHealth
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import DamagedShardError
from kvhaven.types import NO_TENANT, Checksum, ChunkKey, NamespaceDigest, TenantId

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PING_S: Final = 1.0
"""Interval of pings, and of attempts to reach peers that are away."""
_RESOLVE_S: Final = 5.0
_FOLLOW_S: Final = 0.05
"""Shortest interval of announcements of changes."""
_SNAPSHOT_S: Final = 0.002
"""Shortest interval of the parts of a snapshot."""
_OVERFLOWED_S: Final = 60.0
"""Interval of snapshots of a peer with too many chunks."""
_MOST_KNOWN: Final = 100_000
"""Chunks whose peer is remembered."""
_MOST_NAMED: Final = 256
"""Hosts in domains of `dns://` names that are remembered."""
_PIECE: Final = 2048
"""Chunks that are looked for in announcements before others may use the event loop: 0.5 ms."""
_MOST_DAMAGES: Final = 3
_DAMAGES_S: Final = 60.0
"""A peer from which wrong bytes came so often within this time is left out for a while."""


class NodeRegistry(Protocol):
    """A place where nodes find each other. Its methods block, and are called in a thread."""

    title: str

    def members(self) -> list[str]:
        """Register this node again; return the addresses of all. Raises `TierError`."""

    def leave(self) -> None:
        """Remove this node."""


class PeerTier:
    """Tier over the memory of other nodes' services. `Tier` documents the methods.

    Peers announce their chunks, and most lookups are answered by what they announced. A peer is
    asked if its announcements are not complete, or if it has announced a part of the chunks. A read
    goes to the peer that had the chunk, then to the others that may have it. Bytes are verified
    against the checksums of the ranks that computed them, in the thread that receives them. Nothing
    is written: each node keeps what its engines compute, and the chunks it read. A peer that fails
    three times in a row, or sends wrong bytes three times in a minute, is left out for 1 to 30 s.

    `node` is this service's name, different at each start: an address that leads back here is
    ignored. `deadline_s` is the longest silence of a peer. `streams` is the number of shards that
    are read concurrently from one peer. With `certificates`, connections are encrypted. Without
    `tenants`, chunks of a tenant are neither looked up nor read. Nodes in `registries` are peers,
    besides those at `addresses`.
    """

    name = "peer"
    shared = True

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        token: bytes,
        deadline_s: float = 1.0,
        streams: int = 4,
        certificates: Certificates | None = None,
        tenants: bool = True,
        channel: NixlChannel | TcpOnly | None = None,
        registries: Sequence[NodeRegistry] = (),
    ) -> None:
        self.node = uuid.uuid4().hex
        self._addresses = tuple(addresses)
        self._registries = tuple(registries)
        self._registered: dict[NodeRegistry, list[Address]] = {}
        self._token = token
        self._deadline_s = deadline_s
        self._streams = streams
        self._certificates = certificates
        self._tenants = tenants
        self._channel = channel or TcpOnly("")
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: dict[Address, Peer] = {}
        self._leaving: set[Peer] = set()
        """Peers that were dropped, and whose threads have not ended yet."""
        self._where: dict[ChunkName, Peer] = {}
        self._damages: dict[Address, deque[float]] = {}
        """When each peer's last wrong bytes came."""
        self._names = TierExecutor(1)
        self._hosts = TierExecutor(1, max_queued=_MOST_NAMED)
        self._resolved: dict[Address, list[Address]] = {}
        self._named: dict[Address, tuple[float, list[Address]]] = {}
        """Hosts that clients named, and until when they are not resolved again."""
        self._keeper: asyncio.Task[None] | None = None
        self._followers: dict[Peer, asyncio.Task[None]] = {}
        self._epoch = 0
        self._reads = self._misses = self._errors = self._rejected = 0
        self._last_error = ""

    def use(self, channel: NixlChannel | TcpOnly) -> None:
        """Set the channel by which shards are read. Called before `start`."""
        self._channel = channel

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
                KIND if peer.route is not None and peer.route.open else "tcp",
                self._channel.reason if peer.route is None else peer.route.reason,
                peer.view.digests,
                peer.view.synced,
                peer.questions,
            )
            for peer in self._peers.values()
        ]

    def shares(self, tenant: TenantId) -> bool:
        """Return whether a tenant's chunks may move between nodes (setting `peer_tenants`)."""
        return self._tenants or tenant == NO_TENANT

    def named(self, node: str) -> Peer | None:
        """Return the peer with a node's name, if it can be reached."""
        return next((peer for peer in self._usable() if peer.node == node), None)

    async def at(self, address: Address) -> Peer | None:
        """Return the peer at an address; None if there is none that can be reached.

        It is written as in `peers`, or as a name there resolved to, or it is a `dns://` name of
        `peers` or a host in its domain. Of a name that stands for several peers, none is meant.
        Addresses come from clients, so other names are not resolved.
        """
        peer = self._peers.get(address)
        host = address.host.lower().rstrip(".")
        domains = [one for one in self._addresses if _has_host(one, host, address.port)]
        if peer is None and domains:
            same = next((one for one in domains if _domain(one) == host), None)
            known = None if same is None else self._resolved.get(same, [])
            found = await self._resolve_named(host, address.port) if known is None else known
            named = [self._peers[one] for one in found if one in self._peers]
            candidates = [one for one in named if one.usable]
            peer = candidates[0] if len(candidates) == 1 else None
        return peer if peer is not None and peer.usable else None

    async def _resolve_named(self, host: str, port: int) -> list[Address]:
        """Resolve a host in the domain of a `dns://` name, at most every 5 seconds."""
        address = Address(host, port, dynamic=True)
        now = time.monotonic()
        until, found = self._named.get(address, (0.0, []))
        if now < until:
            return found
        if len(self._named) >= _MOST_NAMED:
            self._named.clear()
        self._named[address] = now + _RESOLVE_S, found
        lookup = functools.partial(resolve, address)
        with contextlib.suppress(OSError, TierError):  # no such host
            found = await self._hosts.run(Lane.READ, lookup)
        self._named[address] = now + _RESOLVE_S, found
        return found

    def located(self, chunk: ChunkName, peer: Peer) -> None:
        """Note that a peer has a chunk, so that it is the first to be asked for it."""
        if len(self._where) > _MOST_KNOWN:
            self._where.clear()
        self._where[chunk] = peer

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
        for task in (*self._tasks, *self._followers.values()):
            task.cancel()
        for registry in self._registries:
            with contextlib.suppress(TierError, TimeoutError):  # the entry expires
                async with asyncio.timeout(deadline_s):
                    await self._names.run(Lane.READ, registry.leave)
        closing = [peer.close(deadline_s) for peer in (*self._peers.values(), *self._leaving)]
        names = (self._names.close(deadline_s), self._hosts.close(deadline_s))
        await asyncio.gather(*names, *closing)
        tasks = [*self._followers.values()] + ([self._keeper] if self._keeper is not None else [])
        if tasks:  # their calls have ended now, or are abandoned
            await asyncio.wait(tasks, timeout=deadline_s)

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
        """Look for the chunks of these shards in what peers announced, or ask them."""
        wanted: dict[tuple[NamespaceDigest, TenantId], dict[ChunkKey, None]] = {}
        for shard in shards:
            if self.shares(shard.tenant):
                wanted.setdefault((shard.namespace, shard.tenant), {})[shard.key] = None
        usable = self._usable()
        there: set[ChunkName] = set()
        answered = False
        for (namespace, tenant), keys in wanted.items():
            digests = {key: announced_digest(namespace, key, tenant) for key in keys}
            asked: list[tuple[Peer, set[ChunkKey], list[ChunkKey]]] = []
            async for peer in _in_turns(usable, len(digests)):
                found, unsure = _announced(peer, digests)
                if unsure:
                    asked.append((peer, found, unsure))
                else:
                    answered = True
                    there |= self._note_found(peer, namespace, tenant, found)
            answers = await asyncio.gather(
                *(self._ask(peer, namespace, tenant, unsure) for peer, _, unsure in asked)
            )
            told = zip(asked, answers, strict=True)
            async for (peer, found, _), more in _in_turns(told, len(digests)):
                if more is not None:
                    answered = True
                    there |= self._note_found(peer, namespace, tenant, found | more)
        if wanted and not answered:
            raise TierError(f"no peer answered: {self._last_error}")
        return [(shard.namespace, shard.tenant, shard.key) in there for shard in shards]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read from the peer that had the chunk, or from any other that has it."""
        best = self._where.get((shard.namespace, shard.tenant, shard.key))
        if not self.shares(shard.tenant):
            raise TierMissError("peer_tenants is off: chunks of tenants stay on their nodes")
        usable = self._usable()
        if not usable:
            raise TierError(f"no peer can be reached: {self._last_error}")
        digest = announced_digest(shard.namespace, shard.key, shard.tenant)
        peers = sorted(
            (one for one in usable if one is best or not one.view.synced or one.view.has(digest)),
            key=lambda peer: peer is not best,
        )
        failure: Exception | None = None
        try:
            for peer in peers:
                try:
                    checksum = await peer.fetch(shard, into)
                except DamagedShardError as error:
                    peer.damaged += 1
                    self._rejected += 1
                    failure = error
                    self._failed(peer, error, enough=self._damages_too_often(peer))
                except (PeerError, ProtocolError, TierError) as error:
                    failure = error
                    self._failed(peer, error)
                else:
                    peer.breaker.succeeded()
                    if checksum is not None:
                        peer.read += 1
                        self._reads += 1
                        return checksum
                    # It is gone, as the peer will announce, or cannot be pinned there now.
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

    def _usable(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.usable]

    async def _ask(
        self,
        peer: Peer,
        namespace: NamespaceDigest,
        tenant: TenantId,
        keys: Sequence[ChunkKey],
    ) -> set[ChunkKey] | None:
        """Ask a peer which chunks it has; None if it does not answer."""
        try:
            there = await peer.has(namespace, tenant, keys)
        except (PeerError, ProtocolError, TierError) as error:
            self._failed(peer, error)
            return None
        peer.breaker.succeeded()
        return {key for _, _, key in there}

    def _note_found(
        self, peer: Peer, namespace: NamespaceDigest, tenant: TenantId, keys: set[ChunkKey]
    ) -> set[ChunkName]:
        """Note that a peer has chunks, and return their names."""
        found = {(namespace, tenant, key) for key in keys}
        peer.found += len(found)
        for chunk in found:
            self.located(chunk, peer)
        return found

    def _damages_too_often(self, peer: Peer) -> bool:
        """Note that wrong bytes came; return whether they did three times in a minute.

        In between, lookups and other reads may succeed, so the breaker alone would not open.
        """
        now = time.monotonic()
        times = self._damages.setdefault(peer.address, deque(maxlen=_MOST_DAMAGES))
        times.append(now)
        return len(times) == _MOST_DAMAGES and now - times[0] < _DAMAGES_S

    def _failed(self, peer: Peer, error: Exception, *, enough: bool = False) -> None:
        if isinstance(error, AwayError):
            return
        self._errors += 1
        self._last_error = peer.error = str(error)
        if peer.breaker.failed(enough=enough):
            _log.warning("%s: left out for a while: %s", peer.title, error)

    # Membership

    async def _keep(self, tried: asyncio.Event) -> None:
        """Resolve names, and find out which peers answer, until cancelled."""
        resolved = time.monotonic()
        resolving = self._spawn(self._resolve(), "kvhaven-peers-resolve")
        pings: dict[Peer, asyncio.Task[None]] = {}
        first = True
        while True:
            began = time.monotonic()
            if resolving.done() and time.monotonic() - resolved >= _RESOLVE_S:
                resolved = time.monotonic()
                resolving = self._spawn(self._resolve(), "kvhaven-peers-resolve")
            # A name service may hang: peers that are known are pinged meanwhile.
            await asyncio.wait([resolving], timeout=_PING_S)
            for peer in self._peers.values():
                if peer not in pings or pings[peer].done():
                    pings[peer] = self._spawn(self._look_after(peer), "kvhaven-peers-ping")
            if first:
                self._spawn(_set_after(pings.values(), tried), "kvhaven-peers-tried")
                first = False
            # One that takes long, as to find a host's address may, delays no other.
            waiting = [task for peer, task in pings.items() if self._has(peer)]
            if waiting:
                await asyncio.wait(waiting, timeout=_PING_S)
            pings = {peer: task for peer, task in pings.items() if not task.done()}
            await asyncio.sleep(max(0.0, began + _PING_S - time.monotonic()))

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _resolve(self) -> None:
        """Add peers for new addresses, and drop those of names that no longer have them."""
        try:
            for address in self._addresses:
                if not address.dynamic:
                    self._resolved[address] = [address]
            await self._settle()
            for address in self._addresses:
                if address.dynamic:
                    await self._resolve_name(address)
            for registry in self._registries:
                await self._ask_registry(registry)
        except Exception as error:  # noqa: BLE001  membership must survive any error
            _log.exception("peers: their addresses could not be read")
            self._last_error = str(error)

    async def _resolve_name(self, name: Address) -> None:
        try:
            work = functools.partial(resolve, name)
            self._resolved[name] = await self._names.run(Lane.READ, work)
        except (OSError, TierError) as error:
            # Its members stay while the name service is away.
            self._last_error = f"{name} cannot be resolved: {error}"
        await self._settle()

    async def _ask_registry(self, registry: NodeRegistry) -> None:
        try:
            words = await self._names.run(Lane.READ, registry.members)
        except TierError as error:
            self._last_error = str(error)
        else:
            self._registered[registry] = _addresses(words, registry.title)
        await self._settle()

    async def _settle(self) -> None:
        """Have the peers that names and registries said last, and no others."""
        told = (*self._resolved.values(), *self._registered.values())
        found = dict.fromkeys(address for addresses in told for address in addresses)
        for address in [one for one in found if one not in self._peers]:
            route = self._channel.route(f"peer {address}")
            self._peers[address] = Peer(
                address,
                self.node,
                self._token,
                self._deadline_s,
                self._streams,
                self._certificates,
                route,
            )
        for address in [one for one in self._peers if one not in found]:
            self._damages.pop(address, None)
            peer = self._peers.pop(address)
            if peer in self._followers:
                self._followers.pop(peer).cancel()
            peer.break_off()
            self._leaving.add(peer)
            self._spawn(self._leave(peer), "kvhaven-peers-leave")

    async def _leave(self, peer: Peer) -> None:
        """Forget what a peer announced, and wait for its threads."""
        peer.view.reset()
        await _free(peer)
        await peer.ended()
        self._leaving.discard(peer)

    async def _follow(self, peer: Peer) -> None:
        """Keep the view of a peer up to date, until cancelled."""
        while True:
            pause_s, began = _PING_S, time.monotonic()
            if not peer.usable:
                peer.view.reset()
            else:
                try:
                    await peer.follow()
                    pause_s = _FOLLOW_S if peer.view.synced else _SNAPSHOT_S
                    if peer.view.overflowed:
                        _log.warning("%s: has too many chunks to keep; it is asked", peer.title)
                        pause_s = _OVERFLOWED_S
                except Exception as error:  # noqa: BLE001  now it is asked, and followed again later
                    # Pings, lookups and reads decide whether the peer is in use.
                    expected = isinstance(error, PeerError | ProtocolError | TierError)
                    level = logging.DEBUG if expected else logging.ERROR
                    _log.log(level, "%s: not followed: %s", peer.title, error)
                    peer.view.reset()
            await _free(peer)
            await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))

    async def _look_after(self, peer: Peer) -> None:
        if peer.own:
            return
        try:
            node = await peer.ping()
        except Exception as error:  # noqa: BLE001  this peer is away; the others are kept
            if not isinstance(error, PeerError | ProtocolError | TierError):
                _log.exception("%s: a ping failed unexpectedly", peer.title)
            if not self._has(peer):
                return
            if peer.up or str(error) != peer.error:
                _log.warning("%s: away: %s", peer.title, error)
            self._last_error = peer.error = str(error)
            peer.up = False
            peer.view.reset()
            peer.disconnect()
        else:
            if self._has(peer):
                self._is_there(peer, node)

    def _has(self, peer: Peer) -> bool:
        """Return whether a peer was not dropped meanwhile."""
        return self._peers.get(peer.address) is peer

    def _is_there(self, peer: Peer, node: str) -> None:
        """Note that a peer, the node of that name, has answered."""
        if not peer.up:
            self._epoch += 1
            _log.info("%s: connected, node %s", peer.title, node[:8])
        peer.own = node == self.node
        peer.up, peer.error = True, ""
        if not peer.own:  # a test read may take seconds, and other peers are pinged meanwhile
            self._spawn(peer.negotiate(), "kvhaven-peers-negotiate")
            if peer not in self._followers:
                following = asyncio.create_task(self._follow(peer), name="kvhaven-peers-follow")
                self._followers[peer] = following
        # Not before: a pause that grew while it was away would go on when it is back.
        if peer.breaker.take_probe():
            peer.breaker.probed(success=True)


def _announced(peer: Peer, digests: Mapping[ChunkKey, int]) -> tuple[set[ChunkKey], list[ChunkKey]]:
    """Return which chunks a peer has by its announcements, and which it has to be asked for."""
    view = peer.view
    if not view.synced:
        return set(), list(digests)
    found = {key for key, digest in digests.items() if view.has(digest)}
    # A chain of which it has a part may have become longer since its last announcement.
    return found, [key for key in digests if key not in found] if found else []


async def _set_after(tasks: Iterable[asyncio.Task[None]], event: asyncio.Event) -> None:
    """Set an event when tasks have ended."""
    await asyncio.gather(*tasks, return_exceptions=True)
    event.set()


async def _free(peer: Peer) -> None:
    """Free what was forgotten of a peer's announcements, piece by piece."""
    while peer.view.free_some():  # noqa: ASYNC110  it is work, not a wait
        await asyncio.sleep(0)


async def _in_turns(items: Iterable[T], weight: int) -> AsyncIterator[T]:
    """Yield items, each of which takes as long as `weight` chunks; others run in between."""
    looked = 0
    for item in items:
        if looked >= _PIECE:
            await asyncio.sleep(0)
            looked = 0
        looked += weight
        yield item


def _domain(name: Address) -> str:
    return name.host.lower().rstrip(".")


def _has_host(name: Address, host: str, port: int) -> bool:
    """Return whether a host is a `dns://` name, or in its domain."""
    alike = host == _domain(name) or host.endswith(f".{_domain(name)}")
    return name.dynamic and name.port == port and alike


def _addresses(words: Sequence[str], title: str) -> list[Address]:
    """Return the valid ones of registered addresses; anybody may have written the others."""
    found = []
    for word in words:
        try:
            address = parse_address(word, title)
        except ConfigError as error:
            _log.debug("%s", error)
            continue
        if word.isprintable() and not address.dynamic:
            found.append(address)
    return found
