# SPDX-License-Identifier: Apache-2.0
"""Limits of HTTP connections, over real sockets: handshakes that do not end, slow readers."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from aiohttp import web

from kvhaven import http_server
from kvhaven.http_server import Guard, ProtocolFactory, serving
from tests.gateway_kit import make_certificate

pytestmark = pytest.mark.asyncio

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@contextlib.asynccontextmanager
async def server(guard: Guard, handler: Any = None) -> AsyncIterator[int]:
    """Serve with the limits of `guard`; yield the port."""

    async def handle(request: web.Request) -> web.StreamResponse:
        guard.began(request.transport)
        try:
            if handler is None:
                return web.Response(text="hello")
            answer: web.StreamResponse = await handler(request)
            return answer
        finally:
            guard.ended(request.transport)

    async def listen(protocol: ProtocolFactory) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)

    app = web.Application()
    app.router.add_get("/", handle)
    async with serving(app, guard, listen, idle_s=60, shutdown_s=1) as listening:
        yield listening.sockets[0].getsockname()[1]


def tls_of(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


async def until(what: Any) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110 - a guard signals nothing
            await asyncio.sleep(0.005)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what arrives until the server closes the connection."""
    got = b""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                got += data
    return got


async def test_a_connection_counts_before_its_handshake(certificate: Path) -> None:
    """Each costs memory and a descriptor from its beginning."""
    guard = Guard(most=2, tls=tls_of(certificate))
    async with server(guard) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await until(lambda: guard.connections == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await ended(reader) == b""
        for _, each in (*silent, (reader, writer)):
            each.close()
        await until(lambda: guard.connections == 0)
        trusting = ssl.create_default_context(cafile=certificate)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(REQUEST)
        async with asyncio.timeout(60):
            assert b"hello" in await reader.readuntil(b"hello")
        assert guard.connections == 1
        writer.close()
        await until(lambda: guard.connections == 0)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_fails_or_does_not_end_ends_its_connection(
    certificate: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEADER_S", 0.2)
    guard = Guard(tls=tls_of(certificate))
    async with server(guard) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        await ended(reader)
        writer.close()
        await until(lambda: guard.connections == 0)


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    certificate: Path,
) -> None:
    async with server(Guard(tls=tls_of(certificate))) as port:
        received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        trusting = ssl.create_default_context(cafile=certificate)
        session = trusting.wrap_bio(received, to_send, server_hostname="localhost")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            while True:
                try:
                    session.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(to_send.read())
                    received.write(await reader.read(1 << 16))
            session.write(REQUEST)
            writer.write(to_send.read())  # both: the last message of the handshake, and a request
            got = b""
            while b"hello" not in got:
                received.write(await reader.read(1 << 16))
                with contextlib.suppress(ssl.SSLWantReadError):
                    got += session.read(1 << 16)
        writer.close()


async def test_a_slow_client_has_time_for_the_end_of_its_answer_also_over_tls(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 s after it closed a connection, asyncio drops what is not sent."""
    loop, given = asyncio.get_running_loop(), dict[str, Any]()
    start_tls = loop.start_tls

    async def record(*arguments: Any, **named: Any) -> asyncio.Transport | None:
        given.update(named)
        return await start_tls(*arguments, **named)

    monkeypatch.setattr(loop, "start_tls", record)
    async with server(Guard(tls=tls_of(certificate))) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: given)
        writer.close()
    assert given["ssl_shutdown_timeout"] == http_server.STALL_S


async def test_a_client_that_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALL_S", 0.2)
    left = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            while True:
                await answer.write(bytes(1 << 16))
        finally:
            left.set()

    guard = Guard()
    async with server(guard, endless) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(REQUEST)
        async with asyncio.timeout(60):
            await left.wait()
        await until(lambda: guard.connections == 0)
        assert not reader.at_eof()
        writer.close()


class _Taking(asyncio.Transport):
    """A transport whose client has left these numbers of bytes, one after another, then the last.

    A number is over whenever somebody looks.
    """

    def __init__(self, left: Sequence[int]) -> None:
        super().__init__()
        self.left = [*left]
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize(
    ("limits", "pauses", "left"),
    [
        (["STALL_S"], True, [90, 80, 80, 40, 40, 39, 39]),
        (["STALL_S"], True, [51, 90, 90, 80, 80]),
        (["HEADER_S"], False, [51, 90, 90, 80, 80, 40, 39, 39, 0]),
        (["HEADER_S", "STALL_S"], False, [90, 90]),
    ],
    ids=["while written", "more", "before the next request", "nothing"],
)
async def test_a_client_that_reads_slowly_is_served_to_the_end(
    limits: Sequence[str], pauses: bool, left: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its answer is written only when the time for its next request has begun.

    It need not have taken what came before by then: the last messages of TLS's handshake, 510
    bytes, are not acknowledged when the first answer is written.
    """
    for name in limits:
        monkeypatch.setattr(http_server, name, 0.01)
    transport = _Taking(left)
    guarded = Guard().protocol(asyncio.Protocol())
    guarded.connection_made(transport)
    if pauses:
        guarded.disarm()
        guarded.pause_writing()
    async with asyncio.timeout(60):
        await transport.aborted.wait()
    assert transport.left == [left[-1]]
    guarded.connection_lost(None)
