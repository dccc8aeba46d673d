# SPDX-License-Identifier: Apache-2.0
"""HTTP servers of aiohttp whose connections have limits: the HTTP API and the router."""

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import ssl
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, cast

from aiohttp import web

from kvhaven.client.unix import peer_uid

MOST_CONNECTIONS: Final = 256
HEADER_S: Final = 10.0
"""Seconds for a TLS handshake, for the header of a request, and for the pause between two."""
STALL_S: Final = 600.0
"""Seconds after which a client that has taken no byte of an answer is disconnected."""

ProtocolFactory = Callable[[], asyncio.Protocol]

logger = logging.getLogger(__name__)

_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # aiohttp would log a traceback for each malformed request


class Guard:
    """Registry of a server's connections.

    A connection beyond `most` is closed immediately, and so is one of another user on a unix
    socket. With `tls`, connections are encrypted; they count from before the handshake. A
    connection without a request for `HEADER_S` seconds is closed, also if parts of a header arrive
    meanwhile; after its first request, one without another for `idle_s` seconds (default: the
    same). A client that does not take what it was sent is disconnected after `STALL_S` seconds, one
    that takes it slowly is not.
    """

    def __init__(
        self,
        most: int = MOST_CONNECTIONS,
        idle_s: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._most = most
        self._idle_s = idle_s
        self._tls = tls
        self._open: dict[asyncio.BaseTransport, Guarded] = {}

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def protocol(self, inner: asyncio.Protocol) -> "Guarded":
        """Return `inner` with the limits applied."""
        return Guarded(inner, self._open, self._most, self._tls)

    def abort(self) -> None:
        """Close all connections, also those whose other side does not end its TLS session."""
        for transport in tuple(self._open):
            _abort(transport)

    def began(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that the header of a request is complete."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None:
            guarded.disarm()

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """Record that a request was answered; the next header has its own time."""
        guarded = self._open.get(transport) if transport is not None else None
        if guarded is not None:
            guarded.arm(self._idle_s)


class Guarded(asyncio.Protocol):
    """A protocol that passes everything on to `inner`, within the limits of a `Guard`."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        connections: "dict[asyncio.BaseTransport, Guarded]",
        most: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._inner = inner
        self._open = connections
        self._most = most
        self._tls = tls
        self._transport: asyncio.BaseTransport | None = None
        self._descriptor = -1
        self._made = False
        """Whether `inner` has the connection: after the handshake."""
        self._early: list[bytes] = []
        """Data that came with the last message of the handshake."""
        self._securing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def arm(self, seconds: float | None = None) -> None:
        """Close the connection unless the header of a request arrives in time."""
        self.disarm()
        limit_s = HEADER_S if seconds is None else seconds
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._idle, limit_s)

    def disarm(self) -> None:
        """Wait for no header."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the connection on, or close it."""
        if len(self._open) >= self._most or not _is_own(transport):
            _abort(transport)
            return
        sock: socket.socket | None = transport.get_extra_info("socket")
        self._descriptor = -1 if sock is None else sock.fileno()
        self._take(transport)
        if self._tls is None:
            self._make(transport)
        else:
            raw = cast(asyncio.Transport, transport)
            raw.pause_reading()  # what comes now is for TLS
            self._securing = asyncio.create_task(self._secure(raw, self._tls))

    def data_received(self, data: bytes) -> None:
        """Pass on data."""
        if self._made:
            self._inner.data_received(data)
        else:
            self._early.append(data)

    def eof_received(self) -> bool | None:
        """Pass on the end of the client's data."""
        return self._inner.eof_received() if self._made else None

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly, and watch whether it reads at all."""
        self._inner.pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self._stop_watching()
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and pass on its end. A second call has no effect."""
        self.disarm()
        self._stop_watching()
        if self._transport is not None:
            self._open.pop(self._transport, None)
            self._transport = None
        if self._made:
            self._made = False
            self._inner.connection_lost(exc)

    def _take(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, and give it time for its next step."""
        if self._transport is not None:
            self._open.pop(self._transport, None)
        self._transport = transport
        self._open[transport] = self
        self.arm()

    def _make(self, transport: asyncio.BaseTransport) -> None:
        self._made = True
        self._inner.connection_made(transport)

    async def _secure(self, raw: asyncio.Transport, tls: ssl.SSLContext) -> None:
        """Begin a TLS session on a connection, and pass it on; forget the connection otherwise."""
        secured: asyncio.Transport | None = None
        with contextlib.suppress(OSError):  # of TLS, too: the client does not speak it, or is slow
            secured = await asyncio.get_running_loop().start_tls(
                raw,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=HEADER_S,
                # The end of an answer may still wait; a client that has it all is `_idle` then.
                ssl_shutdown_timeout=STALL_S,
            )
        self._securing = None
        # A connection that ended meanwhile may have no error.
        if secured is None or secured.is_closing() or self._transport is None:
            _abort(raw)
            self.connection_lost(None)
            return
        self._take(secured)
        self._make(secured)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def _idle(self, seconds: float) -> None:
        """Close the connection, unless its client has not taken all of the last answer yet."""
        if self._unsent():
            self.arm(seconds)
            if self._stall is None:
                self._watch_reader()
        elif self._transport is not None:
            _abort(self._transport)

    def _watch_reader(self) -> None:
        """Close the connection if its client takes nothing for `STALL_S` seconds."""
        self._stop_watching()
        loop = asyncio.get_running_loop()
        self._stall = loop.call_later(STALL_S, self._stalled, self._unsent())

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self, before: int) -> None:
        self._stall = None
        unsent = self._unsent()
        if unsent != before and unsent:  # more than before: it was written since
            self._watch_reader()
        elif unsent and self._transport is not None:
            _abort(self._transport)

    def _unsent(self) -> int:
        """Return the bytes that the client has not taken, those in the kernel included."""
        if self._transport is None:
            return 0
        queued = array.array("i", [0])
        with contextlib.suppress(OSError, ValueError):  # there is no socket, or it is closed
            fcntl.ioctl(self._descriptor, termios.TIOCOUTQ, queued)
        buffered = cast(asyncio.WriteTransport, self._transport).get_write_buffer_size()
        return buffered + queued[0]


@asynccontextmanager
async def serving(
    app: web.Application,
    guard: Guard,
    listen: Callable[[ProtocolFactory], Awaitable[asyncio.Server]],
    *,
    idle_s: float,
    shutdown_s: float,
) -> AsyncIterator[asyncio.Server]:
    """Serve an application within a context, with the connections of the server of `listen`.

    A connection without a request is closed after `idle_s` seconds. At the end, requests that are
    being answered get `shutdown_s` seconds.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_malformed,
        handler_cancellation=True,  # a client that goes away ends its request
        keepalive_timeout=idle_s,
        shutdown_timeout=shutdown_s,
    )
    await runner.setup()
    try:
        inner = runner.server
        assert inner is not None, "the runner was set up"
        server = await listen(lambda: guard.protocol(inner()))
        try:
            yield server
        finally:
            server.close()
    finally:
        await runner.cleanup()
        guard.abort()


def _abort(transport: asyncio.BaseTransport) -> None:
    cast(asyncio.Transport, transport).abort()  # uvloop's is no subclass


def _is_own(transport: asyncio.BaseTransport) -> bool:
    """Return whether a connection comes from TCP, or from this user on a unix socket."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return True
    uid = peer_uid(sock)
    if uid != os.geteuid():
        logger.warning("refused a connection of another user (uid %d)", uid)
        return False
    return True
