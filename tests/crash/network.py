# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a link between them that delays, loses, holds or drops packets.

This kernel has no `netem`, so the link is a thread that carries packets from one TUN device to the
other. Namespaces and devices have no names outside; they end with the descriptors of this process.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.fleet.namespaces import Namespace, NoNetworkError, new_namespace, run

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 1, 0x1000
_MTU = 1500
_QUEUE = 10_000


class End(NamedTuple):
    """An end of the link: a network namespace, and the descriptor of its TUN device."""

    namespace: Namespace
    tun: int

    @property
    def address(self) -> str:
        return self.namespace.address

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return self.namespace.inside()


class Link:
    """The link between two namespaces. All can be changed while it carries packets."""

    def __init__(self, ends: tuple[End, End], seed: int) -> None:
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
    if not Path("/dev/net/tun").exists():
        pytest.skip("network namespaces with TUN devices need /dev/net/tun")
    with contextlib.ExitStack() as stack:
        try:
            near = stack.enter_context(_end("10.78.0.1", "10.78.0.2"))
            far = stack.enter_context(_end("10.78.0.2", "10.78.0.1"))
        except NoNetworkError as error:
            pytest.skip(f"network namespaces with TUN devices are not possible here: {error}")
        made = Link((near, far), seed)
        stack.callback(made.close)
        yield made


@contextlib.contextmanager
def _end(address: str, other: str) -> Iterator[End]:
    tuns: list[int] = []

    def prepare() -> None:
        tuns.append(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
        fcntl.ioctl(tuns[0], _TUNSETIFF, struct.pack("16sH14x", b"test", _IFF_TUN | _IFF_NO_PI))
        run(f"ip address add {address} peer {other} dev test")
        run(f"ip link set test mtu {_MTU} txqueuelen 10000 up")

    try:
        with new_namespace(address, prepare) as namespace:
            yield End(namespace, tuns[0])
    finally:
        for tun in tuns:
            os.close(tun)
