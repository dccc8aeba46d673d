# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a link between them that delays, loses, holds or drops packets.

This kernel has no `netem`, so the link is a thread that carries packets from one TUN device to the
other. Namespaces and devices have no names outside; they end with the descriptors of this process.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_MTU = 1500
_QUEUE = 10_000
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace(NamedTuple):
    """A network namespace: its descriptor, that of its TUN device, and its address."""

    net: int
    tun: int
    address: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and the processes that it starts, be in the namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.net)
            yield
        finally:
            _enter(before)
            os.close(before)


class Link:
    """The link between two namespaces. All can be changed while it carries packets."""

    def __init__(self, ends: tuple[Namespace, Namespace], seed: int) -> None:
        self.ends = ends
        self.delay_s = 0.0
        self.loss = 0.0
        self.held = False
        """Whether packets wait; they go on when this ends."""
        self.cut = (False, False)
        """Whether all packets from the first, and from the second namespace, are lost."""
        self.carried = self.lost = 0
        self._random = random.Random(seed)
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(30)
        os.close(self._wake)

    def _carry(self) -> None:
        near, far = (end.tun for end in self.ends)
        to = {near: far, far: near}
        number, queue = itertools.count(), list[tuple[float, int, int, bytes]]()
        while True:
            now = time.monotonic()
            while queue and queue[0][0] <= now and not self.held:
                _, _, tun, packet = heapq.heappop(queue)
                with contextlib.suppress(OSError):  # the device's queue is full
                    os.write(tun, packet)
                    self.carried += 1
            wait = 0.01 if self.held else max(0.0, queue[0][0] - now) if queue else None
            for ready in select.select([near, far, self._wake], [], [], wait)[0]:
                if ready == self._wake:
                    return
                packet = os.read(ready, 1 << 16)
                if (
                    self.cut[ready == far]
                    or self._random.random() < self.loss
                    or len(queue) > _QUEUE
                ):
                    self.lost += 1
                else:
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(queue, (due, next(number), to[ready], packet))


@contextlib.contextmanager
def link(seed: int) -> Iterator[Link]:
    """Make two namespaces and a link between them; skip the test where that is not possible."""
    if os.geteuid() or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):  # noqa: PTH110
        pytest.skip("network namespaces with TUN devices need root, iproute2 and /dev/net/tun")
    ends = _new_namespace("10.78.0.1", "10.78.0.2"), _new_namespace("10.78.0.2", "10.78.0.1")
    made = Link(ends, seed)
    try:
        yield made
    finally:
        made.close()
        for end in ends:
            os.close(end.tun)
            os.close(end.net)


def _new_namespace(address: str, other: str) -> Namespace:
    made: list[Namespace | str] = []

    def make() -> None:  # in a thread of its own, which stays in the new namespace until it ends
        try:
            _check(_libc.unshare(_CLONE_NEWNET), "unshare")
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", b"test", _IFF_TUN | _IFF_NO_PI))
            _run("ip link set lo up")
            _run(f"ip address add {address} peer {other} dev test")
            _run(f"ip link set test mtu {_MTU} txqueuelen 10000 up")
            made.append(Namespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun, address))
        except OSError as error:
            made.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (namespace,) = made
    if isinstance(namespace, str):
        pytest.skip(f"network namespaces with TUN devices are not possible here: {namespace}")
    return namespace


def _enter(net: int) -> None:
    _check(_libc.setns(net, _CLONE_NEWNET), "setns")


def _check(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), call)


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"{line}: {done.stderr.strip()}")
