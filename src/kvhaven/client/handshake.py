# SPDX-License-Identifier: Apache-2.0
"""The handshake: the first messages of a member's connection."""

import os
import socket
import time
from typing import NamedTuple, TypeVar

from kvhaven.client.arena import close_descriptors
from kvhaven.client.unix import peer_uid
from kvhaven.errors import (
    IncompleteEngineError,
    KVHavenError,
    ProtocolError,
    ServiceUnavailableError,
)
from kvhaven.protocol import (
    Attached,
    AttachRank,
    AttachScheduler,
    FrameReader,
    Hello,
    Message,
    Refused,
    ServiceMessage,
    Welcome,
    decode_service,
    encode,
)

M = TypeVar("M", bound=Message)

_ANSWER_S = 30.0
_DESCRIPTORS_MOST = 16


class RefusedError(KVHavenError):
    """The service refuses this member, or cannot start; the message names the setting to change."""


class Greeted(NamedTuple):
    """Result of a handshake. `early` are messages that were received with the last answer."""

    welcome: Welcome
    answer: Attached
    descriptors: list[int]
    early: list[ServiceMessage]


def shake_hands(
    sock: socket.socket, attach: AttachRank | AttachScheduler, reader: FrameReader
) -> Greeted:
    """Send `attach` and wait for the answer, 30 s longer than a scheduler waits for its ranks.

    The caller closes the descriptors. Raises `RefusedError`, `IncompleteEngineError`,
    `ProtocolError`, `ServiceUnavailableError` or `OSError`.
    """
    if peer_uid(sock) != os.geteuid():
        raise RefusedError(
            f"the service there runs as user {peer_uid(sock)}, this process as {os.geteuid()}: "
            "run both as the same user"
        )
    waiting_s = attach.wait_ms / 1000 if isinstance(attach, AttachScheduler) else 0.0
    descriptors: list[int] = []
    try:
        _send(sock, encode(Hello()), _ANSWER_S)
        welcome, _ = _receive(sock, reader, descriptors, Welcome, _ANSWER_S)
        _send(sock, encode(attach), _ANSWER_S)
        answer, early = _receive(sock, reader, descriptors, Attached, _ANSWER_S + waiting_s)
    except BaseException:  # after any error, the descriptors must not leak
        close_descriptors(descriptors)
        raise
    return Greeted(welcome, answer, descriptors, early)


def _send(sock: socket.socket, frame: bytes, timeout_s: float) -> None:
    sock.settimeout(timeout_s)
    sock.sendall(frame)


def _receive(
    sock: socket.socket,
    reader: FrameReader,
    descriptors: list[int],
    wanted: type[M],
    timeout_s: float,
) -> tuple[M, list[ServiceMessage]]:
    """Return the next message, which must be a `wanted` one, and the messages after it."""
    end = time.monotonic() + timeout_s
    while True:
        sock.settimeout(max(0.001, end - time.monotonic()))
        data, more, _flags, _address = socket.recv_fds(
            sock, 65536, _DESCRIPTORS_MOST, socket.MSG_CMSG_CLOEXEC
        )
        descriptors += more
        if not data:
            raise ServiceUnavailableError("the service closed the connection")
        messages = [decode_service(body) for body in reader.feed(data)]
        if not messages:
            continue
        first, *early = messages
        if isinstance(first, Refused):
            raise (IncompleteEngineError if first.passing else RefusedError)(first.reason)
        if not isinstance(first, wanted):
            raise ProtocolError(
                f"the service sent {type(first).__name__}; expected {wanted.__name__}"
            )
        return first, early
