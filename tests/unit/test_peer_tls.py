# SPDX-License-Identifier: Apache-2.0
"""TLS between nodes: who is let in, what is encrypted, and what a ticket is good for."""

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvhaven.config import Settings
from kvhaven.errors import ConfigError, TierError, TierMissError
from kvhaven.keys import tenant_id
from kvhaven.peers import dial as dialing
from kvhaven.peers import visit
from kvhaven.peers.addresses import Address, require_secret
from kvhaven.peers.certificates import Certificates, read_certificates
from kvhaven.peers.dial import Tickets, dial
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import (
    FETCHED,
    FOLLOWING,
    HAS_REPLY,
    TICKET,
    Chunk,
    Fetch,
    GetTicket,
    Has,
    Offer,
    PeerError,
    SilentPeerError,
    Stream,
)
from tests.unit.test_peers import PIECE, SPACE, Held, local, reached

TOKEN = b"a token of the cluster"
PAYLOAD = bytes(PIECE.payload[: PIECE.shard.payload_bytes])


class Authority:
    """A certificate authority, made with openssl; `node` returns the files of a node's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.ca = folder / "ca.pem"
        new = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        self._openssl(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=cluster")

    def node(
        self,
        name: str,
        *,
        encrypt_data: bool = False,
        ca: Path | None = None,
        files: Path | None = None,
    ) -> Certificates:
        """Return a new certificate of this authority; `files`: with copies of all files there."""
        key, cert = f"{name}.key", f"{name}.pem"
        new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        self._openssl(*new, "-keyout", key, "-out", "request", "-subj", f"/CN={name}")
        sign = ["x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key"]
        self._openssl(*sign, "-CAcreateserial", "-out", cert, "-days", "2")
        if files is not None:
            shutil.copytree(self.folder, files)
            return Certificates(*(str(files / one) for one in (cert, key, "ca.pem")))
        paths = (str(self.folder / cert), str(self.folder / key), str(ca or self.ca))
        return Certificates(*paths, encrypt_data=encrypt_data)

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@contextlib.contextmanager
def listening(
    certificates: Certificates | None, token: bytes = b"", *, tenants: bool = True
) -> Iterator[PeerListener]:
    address = Address("127.0.0.1", 0)
    made = PeerListener(address, "there", token, Held(), certificates=certificates, tenants=tenants)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def tier_at(
    port: int,
    certificates: Certificates | None,
    token: bytes = b"",
    deadline_s: float = 5.0,
    *,
    tenants: bool = True,
) -> AsyncIterator[PeerTier]:
    tier = PeerTier(
        [local(port)],
        token=token,
        deadline_s=deadline_s,
        certificates=certificates,
        tenants=tenants,
    )
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(1)


class Wire:
    """A relay to a port, which keeps all bytes that pass, and can stop to pass any."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self.stopped = threading.Event()
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open = [self._server]
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._server.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self._open += [ours, theirs]
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if not self.stopped.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):  # the other side was first
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()


@pytest.mark.parametrize("encrypt_data", [False, True])
@pytest.mark.parametrize("token", [b"", TOKEN])
async def test_keys_are_encrypted_and_chunks_if_wanted(
    authority: Authority, token: bytes, *, encrypt_data: bool
) -> None:
    ours = authority.node("a", encrypt_data=encrypt_data)
    with listening(authority.node("b"), token) as listener, wire_to(listener.port) as wire:
        async with tier_at(wire.port, ours, token) as tier:
            await reached(tier)
            assert list(await tier.contains([PIECE.shard])) == [True]
            assert bytes(SPACE.digest) not in bytes(wire.seen)
            into = memoryview(bytearray(PIECE.shard.payload_bytes))
            for _ in range(3):
                assert await tier.read(PIECE.shard, into) == PIECE.checksum
            assert into == PAYLOAD
        assert (PAYLOAD not in bytes(wire.seen)) == encrypt_data


async def test_either_node_can_have_chunks_encrypted(authority: Authority) -> None:
    there = authority.node("b", encrypt_data=True)
    with listening(there) as listener, wire_to(listener.port) as wire:
        async with tier_at(wire.port, authority.node("a")) as tier:
            await reached(tier)
            into = memoryview(bytearray(PIECE.shard.payload_bytes))
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
        assert PAYLOAD not in bytes(wire.seen)


@pytest.mark.parametrize("who", ["stranger", "nobody", "token", "trusting"])
async def test_only_nodes_with_a_certificate_of_the_authority_are_let_in(
    authority: Authority, tmp_path: Path, who: str
) -> None:
    others = Authority(tmp_path / "others")
    ours = {
        "stranger": others.node("x", ca=authority.ca),  # it is not known to the listener
        "nobody": None,
        "token": None,
        "trusting": others.node("y"),  # it does not know the listener's authority
    }[who]
    token = TOKEN if who == "token" else b""
    with listening(authority.node("b"), token) as listener:
        async with tier_at(listener.port, ours, token) as tier:
            (peer,) = tier.peers()
            assert not peer.up
            assert "peer_cert" in peer.error, peer.error
            if who == "stranger":  # the listener says why it refuses the certificate
                assert "the other node refused this node's certificate" in peer.error, peer.error
                assert "alert" in peer.error, peer.error
        for _ in range(2000):  # the listener counts after it has refused
            status = listener.status()
            if status.refused and status.last_refusal and not status.connections:
                break
            await asyncio.sleep(0.01)
        assert (status.connections, status.refused > 0) == (0, True)
        assert status.last_refusal


async def test_a_node_with_certificates_says_that_the_other_has_none(authority: Authority) -> None:
    with listening(None) as listener:
        async with tier_at(listener.port, authority.node("a")) as tier:
            (peer,) = tier.peers()
            assert not peer.up
            assert "both nodes need peer_cert" in peer.error


def test_the_token_counts_beside_the_certificate(authority: Authority) -> None:
    with (
        listening(authority.node("b"), TOKEN) as listener,
        pytest.raises(PeerError, match="another token"),
    ):
        dial(local(listener.port), "me", b"", authority.node("a"), 5)


def test_a_ticket_is_good_for_one_connection_and_for_chunks_alone(authority: Authority) -> None:
    with listening(authority.node("b")) as listener:
        there = local(listener.port)
        control, _ = dial(there, "me", b"", authority.node("a"), 5)
        end = time.monotonic() + 60
        control.send(GetTicket(), end)
        ticket = control.receive(TICKET, end)
        data, _ = dial(there, "me", b"", None, 5, ticket)
        with pytest.raises(PeerError, match="requires TLS"):
            dial(there, "me", b"", None, 5, ticket)
        data.send(Has(SPACE.digest, PIECE.shard.key), end)
        with pytest.raises(PeerError, match="closed"):
            data.receive(HAS_REPLY, end)
        control.send(Has(SPACE.digest, PIECE.shard.key), end)
        assert control.receive(HAS_REPLY, end).there == b"\1"
        control.send(GetTicket(), end)
        second = control.receive(TICKET, end)
        forged = type(second)(second.id, bytes(32))
        with pytest.raises(PeerError, match="another token"):
            dial(there, "me", b"", None, 5, forged)
        for stream in (control, data):
            stream.close()


@pytest.fixture
def two_streams() -> Iterator[tuple[Stream, Stream]]:
    with socket.socket() as one, socket.socket() as two:
        yield Stream(one, "one"), Stream(two, "two")


def test_tickets_end_and_are_limited_for_each_connection(
    monkeypatch: pytest.MonkeyPatch, two_streams: tuple[Stream, Stream]
) -> None:
    tickets, (one, other) = Tickets(), two_streams
    first = tickets.issue(one)
    assert tickets.redeem(first.id) == (first.secret, None)
    assert tickets.redeem(first.id) is None
    assert tickets.redeem(b"") is None
    kept = tickets.issue(other)
    given = [tickets.issue(one) for _ in range(dialing._MOST_TICKETS + 1)]
    assert tickets.redeem(given[0].id) is None
    assert tickets.redeem(given[1].id) == (given[1].secret, None)
    # A node that asks for many voids its own alone.
    assert tickets.redeem(kept.id) == (kept.secret, None)
    tickets.void(one)
    assert tickets.redeem(given[2].id) is None
    assert not tickets._open
    monkeypatch.setattr(dialing, "_TICKET_S", 0.0)
    late = tickets.issue(one)
    assert tickets.redeem(late.id) is None


@pytest.mark.parametrize("encrypt_data", [False, True])
async def test_a_peer_that_falls_silent_is_given_up_in_time(
    authority: Authority, *, encrypt_data: bool
) -> None:
    with listening(authority.node("b")) as listener, wire_to(listener.port) as wire:
        ours = authority.node("a", encrypt_data=encrypt_data)
        async with tier_at(wire.port, ours, deadline_s=5.0) as tier:  # a handshake takes its time
            await reached(tier)
            peer = next(iter(tier._peers.values()))
            into = memoryview(bytearray(PIECE.shard.payload_bytes))
            await peer.fetch(PIECE.shard, into)
            wire.stopped.set()
            with pytest.raises(SilentPeerError):
                async with asyncio.timeout(60):
                    await peer.fetch(PIECE.shard, into)


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x05\0\0\0hello"])
def test_who_says_nothing_or_nonsense_is_disconnected(
    authority: Authority, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(authority.node("b")) as listener:
        with monkeypatch.context() as patch:
            patch.setattr("kvhaven.peers.listener._HANDSHAKE_S", 0.2)
            with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as sock:
                sock.sendall(said)
                while sock.recv(1 << 16):
                    pass
        dial(local(listener.port), "me", b"", authority.node("a"), 60)[0].close()


def test_renewed_certificates_are_used_without_a_restart(authority: Authority) -> None:
    with listening(authority.node("old")) as listener:
        ours = authority.node("a")
        dial(local(listener.port), "me", b"", ours, 5)[0].close()
        key = authority.folder / "old.key"
        kept = key.read_bytes()
        key.write_bytes(b"half of a k")
        dial(local(listener.port), "me", b"", ours, 5)[0].close()  # with the last good ones
        key.write_bytes(kept)
        other = Authority(authority.folder / "other")
        other.node("new")
        for name in ("key", "pem"):
            shutil.copy(other.folder / f"new.{name}", authority.folder / f"old.{name}")
        with pytest.raises(PeerError):
            dial(local(listener.port), "me", b"", ours, 5)


def test_a_changed_file_that_cannot_be_used_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Authority(tmp_path / "ours")
    with listening(ours.node("b")) as listener:
        key = ours.folder / "b.key"
        kept = key.read_bytes()
        key.write_bytes(b"half of a k")
        for _ in range(3):
            dial(local(listener.port), "me", b"", ours.node("a"), 5)[0].close()
        warned = [one for one in caplog.messages if "peer_cert, peer_key: cannot use" in one]
        assert len(warned) == 1
        assert "peer_cert, peer_key: cannot use" in listener.status().certificates
        key.write_bytes(kept)
        dial(local(listener.port), "me", b"", ours.node("a"), 5)[0].close()
        assert not listener.status().certificates


class Open:
    """A connection for requests, and one for chunks."""

    def __init__(self, listener: PeerListener, ours: Certificates) -> None:
        there, self._end = local(listener.port), time.monotonic() + 60
        self._control, _ = dial(there, "me", b"", ours, 5)
        self._control.send(GetTicket(), self._end)
        ticket = self._control.receive(TICKET, self._end)
        self._data, _ = dial(there, "me", b"", None, 5, ticket)

    def has(self) -> None:
        self._control.send(Has(SPACE.digest, PIECE.shard.key), self._end)
        assert self._control.receive(HAS_REPLY, self._end).there == b"\1"

    def fetch(self) -> None:
        shard = PIECE.shard
        wanted = Fetch(SPACE.digest, shard.key, shard.shard, shard.payload_bytes)
        self._data.send(wanted, self._end)
        assert isinstance(self._data.receive(FETCHED, self._end), Chunk)
        self._data.receive_into(memoryview(bytearray(shard.payload_bytes)), self._end)

    def close(self) -> None:
        self._control.close()
        self._data.close()


def await_refusal(request: Callable[[], None]) -> None:
    """Repeat a request until the connection is closed."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            request()
        except PeerError as error:
            assert re.search("closed|reset|pipe", str(error))  # noqa: PT017 - it comes some time
            return
        time.sleep(0.02)
    raise AssertionError("the connection stays open")


def test_a_node_that_was_expelled_loses_its_open_connections(tmp_path: Path) -> None:
    """Its authority is replaced on the other nodes."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    expelled = old.node("a")
    with listening(old.node("b")) as listener:
        connections = Open(listener, expelled)
        with contextlib.closing(connections):
            connections.has()
            connections.fetch()
            new.node("b")
            for name in ("b.pem", "b.key"):
                shutil.copy(new.folder / name, old.folder / name)
            shutil.copy(new.folder / "ca.pem", old.folder / "ca.pem")
            await_refusal(connections.has)
            await_refusal(connections.fetch)


def test_a_node_loses_its_open_connections_when_its_certificate_ends(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(authority.node("b")) as listener:
        connections = Open(listener, authority.node("a"))
        with contextlib.closing(connections):
            connections.has()
            connections.fetch()
            now = time.time()  # they end in two days
            monkeypatch.setattr("kvhaven.peers.certificates.time.time", lambda: now + 3 * 86400)
            for request in (connections.has, connections.fetch):
                with pytest.raises(PeerError, match=r"closed|reset|pipe"):
                    request()


async def test_a_node_reads_no_longer_from_one_that_was_expelled(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    with listening(old.node("b", files=tmp_path / "b")) as listener:
        async with tier_at(listener.port, old.node("a")) as tier:
            await reached(tier)
            into = memoryview(bytearray(PIECE.shard.payload_bytes))
            assert await tier.read(PIECE.shard, into) == PIECE.checksum
            new.node("a")
            for name in ("a.pem", "a.key", "ca.pem"):
                shutil.copy(new.folder / name, old.folder / name)
            with contextlib.suppress(TierError):
                async with asyncio.timeout(60):
                    while True:
                        await tier.read(PIECE.shard, into)
                        await asyncio.sleep(0.02)


@pytest.mark.parametrize("addresses", [1, 6])
def test_strangers_cannot_keep_nodes_out(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, addresses: int
) -> None:
    monkeypatch.setattr("kvhaven.peers.listener._HANDSHAKE_S", 300)
    with contextlib.ExitStack() as stack, listening(authority.node("b")) as listener:
        for number in range(120):
            source = (f"127.0.1.{number % addresses}", 0)
            there = ("127.0.0.1", listener.port)
            sock = socket.create_connection(there, timeout=60, source_address=source)
            stack.enter_context(contextlib.closing(sock))
            sock.sendall(b"\x16\x03\x01")
        dial(local(listener.port), "me", b"", authority.node("a"), 60)[0].close()
        assert len(listener._unknown) <= 64
        while not listener.status().refused:
            time.sleep(0.01)


def test_the_end_of_a_listener_ends_handshakes(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.peers.listener._HANDSHAKE_S", 300)

    def threads() -> int:
        return sum(one.name == "kvhaven-peer" for one in threading.enumerate())

    before = threads()
    with listening(authority.node("b")) as listener:
        sock = socket.create_connection(("127.0.0.1", listener.port), timeout=60)
        with contextlib.closing(sock):
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS handshake
            while not any(
                isinstance(one._socket, ssl.SSLSocket) for one in tuple(listener._unknown)
            ):
                time.sleep(0.01)
            listener.close()
            end = time.monotonic() + 60
            while threads() > before:
                assert time.monotonic() < end, "a handshake goes on"
                time.sleep(0.01)


def test_tools_visit_over_tls(authority: Authority) -> None:
    with listening(authority.node("b")) as listener:
        speed = visit.measure(local(listener.port), b"", 1 << 20, authority.node("a"))
        assert speed.node == "there"
        with pytest.raises(PeerError, match="requires TLS"):
            visit.namespaces(local(listener.port), b"")


def test_settings_that_do_not_fit_are_named(authority: Authority, tmp_path: Path) -> None:
    authority.node("a")
    cert, key, ca = (str(authority.folder / name) for name in ("a.pem", "a.key", "ca.pem"))
    assert read_certificates(Settings()) is None
    assert read_certificates(Settings(peer_cert=cert, peer_key=key, peer_ca=ca)) is not None
    with pytest.raises(ConfigError, match="peer_key, peer_ca: not set, but peer_cert is"):
        read_certificates(Settings(peer_cert=cert))
    with pytest.raises(ConfigError, match="peer_encrypt_data: on, but there are no"):
        read_certificates(Settings(peer_encrypt_data=True))
    with pytest.raises(ConfigError, match="peer_cert, peer_key: cannot use"):
        read_certificates(Settings(peer_cert=cert, peer_key=ca, peer_ca=ca))
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="peer_cert, peer_key: cannot use"):
        read_certificates(Settings(peer_cert=cert, peer_key=str(locked), peer_ca=ca))
    with pytest.raises(ConfigError, match="peer_cert, peer_key: cannot use"):
        read_certificates(Settings(peer_cert="a\0b", peer_key=key, peer_ca=ca))
    with pytest.raises(ConfigError, match="peer_ca: cannot use"):
        read_certificates(Settings(peer_cert=cert, peer_key=key, peer_ca=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match="peer_cert, peer_key and peer_ca"):
        require_secret(Address("0.0.0.0", 1), secret=False)
    require_secret(Address("0.0.0.0", 1), secret=True)


async def test_chunks_of_tenants_stay_where_they_are_if_wanted() -> None:
    alice = tenant_id("alice")
    shard = msgspec.structs.replace(PIECE.shard, tenant=alice)
    into = memoryview(bytearray(shard.payload_bytes))
    with listening(None, tenants=False) as listener:
        async with tier_at(listener.port, None) as tier:
            await reached(tier)
            assert list(await tier.contains([shard, PIECE.shard])) == [False, True]
            with pytest.raises(TierMissError):
                await tier.read(shard, into)
            stream, _ = dial(local(listener.port), "me", b"", None, 5)
            end = time.monotonic() + 60
            stream.send(Offer("1", SPACE.digest, PIECE.shard.key, alice), end)
            assert "peer_tenants" in stream.receive(FOLLOWING, end).reason
            stream.close()
    with listening(None) as listener:
        async with tier_at(listener.port, None, tenants=False) as tier:
            await reached(tier)
            assert list(await tier.contains([shard, PIECE.shard])) == [False, True]
            assert list(await tier.contains([shard])) == [False]
            with pytest.raises(TierMissError, match="peer_tenants"):
                await tier.read(shard, into)
