# SPDX-License-Identifier: Apache-2.0
"""Questions that people and tests ask a service: one connection, one answer."""

import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvhaven.errors import KVHavenError, ProtocolError, ServiceUnavailableError
from kvhaven.protocol import (
    Clear,
    Cleared,
    Flush,
    Flushed,
    FrameReader,
    Hello,
    Message,
    Refused,
    ServiceMessage,
    Status,
    StatusReply,
    Welcome,
    decode_service,
    encode,
)


class Control:
    """A blocking connection; use `connect`."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self._socket = sock
        self._address = address
        self._reader = FrameReader()
        self._ids = itertools.count(1)
        sock.sendall(encode(Hello()))
        welcome = self._receive()
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{address}: {type(welcome).__name__} instead of Welcome")
        self.service, self.pid = welcome.service, welcome.pid

    def status(self) -> bytes:
        """Return the service's status as JSON (`service.status.ServiceStatus`)."""
        answer = self._ask(Status(next(self._ids)))
        assert isinstance(answer, StatusReply)
        return answer.status

    def clear(self, namespace: bytes = b"", tier: str = "") -> Cleared:
        """Drop a namespace (empty: all) from a tier (empty: from everywhere)."""
        answer = self._ask(Clear(next(self._ids), namespace, tier))
        assert isinstance(answer, Cleared)
        return answer

    def flush(self, wait_s: float) -> int:
        """Wait until what is resident is stored in the tiers; return what is left undone."""
        self._socket.settimeout(wait_s + 5)
        answer = self._ask(Flush(next(self._ids), int(wait_s * 1000)))
        assert isinstance(answer, Flushed)
        return answer.outstanding

    def _ask(self, message: Message) -> ServiceMessage:
        self._socket.sendall(encode(message))
        answer = self._receive()
        if isinstance(answer, Refused):
            raise KVHavenError(answer.reason)
        return answer

    def _receive(self) -> ServiceMessage:
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ServiceUnavailableError(f"{self._address}: the service closed the connection")
            for body in self._reader.feed(data):
                return decode_service(body)


@contextmanager
def connect(address: str, timeout_s: float = 5.0) -> Iterator[Control]:
    """Connect to the service at `address`. Raises `ServiceUnavailableError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
            yield Control(sock, address)
        except TimeoutError as error:
            raise ServiceUnavailableError(
                f"the service at {address} did not answer within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise ServiceUnavailableError(
                f"no service answers at {address} ({error.strerror or error}); "
                "start one with `kvhaven serve`, or name its socket"
            ) from error
