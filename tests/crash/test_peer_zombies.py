# SPDX-License-Identifier: Apache-2.0
"""A peer that is stopped in a transfer and goes on later: it writes nothing of what is another's.

The sender stops itself in the middle of a shard. The read is given up, its memory is given to
another owner, and the sender goes on. Mutants that give the memory away too early must be noticed.
"""

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.errors import TierError
from kvhaven.peers.certificates import Certificates
from kvhaven.peers.tier import PeerTier
from kvhaven.peers.wire import SilentPeerError, Stream
from kvhaven.testing.tiers import until
from kvhaven.tiers import executor as executors
from tests.crash.stopping_sender import shard_of
from tests.crash.workload import WorkingEngine, _state
from tests.unit.test_peer_tls import Authority, authority  # noqa: F401 - a fixture
from tests.unit.test_peers import local, reached

pytestmark = pytest.mark.crash

PAGE = 4096
SIZE = 16 << 20
SHARD = shard_of(SIZE)
THEIRS = 0x11
"""What the next owner of the memory writes there."""
_PROGRAM = str(Path(__file__).with_name("stopping_sender.py"))


class Sender:
    """The process that sends; `ended` is how many transfers it has ended, in any way."""

    def __init__(self, *files: str) -> None:
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, _PROGRAM, str(SIZE), *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.ended = 0
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def stopped(self) -> bool:
        return _state(self.process.pid) == "T"

    def go_on(self) -> None:
        WorkingEngine.thaw(self.process)

    def _listen(self) -> None:
        for _ in self.process.stdout or ():
            self.ended += 1


@contextlib.contextmanager
def sender(*files: str) -> Iterator[Sender]:
    made = Sender(*files)
    try:
        yield made
    finally:
        made.process.send_signal(signal.SIGKILL)
        made.process.communicate()


@contextlib.asynccontextmanager
async def reading(
    there: Sender, certificates: Certificates | None, deadline_s: float
) -> AsyncIterator[tuple[PeerTier, memoryview]]:
    """Yield a tier that reads from the sender, and memory."""
    tier = PeerTier(
        [local(there.port)], token=b"", deadline_s=deadline_s, certificates=certificates
    )
    await tier.start()
    try:
        await reached(tier)
        yield tier, memoryview(mmap.mmap(-1, SIZE))
    finally:
        await tier.close(5)


def overwritten(into: memoryview) -> int:
    """Return how many pages are not as their owner wrote them."""
    page = bytes([THEIRS]) * PAGE
    return sum(into[at : at + PAGE] != page for at in range(0, SIZE, PAGE))


async def given_up(
    there: Sender, certificates: Certificates | None, how: str, deadline_s: float = 3.0
) -> int:
    """Have a read given up, give its memory away, let the sender go on; return pages overwritten.

    It is given up by the tier, since the peer is silent, or by the caller, who cancels it.
    """
    async with reading(there, certificates, deadline_s) as (tier, into):
        read = asyncio.create_task(tier.read(SHARD, into))
        await until(lambda: there.stopped)
        if how == "cancelled":
            await until(lambda: any(into[:PAGE]))
            read.cancel()
        with pytest.raises(TierError if how == "silent" else asyncio.CancelledError):
            await read
        assert there.stopped
        assert any(into), "nothing had arrived, so nothing was given up"
        into[:] = bytes([THEIRS]) * SIZE
        there.go_on()
        await until(lambda: there.ended == 1)
        # It answers again: what it had to send has been sent, or refused by the kernel.
        await until(lambda: tier.peers()[0].up)
        with contextlib.suppress(TimeoutError):
            await until(lambda: overwritten(into) > 0, within_s=0.5)
        return overwritten(into)


@pytest.mark.parametrize("how", ["silent", "cancelled"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_transfer_that_was_given_up_writes_nothing_later(
    request: pytest.FixtureRequest, how: str, *, tls: bool
) -> None:
    files: tuple[str, ...] = ()
    certificates = None
    if tls:
        made: Authority = request.getfixturevalue("authority")
        made.node("there")
        files = tuple(str(made.folder / name) for name in ("there.pem", "there.key", "ca.pem"))
        certificates = made.node("here", encrypt_data=True)
    with sender(*files) as there:
        assert await given_up(there, certificates, how) == 0


async def test_a_receiver_that_goes_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant gives up, and leaves a thread behind that receives."""
    receive, left = Stream.receive_into, []

    def go_on(sock: socket.socket, into: memoryview) -> None:
        sock.settimeout(30)
        with contextlib.suppress(OSError):
            while len(into) and (count := sock.recv_into(into)):
                into = into[count:]

    def leave(self: Stream, into: memoryview, *rest: Any, **more: Any) -> None:
        try:
            receive(self, into, *rest, **more)
        except SilentPeerError:
            if len(into) == SIZE:
                missing = into[sum(map(bool, into[::PAGE])) * PAGE :]
                sock, self._socket = self._socket, socket.socket()  # which is closed now
                left.append(sock)
                threading.Thread(target=go_on, args=(sock, missing), daemon=True).start()
            raise

    monkeypatch.setattr(Stream, "receive_into", leave)
    with sender() as there:
        assert await given_up(there, None, "silent") > 0
    for sock in left:
        sock.close()


async def test_a_cancelled_read_that_does_not_wait_for_its_thread_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant returns while a thread receives; the peer goes on before its deadline."""

    async def wait_for_nothing(future: "asyncio.Future[Any]") -> bool:
        return False

    monkeypatch.setattr(executors, "outlast", wait_for_nothing)
    with sender() as there:
        assert await given_up(there, None, "cancelled", deadline_s=20.0) > 0
