# SPDX-License-Identifier: Apache-2.0
"""A member's connection to the service, kept up by a thread; nobody ever waits for it."""

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvhaven.errors import KVHavenError, ProtocolError, ServiceUnavailableError
from kvhaven.protocol import (
    Ack,
    Attached,
    AttachRank,
    AttachScheduler,
    FrameReader,
    Hello,
    Message,
    Refused,
    Reliable,
    ServiceMessage,
    Welcome,
    decode_service,
    encode,
)

logger = logging.getLogger(__name__)

_UNSENT_LIMIT = 8 << 20
_HANDSHAKE_S = 30.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 2.0
_DESCRIPTORS_MOST = 16


class Listener(Protocol):
    """What a link tells its owner, always from the link's thread."""

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """The service took us (again). The descriptors are the listener's to close."""

    def received(self, message: ServiceMessage) -> None:
        """A message came that is not the link's own business."""

    def detached(self) -> None:
        """The connection is gone; what was asked will not be answered."""


class Link:
    """Connects, says who we are, and does so again whenever the connection is lost.

    `post` and `post_reliable` may be called from any thread and never block: what the
    socket does not take at once is sent by the link's thread. Without a connection `post`
    drops the message and says so. Reliable messages are kept until the service has
    acknowledged them and are sent again after a reconnect; the service drops repetitions.
    When another service answers than before, they are void and forgotten.
    """

    def __init__(
        self,
        address: str,
        attach: AttachRank | AttachScheduler,
        listener: Listener,
        *,
        ensure_service: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._attach = attach
        self._listener = listener
        self._ensure_service = ensure_service
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._sequence = 0
        self._socket: socket.socket | None = None
        self._up = False
        self._closing = threading.Event()
        self._first_try = threading.Event()
        self._refusal: str | None = None
        self._service = ""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvhaven-link", daemon=True)

    @property
    def up(self) -> bool:
        """Whether the service has taken us and the connection stands."""
        return self._up

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait for the first attach.

        Raises `KVHavenError` when the service refused us (its reason says what to change)
        and `ServiceUnavailableError` when nothing answered in time; the link goes on trying
        then, so the caller may carry on without.
        """
        self._thread.start()
        if not self._first_try.wait(timeout_s):
            raise ServiceUnavailableError(
                f"no node service answered at {self._address} within {timeout_s:g} s"
            )
        if self._refusal is not None:
            raise KVHavenError(self._refusal)

    def post(self, message: Message) -> bool:
        """Send a message; False when there is no connection or it does not take any more."""
        frame = encode(message)
        with self._lock:
            if not self._up or len(self._unsent) > _UNSENT_LIMIT:
                return False
            self._send(frame)
        return True

    def post_reliable(self, make: Callable[[int], Reliable]) -> None:
        """Send a message that must arrive as long as this service lives; `make` takes its seq."""
        with self._lock:
            self._sequence += 1
            frame = encode(make(self._sequence))
            self._outbox.append((self._sequence, frame))
            if self._up:
                self._send(frame)

    def close(self, flush_s: float = 1.0) -> None:
        """Send what waits, `flush_s` at most, and end the thread."""
        end = time.monotonic() + flush_s
        while self._up and self._outbox and time.monotonic() < end:
            time.sleep(0.005)
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _RETRY_FIRST_S
        while not self._closing.is_set():
            try:
                self._connect()
            except (OSError, KVHavenError) as error:
                if isinstance(error, _RefusedError):
                    self._refusal = str(error)
                    self._first_try.set()
                logger.debug("no connection to %s: %s", self._address, error)
                self._closing.wait(pause)
                pause = min(pause * 2, _RETRY_MOST_S)
                continue
            pause = _RETRY_FIRST_S
            self._refusal = None
            self._first_try.set()
            try:
                self._receive()
            except (OSError, ProtocolError) as error:
                if not self._closing.is_set():
                    logger.warning("lost the node service at %s: %s", self._address, error)
            self._disconnect()
        self._disconnect()

    def _connect(self) -> None:
        self._ensure_service()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_HANDSHAKE_S)
            sock.connect(self._address)
            _require_own_user(sock)
            sock.sendall(encode(Hello()))
            self._reader = FrameReader()
            welcome, _ = self._await_answer(sock, Welcome)
            sock.sendall(encode(self._attach))
            answer, descriptors = self._await_answer(sock, Attached)
        except BaseException:
            sock.close()
            raise
        assert isinstance(welcome, Welcome)
        assert isinstance(answer, Attached)
        if welcome.service != self._service:
            with self._lock:
                self._outbox.clear()
            self._service = welcome.service
        self._listener.attached(welcome.service, answer, descriptors)
        sock.setblocking(False)
        with self._lock:
            self._socket = sock
            self._unsent.clear()
            self._up = True
            for _, frame in self._outbox:
                self._send(frame)

    def _await_answer(
        self, sock: socket.socket, wanted: type[Message]
    ) -> tuple[ServiceMessage, list[int]]:
        descriptors: list[int] = []
        while True:
            data, more, _flags, _address = socket.recv_fds(sock, 65536, _DESCRIPTORS_MOST)
            descriptors += more
            if not data:
                raise ServiceUnavailableError("the service closed the connection")
            for body in self._reader.feed(data):
                message = decode_service(body)
                if isinstance(message, Refused):
                    raise _RefusedError(message.reason)
                if not isinstance(message, wanted):
                    raise ProtocolError(f"{type(message).__name__} instead of {wanted.__name__}")
                return message, descriptors

    def _receive(self) -> None:
        sock = self._socket
        assert sock is not None
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._closing.is_set():
                for key, events in selector.select():
                    if key.fileobj == self._wake_read:
                        os.read(self._wake_read, 4096)
                    elif events & selectors.EVENT_READ:
                        data = sock.recv(256 << 10)
                        if not data:
                            raise ConnectionResetError("it closed the connection")
                        for body in self._reader.feed(data):
                            self._handle(decode_service(body))
                with self._lock:
                    self._flush()
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
                selector.modify(sock, wanted)

    def _handle(self, message: ServiceMessage) -> None:
        if isinstance(message, Ack):
            with self._lock:
                while self._outbox and self._outbox[0][0] <= message.seq:
                    self._outbox.popleft()
        else:
            self._listener.received(message)

    def _disconnect(self) -> None:
        with self._lock:
            was_up, self._up = self._up, False
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if was_up:
            self._listener.detached()

    # --- sending, with the lock held --------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        idle = not self._unsent
        self._unsent += frame
        if idle:
            self._flush()
        if self._unsent:
            self._wake()

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The thread sees the same error when it reads, and reconnects.
            self._unsent.clear()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has been woken already
            os.write(self._wake_write, b"\0")


class _RefusedError(KVHavenError):
    """The service answered `Refused`."""


def _require_own_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        raise _RefusedError(f"the service there runs as user {uid}, this process as {os.geteuid()}")
