# SPDX-License-Identifier: Apache-2.0
"""Peers that are rogue, silent or many: each costs its own answers and nothing else."""

import asyncio
import contextlib
import errno
import functools
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvhaven.catalog.announcer import START, Batch, Cursor
from kvhaven.catalog.loans import Loan
from kvhaven.catalog.shared_index import LOOKUP_SHARDS
from kvhaven.errors import TierError, TierMissError
from kvhaven.keys import announced_digest
from kvhaven.peers import tier as tiers
from kvhaven.peers.addresses import Address
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.peer import Peer
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import (
    FETCHED,
    HANDSHAKE_LIMIT,
    MOST_KEYS,
    PONG,
    REQUEST,
    Announce,
    Chunk,
    Fetch,
    Has,
    HasReply,
    PeerError,
    PeerMessage,
    Ping,
    Pong,
    SilentPeerError,
    Stream,
    Watch,
    greet,
    welcome,
)
from kvhaven.testing.tiers import make_namespace, make_piece
from kvhaven.tiers.base import Namespace
from kvhaven.types import (
    KEY_BYTES,
    ChunkKey,
    Extent,
    NamespaceDigest,
    ShardId,
    TenantId,
    align_up,
)
from tests.shelf import Unannounced

SPACE = make_namespace()
PIECE = make_piece(SPACE, 1)


class Held(Unannounced):
    """A lender of one chunk."""

    def __init__(self) -> None:
        self.open = 0

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        del namespace, tenant
        return [key == PIECE.shard.key for key in keys]

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        del namespace, tenant
        if key != PIECE.shard.key:
            return None
        self.open += 1
        return Loan(1, SPACE, Extent(0, 0, 1, 1), (PIECE.checksum,) * len(SPACE.table.shards))

    def memory(self, loan: Loan) -> memoryview:
        del loan
        return memoryview(bytes(PIECE.payload) * (1 + len(SPACE.table.shards)))

    def returned(self, loan: Loan) -> None:
        del loan
        self.open -= 1

    def namespaces(self) -> Sequence[Namespace]:
        return [SPACE]


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    made = PeerListener(Address("127.0.0.1", 0), "there", b"", Held())
    yield made
    made.close()


@contextlib.contextmanager
def rogue(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a peer that handles each connection with `serve`."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                threading.Thread(target=quietly, args=(sock,), daemon=True).start()

    def quietly(sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock:
            serve(sock)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(server.getsockname()[1])
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def answering(answer: Callable[[Stream, Any, float], None]) -> Callable[[socket.socket], None]:
    """Return what a peer does that greets, answers pings, and leaves the rest to `answer`."""

    def serve(sock: socket.socket) -> None:
        stream = Stream(sock, "test")
        deadline = time.monotonic() + 60
        with contextlib.suppress(PeerError):
            welcome(stream, "there", b"", deadline)
            while True:
                request = stream.receive(REQUEST, deadline)
                if isinstance(request, Ping):
                    stream.send(Pong(), deadline)
                else:
                    answer(stream, request, deadline)

    return serve


def silent(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@contextlib.asynccontextmanager
async def tier_of(*hosts: Address, **options: float) -> AsyncIterator[PeerTier]:
    tier = PeerTier(hosts, token=b"", deadline_s=options.pop("deadline_s", 10.0))
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(1)


def local(port: int) -> Address:
    return Address("127.0.0.1", port)


async def reached(tier: PeerTier, count: int = 1) -> None:
    """Wait until so many peers answer."""
    for _ in range(2000):
        if sum(peer.up for peer in tier.peers()) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(tier.peers())


@pytest.mark.parametrize(
    "answer",
    [
        frame(msgspec.msgpack.encode({"type": "PeerRefused", "reason": "x"})[:-1] + b"\xff"),
        frame(b"\x91" * 900),
        frame(b"\x81\xa4type\xaaPeerRefused\n" + b"\n" * 500),
        struct.pack("<I", HANDSHAKE_LIMIT + 1),
        struct.pack("<I", (1 << 32) - 1),
        b"",
    ],
)
async def test_a_rogue_peer_keeps_no_other_away(
    listener: PeerListener, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with rogue(lambda sock: sock.sendall(answer)) as port:
        async with tier_of(local(port), local(listener.port)) as tier:
            await reached(tier)
            assert list(await tier.contains([PIECE.shard])) == [True]
            assert [peer.up for peer in tier.peers()] == [False, True]
            assert all(len(peer.error) < 500 for peer in tier.peers())
    assert "Traceback" not in caplog.text
    assert "\n\n" not in caplog.text


async def test_an_answer_to_another_request_is_refused() -> None:
    """The bytes and their checksum agree, but they are another chunk's."""

    def answer(stream: Stream, request: Any, deadline: float) -> None:
        if isinstance(request, Fetch):
            stream.send(Chunk(other.shard.key, other.shard.shard, other.checksum), deadline)
            stream.send_bytes(other.payload[: other.shard.payload_bytes], deadline)

    other = make_piece(SPACE, 2)
    with rogue(answering(answer)) as port:
        async with tier_of(local(port)) as tier:
            await reached(tier)
            with pytest.raises(TierError, match="an answer to another request"):
                await tier.read(PIECE.shard, memoryview(bytearray(align_up(len(PIECE.payload)))))


async def test_a_name_that_cannot_be_one_keeps_no_other_away(listener: PeerListener) -> None:
    bad = Address("a..b", 1), Address("a..b", 1, dynamic=True)
    async with tier_of(*bad, local(listener.port)) as tier:
        await reached(tier)
        assert list(await tier.contains([PIECE.shard])) == [True]


async def test_reads_of_a_silent_peer_hold_up_no_lookup_of_another(listener: PeerListener) -> None:
    def relay(sock: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", listener.port)) as far:
            threading.Thread(target=copy, args=(far, sock), daemon=True).start()
            copy(sock, far)

    hold = threading.Event()

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if hold.is_set():
                    continue
                sink.sendall(data)

    with rogue(relay) as port:
        async with tier_of(local(port), local(listener.port), deadline_s=5) as tier:
            await reached(tier, 2)
            hold.set()
            into = [memoryview(bytearray(align_up(len(PIECE.payload)))) for _ in range(64)]
            reads = [asyncio.create_task(tier.read(PIECE.shard, buffer)) for buffer in into]
            assert list(await tier.contains([PIECE.shard])) == [True]
            found = await asyncio.gather(*reads, return_exceptions=True)
            assert {PIECE.checksum} == {one for one in found if isinstance(one, bytes)}
            assert len([one for one in found if isinstance(one, bytes)]) == 64


async def test_it_closes_in_time_beside_silence() -> None:
    with rogue(silent) as port:
        tier = PeerTier([local(port)], token=b"", deadline_s=30)
        starting = asyncio.create_task(tier.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        async with asyncio.timeout(10):
            await tier.close(0.2)


async def test_a_listener_survives_those_who_never_say_who_they_are(listener: PeerListener) -> None:
    socks = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(80)]
    try:
        async with tier_of(local(listener.port), deadline_s=10) as tier:
            for sock in socks:
                sock.close()
            await reached(tier)
            assert list(await tier.contains([PIECE.shard])) == [True]
    finally:
        for sock in socks:
            sock.close()


async def test_many_keys_are_asked_for_in_messages_of_a_bounded_size(
    listener: PeerListener,
) -> None:
    shards = [make_piece(SPACE, number).shard for number in range(2 * MOST_KEYS + 1)]
    async with tier_of(local(listener.port)) as tier:
        await reached(tier)
        there = await tier.contains(shards)
    assert [shard for shard, has in zip(shards, there, strict=True) if has] == [PIECE.shard]


async def test_without_any_peer_it_is_offline_and_raises() -> None:
    with rogue(silent) as port:
        async with tier_of(local(port), deadline_s=0.3) as tier:
            assert not tier.health().online
            with pytest.raises(TierError, match="no peer"):
                await tier.contains([PIECE.shard])
            with pytest.raises(TierError, match="no peer"):
                await tier.read(PIECE.shard, memoryview(bytearray(len(PIECE.payload))))


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_stream_ends_at_its_deadline_although_bytes_keep_moving(direction: str) -> None:
    """Every part that moves is in time, but all of it would take minutes."""

    def move(sock: socket.socket) -> None:
        for _ in range(400):
            if direction == "send":
                sock.recv(10_000)
            else:
                sock.send(bytes(100))
            time.sleep(0.01)

    with rogue(move) as port:
        stream = Stream(socket.create_connection(("127.0.0.1", port)), "test")
        deadline = time.monotonic() + 0.5
        data = memoryview(bytearray(64 << 20))
        if direction == "send":
            call = functools.partial(stream.send_bytes, data, deadline)
        else:
            call = functools.partial(stream.receive_into, data, deadline, silence_s=30)
        with contextlib.closing(stream), pytest.raises(SilentPeerError):
            call()


class Counted(socket.socket):
    """A socket that counts the options that are set."""

    set = 0

    def setsockopt(self, *option: Any) -> None:
        self.set += 1
        super().setsockopt(*option)


class Sandboxed(socket.socket):
    """A socket that takes no options of TCP."""

    def setsockopt(self, *option: Any) -> None:
        if option[0] == socket.IPPROTO_TCP:
            raise OSError(errno.ENOPROTOOPT, "no such option")
        super().setsockopt(*option)


def test_a_socket_without_options_of_tcp_is_used(listener: PeerListener) -> None:
    sock, deadline = Sandboxed(), time.monotonic() + 60
    sock.connect(("127.0.0.1", listener.port))
    with contextlib.closing(Stream(sock, "test")) as stream:
        assert greet(stream, "here", b"", deadline) == "there"


def test_a_timeout_that_an_earlier_call_left_ends_no_later_call() -> None:
    """The kernel's timeout of the first call is shorter than what the second one may take."""

    def move(sock: socket.socket) -> None:
        sock.sendall(b"1")
        time.sleep(2)
        sock.sendall(b"2")
        silent(sock)

    with rogue(move) as port:
        stream = Stream(socket.create_connection(("127.0.0.1", port)), "test")
        data = memoryview(bytearray(1))
        with contextlib.closing(stream):
            stream.receive_into(data, time.monotonic() + 1.5)
            stream.receive_into(data, time.monotonic() + 2.9)
            assert bytes(data) == b"2"


def test_a_silence_ends_a_call_at_its_own_time() -> None:
    """Not at the kernel's timeout, which is shorter, nor at twice of it."""
    with rogue(silent) as port:
        stream = Stream(socket.create_connection(("127.0.0.1", port)), "test")
        data = memoryview(bytearray(1))
        with contextlib.closing(stream):
            for silence_s in (0.2, 0.35):
                began = time.monotonic()
                with pytest.raises(SilentPeerError):
                    stream.receive_into(data, began + 60, silence_s=silence_s)
                assert time.monotonic() - began >= silence_s


def test_shards_in_a_row_set_no_timeouts() -> None:
    """Each would be a call of the kernel, eight a shard."""

    def move(sock: socket.socket) -> None:
        stream = Stream(sock, "test")
        with contextlib.suppress(PeerError):
            while True:
                stream.receive(REQUEST, time.monotonic() + 60)
                stream.send(Pong(), time.monotonic() + 60)
                stream.send_bytes(memoryview(bytes(1000)), time.monotonic() + 60)

    with rogue(move) as port:
        sock = Counted()
        sock.connect(("127.0.0.1", port))
        stream = Stream(sock, "test")
        data = memoryview(bytearray(1000))
        with contextlib.closing(stream):
            for _ in range(50):
                stream.send(Ping(), time.monotonic() + 60)
                stream.receive(PONG, time.monotonic() + 60)
                stream.receive_into(data, time.monotonic() + 600, silence_s=60)
            assert sock.set < 50  # not one a shard: a busy machine may shorten some


@pytest.mark.parametrize("layers", [1, 100, 70_000])
def test_a_payload_begins_at_a_multiple_of_64_bytes(layers: int) -> None:
    """Whatever the length of the message. A node without padding is understood, too."""
    shard = ShardId(0, (0, layers), (0, 1))
    chunk = Chunk(PIECE.shard.key, shard, PIECE.checksum)
    payload = bytes(PIECE.payload[:1000])

    def move(sock: socket.socket) -> None:
        stream, deadline = Stream(sock, "test"), time.monotonic() + 60
        stream.send_chunk(chunk, memoryview(payload), deadline)
        stream.send(chunk, deadline)

    with rogue(move) as port, socket.create_connection(("127.0.0.1", port)) as sock:
        sent = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    (length,) = struct.unpack("<I", sent[:4])
    padded, rest = sent[4 : 4 + length], sent[4 + length :]
    assert (4 + length) % 64 == 0
    assert rest[: len(payload)] == payload
    bare = rest[len(payload) + 4 :]
    for body in (padded, bare):
        got = FETCHED.decode(body)
        assert isinstance(got, Chunk)
        assert msgspec.structs.replace(got, padding=b"") == chunk


async def test_a_peer_that_was_away_returns_when_it_answers_however_long_it_was(
    listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out because its answers failed, and then it was not there at all."""
    away, connections = threading.Event(), 0

    def relay(sock: socket.socket) -> None:
        nonlocal connections
        connections += 1
        if away.is_set():
            return
        with socket.create_connection(("127.0.0.1", listener.port)) as far:
            threading.Thread(target=copy, args=(far, sock), daemon=True).start()
            copy(sock, far)

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not away.is_set():
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(tiers, "_PING_S", 0.01)
    with rogue(relay) as port:
        async with tier_of(local(port)) as tier:
            await reached(tier)
            away.set()
            (peer,) = tier._peers.values()
            for _ in range(3):
                peer.breaker.failed()
            first, before = peer.breaker.pause_s, connections
            while connections < before + 20:  # noqa: ASYNC110  pings
                await asyncio.sleep(0.01)
            monkeypatch.setattr(peer.breaker, "_since", -1e9)  # a long time ago
            while connections < before + 40:  # noqa: ASYNC110  pings
                await asyncio.sleep(0.01)
            assert not peer.usable
            assert peer.breaker.pause_s == first
            away.clear()
            await reached(tier)


def resolve_by(monkeypatch: pytest.MonkeyPatch, found: Callable[[str], list[str]]) -> None:
    """Let names have the addresses that `found` returns; numbers are as ever."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *more: Any, **options: Any) -> Any:
        if host[0].isdigit():
            return real(host, port, *more, **options)
        addresses = found(host)
        if not addresses:
            raise socket.gaierror("no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


async def test_a_peer_is_found_by_its_name_and_by_hosts_in_its_domain(
    listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    known = {"decode": ["127.0.0.1"], "decode-0.decode": ["127.0.0.1"], "x.decode": ["127.0.0.9"]}

    def found(host: str) -> list[str]:
        asked.append(host)
        return known.get(host, [])

    resolve_by(monkeypatch, found)
    port = listener.port
    tier = PeerTier([Address("decode", port, dynamic=True)], token=b"")
    await tier.start()
    try:
        await reached(tier)
        (peer,) = tier._peers.values()
        for host in ("127.0.0.1", "decode", "DECODE.", "decode-0.decode", "decode-0.decode"):
            assert await tier.at(Address(host, port)) is peer, host
        assert asked.count("decode-0.decode") == 1
        for host in ("x.decode", "no.decode", "no.decode", "undecode", "decode.example"):
            assert await tier.at(Address(host, port)) is None, host
        assert await tier.at(Address("decode", port + 1)) is None
        assert asked.count("no.decode") == 1
        assert not {"undecode", "decode.example"} & {*asked}
    finally:
        await tier.close(1)


async def test_a_name_of_several_peers_means_none_of_them(
    listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = PeerListener(Address("127.0.0.2", listener.port), "other", b"", Held())

    resolve_by(monkeypatch, lambda _: ["127.0.0.1", "127.0.0.2"])
    tier = PeerTier([Address("decode", listener.port, dynamic=True)], token=b"")
    await tier.start()
    try:
        while sum(peer.up for peer in tier.peers()) < 2:  # noqa: ASYNC110 - peers signal nothing
            await asyncio.sleep(0.01)
        assert await tier.at(Address("decode", listener.port)) is None
        assert await tier.at(Address("127.0.0.2", listener.port)) is not None
    finally:
        await tier.close(1)
        second.close()


@pytest.mark.parametrize(
    ("announce", "followed"),
    [
        (Announce("there", 0, 0, fresh=True, whole=True), True),
        (Announce("there", 0, 0, fresh=True, whole=False), False),
        (Announce("there", 0, 0, fresh=True, whole=True, added=b"part of"), False),
        (Announce("there", 0, 0, fresh=False, whole=True), False),
        (Announce("there", -1, 0, fresh=True, whole=True), False),
        (Pong(), False),
        (None, False),
    ],
)
async def test_a_peer_whose_announcements_make_no_sense_is_asked(
    announce: PeerMessage | None, *, followed: bool
) -> None:
    asked = threading.Event()

    def answer(stream: Stream, request: Any, deadline: float) -> None:
        if isinstance(request, Has):
            stream.send(HasReply(b"\1" * (len(request.keys) // KEY_BYTES)), deadline)
        elif isinstance(request, Watch):
            asked.set()
            if announce is not None:
                time.sleep(0.01)
                stream.send(announce, deadline)

    with rogue(answering(answer)) as port:
        async with tier_of(local(port), deadline_s=5.0) as tier:
            await reached(tier)
            await asyncio.to_thread(asked.wait, 60)
            for _ in range(500 if followed else 20):
                (peer,) = tier.peers()
                if peer.followed:
                    break
                await asyncio.sleep(0.01)
            assert (peer.up, peer.followed) == (True, followed)
            # What is announced is believed, and else there is a question.
            assert list(await tier.contains([PIECE.shard])) == [not followed]
            (peer,) = tier.peers()
            assert (peer.questions > 0) == (not followed)


class Busy(Held):
    """A lender that announces its chunk once, and cannot pin it while it is `full`."""

    full = True

    def announced(self, cursor: Cursor, wait_s: float) -> Batch:
        if cursor != START:
            time.sleep(wait_s)
            return Batch(cursor, True, False, (), ())
        digest = announced_digest(PIECE.shard.namespace, PIECE.shard.key, PIECE.shard.tenant)
        return Batch(Cursor(0, 0), True, True, (digest,), ())

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        return None if self.full else super().lend(namespace, key, tenant)


async def test_a_chunk_that_a_busy_peer_cannot_pin_is_found_again_later() -> None:
    """It has announced the chunk once, and will not do so again: it never was without it."""
    lender = Busy()
    listener = PeerListener(Address("127.0.0.1", 0), "there", b"", lender)
    try:
        async with tier_of(local(listener.port), deadline_s=5.0) as tier:
            while not any(peer.followed for peer in tier.peers()):  # noqa: ASYNC110 - no signal
                await asyncio.sleep(0.01)
            into = memoryview(bytearray(align_up(len(PIECE.payload))))
            with pytest.raises(TierMissError):
                await tier.read(PIECE.shard, into)
            lender.full = False
            assert list(await tier.contains([PIECE.shard])) == [True]
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
            (peer,) = tier.peers()
            assert peer.questions == 0
    finally:
        listener.close()


async def test_a_name_service_that_hangs_keeps_no_other_peer_away(
    listener: PeerListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_PING_S", 0.02)
    answered = threading.Event()

    def hang(address: Address) -> list[Address]:
        if address.dynamic:
            assert answered.wait(60)
        return [address]

    monkeypatch.setattr(tiers, "resolve", hang)
    async with tier_of(Address("service", 7420, dynamic=True), local(listener.port)) as tier:
        await reached(tier)
        listener.close()
        async with asyncio.timeout(60):
            while any(peer.up for peer in tier.peers()):  # noqa: ASYNC110  nothing tells a test
                await asyncio.sleep(0.01)
        answered.set()


class Turns:
    """Count of the turns that others get on the event loop."""

    def __init__(self) -> None:
        self.count = 0

    async def take(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_a_long_lookup_at_many_peers_lets_others_run() -> None:
    tier = PeerTier([], token=b"", streams=1)
    for number in range(24):
        address = Address(f"10.0.0.{number}", 7420)
        peer = tier._peers[address] = Peer(address, "here", b"", 1.0, 1)
        peer.up = peer.view.synced = True
    namespace = make_namespace(sizes=(1,))
    shards = [make_piece(namespace, number).shard for number in range(LOOKUP_SHARDS)]
    turns = Turns()
    others = asyncio.create_task(turns.take())
    assert not any(await tier.contains(shards))
    assert turns.count >= 24 * len(shards) // tiers._PIECE - 1
    others.cancel()
    await tier.close(5)


async def test_what_many_chunks_of_a_peer_took_is_freed_in_turns(listener: PeerListener) -> None:
    async with tier_of(local(listener.port)) as tier:
        await reached(tier)
        (peer,) = tier._peers.values()
        view = peer.view
        view.apply("there", Batch(Cursor(1, 0), True, True, range(1 << 14), ()))
        dropped = view._dropped
        view.reset()
        assert len(dropped) == 256
        assert view.free_some()
        assert len(dropped) == 256 - 8
        async with asyncio.timeout(60):
            while dropped:  # noqa: ASYNC110  nothing tells a test of it
                await asyncio.sleep(0.02)
