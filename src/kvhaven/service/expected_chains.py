# SPDX-License-Identifier: Apache-2.0
"""Expected chains: what other nodes' engines compute now, read from them chunk by chunk."""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Final

from kvhaven.catalog.actions import TierName
from kvhaven.errors import KVHavenError, ProtocolError, TierError
from kvhaven.peers.peer import Peer
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import MOST_OFFERED, Following, Offer, PeerError, Progress, Pull
from kvhaven.protocol import KeyList, PullChain, batches, tail_of, tenant_of
from kvhaven.service.driver import Driver
from kvhaven.service.lending import LoopCalls
from kvhaven.service.turns import Job
from kvhaven.tiers.base import Namespace
from kvhaven.types import KEY_BYTES, ChunkKey, NamespaceDigest

logger = logging.getLogger(__name__)
_numbers: Final = itertools.count(1)

_TIER: Final = TierName(PeerTier.name)
_PIECE: Final = 128
"""Chunks that one piece of a job handles; takes 1 ms."""
_MOST_CHAINS: Final = 1024
_MOST_KEYS: Final = 1 << 17
"""Chunks of all chains together."""
_LONGEST_QUIET_S: Final = 60.0
"""A chain of which no chunk arrives for this long ends, whatever its node says."""


class _Chain:
    """A chain that a peer computes. `lookups` are the pending lookups of its chunks, by key.

    Each lookup is answered once: its answer begins with its removal. A chunk in `arrived` is
    answered as present, by the job that was started when it arrived, or when it is expected.
    `others` are its chunks that had a lookup already, most often of another chain that begins with
    the same chunks. If that chain ends without them, this one takes over the lookups.
    """

    def __init__(self, peer: Peer, namespace: Namespace, offer: Offer | Pull, now: float) -> None:
        self.peer = peer
        self.namespace = namespace
        self.keys = KeyList(offer.keys)
        self.tail = tail_of(offer.tail)
        self.tail_tokens = 0
        """Stored tokens of the tail, once it has arrived."""
        self.last = self.tail if self.tail is not None or not len(self.keys) else self.keys[-1]
        self.tenant = tenant_of(offer.tenant)
        self.lookups: dict[ChunkKey, int] = {}
        self.arrived: set[ChunkKey] = set()
        self.others: set[ChunkKey] = set()
        self.heard = self.moved = now
        """Times of its last message, and of its last chunk."""
        self.ended = False
        self.refused = False
        """Whether the peer does not say which chunks it has."""

    def can_take_over(self, chain: "_Chain", key: ChunkKey) -> bool:
        """Return whether this chain may still bring a chunk that an ended one has not brought."""
        alike = self.namespace is chain.namespace and self.tenant == chain.tenant
        return alike and not self.ended and key not in self.arrived


class ExpectedChains:
    """Chains that other nodes offer, or were asked for, until each chunk's fate is known.

    A node that offers a chain and is then silent for `stall_s` seconds has failed: its chain ends,
    and requests that wait for it continue. `peers` is the tier that reads the chunks. `spawn` runs
    a coroutine as a task of the service. `offered` and `progressed` are called from threads, all
    else on the event loop.
    """

    def __init__(
        self,
        driver: Driver,
        peers: PeerTier | None,
        stall_s: float,
        spawn: Callable[[Coroutine[None, None, None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._peers = peers
        self._stall_s = stall_s
        self._spawn = spawn
        self._clock = clock
        self._calls = LoopCalls()
        self._chains: dict[tuple[str, str], _Chain] = {}
        self._successors: dict[ChunkKey, dict[_Chain, None]] = {}
        """Chains by their `others`."""
        self.accepted = self.completed = self.stalled = self.pulled = 0

    def __len__(self) -> int:
        """Return the number of chains that have not ended."""
        return len(self._chains)

    def offered(self, node: str, offer: Offer) -> Following:
        """Expect a chain, unless this node cannot read it."""
        return self._calls.call(functools.partial(self._expect, node, offer))

    def progressed(self, node: str, progress: Progress) -> Following:
        """Read the chunks that have arrived; `ended`: expect no others."""
        return self._calls.call(functools.partial(self._advance, node, progress))

    def pull(self, digest: NamespaceDigest, order: PullChain) -> bool:
        """Expect a chain that another node has computed, and ask it for the chunks.

        It is not asked for a chain that it offers, or whose last chunk is in a known place. If it
        does not answer, chunks are looked up at all peers as ever. Returns False if it cannot be
        asked. Raises `ProtocolError` for malformed keys.
        """
        whole = len(order.keys) <= MOST_OFFERED * KEY_BYTES
        keys = order.keys[: MOST_OFFERED * KEY_BYTES]
        tail = order.tail if whole else b""
        pull = Pull(f"pull-{next(_numbers)}", digest, keys, order.tenant, tail)
        if self._peers is None or not self._peers.shares(tenant_of(order.tenant)):
            return False
        peer = self._peers.named(order.source)
        if peer is None:
            return False
        if self._has_last(peer, digest, pull):
            return True
        if self._begin(order.source, peer, pull):
            return False
        self.pulled += 1
        self._spawn(self._ask(peer, order.source, pull))
        return True

    def _has_last(self, peer: Peer, digest: NamespaceDigest, pull: Pull) -> bool:
        """Return whether a chain's last chunk is in a known place, or offered by this peer."""
        keys, tenant = KeyList(pull.keys), tenant_of(pull.tenant)
        last = tail_of(pull.tail) or (keys[-1] if len(keys) else None)
        if last is None or self._driver.catalog.place_of(digest, last, tenant) is not None:
            return True
        return any(
            chain.last == last and chain.peer is peer and chain.tenant == tenant
            for chain in self._chains.values()
        )

    async def _ask(self, peer: Peer, node: str, pull: Pull) -> None:
        try:
            answer = await peer.tell(pull)
        except (PeerError, ProtocolError, TierError) as error:
            answer = Following(yes=False, reason=str(error))
        chain = self._chains.get((node, pull.id))
        if chain is not None and not answer.yes:
            logger.info("%s sends no chain: %r", peer.title, answer.reason)
            chain.refused = True
            with self._driver.event():
                self._end((node, pull.id))

    def end_silent(self) -> Job:
        """End the chains of nodes that have said nothing, or sent no chunk, for too long."""
        now = self._clock()
        for name, chain in tuple(self._chains.items()):
            if self._chains.get(name) is not chain:
                continue
            if now - chain.heard > self._stall_s or now - chain.moved > _LONGEST_QUIET_S:
                logger.warning("%s: silent while it computes a chain", chain.peer.title)
                self.stalled += 1
                self._end(name)
                yield

    def _expect(self, node: str, offer: Offer) -> Following:
        peer = self._peers.named(node) if self._peers is not None else None
        if peer is None:
            return _refusal("the node that offers is not among this node's peers (setting peers)")
        self._end((node, offer.id))
        reason = self._begin(node, peer, offer)
        return Following(yes=not reason, reason=reason)

    def _begin(self, node: str, peer: Peer, offer: Offer | Pull) -> str:
        """Expect a chain; return why not, or nothing."""
        known = sum(len(chain.keys) for chain in self._chains.values())
        if len(self._chains) >= _MOST_CHAINS or known + len(offer.keys) // KEY_BYTES > _MOST_KEYS:
            return "too many chunks are expected already"
        try:
            namespace = self._driver.catalog.namespace(NamespaceDigest(offer.namespace))
        except KVHavenError:
            return "no engine of this node has that namespace: see kvhaven peers diff"
        chain = _Chain(peer, namespace, offer, self._clock())
        self._chains[node, offer.id] = chain
        self.accepted += 1
        self._driver.turns.start(self._expecting(chain))
        return ""

    def _advance(self, node: str, progress: Progress) -> Following:
        chain = self._chains.get((node, progress.id))
        if chain is None:
            return _refusal("this chain is not expected")
        chain.heard = self._clock()
        if any(index >= len(chain.keys) for index in progress.arrived):
            self._end((node, progress.id))
            return _refusal("the progress names chunks that were not offered")
        arrived = [chain.keys[index] for index in progress.arrived]
        if progress.tail:
            if chain.tail is None or not chain.namespace.has_tails_of(progress.tail):
                self._end((node, progress.id))
                return _refusal("the progress names a tail that was not offered or cannot be")
            chain.tail_tokens = progress.tail
            arrived.append(chain.tail)
        chain.arrived.update(arrived)
        if arrived:
            chain.moved = chain.heard
        self._driver.turns.start(self._arriving(chain, arrived))
        if progress.ended:
            self.completed += 1
            self._end((node, progress.id))
        return Following(yes=True)

    def _end(self, name: tuple[str, str]) -> None:
        chain = self._chains.pop(name, None)
        if chain is not None:
            chain.ended = True
            self._driver.turns.start(self._ending(chain))

    # Jobs, which may run in turns

    def _expecting(self, chain: _Chain) -> Job:
        digest = chain.namespace.digest
        for first in range(0, max(1, len(chain.keys)), _PIECE):
            if chain.ended:
                return
            part, end = chain.keys[first : first + _PIECE], first + _PIECE
            tail = chain.tail if end >= len(chain.keys) else None
            catalog = self._driver.catalog
            numbers = catalog.expected(_TIER, digest, part, chain.tenant, tail)
            chain.lookups |= numbers
            wanted = part if tail is None else [*part, tail]
            for key in [key for key in wanted if key not in numbers]:
                chain.others.add(key)
                self._successors.setdefault(key, {})[chain] = None
            for key in chain.arrived.intersection(wanted):
                self._answer(chain, key, came=True)
            yield

    def _arriving(self, chain: _Chain, keys: list[ChunkKey]) -> Job:
        assert self._peers is not None, "a chain is expected only from peers"
        for part in batches(keys, _PIECE):
            for key in part:
                self._peers.located((chain.namespace.digest, chain.tenant, key), chain.peer)
                self._answer(chain, key, came=True)
            yield

    def _ending(self, chain: _Chain) -> Job:
        for part in batches([key for key in chain.lookups if key not in chain.arrived], _PIECE):
            for key in part:
                others = self._successors.get(key, ())
                successor = next((one for one in others if one.can_take_over(chain, key)), None)
                if successor is not None:
                    successor.lookups[key] = chain.lookups.pop(key)
                elif chain.refused:
                    self._driver.catalog.withdrawn(_TIER, chain.lookups.pop(key))
                else:
                    self._answer(chain, key, came=False)
            yield
        for part in batches(list(chain.others), _PIECE):
            for key in part:
                del self._successors[key][chain]
                if not self._successors[key]:
                    del self._successors[key]
            yield

    def _answer(self, chain: _Chain, key: ChunkKey, *, came: bool) -> None:
        number = chain.lookups.pop(key, None)
        catalog, namespace = self._driver.catalog, chain.namespace
        tail = chain.tail_tokens if key == chain.tail else 0
        if number is None and came:
            # It had another lookup when the chain was offered.
            catalog.arrived(_TIER, namespace.digest, key, chain.tenant, tail)
        if number is not None:
            found = {key: namespace.table.complete} if came else None
            catalog.tier_looked_up(_TIER, number, found, tail)


def _refusal(reason: str) -> Following:
    return Following(yes=False, reason=reason)
