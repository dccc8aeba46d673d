# SPDX-License-Identifier: Apache-2.0
"""Nodes that replay, forge or send nonsense: refused or a miss, and counted.

That a chunk is lent to its own tenant only is in `tests/crash/test_peers.py`, with real services.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhaven.errors import KVHavenError, TierMissError
from kvhaven.keys import tenant_id
from kvhaven.peers import wire
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.peer import Peer
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import (
    FETCHED,
    HAS_REPLY,
    PONG,
    Absent,
    Fetch,
    Has,
    PeerError,
    PeerHello,
    PeerMessage,
    PeerProof,
    PeerRefused,
    Ping,
    Stream,
    greet,
    welcome,
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


def test_a_replayed_handshake_is_refused() -> None:
    with node(full()) as listener:
        assert replay(listener) is PeerRefused


def test_with_equal_nonces_a_replay_would_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the test above notices it."""
    monkeypatch.setattr(wire, "os", SimpleNamespace(urandom=bytes))
    with node(full()) as listener:
        assert replay(listener) is not PeerRefused


def test_the_listeners_own_proof_opens_nothing() -> None:
    with node(full()) as listener, contextlib.closing(stream_to(listener)) as bad:
        bad.send(PeerHello("there", bytes(32)), END)
        answer = bad.receive(wire._WELCOME, END)
        assert not isinstance(answer, PeerRefused)
        bad.send(PeerProof(answer.proof), END)
        assert isinstance(bad.receive(wire._READY, END), PeerRefused)


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


async def test_wrong_bytes_under_a_right_name_are_a_miss_and_counted() -> None:
    shelf = full(wrong=True)
    into = page_buffer(PIECE.shard.payload_bytes)
    with node(shelf) as listener:
        async with tier_of(listener) as tier:
            for number in range(1, 4):
                with pytest.raises(TierMissError):
                    await tier.read(PIECE.shard, into)
                assert (tier.health().rejected, tier.health().misses) == (number, number)
            (peer,) = tier.peers()
            assert (peer.shards_damaged, peer.shards_read, peer.up) == (3, 0, False)
            assert "wrong bytes" in peer.error
        assert not shelf.open


async def test_an_honest_node_is_read_in_place_of_one_with_wrong_bytes() -> None:
    into = page_buffer(PIECE.shard.payload_bytes)
    with node(full(wrong=True)) as bad, node(full()) as good:
        async with tier_of(bad, good) as tier:
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
            assert bytes(into[: PIECE.shard.payload_bytes]) == content(PIECE)
            assert [peer.shards_damaged for peer in tier.peers()] == [1, 0]


def test_a_shard_of_another_length_tenant_or_place_is_absent() -> None:
    shelf, shard = full(), PIECE.shard
    right = Fetch(shard.namespace, shard.key, shard.shard, shard.payload_bytes)
    place = msgspec.structs.replace(shard.shard, heads=(5, 6))
    asked = [
        msgspec.structs.replace(right, tenant=tenant_id("another")),
        msgspec.structs.replace(right, payload_bytes=1),
        msgspec.structs.replace(right, payload_bytes=1 << 40),
        msgspec.structs.replace(right, payload_bytes=-1),
        msgspec.structs.replace(right, key=bytes(32)),
        msgspec.structs.replace(right, shard=place),
    ]
    with node(shelf) as listener, contextlib.closing(stream_to(listener)) as stream:
        greet(stream, "me", TOKEN, END)
        for request in asked:
            stream.send(request, END)
            assert isinstance(stream.receive(FETCHED, END), Absent), request
        assert not shelf.open


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


@pytest.mark.parametrize("known", [False, True])
def test_random_frames_end_their_own_connection_at_most(
    caplog: pytest.LogCaptureFixture, *, known: bool
) -> None:
    shelf = full()
    with node(shelf) as listener, contextlib.closing(stream_to(listener)) as good:
        greet(good, "good", TOKEN, END)

        @_many
        @given(_frames)
        def send(frames: list[bytes]) -> None:
            with contextlib.closing(stream_to(listener)) as bad:
                if known:
                    greet(bad, "bad", TOKEN, END)
                with contextlib.suppress(KVHavenError):
                    bad.send_bytes(memoryview(b"".join(frames)), END)
                with contextlib.suppress(OSError):
                    bad._socket.settimeout(60)
                    bad._socket.shutdown(socket.SHUT_WR)
                    while bad._socket.recv(1 << 20):
                        pass
            good.send(Has(SPACE.digest, PIECE.shard.key), END)
            assert good.receive(HAS_REPLY, END).there == b"\1"

        with caplog.at_level(logging.INFO):
            send()
        assert not shelf.open
    assert "unexpected" not in caplog.text


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
