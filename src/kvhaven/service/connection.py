# SPDX-License-Identifier: Apache-2.0
"""One client's socket on the event loop: frames in and out, and descriptors with them."""

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
from kvhaven.service.turns import Job, Turns

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 32 << 10
"""Messages may be small: cutting a larger piece into frames would take milliseconds."""
_LONG_BYTES = 128 << 10
"""To decode a longer message is a piece of its own: 0.05 ms for 1 MB of keys, 3 ms of commits."""
_UNSENT_LIMIT = 64 << 20
"""A client that lets this much pile up is not reading; it is disconnected."""
_HELLO_S = 10.0
"""Who has not said Hello by then is disconnected: descriptors are few."""
_BACKLOG = 512
_ACCEPT_PAUSE_S = 0.5


class Connection:
    """Reads messages and hands each to `on_message`; calls `on_closed` exactly once.

    What takes long to handle is a job (`on_message` returns it), and the next message waits until
    it is done; nothing more is read meanwhile. Whatever handling raises closes this connection and
    changes nothing else; when it is closed, what is left of a job is dropped. After the
    messages of one readable event were handled, `on_batch` is called, so that
    acknowledgements can be sent once for many. Who does not `greet` in time is disconnected.

    `send` never calls back: a connection that fails in it is closed by the loop a moment
    later, so that nobody's tables change under their hands.
    """

    def __init__(
        self,
        sock: socket.socket,
        turns: Turns,
        *,
        on_message: Callable[["Connection", ClientMessage], Job | None],
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
        self._waits_to_write = False
        self._closed = False
        self.greeted = False
        self._silent = self._loop.call_later(_HELLO_S, self._give_up)
        self._loop.add_reader(sock, self._readable)

    @property
    def closed(self) -> bool:
        """Whether it is closed, or will be in a moment: nothing can be said any more."""
        return self._closed or self._failed

    def greet(self) -> None:
        """Note that the client has said Hello."""
        self.greeted = True
        self._silent.cancel()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, now or when the socket takes it; descriptors go with its first byte."""
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
        """Send what the socket takes, say nothing more, and close from the loop."""
        if not self.closed:
            self._failed = True
            self._loop.call_soon(self.close)

    def close(self) -> None:
        """Close the socket and tell the owner. Safe to call again."""
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
        self._fail(ProtocolError(f"no Hello came within {_HELLO_S:g} s"))

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
            self._unhandled.extend(self._reader.feed(data))
        except ProtocolError as error:
            self._fail(error)
            return
        if not self._turns.start(self._handle()):
            self._paused = True
            self._loop.remove_reader(self._socket)

    def _handle(self) -> Job:
        """Handle what was read, and read on."""
        try:
            while self._unhandled and not self.closed:
                long = len(self._unhandled[0]) > _LONG_BYTES
                message = decode_client(self._unhandled.popleft())
                if long:
                    yield
                    if self.closed:
                        return
                for _ in self._on_message(self, message) or ():
                    yield
                    if self.closed:
                        return
                yield
            if not self.closed:
                self._on_batch(self)
        except Exception as error:  # noqa: BLE001 - one client's message must not end all others
            self._fail(error)
        if self._paused and not self.closed:
            self._paused = False
            self._loop.add_reader(self._socket, self._readable)

    def _fail(self, error: Exception) -> None:
        """Close the connection, because of what its client said."""
        if isinstance(error, ProtocolError):
            logger.warning("closed a connection: %s", error)
        else:
            logger.error("closed a connection whose message could not be handled", exc_info=error)
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

    def _send_some(self, data: memoryview, descriptors: Sequence[int]) -> int:
        if descriptors:
            return socket.send_fds(self._socket, [data], list(descriptors))
        return self._socket.send(data)


class Listener:
    """A listening socket at `path`; hands every connection of our own user to `on_socket`.

    A stale socket file (nobody listens on it) is replaced. Raises `KVHavenError` when
    somebody does listen, or when the socket cannot be made there.
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
        """Accept no more, and remove the socket file. Safe to call again."""
        if self._socket.fileno() < 0:
            return
        if self._resume is not None:
            self._resume.cancel()
        with contextlib.suppress(RuntimeError):  # no loop runs: none was told of the socket
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
            logger.warning("refused a connection of user %d", uid)
            sock.close()
            return
        self._on_socket(sock)

    def _pause(self) -> None:
        """Leave the queue alone for a while: the loop would only spin."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._resume = loop.call_later(_ACCEPT_PAUSE_S, self.start, self._on_socket)
