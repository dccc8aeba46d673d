# SPDX-License-Identifier: Apache-2.0
"""HTTP servers of aiohttp whose connections have limits: the HTTP API and the router."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, cast

from aiohttp import web

from kvhaven.client.unix import peer_uid

MOST_CONNECTIONS: Final = 256
HEADER_S: Final = 10.0
"""Seconds for the header of a request, and for the pause between two requests."""

ProtocolFactory = Callable[[], asyncio.Protocol]

logger = logging.getLogger(__name__)

_malformed = logging.getLogger(f"{__name__}.malformed")
_malformed.setLevel(logging.CRITICAL)  # aiohttp would log a traceback for each malformed request


class Guard:
    """Registry of a server's connections.

    A connection beyond `most` is closed immediately, and so is one of another user on a unix
    socket. A connection without a request for `HEADER_S` seconds is closed, also if parts of a
    header arrive meanwhile; after its first request, one without another for `idle_s` seconds
    (default: the same).
    """

    def __init__(self, most: int = MOST_CONNECTIONS, idle_s: float | None = None) -> None:
        self._most = most
        self._idle_s = idle_s
        self._open: dict[asyncio.BaseTransport, Guarded] = {}

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, inner: asyncio.Protocol) -> "Guarded":
        """Return `inner` with the limits applied."""
        return Guarded(inner, self._open, self._most)

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
    ) -> None:
        self._inner = inner
        self._open = connections
        self._most = most
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, seconds: float | None = None) -> None:
        """Close the connection unless the header of a request arrives in time."""
        self.disarm()
        limit_s = HEADER_S if seconds is None else seconds
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._abort)

    def disarm(self) -> None:
        """Wait for no header."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the connection on, or close it."""
        if len(self._open) >= self._most or not _is_own(transport):
            self._inner = asyncio.Protocol()
            _abort(transport)
            return
        self._transport = transport
        self._open[transport] = self
        self.arm()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on data."""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass on the end of the client's data."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and pass on its end."""
        self.disarm()
        if self._transport is not None:
            self._open.pop(self._transport, None)
        self._inner.connection_lost(exc)

    def _abort(self) -> None:
        if self._transport is not None:
            _abort(self._transport)


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
