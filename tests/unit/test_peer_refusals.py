# SPDX-License-Identifier: Apache-2.0
"""Who may read from a node's listener, and what a node believes of those it reads from.

Random frames are made by hypothesis: as first bytes, as requests of a node that is let in, and as
answers; `KVHAVEN_EVENTS` says how many. Whatever comes, a connection ends or is answered, no chunk
stays lent, and others go on.
"""

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.catalog.loans import Loan
from kvhaven.errors import KVHavenError, ProtocolError, TierError, TierMissError
from kvhaven.keys import tenant_id
from kvhaven.peers import tier as tiers
from kvhaven.peers import wire
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import (
    FETCHED,
    FRAME_LIMIT,
    HAS_REPLY,
    NONCE_BYTES,
    PONG,
    PROOF_BYTES,
    REQUEST,
    Absent,
    Chunk,
    Fetch,
    Has,
    HasReply,
    PeerError,
    PeerHello,
    PeerMessage,
    PeerProof,
    PeerRefused,
    PeerWelcome,
    Ping,
    Pong,
    Stream,
    greet,
    welcome,
)
from kvhaven.testing.tiers import make_namespace, make_piece
from kvhaven.types import NO_TENANT, ChunkKey, NamespaceDigest, ShardId, TenantId, align_up
from tests.crash.workload import events_of_this_run
from tests.unit.test_peer_tls import wire_to
from tests.unit.test_peers import PIECE, SPACE, Held, frame, local, reached, rogue

TOKEN = b"a token of the cluster"
ANN, BEN = tenant_id("ann"), tenant_id("ben")
FETCH = Fetch(SPACE.digest, PIECE.shard.key, PIECE.shard.shard, PIECE.shard.payload_bytes)
_WAIT_S = 60.0


class Private(Held):
    """A lender of one chunk of one tenant, that notes how often it was asked for anything."""

    def __init__(self, tenant: TenantId = NO_TENANT) -> None:
        super().__init__()
        self.tenant = tenant
        self.asked = 0

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        self.asked += 1
        mine = (namespace, tenant) == (SPACE.digest, self.tenant)
        return [mine and key == PIECE.shard.key for key in keys]

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        self.asked += 1
        if (namespace, tenant) != (SPACE.digest, self.tenant):
            return None
        return super().lend(namespace, key, tenant)


@contextlib.contextmanager
def listening(
    lender: Held | None = None, token: bytes = TOKEN, *, tenants: bool = True
) -> Iterator[PeerListener]:
    address = Address("127.0.0.1", 0)
    made = PeerListener(address, "there", token, lender or Held(), tenants=tenants)
    try:
        yield made
    finally:
        made.close()


def later() -> float:
    return time.monotonic() + _WAIT_S


@contextlib.contextmanager
def stream_to(port: int) -> Iterator[Stream]:
    sock = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
    with contextlib.closing(Stream(sock, "there")) as stream:
        yield stream


def fetched(stream: Stream, request: Fetch = FETCH) -> bytes | None:
    """Return the bytes of a shard; None if the peer says that it does not have it."""
    stream.send(request, later())
    answer = stream.receive(FETCHED, later())
    if isinstance(answer, Absent):
        return None
    data = bytearray(request.payload_bytes)
    stream.receive_into(memoryview(data), later())
    return bytes(data)


@pytest.mark.parametrize("version", [wire.VERSION - 1, wire.VERSION + 1])
async def test_a_node_of_another_version_is_refused_by_both_sides_with_the_reason(
    version: int,
) -> None:
    with listening() as listener, stream_to(listener.port) as stream:
        stream.send(PeerHello("elsewhere", bytes(NONCE_BYTES), version), later())
        answer = stream.receive(msgspec.msgpack.Decoder(PeerRefused), later())
        assert f"version {version} was offered; this node has {wire.VERSION}" in answer.reason
        assert ended(stream)

    def other(sock: socket.socket) -> None:
        stream = Stream(sock, "here")
        assert stream.receive(msgspec.msgpack.Decoder(PeerHello), later()).version == wire.VERSION
        with contextlib.suppress(PeerError):
            wire.refuse(stream, f"this node has {version}: install the same KVHaven", later())

    with rogue(other) as port:
        tier = PeerTier([local(port)], token=TOKEN)
        await tier.start()
        (peer,) = tier.peers()
        assert f"this node has {version}: install the same KVHaven" in peer.error
        await tier.close(1)


def nothing_lent(lender: Held) -> None:
    """Wait until the listener's threads have returned all; they do so after the last byte."""
    end = later()
    while lender.open:
        assert time.monotonic() < end, "a chunk stays lent"
        time.sleep(0.01)


def ended(stream: Stream) -> bool:
    """Return whether the other side closes the connection, whatever it says before."""
    with contextlib.suppress(PeerError, ProtocolError):
        while True:
            stream.receive(msgspec.msgpack.Decoder(Any), later())
    try:
        stream.receive_into(memoryview(bytearray(1)), later())
    except wire.SilentPeerError:
        return False
    except PeerError:
        return True
    return False


@pytest.mark.parametrize("token", [b"", b"another token", TOKEN[:-1], TOKEN + b"x", TOKEN * 99])
def test_who_does_not_know_the_token_is_refused(token: bytes) -> None:
    lender = Private()
    with listening(lender) as there, stream_to(there.port) as stream:
        # It knows at once that the other has another token; the other is as careful.
        with pytest.raises(PeerError, match="another token"):
            greet(stream, "here", token, later())
        with stream_to(there.port) as stubborn:
            stubborn.send(PeerHello("here", bytes(NONCE_BYTES)), later())
            heard = stubborn.receive(wire._WELCOME, later())
            assert isinstance(heard, PeerWelcome)
            proof = wire._proof(token, "connects", "here", bytes(NONCE_BYTES), heard.nonce)
            stubborn.send(PeerProof(proof), later())
            refused = stubborn.receive(wire._READY, later())
            assert isinstance(refused, PeerRefused)
            assert "another token" in refused.reason
            assert ended(stubborn)
        assert lender.asked == 0
        with stream_to(there.port) as friend:
            greet(friend, "friend", TOKEN, later())
            assert fetched(friend) is not None


@pytest.mark.parametrize(
    "first",
    [
        [FETCH],
        [Ping()],
        [PeerProof(bytes(PROOF_BYTES))],
        [PeerHello("here", bytes(NONCE_BYTES)), FETCH],
        [PeerHello("here", bytes(NONCE_BYTES)), PeerHello("here", bytes(NONCE_BYTES))],
        [PeerHello("here", bytes(NONCE_BYTES)), PeerProof(bytes(PROOF_BYTES)), FETCH],
    ],
    ids=lambda first: "-".join(type(one).__name__ for one in first),
)
def test_nothing_is_answered_before_the_proof(first: list[PeerMessage]) -> None:
    lender = Private()
    with listening(lender) as there, stream_to(there.port) as stream:
        with contextlib.suppress(PeerError):
            for message in first:
                stream.send(message, later())
        assert ended(stream)
        assert lender.asked == 0


def test_a_proof_of_the_listener_is_none_of_the_one_that_connects() -> None:
    """Else who does not know the token could send the listener's own proof back to it."""
    lender = Private()
    with listening(lender) as there, stream_to(there.port) as stream:
        stream.send(PeerHello("there", bytes(NONCE_BYTES)), later())
        heard = stream.receive(wire._WELCOME, later())
        assert isinstance(heard, PeerWelcome)
        stream.send(PeerProof(heard.proof), later())
        assert isinstance(stream.receive(wire._READY, later()), PeerRefused)
        assert ended(stream)
        assert lender.asked == 0


def conversation(port: int) -> tuple[bytes, bytes]:
    """Fetch through a relay; return all bytes of each side, as somebody on the way sees them."""
    said, heard = bytearray(), bytearray()
    with wire_to(port) as relay, stream_to(relay.port) as stream:
        send, receive = stream.send_bytes, stream.receive_into

        def sent(data: memoryview, deadline: float, *, more: bool = False) -> None:
            said.extend(data)
            send(data, deadline, more=more)

        def received(into: memoryview, *rest: Any, **more: Any) -> None:
            receive(into, *rest, **more)
            heard.extend(into)

        stream.send_bytes, stream.receive_into = sent, received  # type: ignore[method-assign]
        greet(stream, "here", TOKEN, later())
        assert fetched(stream) is not None
        assert TOKEN not in relay.seen
    return bytes(said), bytes(heard)


def test_what_was_overheard_opens_nothing_a_second_time() -> None:
    lender = Private()
    with listening(lender) as there:
        said, heard = conversation(there.port)
        asked = lender.asked
        assert asked > 0
        with stream_to(there.port) as stream:
            stream.send_bytes(memoryview(said), later())
            assert isinstance(stream.receive(wire._WELCOME, later()), PeerWelcome)
            assert isinstance(stream.receive(wire._READY, later()), PeerRefused)
            assert ended(stream)
        assert lender.asked == asked

    def play(sock: socket.socket) -> None:
        sock.sendall(heard)
        while sock.recv(1 << 16):
            pass

    with (
        rogue(play) as port,
        stream_to(port) as stream,
        pytest.raises(PeerError, match="another token"),
    ):
        greet(stream, "here", TOKEN, later())


@pytest.mark.parametrize("tenants", [True, False])
def test_a_key_is_good_for_its_tenant_and_namespace_only(*, tenants: bool) -> None:
    lender = Private(ANN)
    other = make_namespace("another model")
    with listening(lender, tenants=tenants) as there, stream_to(there.port) as stream:
        greet(stream, "here", TOKEN, later())
        key = PIECE.shard.key
        for namespace, tenant, yes in (
            (SPACE, NO_TENANT, False),
            (SPACE, BEN, False),
            (other, ANN, False),
            (SPACE, ANN, tenants),
        ):
            stream.send(Has(namespace.digest, key, tenant), later())
            assert stream.receive(HAS_REPLY, later()).there == bytes([yes])
            request = msgspec.structs.replace(FETCH, namespace=namespace.digest, tenant=tenant)
            assert (fetched(stream, request) is not None) == yes
    nothing_lent(lender)


@pytest.mark.parametrize(
    "odd",
    [
        {"payload_bytes": PIECE.shard.payload_bytes + 1},
        {"payload_bytes": PIECE.shard.payload_bytes - 1},
        {"payload_bytes": 0},
        {"payload_bytes": -1},
        {"payload_bytes": (1 << 63) - 1},
        {"shard": ShardId(0, (0, 8), (1, 2))},
        {"shard": ShardId(0, (0, 9), (0, 1))},
        {"key": bytes(32)},
    ],
    ids=str,
)
def test_a_part_that_is_no_shard_is_not_sent(odd: dict[str, Any]) -> None:
    lender = Private()
    with listening(lender) as there, stream_to(there.port) as stream:
        greet(stream, "here", TOKEN, later())
        stream.send(msgspec.structs.replace(FETCH, **odd), later())
        assert isinstance(stream.receive(FETCHED, later()), Absent)
        assert fetched(stream) is not None
    nothing_lent(lender)


class Liar:
    """A peer that has everything; `chunk` and `data` are what it answers to a fetch."""

    def __init__(self, chunk: Chunk, data: bytes) -> None:
        self.chunk, self.data = chunk, data
        self.fetches = 0

    def serve(self, sock: socket.socket) -> None:
        stream = Stream(sock, "test")
        with contextlib.suppress(PeerError, ProtocolError):
            welcome(stream, "liar", TOKEN, later())
            while True:
                request = stream.receive(REQUEST, later())
                if isinstance(request, Ping):
                    stream.send(Pong(), later())
                elif isinstance(request, Has):
                    stream.send(HasReply(b"\1" * (len(request.keys) // 32)), later())
                else:
                    self.fetches += 1
                    stream.send(self.chunk, later())
                    stream.send_bytes(memoryview(self.data), later())


@contextlib.asynccontextmanager
async def _tier_of(*ports: int) -> Any:
    tier = PeerTier([local(port) for port in ports], token=TOKEN, deadline_s=5)
    await tier.start()
    try:
        await reached(tier, len(ports))
        yield tier
    finally:
        await tier.close(1)


def buffer() -> memoryview:
    return memoryview(bytearray(align_up(len(PIECE.payload))))


@pytest.mark.parametrize("wrong", ["bytes", "checksum", "both"])
async def test_wrong_bytes_under_a_right_name_are_a_miss_and_open_the_breaker(wrong: str) -> None:
    """Lookups succeed in between, so failures in a row alone would never leave the peer out."""
    right, other = bytes(PIECE.payload), make_piece(SPACE, 2)
    chunk = Chunk(
        PIECE.shard.key,
        PIECE.shard.shard,
        PIECE.checksum if wrong == "bytes" else other.checksum,
    )
    flipped = bytes([right[0] ^ 1]) + right[1:]
    data = right if wrong == "checksum" else flipped
    liar = Liar(chunk, data[: PIECE.shard.payload_bytes])
    with rogue(liar.serve) as port, listening(Private()) as honest:
        async with _tier_of(port) as tier:
            for count in range(1, tiers._MOST_DAMAGES + 1):
                assert tier.health().online
                assert list(await tier.contains([PIECE.shard])) == [True]
                with pytest.raises(TierMissError):
                    await tier.read(PIECE.shard, buffer())
                health, (peer,) = tier.health(), tier.peers()
                assert (health.rejected, peer.shards_damaged) == (count, count)
                assert health.reads == peer.shards_read == 0
            assert not tier.health().online
            fetches = liar.fetches
            with pytest.raises(TierError):
                await tier.read(PIECE.shard, buffer())
            assert liar.fetches == fetches
        # The last that has it is asked first, and then the other.
        async with _tier_of(honest.port, port) as tier:
            assert list(await tier.contains([PIECE.shard])) == [True]
            into = buffer()
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
            assert tier.health().rejected == 1
            assert into[: PIECE.shard.payload_bytes] == PIECE.payload[: PIECE.shard.payload_bytes]


async def test_wrong_bytes_long_ago_leave_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_DAMAGES_S", 0.0)
    chunk = Chunk(PIECE.shard.key, PIECE.shard.shard, PIECE.checksum)
    liar = Liar(chunk, bytes(PIECE.shard.payload_bytes))
    with rogue(liar.serve) as port:
        async with _tier_of(port) as tier:
            for _ in range(2 * tiers._MOST_DAMAGES):
                assert list(await tier.contains([PIECE.shard])) == [True]
                with pytest.raises(TierMissError):
                    await tier.read(PIECE.shard, buffer())
            assert tier.health().online


# Random frames

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=80)
    | st.sampled_from([bytes(PIECE.shard.key), bytes(SPACE.digest), b"\xff" * 32]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_MESSAGES = [
    message
    for message in vars(wire).values()
    if isinstance(message, type) and issubclass(message, PeerMessage) and message is not PeerMessage
]


def _fields(message: type[PeerMessage]) -> st.SearchStrategy[bytes]:
    """Return frames with a message's name and fields, of values that may be of any type."""
    names = [one.encode_name for one in msgspec.structs.fields(message)]
    some = st.fixed_dictionaries({}, optional=dict.fromkeys(names, _values))
    return some.map(lambda given: _packed({"type": message.__name__} | given))


def _packed(value: Any) -> bytes:
    return frame(msgspec.msgpack.encode(value))


_right = st.sampled_from(
    [
        Ping(),
        FETCH,
        Has(SPACE.digest, PIECE.shard.key),
        Has(SPACE.digest, b"123"),
        Fetch(SPACE.digest, bytes(32), PIECE.shard.shard, 1),
        PeerHello("x", bytes(NONCE_BYTES)),
    ]
).map(lambda message: frame(msgspec.msgpack.encode(message)))
_frames = st.one_of(
    _right,
    st.sampled_from(_MESSAGES).flatmap(_fields),
    _values.map(_packed),
    st.binary(max_size=200).map(frame),
    st.binary(max_size=200),
    st.integers(0, (1 << 32) - 1).map(lambda length: struct.pack("<I", length)),
    st.just(frame(b"\x91" * 900)),
    st.just(struct.pack("<I", FRAME_LIMIT) + bytes(100)),
)


def _send_all(port: int, parts: Sequence[bytes], token: bytes | None) -> None:
    """Send bytes, as one who is let in or not, and wait until the connection has ended."""
    with stream_to(port) as stream:
        if token is not None:
            greet(stream, "here", token, later())
        sock = stream._socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wire._timeval(_WAIT_S))
        with contextlib.suppress(OSError):  # the other side may have ended it
            for part in parts:
                sock.sendall(part)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while sock.recv(1 << 16):  # raises BlockingIOError if nothing comes for a long time
                pass


@pytest.mark.parametrize("inside", [False, True])
def test_random_frames_end_their_connection_only(
    caplog: pytest.LogCaptureFixture, *, inside: bool
) -> None:
    lender = Private()
    with listening(lender) as there, caplog.at_level(logging.WARNING):

        @hypothesis.settings(max_examples=events_of_this_run(150), deadline=None)
        @given(st.lists(_frames, max_size=4))
        def play(parts: list[bytes]) -> None:
            _send_all(there.port, parts, TOKEN if inside else None)
            assert "unexpected" not in caplog.text, caplog.text

        play()
        if not inside:
            assert lender.asked == 0
        with stream_to(there.port) as stream:
            greet(stream, "friend", TOKEN, later())
            stream.send(Ping(), later())
            assert stream.receive(PONG, later()) == Pong()
            assert fetched(stream) is not None
        end = later()
        while there._streams or there._unknown:
            assert time.monotonic() < end, "connections stay"
            time.sleep(0.01)
        nothing_lent(lender)


def test_random_answers_end_their_connection_only() -> None:
    """What a reader calls with them raises nothing but the errors that it handles."""
    answer: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        stream = Stream(sock, "test")
        with contextlib.suppress(PeerError, ProtocolError):
            welcome(stream, "there", TOKEN, later())
            stream.receive(REQUEST, later())
            sock.sendall(b"".join(answer))

    decoders = [
        value for name, value in vars(wire).items() if isinstance(value, msgspec.msgpack.Decoder)
    ]
    with rogue(serve) as port:

        @hypothesis.settings(max_examples=events_of_this_run(150), deadline=None)
        @given(st.sampled_from(decoders), st.lists(_frames, max_size=3))
        def play(expected: "msgspec.msgpack.Decoder[Any]", parts: list[bytes]) -> None:
            answer[:] = parts
            with stream_to(port) as stream:
                greet(stream, "here", TOKEN, later())
                stream.send(Ping(), later())
                with contextlib.suppress(KVHavenError):
                    while True:
                        stream.receive(expected, later())

        play()
