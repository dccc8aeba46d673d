# SPDX-License-Identifier: Apache-2.0
"""One client's socket on the event loop: frames in and out, and descriptors with them."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvhaven.errors import ProtocolError
from kvhaven.protocol import ClientMessage, FrameReader, Message, decode_client, encode

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 << 10
_UNSENT_LIMIT = 64 << 20
"""A client that lets this much pile up is not reading; it is disconnected."""


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


class Connection:
    """Reads messages and hands each to `on_message`; calls `on_closed` exactly once.

    An exception of type `ProtocolError` from either decoding or `on_message` closes this
    connection and changes nothing else. After the messages of one readable event were
    handled, `on_batch` is called, so that acknowledgements can be sent once for many.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[["Connection", ClientMessage], None],
        on_batch: Callable[["Connection"], None],
        on_closed: Callable[["Connection"], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_batch = on_batch
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self.closed = False
        self.greeted = False
        self._loop.add_reader(sock, self._readable)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, now or when the socket takes it; descriptors go with its first byte."""
        if self.closed:
            return
        frame = encode(message)
        self._unsent.append((memoryview(frame), descriptors))
        self._unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._writable()
        if self._unsent_bytes > _UNSENT_LIMIT:
            logger.warning("a client does not read its answers: disconnected")
            self.close()

    def close(self) -> None:
        """Close the socket and tell the owner. Safe to call again."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._unsent.clear()
        self._on_closed(self)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for body in self._reader.feed(data):
                self._on_message(self, decode_client(body))
        except ProtocolError as error:
            logger.warning("closed a connection: %s", error)
            self.close()
        else:
            self._on_batch(self)

    def _writable(self) -> None:
        try:
            while self._unsent:
                data, descriptors = self._unsent[0]
                sent = self._send_some(data, descriptors)
                self._unsent_bytes -= sent
                if sent < len(data):
                    self._unsent[0] = (data[sent:], ())
                    break
                self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if self._unsent:
            self._loop.add_writer(self._socket, self._writable)
        else:
            self._loop.remove_writer(self._socket)

    def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> int:
        if descriptors:
            return socket.send_fds(self._socket, [data], list(descriptors))
        return self._socket.send(data)


def listen(path: str) -> socket.socket:
    """Return a listening socket at `path`, in a directory only this user may enter.

    A stale socket file (nobody listens on it) is replaced; raises `OSError` (EADDRINUSE)
    when somebody does.
    """
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            Path(path).unlink()
        else:
            raise OSError(98, f"another service answers at {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(mask)
    sock.listen(128)
    sock.setblocking(False)
    return sock
