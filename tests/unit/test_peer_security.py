# SPDX-License-Identifier: Apache-2.0
"""Recorded handshakes, and an honest node beside one with wrong bytes.

Besides `test_peer_refusals.py`.
"""

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from kvhaven.peers import wire
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import (
    PONG,
    PeerError,
    PeerHello,
    PeerMessage,
    PeerRefused,
    Ping,
    Stream,
    greet,
)
from kvhaven.testing.tiers import content, make_namespace, make_piece, page_buffer
from tests.shelf import Shelf
from tests.unit.test_peers import frame, local, reached, rogue

TOKEN = b"a token of the cluster"
SPACE = make_namespace()
PIECE = make_piece(SPACE, 1)
END = time.monotonic() + 3600


@contextlib.contextmanager
def node(shelf: Shelf, token: bytes = TOKEN) -> Iterator[PeerListener]:
    listener = PeerListener(Address("127.0.0.1", 0), "there", token, shelf, shelf)
    try:
        yield listener
    finally:
        listener.close()


def full(*, wrong: bool = False) -> Shelf:
    """Return what a node holds: the piece, or other bytes under its name and checksum."""
    shelf = Shelf()
    payload = bytearray(content(PIECE))
    payload[77] ^= wrong
    shelf.put(PIECE.shard, memoryview(payload), PIECE.checksum)
    return shelf


class Recording(Stream):
    """One that keeps what it sends."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, "there")
        self.sent = b""

    def send_bytes(self, data: memoryview, deadline: float) -> None:
        self.sent += data
        super().send_bytes(data, deadline)


def stream_to(listener: PeerListener) -> Recording:
    return Recording(socket.create_connection(("127.0.0.1", listener.port)))


def replay(listener: PeerListener) -> type[PeerMessage]:
    """Replay a good node's handshake and a request; return what comes after the welcome."""
    with contextlib.closing(stream_to(listener)) as good:
        greet(good, "good", TOKEN, END)
        good.send(Ping(), END)
        good.receive(PONG, END)
    with contextlib.closing(stream_to(listener)) as bad:
        bad.send_bytes(memoryview(good.sent), END)
        bad.receive(wire._WELCOME, END)
        return type(bad.receive(wire._READY, END))


def test_a_replay_is_refused_because_nonces_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    with node(full()) as listener:
        assert replay(listener) is PeerRefused
    monkeypatch.setattr(wire, "os", SimpleNamespace(urandom=bytes))
    with node(full()) as listener:
        assert replay(listener) is not PeerRefused


def test_a_recorded_welcome_deceives_no_node() -> None:
    with node(full()) as listener, contextlib.closing(stream_to(listener)) as good:
        good.send(PeerHello("good", bytes(32)), END)
        recorded = good.receive(wire._WELCOME, END)

    def serve(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(frame(msgspec.msgpack.encode(recorded)))
        sock.recv(1 << 16)

    with (
        rogue(serve) as port,
        contextlib.closing(Stream(socket.create_connection(("127.0.0.1", port)), "bad")) as stream,
        pytest.raises(PeerError, match="another token"),
    ):
        greet(stream, "good", TOKEN, END)


@contextlib.asynccontextmanager
async def tier_of(*listeners: PeerListener) -> AsyncIterator[PeerTier]:
    hosts = [local(listener.port) for listener in listeners]
    tier = PeerTier(hosts, token=TOKEN, deadline_s=5.0)
    await tier.start()
    try:
        await reached(tier, len(hosts))
        yield tier
    finally:
        await tier.close(5)


async def test_an_honest_node_is_read_in_place_of_one_with_wrong_bytes() -> None:
    into = page_buffer(PIECE.shard.payload_bytes)
    with node(full(wrong=True)) as bad, node(full()) as good:
        async with tier_of(bad, good) as tier:
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
            assert bytes(into[: PIECE.shard.payload_bytes]) == content(PIECE)
            assert [peer.shards_damaged for peer in tier.peers()] == [1, 0]
