# SPDX-License-Identifier: Apache-2.0
"""Connections to other nodes' listeners, and the tickets that data connections need."""

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.wire import (
    PROOF_BYTES,
    TICKET_BYTES,
    Credential,
    PeerError,
    Stream,
    Ticket,
    greet,
)

_TICKET_S: Final = 10.0
_MOST_TICKETS: Final = 64
"""Tickets of one connection that were not used yet."""


class Tickets:
    """Tickets that were given out: each is valid for one connection, for 10 s.

    Without certificates of its own, a node that connects without TLS could be anybody; a ticket,
    which it got over TLS, tells that it is one that has a certificate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, tuple[Stream, float, bytes]] = {}
        self._given: dict[Stream, dict[bytes, None]] = {}
        """Open tickets of each connection, oldest first."""

    def issue(self, to: Stream) -> Ticket:
        """Return a new ticket; if a connection has too many, its own oldest one is void."""
        ticket = Ticket(os.urandom(TICKET_BYTES), os.urandom(PROOF_BYTES))
        with self._lock:
            given = self._given.setdefault(to, {})
            if len(given) >= _MOST_TICKETS:
                self._drop(next(iter(given)))
            given[ticket.id] = None
            self._open[ticket.id] = to, time.monotonic() + _TICKET_S, ticket.secret
        return ticket

    def redeem(self, ticket: bytes) -> tuple[bytes, Credential | None] | None:
        """Return the secret of a ticket once, and the credential of the connection that got it.

        None if there is no such ticket.
        """
        with self._lock:
            if ticket not in self._open:
                return None
            to, until, secret = self._open[ticket]
            self._drop(ticket)
        return (secret, to.credential) if time.monotonic() < until else None

    def void(self, of: Stream) -> None:
        """Void all tickets of a connection that has ended."""
        with self._lock:
            for ticket in self._given.pop(of, ()):
                del self._open[ticket]

    def _drop(self, ticket: bytes) -> None:
        to, _, _ = self._open.pop(ticket)
        self._given[to].pop(ticket, None)


def encrypt(
    stream: Stream,
    certificates: Certificates,
    wrap: Callable[[socket.socket], socket.socket],
    deadline: float,
) -> None:
    """Encrypt a new connection, if `wrap` says so. Raises `PeerError`."""
    try:
        stream.secure(wrap, lambda sock: certificates.shake_hands(sock, deadline))
    except PeerError as error:
        raise PeerError(f"{stream.title}: {error}") from error


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
    stream = Stream(sock, title)
    try:
        if certificates is not None and ticket is None:
            encrypt(stream, certificates, certificates.connect, deadline)
        if ticket is None:
            return stream, greet(stream, node, token, deadline)
        return stream, greet(stream, node, ticket.secret, deadline, ticket.id)
    except BaseException:  # after any error, the connection must not leak
        stream.close()
        raise
