# SPDX-License-Identifier: Apache-2.0
"""Client connections on the event loop: frames in and out, with file descriptors."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvhaven.client.unix import listens, peer_uid
from kvhaven.errors import KVHavenError, ProtocolError
from kvhaven.protocol import ClientMessage, FrameReader, Message, decode_client, encode
from kvhaven.service.turns import AnyJob, Turns

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 32 << 10
"""Small, because a larger piece may hold so many messages that framing takes milliseconds."""
_LONG_BYTES = 128 << 10
"""A longer message is decoded in its own piece: 1 MB of keys takes 0.05 ms, of commits 3 ms."""
_UNSENT_LIMIT = 64 << 20
"""A client with more unsent bytes does not read its answers, and is disconnected."""
_HELLO_S = 10.0
"""A client without a Hello by then is disconnected, because descriptors are scarce."""
_BACKLOG = 512
_ACCEPT_PAUSE_S = 0.5


class Connection:
    """One client's socket. It passes each message to `on_message`, and calls `on_closed` once.

    If a message takes long to handle, `on_message` returns a job. The next message waits until the
    job is done, and the socket is not read meanwhile. An exception in a handler closes this
    connection and has no other effect. When the connection closes, the rest of a job is dropped.
    After the messages of one readable event, `on_batch` is called, so that one acknowledgement
    covers all of them. A connection that is not marked with `greet` in time is closed.

    `send` calls no callback: if it fails, the event loop closes the connection a moment later, so
    that a caller's tables do not change during the call.
    """

    def __init__(
        self,
        sock: socket.socket,
        turns: Turns,
        *,
        on_message: Callable[["Connection", ClientMessage], AnyJob | None],
        on_batch: Callable[["Connection"], None],
        on_closed: Callable[["Connection"], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_batch = on_batch
        self._on_closed = on_closed
        self._turns = turns
        self._reader = FrameReader()
        self._unhandled: deque[memoryview] = deque()
        self._paused = False
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._failed = False
        self._finishing = False
        self._waits_to_write = False
        self._closed = False
        self.greeted = False
        self.broken = False
        """Whether it was closed for a message that is malformed, unexpected, or overdue."""
        self._silent = self._loop.call_later(_HELLO_S, self._give_up)
        self._loop.add_reader(sock, self._readable)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or about to close; nothing more can be sent."""
        return self._closed or self._failed or self._finishing

    def greet(self) -> None:
        """Record that the client sent a valid Hello."""
        self.greeted = True
        self._silent.cancel()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message as soon as the socket takes it; descriptors go with its first byte."""
        if self.closed:
            return
        frame = encode(message)
        self._unsent.append((memoryview(frame), descriptors))
        self._unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._write()
        if self._unsent_bytes > _UNSENT_LIMIT:
            logger.warning("a client does not read its answers: disconnected")
            self.close_soon()

    def close_soon(self) -> None:
        """Send nothing more, and let the event loop close the connection."""
        if not (self._closed or self._failed):
            self._failed = True
            self._loop.call_soon(self.close)

    def finish(self) -> None:
        """Send the unsent messages, handle no more, and close once the client has closed.

        A client that sends when the socket is closed already may lose the last messages to it.
        """
        self._finishing = True
        if not self._unsent:
            self._end_sending()

    def _end_sending(self) -> None:
        with contextlib.suppress(OSError):  # the client has closed
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket and call `on_closed`. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        self._silent.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._unsent.clear()
        self._on_closed(self)

    def _give_up(self) -> None:
        self._fail(ProtocolError(f"the client sent no Hello within {_HELLO_S:g} s"))

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
        if self._finishing:
            return
        try:
            self._unhandled.extend(self._reader.feed(data))
        except ProtocolError as error:
            self._fail(error)
            return
        if not self._turns.start(self._handle()):
            self._paused = True
            self._loop.remove_reader(self._socket)

    def _handle(self) -> AnyJob:
        """Handle the messages that were read, then resume reading."""
        try:
            while self._unhandled and not self.closed:
                long = len(self._unhandled[0]) > _LONG_BYTES
                message = decode_client(self._unhandled.popleft())
                if long:
                    yield None
                    if self.closed:
                        return
                for hint in self._on_message(self, message) or ():
                    yield hint
                    if self.closed:
                        return
                yield None
            if not self.closed:
                self._on_batch(self)
        except Exception as error:  # noqa: BLE001 - one client must not end all others
            self._fail(error)
        if self._paused and not self.closed:
            self._paused = False
            self._loop.add_reader(self._socket, self._readable)

    def _fail(self, error: Exception) -> None:
        """Log the error and close the connection."""
        if isinstance(error, ProtocolError):
            self.broken = True
            logger.warning("closed a connection: %s", error)
        else:
            logger.error("closed a connection: its message could not be handled", exc_info=error)
        self.close_soon()

    def _write(self) -> None:
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
            self.close_soon()
            return
        if bool(self._unsent) == self._waits_to_write:
            return
        self._waits_to_write = bool(self._unsent)
        if self._waits_to_write:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)
            if self._finishing:
                self._end_sending()

    def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> int:
        if descriptors:
            return socket.send_fds(self._socket, [data], list(descriptors))
        return self._socket.send(data)


class Listener:
    """Listening socket at `path`; passes each connection of the service's user to `on_socket`.

    A stale socket file, on which no process listens, is replaced. Raises `KVHavenError` if a
    process listens at `path`, or if the socket cannot be created there.
    """

    def __init__(self, path: str) -> None:
        if listens(path):
            raise KVHavenError(f"another service answers at {path}")
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            Path(path).unlink(missing_ok=True)
            self._socket.bind(path)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise KVHavenError(f"cannot listen at {path}: {error.strerror or error}") from error
        finally:
            os.umask(mask)
        self._socket.setblocking(False)
        self._resume: asyncio.TimerHandle | None = None

    def start(self, on_socket: Callable[[socket.socket], None]) -> None:
        """Accept connections from now on."""
        self._on_socket = on_socket
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Stop accepting, and remove the socket file. Safe to call again."""
        if self._socket.fileno() < 0:
            return
        if self._resume is not None:
            self._resume.cancel()
        with contextlib.suppress(RuntimeError):  # no loop runs: `start` was not called
            asyncio.get_running_loop().remove_reader(self._socket)
        Path(self._path).unlink(missing_ok=True)
        self._socket.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("could not accept a connection: %s", error)
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                self._pause()
            return
        uid = peer_uid(sock)
        if uid != os.geteuid():
            logger.warning("refused a connection of another user (uid %d)", uid)
            sock.close()
            return
        self._on_socket(sock)

    def _pause(self) -> None:
        """Stop accepting for a while: without free descriptors the loop would only spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._resume = loop.call_later(_ACCEPT_PAUSE_S, self.start, self._on_socket)
