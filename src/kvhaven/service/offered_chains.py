# SPDX-License-Identifier: Apache-2.0
"""Offered chains: what this node's engines compute for other nodes, announced chunk by chunk."""

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Final

from kvhaven.catalog.actions import SessionId
from kvhaven.errors import ConfigError, ProtocolError, TierError
from kvhaven.peers.addresses import Address, parse_address
from kvhaven.peers.peer import Peer
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import MOST_OFFERED, Following, Offer, PeerError, Progress, Pull
from kvhaven.protocol import KeyList, OfferChain, batches, tail_of, tenant_of
from kvhaven.service.driver import Driver
from kvhaven.service.lending import LoopCalls
from kvhaven.service.turns import Job
from kvhaven.types import KEY_BYTES, ChunkKey, NamespaceDigest

logger = logging.getLogger(__name__)

BEAT_S: Final = 0.25
"""Longest silence about a chain that is being computed."""
_LOOK_AHEAD: Final = 64
"""Missing chunks that are looked up at each beat, because they may come from a tier."""
_PIECE: Final = 512
"""Chunks that are looked up in one event: 0.5 ms."""
_QUIET_S: Final = 4 * BEAT_S
"""A chain whose request has ended is over when no chunk was saved for this long.

A quarter of this is enough if no rank is writing what is missing, and it is only the tail (it found
no space, or its request was aborted), or another node asked for the chain after the prefill."""
_LONGEST_QUIET_S: Final = 120.0
"""Any chain is over when no chunk was saved for this long."""
_MOST_CHAINS: Final = 1024
_MOST_KEYS: Final = 1 << 17
"""Chunks of all chains that are still to come."""
_MOST_KINDS: Final = 64
_numbers: Final = itertools.count(1)


class _Chain:
    """A chain that an engine computes. `missing` are the indices of its chunks still to come.

    A chain that another node asks for (`Pull`) has no session: its prefill has ended.
    """

    def __init__(
        self,
        session: SessionId | None,
        digest: NamespaceDigest,
        order: OfferChain | Pull,
        now: float,
        asked_by: str = "",
    ) -> None:
        self.session = session
        self.name = asked_by if session is None else session, order.id
        self.wire_id = f"{next(_numbers)}" if session is not None else order.id
        """Its name between nodes: engines choose `id`, and two may choose the same."""
        self.digest = digest
        self.tenant = tenant_of(order.tenant)
        self.keys = order.keys[: MOST_OFFERED * KEY_BYTES]
        self.tail = tail_of(order.tail) if len(self.keys) == len(order.keys) else None
        self.missing = {key: index for index, key in enumerate(KeyList(self.keys))}
        if self.tail is not None:
            self.missing[self.tail] = len(self.missing)
        self.arrived: list[int] = []
        """Indices that the peer was not told yet."""
        self.tail_tokens = 0
        """Stored tokens of the tail, if it has arrived and the peer was not told yet."""
        self.line: _Line | None = None
        self.offered = session is None
        self.computing = session is not None
        """Whether the engine's request runs."""
        self.moved = now
        """Time of the last chunk, or of the end of the request."""
        self.told = now


class _Line:
    """The chains that one peer is told of; `news` wakes the task that tells it."""

    def __init__(self) -> None:
        self.chains: dict[_Chain, None] = {}
        self.news = asyncio.Event()


class OfferedChains:
    """Announcer of chains: an offer, the chunks that can be read as they are saved, and an end.

    Each peer has one task, which sends one message after another, so a slow peer gets fewer and
    longer ones. A peer that fails is told nothing more of its chains, and ends them itself.

    `attached` returns whether a session exists, `spawn` runs a coroutine as a task of the service.
    Used on the event loop only.
    """

    def __init__(
        self,
        driver: Driver,
        peers: PeerTier | None,
        attached: Callable[[SessionId], bool],
        spawn: Callable[[Coroutine[None, None, None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._peers = peers
        self._attached = attached
        self._spawn = spawn
        self._clock = clock
        self._calls = LoopCalls()
        self._chains: dict[tuple[str, str], _Chain] = {}
        """By the session of the engine, or the name of the node that asked for it, and the id."""
        self._awaited: dict[ChunkKey, dict[_Chain, None]] = {}
        self._lines: dict[Peer, _Line] = {}
        self._complaints: set[str] = set()
        self.offered = self.refused = 0

    def __len__(self) -> int:
        """Return the number of chains that are not over."""
        return len(self._chains)

    def offer(self, session: SessionId, digest: NamespaceDigest, order: OfferChain) -> None:
        """Announce a chain that a session's engine computes.

        A chain that cannot be announced is logged: the other node reads it later, without overlap.
        Raises `ProtocolError` for malformed keys.
        """
        if self._peers is None:
            self._complain("no peers", "kvhaven.to: this node has no peers; set peers")
            return
        if not self._peers.shares(tenant_of(order.tenant)):
            self._complain(
                "tenant", "kvhaven.to: peer_tenants is off, and the request has a tenant"
            )
            return
        try:
            address = parse_address(order.to, "kvhaven.to")
        except ConfigError as error:
            self._complain("address", str(error))
            return
        chain = _Chain(session, digest, order, self._clock())
        if not self._add(chain):
            self.refused += 1
            return
        self._spawn(self._offer(self._peers, chain, address))

    def pulled(self, node: str, pull: Pull) -> Following:
        """Tell a node which chunks of a chain are here. Called from threads."""
        return self._calls.call(functools.partial(self._pulled, node, pull))

    def _pulled(self, node: str, pull: Pull) -> Following:
        digest = NamespaceDigest(pull.namespace)
        peer = self._peers.named(node) if self._peers is not None else None
        if peer is None:
            reason = "the node that asks is not among this node's peers (setting peers)"
            return Following(yes=False, reason=reason)
        if digest not in {one.digest for one in self._driver.catalog.namespaces()}:
            reason = "no engine of this node has that namespace: see kvhaven peers diff"
            return Following(yes=False, reason=reason)
        chain = _Chain(None, digest, pull, self._clock(), node)
        if not self._add(chain):
            return Following(yes=False, reason="too many chains are open already")
        self.offered += 1
        self._spawn(self._begin(peer, chain))
        return Following(yes=True)

    def _add(self, chain: _Chain) -> bool:
        """Follow what is saved of a chain; return False if there are too many, or it is known."""
        much = len(self._chains) >= _MOST_CHAINS or len(self._awaited) >= _MOST_KEYS
        if much or chain.name in self._chains:
            return False
        self._chains[chain.name] = chain
        for key in chain.missing:
            self._awaited.setdefault(key, {})[chain] = None
        return True

    def request_ended(self, session: SessionId, request: str) -> None:
        """Note that a request ended; chunks that are still being saved count."""
        chain = self._chains.get((session, request))
        if chain is not None:
            chain.computing = False
            chain.moved = self._clock()

    def saved(self, key: ChunkKey) -> None:
        """Note that a chunk can be read from now on."""
        for chain in tuple(self._awaited.get(key, ())):
            self._arrived(chain, key)

    async def _offer(self, peers: PeerTier, chain: _Chain, address: Address) -> None:
        peer = await peers.at(address)
        if peer is None:
            reason = f"kvhaven.to: {address} is not a peer that this node can reach"
            self._complain("stranger", reason)
            self._drop(chain)
            return
        await self._begin(peer, chain)

    async def _begin(self, peer: Peer, chain: _Chain) -> None:
        """Find out what is here of a chain, and tell a peer of it from now on."""
        for part in batches(list(chain.missing), _PIECE):
            self._look_for(chain, part)
            await asyncio.sleep(0)
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = _Line()
            self._spawn(self._tell_all(peer, line))
        chain.line = line
        line.chains[chain] = None
        line.news.set()

    async def _tell_all(self, peer: Peer, line: _Line) -> None:
        """Tell a peer of its chains until none is left, or the peer fails."""
        try:
            while line.chains:
                line.news.clear()
                for chain in tuple(line.chains):
                    if not await self._tell(peer, chain):
                        self._drop(chain)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await line.news.wait()
        except (PeerError, ProtocolError, TierError) as error:
            logger.warning("%s: not told of %d chains: %s", peer.title, len(line.chains), error)
        finally:
            del self._lines[peer]
            self._driver.turns.start(self._drop_all(tuple(line.chains)))

    async def _tell(self, peer: Peer, chain: _Chain) -> bool:
        """Tell a peer what is new of a chain; return whether it is to be told more."""
        if not chain.offered:
            offer = Offer(chain.wire_id, chain.digest, chain.keys, chain.tenant, chain.tail or b"")
            answer = await peer.tell(offer)
            if not answer.yes:
                self._complain(answer.reason, f"{peer.title} expects no chain: {answer.reason!r}")
                return False
            chain.offered = True
            self.offered += 1
        beat = self._clock() - chain.told >= BEAT_S
        if beat:
            self._look_for(chain, list(islice(chain.missing, _LOOK_AHEAD)))
        over = self._is_over(chain)
        if not (beat or over or chain.arrived or chain.tail_tokens):
            return True
        arrived, chain.arrived = chain.arrived, []
        tail, chain.tail_tokens = chain.tail_tokens, 0
        chain.told = self._clock()
        answer = await peer.tell(Progress(chain.wire_id, arrived, over, tail))
        return answer.yes and not over

    def _is_over(self, chain: _Chain) -> bool:
        quiet = self._clock() - chain.moved
        patience = _LONGEST_QUIET_S
        if not chain.computing:
            patience = _QUIET_S if self._may_come(chain) else BEAT_S
        gone = chain.session is not None and not self._attached(chain.session)
        return not chain.missing or quiet >= patience or gone

    def _may_come(self, chain: _Chain) -> bool:
        """Return whether more is likely to be saved of a chain whose request has ended."""
        if chain.session is not None and [*islice(chain.missing, 2)] != [chain.tail]:
            return True  # its last chunks may still be on their way from the device
        saving, some = self._driver.catalog.is_being_saved, islice(chain.missing, _LOOK_AHEAD)
        return any(saving(chain.digest, key, chain.tenant) for key in some)

    def _look_for(self, chain: _Chain, keys: Sequence[ChunkKey]) -> None:
        there = self._driver.catalog.has(chain.digest, keys, chain.tenant)
        for key, has in zip(keys, there, strict=True):
            if has:
                self._arrived(chain, key)

    def _arrived(self, chain: _Chain, key: ChunkKey) -> None:
        index = chain.missing.pop(key, None)
        if index is None:
            return
        self._forget(chain, key)
        if key == chain.tail:
            catalog = self._driver.catalog
            chain.tail_tokens = catalog.retain_tail(chain.digest, key, chain.tenant)
        else:
            chain.arrived.append(index)
        chain.moved = self._clock()
        if chain.line is not None:
            chain.line.news.set()

    def _drop(self, chain: _Chain) -> None:
        del self._chains[chain.name]
        for key in chain.missing:
            self._forget(chain, key)
        if chain.line is not None:
            del chain.line.chains[chain]

    def _drop_all(self, chains: Sequence[_Chain]) -> Job:
        for chain in chains:
            self._drop(chain)
            yield

    def _forget(self, chain: _Chain, key: ChunkKey) -> None:
        awaiting = self._awaited[key]
        del awaiting[chain]
        if not awaiting:
            del self._awaited[key]

    def _complain(self, kind: str, reason: str) -> None:
        """Count a chain that is not announced; log the first reason of each kind."""
        self.refused += 1
        if kind not in self._complaints and len(self._complaints) < _MOST_KINDS:
            self._complaints.add(kind)
            logger.warning("chain not offered: %s (more like this are not logged)", reason)
