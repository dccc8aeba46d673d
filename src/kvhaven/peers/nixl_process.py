# SPDX-License-Identifier: Apache-2.0
"""One NIXL helper process, seen from the service: its start, its requests, and its end."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, Protocol, TypeVar

import msgspec

from kvhaven.errors import KVHavenError
from kvhaven.peers.nixl_messages import (
    ENCODER,
    FROM_HELPER,
    PACKET,
    Connect,
    Done,
    Failed,
    FromHelper,
    Lending,
    Order,
    Read,
    Role,
    ToHelper,
    Up,
)

T = TypeVar("T")

PROGRAM: Final = (sys.executable, "-m", "kvhaven.peers.nixl_helper")

_REAP_S: Final = 1.0

_lock_bytes: Final = itertools.count(1 << 48)
"""Far above those of engines, which count from 1. No byte is used twice."""


class HelperError(KVHavenError):
    """A helper could not start, refused a request, was late, or has ended."""


class ArenaMemory(Protocol):
    """The service's side of the arena."""

    @property
    def size(self) -> int:
        """Planned size in bytes."""

    @property
    def address(self) -> int:
        """Address of byte 0 in this process."""

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of the segments, of which there is one."""

    usable: int
    """Bytes at the front that are allocated."""
    allocating: bool
    """Whether `usable` still grows."""

    def is_mapped(self, lock_byte: int) -> bool:
        """Return whether another process holds the lock on a byte."""


class HelperProcess:
    """A helper process. Its methods may be called from any thread.

    It must be started by a thread that lives as long as the helper is wanted: the kernel kills the
    helper with that thread, however the service ends.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        memory: ArenaMemory,
        backends: Sequence[str],
        environment: Mapping[str, str],
        *,
        protect: bool,
        on_ended: Callable[[], None] = lambda: None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.name = name
        self.ended = threading.Event()
        """Set when the helper has closed its socket: it has ended, or soon will."""
        self._on_ended = on_ended
        self._memory = memory
        self._lock_byte = next(_lock_bytes)
        descriptor = memory.descriptors[0]
        order = Order(
            role=role,
            name=name,
            descriptor=descriptor,
            size=memory.size,
            usable=memory.usable,
            lock_byte=self._lock_byte,
            protect=protect,
            parent=os.getpid(),
            backends=list(backends),
        )
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                [*program, msgspec.json.encode(order).decode()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C ends the service, which ends the helper
            )
        except OSError as error:
            self._socket.close()
            raise HelperError(f"its helper process cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._up: Future[Up] = Future()
        self._waiting: dict[int, Future[str]] = {}
        self._killed = False
        self._last_words = ""
        threading.Thread(target=self._listen, name="kvhaven-nixl-helper", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def up(self, timeout_s: float) -> Up:
        """Wait until it is ready. Raises `HelperError`."""
        return self._result(self._up, timeout_s, "its helper process did not start in time")

    def connect(
        self, metadata: bytes, probe_address: int, probe: bytes, timeout_s: float, replaces: str
    ) -> str:
        """Read and compare another helper's probe; return its agent's name.

        Raises `HelperError`. The helper must be killed then, as after any failed request.
        """
        number = next(self._numbers)
        request = Connect(number, metadata, probe_address, probe, replaces)
        return self._ask(number, request, timeout_s)

    def read(self, agent: str, address: int, offset: int, length: int, timeout_s: float) -> None:
        """Read from a connected agent to an offset of the arena.

        Raises `HelperError`. Then the transfer may still be running, so the helper must be killed,
        and the memory is free when it is `gone`.
        """
        number = next(self._numbers)
        self._ask(number, Read(number, agent, address, offset, length), timeout_s)

    def lending(self, open_: int) -> None:
        """Tell how many chunks other nodes may be reading from it. Kills it if it does not listen.

        Never waits: a helper that was stopped must not stop the listener's threads.
        """
        with self._lock:
            try:
                self._send(Lending(open_))
            except HelperError:
                self._process.kill()

    def kill(self) -> bool:
        """Kill it; return whether this was the first time. All its requests end: `HelperError`."""
        with self._lock:
            first, self._killed = not self._killed, True
        self._process.kill()
        return first

    @property
    def gone(self) -> bool:
        """Whether nothing can write the arena through it any more.

        Two proofs are needed. The lock is free when no process has the mapping, children of the
        helper included. The process was reaped when it has closed its files, and with them the
        memory regions of network cards, which may outlive the mapping.
        """
        reaped = self._process.poll() is not None
        return reaped and not self._memory.is_mapped(self._lock_byte)

    def _ask(self, number: int, request: ToHelper, timeout_s: float) -> str:
        answer: Future[str] = Future()
        with self._lock:
            self._send(request)
            self._waiting[number] = answer
        try:
            return self._result(answer, timeout_s, f"no answer within {timeout_s:.1f} s")
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _send(self, message: ToHelper) -> None:
        """Send a message without waiting. Called with the lock. Raises `HelperError`."""
        try:
            self._socket.send(ENCODER.encode(message), socket.MSG_DONTWAIT)
        except BlockingIOError as error:
            raise HelperError("its helper process does not take messages") from error
        except OSError as error:  # closed at its end, here or there
            raise HelperError(self._epitaph) from error

    def _result(self, future: "Future[T]", timeout_s: float, late: str) -> T:
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise HelperError(late) from error

    @property
    def _epitaph(self) -> str:
        if self._last_words:
            return self._last_words
        status = self._process.returncode
        ended = "has ended" if status is None else f"ended with status {status}"
        return f"its helper process {'was killed' if self._killed else ended}"

    # In a thread

    def _receive(self) -> FromHelper | None:
        """Wait for a message; None at the end of the socket, and after an invalid message."""
        try:
            packet = self._socket.recv(PACKET)
            return FROM_HELPER.decode(packet) if packet else None
        except OSError:
            return None
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            self._refuse(str(error))
            return None

    def _refuse(self, why: str) -> None:
        self._last_words = f"its helper process sent an invalid message: {why}"
        self._process.kill()

    def _listen(self) -> None:
        """Hand out answers until the helper closes its socket."""
        while (message := self._receive()) is not None:
            if isinstance(message, Up):
                if self._up.done():
                    self._refuse("a second Up")
                    break
                self._up.set_result(message)
                continue
            with self._lock:
                answer = self._waiting.pop(message.id, None)
            if isinstance(message, Failed) and not message.id:
                self._last_words = message.reason
            elif answer is not None and isinstance(message, Done):
                answer.set_result(message.agent)
            elif answer is not None and isinstance(message, Failed):
                answer.set_exception(HelperError(message.reason))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        with self._lock:
            self.ended.set()
            left, self._waiting = self._waiting, {}
            self._socket.close()
        for answer in left.values():
            answer.set_exception(HelperError(self._epitaph))
        if not self._up.done():
            self._up.set_exception(HelperError(self._epitaph))
        self._on_ended()
