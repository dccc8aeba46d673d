# SPDX-License-Identifier: Apache-2.0
"""Network namespaces without names: they end with the descriptors and processes that hold them."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(Exception):
    """This process cannot make or connect namespaces; the message has the reason."""


@dataclass(frozen=True)
class Namespace:
    """A network namespace, and the address that it has in it."""

    descriptor: int
    address: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and the threads and processes that it starts, be in the namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self.descriptor)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)


@contextlib.contextmanager
def new_namespace(address: str, prepare: Callable[[], None] = lambda: None) -> Iterator[Namespace]:
    """Yield a new namespace, after `prepare` was called inside of it. Raises `NoNetworkError`."""
    made: list[int] = []
    problems: list[str] = []

    def make() -> None:  # in a thread of its own, which stays in the namespace until it ends
        try:
            _unshare()
            run("ip link set lo up")
            prepare()
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        except (OSError, NoNetworkError) as error:
            problems.append(str(error))

    require_root()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        raise NoNetworkError(*problems)
    try:
        yield Namespace(made[0], address)
    finally:
        os.close(made[0])


@contextlib.contextmanager
def star(prefix: str, nodes: int) -> Iterator[list[Namespace]]:
    """Yield namespaces that reach each other through a bridge, which is in the last of them.

    Their addresses are `prefix`.1 and so on. Raises `NoNetworkError`.
    """
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(new_namespace(f"{prefix}.{number}"))
            for number in range(1, nodes + 2)
        ]
        *ends, hub = made
        with hub.inside():
            run("ip link add bridge type bridge")
            run(f"ip address add {hub.address}/24 dev bridge")
            run("ip link set bridge up")
        for number, end in enumerate(ends):
            with hub.inside():
                connect(f"port{number}", end, "node")
                run(f"ip link set port{number} master bridge")
                run(f"ip link set port{number} up")
            with end.inside():
                run(f"ip address add {end.address}/24 dev node")
                run("ip link set node up")
        yield made


def connect(name: str, other: Namespace, other_name: str) -> None:
    """Make a link from this namespace to another; both ends are down. Raises `NoNetworkError`."""
    there = f"/proc/{os.getpid()}/fd/{other.descriptor}"
    run(f"ip link add {name} type veth peer name {other_name} netns {there}")


def run(line: str) -> None:
    """Run a command. Raises `NoNetworkError` if it fails."""
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetworkError(f"{line}: {done.stderr.strip()}")


def require_root(*programs: str) -> None:
    """Raise `NoNetworkError` if this is not root, or without these programs and `ip`."""
    if os.geteuid():
        raise NoNetworkError("only root can make network namespaces")
    for name in ("ip", *programs):
        if shutil.which(name) is None:
            raise NoNetworkError(f"{name} is not installed (Debian: iproute2)")


def _unshare() -> None:
    if _libc.unshare(_CLONE_NEWNET):
        raise NoNetworkError(f"unshare: {os.strerror(ctypes.get_errno())}")


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise NoNetworkError(f"setns: {os.strerror(ctypes.get_errno())}")
