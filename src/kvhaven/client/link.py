# SPDX-License-Identifier: Apache-2.0
"""A member's connection to the service, kept up by a thread; callers never wait for it."""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvhaven.client.handshake import RefusedError, shake_hands
from kvhaven.errors import IncompleteEngineError, KVHavenError, ServiceUnavailableError
from kvhaven.niceness import run_soon_after_waking
from kvhaven.protocol import (
    Ack,
    Attached,
    AttachRank,
    AttachScheduler,
    FrameReader,
    Message,
    Reliable,
    ServiceMessage,
    decode_service,
    encode,
)

logger = logging.getLogger(__name__)

_UNSENT_LIMIT = 8 << 20
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 2.0
_REFUSED_MOST_S = 30.0
"""Longest pause after a refusal or a failed start of a service, which cost more than a failed
connection."""
_RECEIVE_BYTES = 256 << 10


class Listener(Protocol):
    """Callbacks from a link to its owner, always in the link's thread."""

    def greeting(self) -> AttachRank | AttachScheduler:
        """Return the attach message; called for each connection."""

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Handle an accepted connection, first or repeated. The listener closes `descriptors`."""

    def received(self, message: ServiceMessage) -> None:
        """Handle a message other than an acknowledgement."""

    def detached(self) -> None:
        """Handle the loss of the connection; pending requests will not be answered."""

    def forked(self) -> None:
        """Renew locks in a forked child, where the threads that held them are gone."""


class Link:
    """A connection to the service that attaches again whenever it is lost.

    `post` and `post_reliable` may be called from any thread and never block: the link's thread
    sends the part that the socket does not take immediately. Without a connection, `post` drops the
    message and returns False. Reliable messages are kept until the service has acknowledged them
    and are sent again after a reconnect; the service drops duplicates. When another service answers
    than before, they are void and dropped.

    `ensure_service` is called if no process listens at the address; it takes bounded time.
    """

    def __init__(
        self,
        address: str,
        listener: Listener,
        *,
        ensure_service: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._listener = listener
        self._ensure_service = ensure_service
        self._lock = threading.Lock()
        # All below is guarded by the lock; `_up` and `_service` may be read without it.
        self._unsent = bytearray()
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._sequence = 0
        self._socket: socket.socket | None = None
        self._up = False
        self._service = ""
        self._closing = threading.Event()
        self._first_try = threading.Event()
        self._refusal: KVHavenError | None = None
        self._complaint = ""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvhaven-link", daemon=True)
        _links.add(self)

    @property
    def up(self) -> bool:
        """Whether the service has accepted this member and the connection is open."""
        return self._up

    @property
    def closing(self) -> threading.Event:
        """Set once `close` was called, so that preparations of a later start can stop."""
        return self._closing

    @property
    def acknowledged(self) -> bool:
        """Whether the service has handled every reliable message."""
        return not self._outbox

    def start(self, timeout_s: float) -> None:
        """Start the thread and wait for the first attach.

        Raises `KVHavenError` if the service refuses this member (the message names the setting to
        change); then the link is closed. Raises `ServiceUnavailableError` if no service answers in
        time, or `IncompleteEngineError` if the engine's other processes are the cause; then the
        link keeps retrying, so the caller may continue without a cache.
        """
        self._thread.start()
        if not self._first_try.wait(timeout_s):
            raise ServiceUnavailableError(
                f"no node service answered at {self._address} within {timeout_s:g} s"
                + (f": {self._complaint}" if self._complaint else "")
            )
        refusal = self._refusal
        if refusal is not None:
            if not isinstance(refusal, ServiceUnavailableError):
                self.close(0)
            raise refusal

    def post(self, message: Message) -> bool:
        """Send a message; return False without a connection, or if too much is unsent."""
        frame = encode(message)
        with self._lock:
            if not self._up or len(self._unsent) > _UNSENT_LIMIT:
                return False
            self._send(frame)
        return True

    def post_reliable(self, make: Callable[[int], Reliable], service: str) -> None:
        """Send a message that must arrive as long as `service` lives; `make` takes its `seq`.

        Another service never gets it: generations and lease ids would mean something else there.
        """
        with self._lock:
            if service != self._service or self._closing.is_set():
                return
            self._sequence += 1
            frame = encode(make(self._sequence))
            self._outbox.append((self._sequence, frame))
            if self._up:
                self._send(frame)

    def close(self, flush_s: float = 1.0) -> bool:
        """Flush for at most `flush_s` seconds, then end the thread; return whether it ended."""
        end = time.monotonic() + flush_s
        while self._up and self._outbox and time.monotonic() < end:
            time.sleep(0.005)
        with self._lock:
            self._closing.set()
            self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            return False  # the thread is still starting a service, and ends after that
        self._close_pipe()
        return True

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _RETRY_FIRST_S
        run_soon_after_waking()  # an answer that comes late is a miss
        while not self._closing.is_set():
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001 - only this thread retries
                self._complain(error)
                self._closing.wait(pause)
                refused = isinstance(error, RefusedError | IncompleteEngineError)
                pause = min(pause * 2, _REFUSED_MOST_S if refused else _RETRY_MOST_S)
                continue
            pause = _RETRY_FIRST_S
            if self._complaint:
                logger.warning("attached to the node service at %s", self._address)
            self._complaint, self._refusal = "", None
            self._first_try.set()
            try:
                self._receive()
            except Exception as error:  # noqa: BLE001 - as above
                if not self._closing.is_set():
                    logger.warning("lost the node service at %s: %s", self._address, error)
            self._disconnect()

    def _complain(self, error: Exception) -> None:
        """Log a reason once until it changes; the first refusal is raised by `start`."""
        reason = f"{type(error).__name__}: {error}" if not str(error) else str(error)
        if not self._first_try.is_set() and isinstance(error, RefusedError | IncompleteEngineError):
            self._refusal = error
            self._first_try.set()
        if reason != self._complaint and not self._closing.is_set():
            logger.warning("no node service at %s, retrying: %s", self._address, reason)
        self._complaint = reason

    def _connect(self) -> None:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(self._reach())
            self._reader = FrameReader()
            attach = self._listener.greeting()
            welcome, answer, descriptors, early = shake_hands(sock, attach, self._reader)
            with self._lock:
                if welcome.service != self._service:
                    self._outbox.clear()
                    self._service = welcome.service
            self._listener.attached(welcome.service, answer, descriptors)
            sock.setblocking(False)
            undo.pop_all()
        with self._lock:
            self._socket = sock
            self._unsent.clear()
            self._up = True
            for _, frame in self._outbox:
                self._send(frame)
        for message in early:
            self._handle(message)

    def _reach(self) -> socket.socket:
        """Return a connected socket; start a service if no process listens."""
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return _connected(self._address)
        self._ensure_service()
        return _connected(self._address)

    def _receive(self) -> None:
        sock = self._socket
        assert sock is not None
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            wanted = selectors.EVENT_READ
            while not self._closing.is_set():
                for key, events in selector.select():
                    if key.fileobj == self._wake_read:
                        os.read(self._wake_read, 4096)
                    elif events & selectors.EVENT_READ:
                        data = sock.recv(_RECEIVE_BYTES)
                        if not data:
                            raise ConnectionResetError("the service closed the connection")
                        for body in self._reader.feed(data):
                            self._handle(decode_service(body))
                with self._lock:
                    self._flush()
                    unsent = bool(self._unsent)
                before, wanted = wanted, selectors.EVENT_READ | (selectors.EVENT_WRITE * unsent)
                if wanted != before:
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
            self._up = False
            if self._socket is not None:
                self._socket.close()
                self._socket = None
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
            # The thread gets the same error when it reads, and reconnects.
            self._unsent.clear()

    def _wake(self) -> None:
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # the thread is already woken
                os.write(self._wake_write, b"\0")

    def _close_pipe(self) -> None:
        with self._lock:
            if self._wake_write >= 0:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1

    def abandon_in_child(self) -> None:
        """Close the connection in a forked child, which has no thread to serve it.

        Otherwise the service would consider the parent connected as long as the child lives.
        """
        # Another thread of the parent may have held any lock.
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener.forked()
        self._closing.set()
        self._up = False
        if self._socket is not None:
            os.close(self._socket.detach())
            self._socket = None
        self._close_pipe()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _abandon_all() -> None:
    for link in tuple(_links):
        link.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all)


def _connected(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(5.0)
        sock.connect(address)
    except BaseException:  # after any error, the socket must not leak
        sock.close()
        raise
    return sock
