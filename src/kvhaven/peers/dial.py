# SPDX-License-Identifier: Apache-2.0
"""Connections to other nodes' listeners, and the tickets that data connections need."""

import os
import socket
import threading
import time
from typing import Final

from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.wire import (
    PROOF_BYTES,
    TICKET_BYTES,
    PeerError,
    Stream,
    Ticket,
    greet,
)

_TICKET_S: Final = 10.0
_MOST_TICKETS: Final = 1024


class Tickets:
    """Tickets that were given out: each is valid for one connection, for 10 s.

    Without certificates of its own, a node that connects without TLS could be anybody; a ticket,
    which it got over TLS, tells that it is one that has a certificate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[float, bytes]] = {}

    def issue(self) -> Ticket:
        """Return a new ticket; the oldest is void if there are too many."""
        ticket = Ticket(os.urandom(TICKET_BYTES), os.urandom(PROOF_BYTES))
        with self._lock:
            if len(self._open) >= _MOST_TICKETS:
                del self._open[next(iter(self._open))]
            self._open[ticket.id] = time.monotonic() + _TICKET_S, ticket.secret
        return ticket

    def redeem(self, ticket: bytes) -> bytes | None:
        """Return the secret of a ticket once; None if there is no such ticket."""
        with self._lock:
            until, secret = self._open.pop(ticket, (0.0, b""))
        return secret if time.monotonic() < until else None


def dial(
    address: Address,
    node: str,
    token: bytes,
    certificates: Certificates | None,
    deadline_s: float,
    ticket: Ticket | None = None,
) -> tuple[Stream, str]:
    """Connect to a node's listener as `node`; return the connection and the other node's name.

    With certificates the connection is encrypted, unless it has a ticket. Raises `PeerError`, and
    `ProtocolError` if the other side is no node.
    """
    title, deadline = f"peer {address}", time.monotonic() + deadline_s
    try:
        sock = socket.create_connection((address.host, address.port), timeout=deadline_s)
    except (OSError, UnicodeError) as error:  # no DNS name may be like that
        reason = getattr(error, "strerror", None) or str(error)
        raise PeerError(f"{title} cannot be reached: {reason}") from error
    if certificates is not None and ticket is None:
        try:
            sock = certificates.connect(sock, deadline)
        except PeerError as error:
            raise PeerError(f"{title}: {error}") from error
    stream = Stream(sock, title)
    try:
        if ticket is None:
            return stream, greet(stream, node, token, deadline)
        return stream, greet(stream, node, ticket.secret, deadline, ticket.id)
    except BaseException:  # after any error, the connection must not leak
        stream.close()
        raise
