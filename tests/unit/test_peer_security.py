# SPDX-License-Identifier: Apache-2.0
"""What the nonces of the handshake are for, and nodes that answer nonsense.

`test_peer_refusals.py` has all other refusals.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhaven.errors import KVHavenError
from kvhaven.peers import wire
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.peer import Peer
from kvhaven.peers.wire import (
    PONG,
    PeerMessage,
    PeerRefused,
    Ping,
    Stream,
    greet,
    welcome,
)
from kvhaven.testing.tiers import content, make_namespace, make_piece, page_buffer
from tests.shelf import Shelf
from tests.unit.test_peers import frame, local, rogue

TOKEN = b"a token of the cluster"
SPACE = make_namespace()
PIECE = make_piece(SPACE, 1)
END = time.monotonic() + 3600


@contextlib.contextmanager
def node(shelf: Shelf, token: bytes = TOKEN) -> Iterator[PeerListener]:
    listener = PeerListener(Address("127.0.0.1", 0), "there", token, shelf)
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

    def send_bytes(self, data: memoryview, deadline: float, *, more: bool = False) -> None:
        self.sent += data
        super().send_bytes(data, deadline, more=more)


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


def test_with_equal_nonces_a_replay_would_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the test above notices it."""
    monkeypatch.setattr(wire, "os", SimpleNamespace(urandom=bytes))
    with node(full()) as listener:
        assert replay(listener) is not PeerRefused


_names = [
    *("Ping", "Has", "Fetch", "Offer", "Progress", "Probe", "GetTicket", "Describe", "Pong"),
    *("Chunk", "Absent", "HasReply", "Following", "PeerHello", "PeerReady", "Described", "Ticket"),
]
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.binary(max_size=40)
    | st.just(bytes(PIECE.shard.key))
    | st.just(bytes(SPACE.digest))
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
_fields = st.sampled_from(
    [
        *("id", "namespace", "keys", "key", "tenant", "tail", "shard", "payload_bytes", "there"),
        *("arrived", "ended", "yes", "reason", "checksum", "secret", "namespaces", "node", "nonce"),
    ]
)
_messages = st.builds(
    lambda name, fields: frame(msgspec.msgpack.encode(fields | {"type": name})),
    st.sampled_from(_names),
    st.dictionaries(_fields, _values, max_size=6),
)
_frames = st.lists(
    _messages | st.binary(max_size=60).map(frame) | st.binary(max_size=60), min_size=1, max_size=4
)
_many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def test_random_answers_are_errors_or_misses() -> None:
    """A node with the token answers anything: what is read is right, or there is an error."""
    answers = b""

    def serve(sock: socket.socket) -> None:
        stream = Stream(sock, "me")
        with contextlib.suppress(KVHavenError):
            welcome(stream, "bad", TOKEN, END)
            sock.recv(1 << 16)
            sock.sendall(answers)

    loop = asyncio.get_running_loop()

    def wait(asked: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(asked, loop).result(60)

    with rogue(serve) as port:
        peer = Peer(local(port), "me", TOKEN, 5.0, 1)
        peer.up = True
        shard, into = PIECE.shard, page_buffer(PIECE.shard.payload_bytes)

        @_many
        @given(_frames)
        def answer(frames: list[bytes]) -> None:
            nonlocal answers
            answers = b"".join(frames)
            with contextlib.suppress(KVHavenError):
                assert wait(peer.fetch(shard, into)) is None  # or it says that it has nothing
            with contextlib.suppress(KVHavenError):
                there = wait(peer.has(shard.namespace, shard.tenant, [shard.key]))
                assert there <= {(shard.namespace, shard.tenant, shard.key)}
            with contextlib.suppress(KVHavenError):
                wait(peer.ping())

        await asyncio.to_thread(answer)
        await peer.close(5)
