# SPDX-License-Identifier: Apache-2.0
"""Peers that leave, and peers whose host is looked up for long: no other waits for them."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvhaven.errors import TierError
from kvhaven.peers import tier as tiers
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.peer import Peer
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import Chunk, Fetch, Stream
from kvhaven.testing.tiers import until
from kvhaven.types import align_up
from tests.unit.test_peers import PIECE, Held, answering, local, reached, rogue, tier_of

AWAY = "away.example"


class LookUp:
    """`socket.getaddrinfo` that gives no answer about `AWAY` until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self._other = socket.getaddrinfo

    def __call__(self, host: Any, *more: Any, **options: Any) -> Any:
        if host == AWAY:
            self.begun.set()
            self.goes_on.wait()
            raise socket.gaierror(-3, "no answer")
        return self._other(host, *more, **options)


@pytest.fixture
def look_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[LookUp]:
    made = LookUp()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.goes_on.set()


class Named:
    """A registry of one node, until it forgets it."""

    title = "test"

    def __init__(self, node: str) -> None:
        self.words = [node]

    def members(self) -> list[str]:
        return self.words

    def leave(self) -> None:
        pass


async def test_a_peer_that_leaves_writes_no_memory_after_the_read_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes keep coming, slowly; the memory has another owner as soon as the read has ended."""
    monkeypatch.setattr(tiers, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(tiers, "_PING_S", 0.05)
    asked = threading.Event()

    def answer(stream: Stream, request: Any, deadline: float) -> None:
        if isinstance(request, Fetch):
            stream.send(Chunk(PIECE.shard.key, PIECE.shard.shard, PIECE.checksum), deadline)
            asked.set()
            for at in range(request.payload_bytes):
                stream.send_bytes(memoryview(PIECE.payload)[at : at + 1], deadline)
                time.sleep(0.05)

    with rogue(answering(answer)) as port:
        names = Named(f"127.0.0.1:{port}")
        tier = PeerTier([], token=b"", deadline_s=10, registries=[names])
        await tier.start()
        await reached(tier)
        into = memoryview(bytearray(align_up(len(PIECE.payload))))
        reading = asyncio.create_task(tier.read(PIECE.shard, into))
        await asyncio.to_thread(asked.wait, 60)
        names.words = []
        await until(lambda: not tier.peers())
        ended, _ = await asyncio.wait([reading], timeout=50)  # all bytes would take 500 s
        assert ended, "the read was not broken off"
        with pytest.raises(TierError):
            await reading
        into[:] = bytes(len(into))
        await asyncio.sleep(0.5)
        assert not any(into)
        await tier.close(1)


async def test_a_host_that_is_looked_up_for_long_delays_no_other_peer(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_PING_S", 0.02)
    listener = PeerListener(local(0), "there", b"", Held())
    pings, ping = 0, Peer.ping

    async def counted(peer: Peer) -> str:
        nonlocal pings
        pings += peer.address.port == listener.port
        return await ping(peer)

    monkeypatch.setattr(Peer, "ping", counted)
    try:
        async with tier_of(Address(AWAY, 1), local(listener.port), deadline_s=1):
            await until(lambda: pings >= 5)
            look_up.goes_on.set()
    finally:
        listener.close()


async def test_it_closes_in_time_beside_a_peer_that_left_and_is_still_looked_up(
    look_up: LookUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_RESOLVE_S", 0.0)
    monkeypatch.setattr(tiers, "_PING_S", 0.02)
    names = Named(f"{AWAY}:1")
    tier = PeerTier([], token=b"", deadline_s=10, registries=[names])
    starting = asyncio.create_task(tier.start())
    await asyncio.to_thread(look_up.begun.wait, 60)
    names.words = []
    await until(lambda: not tier.peers())
    async with asyncio.timeout(60):
        await tier.close(0.2)
        starting.cancel()
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
