# SPDX-License-Identifier: Apache-2.0
"""A node that stops itself (SIGSTOP) in the middle of each shard that it sends.

Run as a program, with the shard's size, and with the files of a certificate or without. It writes
its port, and then a line whenever it has nothing more to send.
"""

import signal
import sys
import threading

from kvhaven.catalog.loans import Loan
from kvhaven.peers.addresses import Address
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.listener import PeerListener
from kvhaven.peers.wire import Stream
from kvhaven.tiers.base import StoredShard
from kvhaven.types import ChunkKey, NamespaceDigest, ShardId
from tests.shelf import Shelf

LEAST = 1 << 20
"""Bytes from which something is a shard, and no message."""


def shard_of(size: int) -> StoredShard:
    """Return the name of the shard."""
    return StoredShard(
        NamespaceDigest(b"n" * 32), ChunkKey(b"k" * 32), ShardId(0, (0, 1), (0, 1)), size
    )


class Talking(Shelf):
    """One that tells when a loan has ended."""

    def returned(self, loan: Loan) -> None:
        super().returned(loan)
        print("returned", flush=True)  # noqa: T201 - the test reads it


_send = Stream.send_bytes


def send_and_stop(stream: Stream, data: memoryview, deadline: float, *, more: bool = False) -> None:
    half = len(data) // 2 if len(data) >= LEAST else 0
    _send(stream, data[:half], deadline, more=more)
    if half:
        # To this thread: if another took the signal, this one could go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    _send(stream, data[half:], deadline, more=more)


def main() -> None:
    size, files = int(sys.argv[1]), sys.argv[2:]
    shelf = Talking()
    shelf.put(shard_of(size), memoryview(bytes([0xEE]) * size))
    Stream.send_bytes = send_and_stop  # type: ignore[method-assign, assignment]
    certificates = Certificates(*files, encrypt_data=True) if files else None
    listener = PeerListener(
        Address("127.0.0.1", 0), "zombie", b"", shelf, certificates=certificates
    )
    print(listener.port, flush=True)  # noqa: T201 - the test reads it
    sys.stdin.read()


if __name__ == "__main__":
    main()
