# SPDX-License-Identifier: Apache-2.0
"""Peers behind `faulty`, over connections that damage, cut and hold back bytes, and wrong memory.

Two tiers read from two nodes that hold the same chunks, each through a relay of its own. What a
node has in memory is damaged, evicted and restored meanwhile. No read returns a wrong byte or is
late, and at the end neither a loan, a thread nor a descriptor is left.

`KVHAVEN_EVENTS` is the number of reads for each seed: 5000 are 100,000 in total.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.peers import peer
from kvhaven.peers import tier as tiers
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import PeerTier
from kvhaven.testing.faulty_tier import EVERYTHING, FaultyTier
from kvhaven.testing.tiers import Piece, content, make_namespace, make_piece, until
from kvhaven.tiers.base import Tier
from kvhaven.tiers.health import Breaker
from kvhaven.types import Checksum
from tests.conformance.test_tier_faults import AT_ONCE, LATE_S, _held
from tests.shelf import Shelf, as_chunk
from tests.timed_calls import DEADLINE_S, SEEDS, TimedCalls
from tests.unit.test_peers import local, reached

_log = logging.getLogger(__name__)

READS = int(os.environ.get("KVHAVEN_EVENTS", "40"))
FAULTS = msgspec.structs.replace(EVERYTHING, stall=0.003)
PEER_S = 0.1
"""Longest silence of a peer."""
_SPACE = make_namespace("model", (10_000, 4096, 1))
PIECES = [
    piece._replace(shard=as_chunk(piece.shard))
    for number in range(6)
    for at in range(3)
    for piece in [make_piece(_SPACE, number, at)]
]


class Relay:
    """A relay to a port that harms, sometimes, what the listening side sends."""

    def __init__(self, port: int, seed: int) -> None:
        self.harm = True
        self.harmed: Counter[str] = Counter()
        self._to = port
        self._random = random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self.port: int = self._server.getsockname()[1]
        self._start(self._accept)

    def _start(self, target: "object", *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open |= {near, far}
                self._start(self._serve, near, far)

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        back = threading.Thread(target=self._pass, args=(far, near), daemon=True)
        back.start()
        self._pass(near, far, honest=True)
        back.join()
        for sock in (near, far):
            self._open.discard(sock)
            sock.close()

    def _pass(self, source: socket.socket, sink: socket.socket, *, honest: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if not honest and self.harm and not self._harm(data):
                    break
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _harm(self, data: bytearray) -> bool:
        """Change the data, or delay it; return whether the connection goes on."""
        dice, drawn = self._random, self._random.random()
        how = next((how for how, below in _HARM.items() if drawn < below), "")
        self.harmed[how] += 1
        if how == "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif how == "cut":
            del data[dice.randrange(len(data)) :]
        elif how == "more":
            data += dice.randbytes(dice.randrange(1, 100))
        elif how == "hold":
            self._closed.wait(2 * PEER_S)
        return how != "end"

    def close(self) -> None:
        self._closed.set()
        for sock in (self._server, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._server.close()


_HARM = {"flip": 0.02, "cut": 0.03, "more": 0.04, "hold": 0.045, "end": 0.06}
"""Kinds of harm, by the number between 0 and 1 below which they are drawn."""


class Node:
    """Another node: what it holds, its listener, and the relay before it."""

    def __init__(self, seed: int) -> None:
        self.shelf = Shelf()
        for piece in PIECES:
            self.restore(piece)
        where = Address("127.0.0.1", 0)
        self.listener = PeerListener(where, f"node {seed}", b"", self.shelf)
        self.relay = Relay(self.listener.port, seed)

    def restore(self, piece: Piece) -> None:
        """Have the right bytes."""
        self.shelf.put(piece.shard, memoryview(content(piece)), piece.checksum)

    def damage(self, piece: Piece, dice: random.Random) -> None:
        """Have other bytes than the checksum's, or another checksum."""
        wrong = bytearray(content(piece))
        wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
        checksum = piece.checksum
        if dice.random() < 0.3:
            wrong, checksum = bytearray(content(piece)), Checksum(dice.randbytes(16))
        self.shelf.put(piece.shard, memoryview(wrong), checksum)

    def close(self) -> None:
        self.relay.close()
        self.listener.close()


class Play(TimedCalls):
    """Random reads and lookups of random tiers, with their deadlines."""

    def __init__(self, nodes: list[Node], tiers: list[FaultyTier], seed: int) -> None:
        self._random = random.Random(seed)
        super().__init__(self._random, (PIECES[0], PIECES[1]))
        self._nodes = nodes
        self._tiers = tiers

    async def call(self) -> None:
        """Make one call, and count how it ended."""
        dice = self._random
        piece, tier, node = dice.choice(PIECES), dice.choice(self._tiers), dice.choice(self._nodes)
        drawn = dice.random()
        if drawn < 0.05:
            node.damage(piece, dice)
        elif drawn < 0.1:
            node.shelf.remove(piece.shard)
        elif drawn < 0.25:
            node.restore(piece)
        kind = "read" if dice.random() < 0.8 else "contains"
        await self.time(kind, getattr(self, kind)(tier, piece))


@contextlib.contextmanager
def two_nodes(seed: int) -> Iterator[list[Node]]:
    nodes = [Node(2 * seed), Node(2 * seed + 1)]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.close()


async def play(seed: int) -> Counter[str]:
    """Read until there were enough reads, and verify what is left; return what happened."""
    with two_nodes(seed) as nodes:
        async with contextlib.AsyncExitStack() as stack:
            inner = []
            for _ in range(2):
                where = [local(node.relay.port) for node in nodes]
                inner.append(PeerTier(where, token=b"", deadline_s=PEER_S))
                await inner[-1].start()
                stack.push_async_callback(inner[-1].close, 5)
            faulty = [FaultyTier(tier, seed, FAULTS) for tier in inner]
            playing = Play(nodes, faulty, seed)
            counts = playing.counts
            while counts["read"] < READS or counts["read: right"] <= READS // 10:
                await asyncio.gather(*(playing.call() for _ in range(AT_ONCE)))
            assert counts["read: wrong"] == counts["contains: wrong"] == 0, counts
            assert playing.latest_s < DEADLINE_S + LATE_S
            for node in nodes:
                node.relay.harm = False
                for piece in PIECES:
                    node.restore(piece)
            for tier in inner:
                await reached(tier, 2)
            for tier in inner:
                for piece in PIECES:
                    await read_at_last(playing, tier, piece)
                assert tier.health().queued_reads == 0
            counts["rejected"] = sum(tier.health().rejected for tier in inner)
            counts["late_ms"] = int(playing.latest_s * 1000)
            for node in nodes:
                counts.update({f"harm: {how}": n for how, n in node.relay.harmed.items() if how})
        for node in nodes:
            await until(lambda node=node: not node.shelf.open)  # type: ignore[misc]
    return counts


async def read_at_last(playing: Play, tier: Tier, piece: Piece) -> None:
    """Read what is right; connections that were harmed before fail first, each once."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(TierError, TierMissError):
                assert await playing.read(tier, piece) == "right"
                return
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_no_wrong_byte_no_late_answer_and_no_leak(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_PING_S", 0.02)
    breaker = functools.partial(Breaker, threshold=3, pause_s=0.02, max_pause_s=0.1)
    monkeypatch.setattr(peer, "Breaker", lambda clock, **_: breaker(clock))
    before = _held()
    counts = await play(seed)
    _log.info("seed %d: %s", seed, dict(counts))
    gc.collect()
    await until(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)))
