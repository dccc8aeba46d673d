# SPDX-License-Identifier: Apache-2.0
"""NIXL helper: the only process in which NIXL runs, with a mapping of the arena of its own.

NIXL cannot cancel a transfer, and UCX may abort the process that survives a peer. A helper can be
killed: then its transfers have ended, and the service, which maps the same memory, goes on. The
service starts two, `python -m kvhaven.peers.nixl_helper ORDER` with a socket as standard input:
one that reads from other nodes into the arena, and one from which others read.

Neither uses NIXL's progress thread, which occupies a core while idle (1.5.1). A helper advances
transfers itself, every 0.1 ms while there are any.
"""

import contextlib
import ctypes
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Final

import msgspec

from kvhaven.arena.segment import MappedSegment
from kvhaven.errors import KVHavenError
from kvhaven.niceness import lower_thread_priority
from kvhaven.peers.nixl_messages import (
    ENCODER,
    PACKET,
    PROBE_BYTES,
    TO_HELPER,
    Connect,
    Done,
    Failed,
    FromHelper,
    Lending,
    Order,
    Read,
    ToHelper,
    Up,
)

MODULES: Final = ("nixl_cu12", "nixl_cu13", "nixl._api")
"""Packages of NIXL, of which the first that is installed is used."""

_PAUSE_S: Final = 1e-4
"""Between two rounds of progress: with none, UCX moved half as many bytes per second here."""
_IDLE_S: Final = 0.05
"""Between two rounds of progress while nobody reads."""
_AWAKE_S: Final = 2.0
"""How long a helper stays attentive after the last reader has come or gone."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class _Transfer(msgspec.Struct):
    """A read under way: its request, and NIXL's handle."""

    request: Read | Connect
    handle: Any  # nixl_xfer_handle; NIXL is optional
    agent: str


class _Helper:
    """A NIXL agent over a mapping of the arena."""

    def __init__(self, order: Order, sock: socket.socket) -> None:
        self._socket = sock
        self._segment = MappedSegment.map(
            0, order.descriptor, order.size, order.lock_byte, order.usable
        )
        if order.protect:
            _protect(self._segment.address, order.size)
        self._probe = mmap.mmap(-1, PROBE_BYTES)
        self._probe[:] = os.urandom(PROBE_BYTES) if order.role == "send" else bytes(PROBE_BYTES)
        self._probe_address = ctypes.addressof(ctypes.c_char.from_buffer(self._probe))
        nixl = _import_nixl()
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=order.backends)
        self._agent = nixl.nixl_agent(order.name, config)
        missing = [name for name in order.backends if name not in self._agent.backends]
        if missing:
            raise RuntimeError(f"NIXL has no backend {', '.join(missing)}")
        regions = [
            (self._segment.address, order.usable, 0, ""),
            (self._probe_address, PROBE_BYTES, 0, ""),
        ]
        self._agent.register_memory(regions, "DRAM")
        self._transfers: list[_Transfer] = []
        self._lending = 0
        self._awake_until = 0.0

    def up(self) -> Up:
        """Return the first message."""
        metadata = self._agent.get_agent_metadata()
        return Up(metadata, self._segment.address, self._probe_address, bytes(self._probe))

    def run(self) -> None:
        """Serve until the service closes the socket."""
        while self._receive():
            if not self._transfers:
                self._agent.get_new_notifs()  # progresses UCX, as looking after a transfer does
            self._transfers = [one for one in self._transfers if not self._ended(one)]

    def _receive(self) -> bool:
        """Take the next packets, or wait a little; return False when the service is gone."""
        busy = self._transfers or self._lending or time.monotonic() < self._awake_until
        wait_s = _PAUSE_S if busy else _IDLE_S
        while select.select([self._socket], [], [], wait_s)[0]:
            packet = self._socket.recv(PACKET)
            if not packet:
                return False
            self._take(TO_HELPER.decode(packet))
            wait_s = 0
        return True

    def _take(self, message: ToHelper) -> None:
        if isinstance(message, Lending):
            self._lending = message.open
            self._awake_until = time.monotonic() + _AWAKE_S
            return
        try:
            self._transfers.append(self._begin(message))
        except Exception as error:  # noqa: BLE001  NIXL raises what it likes
            self.say(Failed(message.id, _reason(error)))

    def _begin(self, message: Connect | Read) -> _Transfer:
        if isinstance(message, Read):
            local = self._segment.address + message.offset
            return self._read(message, message.agent, message.address, local, message.length)
        if message.replaces:
            with contextlib.suppress(Exception):  # it may be gone, as it is meant to be
                self._agent.remove_remote_agent(message.replaces)
        agent = self._agent.add_remote_agent(message.metadata)
        agent = agent.decode() if isinstance(agent, bytes) else str(agent)
        self._probe[:] = bytes(PROBE_BYTES)
        return self._read(message, agent, message.probe_address, self._probe_address, PROBE_BYTES)

    def _read(
        self, request: Connect | Read, agent: str, remote: int, local: int, length: int
    ) -> _Transfer:
        here = self._agent.get_xfer_descs([(local, length, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(remote, length, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", here, there, agent)
        transfer = _Transfer(request, handle, agent)
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError("NIXL could not start the transfer")
        return transfer

    def _ended(self, transfer: _Transfer) -> bool:
        """Report a transfer that has ended; return whether it has."""
        request = transfer.request
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception as error:  # noqa: BLE001  NIXL raises what it likes
            self.say(Failed(request.id, _reason(error)))
            return True
        if state == "PROC":
            return False
        if state != "DONE":
            self.say(Failed(request.id, f"NIXL reports {state}"))
            return True
        self._agent.release_xfer_handle(transfer.handle)
        if isinstance(request, Connect) and self._probe[:] != request.probe:
            self.say(Failed(request.id, "the self-test read other bytes than were there"))
        else:
            self.say(Done(request.id, transfer.agent))
        return True

    def say(self, message: FromHelper) -> None:
        self._socket.send(ENCODER.encode(message))


def main() -> int:
    """Run a helper as its order says; return the exit status."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    # The thread of the service that starts helpers lives as long as it wants them.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != order.parent:
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the service, which ends its helpers
    lower_thread_priority()  # the only one now: those of NIXL inherit it
    sock = socket.socket(fileno=os.dup(0))
    try:
        helper = _Helper(order, sock)
        first = helper.up()
    except Exception as error:  # noqa: BLE001  NIXL raises what it likes
        sock.send(ENCODER.encode(Failed(0, _reason(error))))
        return 1
    with contextlib.suppress(OSError):  # the service is gone
        helper.say(first)
        helper.run()
    return 0


def _import_nixl() -> Any:  # NIXL is optional
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise RuntimeError("NIXL is not installed")


def _protect(address: int, size: int) -> None:
    """Make a mapping read-only. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.mprotect(address, size, mmap.PROT_READ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _reason(error: Exception) -> str:
    if isinstance(error, KVHavenError):
        return str(error)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.stdout.flush()
    # Without finalizers: those of NIXL wait for other nodes.
    status = main()
    sys.stderr.flush()
    os._exit(status)
