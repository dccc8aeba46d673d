# SPDX-License-Identifier: Apache-2.0
"""Visits of tools to a node's listener: its speed, and the namespaces of its engines."""

import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.dial import dial
from kvhaven.peers.wire import (
    DESCRIBED,
    PONG,
    PROBED,
    Describe,
    NamespaceFields,
    Ping,
    Probe,
    Stream,
)

_DEADLINE_S: Final = 5.0
_LONGEST_S: Final = 60.0
"""Longest time of a probe, as long as bytes keep coming."""
_PINGS: Final = 20


class Speed(NamedTuple):
    """Speed of the connection to a node: median round trip in seconds, and bytes per second."""

    node: str
    round_trip_s: float
    bytes_per_s: float


def measure(
    address: Address, token: bytes, size: int, certificates: Certificates | None = None
) -> Speed:
    """Ping a node and receive `size` bytes from it, encrypted if there are certificates.

    Raises `PeerError`.
    """
    with _visit(address, token, certificates) as (stream, node):
        trips = []
        for _ in range(_PINGS):
            begin = time.perf_counter()
            stream.send(Ping(), _deadline())
            stream.receive(PONG, _deadline())
            trips.append(time.perf_counter() - begin)
        into = memoryview(bytearray(size))
        begin = time.perf_counter()
        stream.send(Probe(size), _deadline())
        stream.receive(PROBED, _deadline())
        stream.receive_into(into, time.monotonic() + _LONGEST_S, silence_s=_DEADLINE_S)
        seconds = time.perf_counter() - begin
    return Speed(node, statistics.median(trips), size / seconds)


def namespaces(
    address: Address, token: bytes, certificates: Certificates | None = None
) -> Sequence[NamespaceFields]:
    """Return the newest namespaces of a node's engines. Raises `PeerError`."""
    with _visit(address, token, certificates) as (stream, _):
        stream.send(Describe(), _deadline())
        return stream.receive(DESCRIBED, _deadline()).namespaces


@contextmanager
def _visit(
    address: Address, token: bytes, certificates: Certificates | None
) -> Iterator[tuple[Stream, str]]:
    """Connect; yield the connection and the node's name."""
    stream, node = dial(address, uuid.uuid4().hex, token, certificates, _DEADLINE_S)
    try:
        yield stream, node
    finally:
        stream.close()


def _deadline() -> float:
    return time.monotonic() + _DEADLINE_S
