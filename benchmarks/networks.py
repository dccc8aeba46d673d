# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a link of limited speed between them, for this process's threads.

They have no names and belong to no file: they end with the processes in them, and with this one.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_BURST = "256kb"
"""Bytes that `tbf` sends without a pause: more than one packet as large as TCP makes them."""
_QUEUE = "4mb"
_libc = ctypes.CDLL(None, use_errno=True)


class NoLinkError(Exception):
    """This process cannot make namespaces or limit a link; the message has the reason."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace, and the address of its end of the link."""

    descriptor: int
    address: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and the threads and processes that it starts, be in the namespace."""
        with _opened("/proc/thread-self/ns/net") as before:
            _enter(self.descriptor)
            try:
                yield
            finally:
                _enter(before)


@dataclass(frozen=True)
class Link:
    """A link between two namespaces."""

    near: Namespace
    far: Namespace

    def limit(self, rate: str) -> None:
        """Limit both directions to a rate, such as `200mbit`; empty: no limit."""
        kind = f"tbf rate {rate} burst {_BURST} limit {_QUEUE}" if rate else "noqueue"
        for end in (self.near, self.far):
            with end.inside():
                _run(f"tc qdisc replace dev bench root {kind}")


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Make two namespaces and a link between them. Raises `NoLinkError`."""
    if os.geteuid():
        raise NoLinkError("only root can make network namespaces")
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise NoLinkError(f"{missing[0]} is not installed (Debian: iproute2)")
    with _new_namespace() as near, _new_namespace() as far:
        ends = Link(Namespace(near, "10.77.0.1"), Namespace(far, "10.77.0.2"))
        with ends.near.inside():
            there = f"/proc/{os.getpid()}/fd/{far}"
            _run(f"ip link add bench type veth peer name bench netns {there}")
        for end in (ends.near, ends.far):
            with end.inside():
                _run("ip link set lo up")
                _run(f"ip address add {end.address}/24 dev bench")
                _run("ip link set bench up")
        yield ends


@contextlib.contextmanager
def _new_namespace() -> Iterator[int]:
    """Yield the descriptor of a new namespace; it is made in a thread, which ends."""
    made: list[int] = []

    def make() -> None:
        if not _libc.unshare(_CLONE_NEWNET):
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise NoLinkError("the kernel refuses new network namespaces")
    try:
        yield made[0]
    finally:
        os.close(made[0])


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise NoLinkError(f"setns: {os.strerror(ctypes.get_errno())}")


def _run(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLinkError(f"{line}: {done.stderr.strip()}")
