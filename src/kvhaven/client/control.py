# SPDX-License-Identifier: Apache-2.0
"""The admin client: requests of people and tests to a service, one at a time."""

import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvhaven.errors import KVHavenError, ProtocolError, ServiceUnavailableError
from kvhaven.protocol import (
    TENANTS,
    Clear,
    Cleared,
    Flush,
    Flushed,
    FrameReader,
    Hello,
    Limit,
    Limited,
    Message,
    Refused,
    ServiceMessage,
    Status,
    StatusReply,
    Welcome,
    decode_service,
    encode,
)
from kvhaven.types import NO_TENANT, TenantId

M = TypeVar("M", bound=Message)

_GRACE_S = 5.0


class Control:
    """A blocking connection to a service, created by `connect`.

    Every method raises `ServiceUnavailableError` if the service does not answer in time, and
    `KVHavenError` with the service's reason if it refuses.
    """

    def __init__(self, sock: socket.socket, address: str, timeout_s: float) -> None:
        self._socket = sock
        self._address = address
        self._timeout_s = timeout_s
        self._reader = FrameReader()
        self._received: deque[ServiceMessage] = deque()
        self._ids = itertools.count(1)
        welcome = self._ask(Hello(), Welcome, timeout_s)
        self.service, self.pid = welcome.service, welcome.pid
        self._features = welcome.features

    def status(self) -> bytes:
        """Return the service's status as JSON (`service.status.ServiceStatus`)."""
        return self._ask(Status(next(self._ids)), StatusReply, self._timeout_s).status

    def clear(
        self,
        namespace: bytes = b"",
        tier: str = "",
        wait_s: float | None = None,
        tenant: TenantId = NO_TENANT,
    ) -> Cleared:
        """Drop a namespace (empty: all) from a tier (empty: from memory and the node's disk).

        With `tenant`, drop only that tenant's chunks; the request is not sent to a service whose
        version does not support tenants, because that service would drop all chunks.

        A shared tier may take minutes: wait `wait_s` seconds for it. It is cleared for all nodes.
        """
        timeout_s = self._timeout_s if wait_s is None else wait_s
        if tenant and not self._features & TENANTS:
            raise KVHavenError(
                f"the service at {self._address}: its version does not support tenants and would "
                "clear the chunks of all of them; restart it with this version"
            )
        request = Clear(next(self._ids), namespace, tier, tenant)
        return self._ask(request, Cleared, timeout_s)

    def limit(
        self, tenant: TenantId, memory: int | None = None, disk: int | None = None
    ) -> Limited:
        """Set a tenant's quotas in bytes; `NO_LIMIT` removes a quota, None keeps it."""
        return self._ask(Limit(next(self._ids), tenant, memory, disk), Limited, self._timeout_s)

    def flush(self, wait_s: float) -> int:
        """Wait until resident chunks are stored in the tiers; return the number of writes left."""
        request = Flush(next(self._ids), int(wait_s * 1000))
        return self._ask(request, Flushed, wait_s + _GRACE_S).outstanding

    def _ask(self, request: Message, wanted: type[M], timeout_s: float) -> M:
        self._socket.settimeout(timeout_s)
        try:
            with contextlib.suppress(BrokenPipeError):  # the reason may still be readable
                self._socket.sendall(encode(request))
            answer = self._receive()
        except TimeoutError as error:
            raise ServiceUnavailableError(
                f"the service at {self._address} did not answer within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise ServiceUnavailableError(
                f"lost the service at {self._address}: {error.strerror or error}"
            ) from error
        if isinstance(answer, Refused):
            raise KVHavenError(answer.reason)
        if not isinstance(answer, wanted):
            raise ProtocolError(
                f"the service at {self._address} sent {type(answer).__name__}; expected "
                f"{wanted.__name__}"
            )
        return answer

    def _receive(self) -> ServiceMessage:
        while not self._received:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ServiceUnavailableError(
                    f"the service at {self._address} closed the connection"
                )
            self._received.extend(decode_service(body) for body in self._reader.feed(data))
        return self._received.popleft()


@contextmanager
def connect(address: str, timeout_s: float = 5.0) -> Iterator[Control]:
    """Connect to the service at `address`. Raises `ServiceUnavailableError` if none answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
        except TimeoutError as error:
            raise ServiceUnavailableError(
                f"the service at {address} did not answer within {timeout_s:g} s"
            ) from error
        except OSError as error:
            raise ServiceUnavailableError(
                f"no service answers at {address} ({error.strerror or error}); "
                "start one with `kvhaven serve`, or name its socket"
            ) from error
        yield Control(sock, address, timeout_s)
