# SPDX-License-Identifier: Apache-2.0
"""The extension's functions as Python sees them: `Native`, one object a kind of device."""

import ctypes
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tests.simulators import build
from tests.simulators.ops import LATER, WAITING

KINDS = ("hpu", "xpu", "cuda")
"""Torch's types of devices, in the order of the extension's numbers."""
CALLS = ("event", "record", "wait", "copy", "kernel", "allocate", "synchronize", "flush")
"""What can be made to fail, likewise."""

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class Synchronization(NamedTuple):
    """A call that waited for the device."""

    what: str
    """How: `event.synchronize`, `stream.synchronize`, `synchronize`, `copy to the host`, ..."""
    where: str
    """The Python function that did it, outside torch and the simulators: `worker.py:load`."""
    thread: str


class NoDriverError(RuntimeError):
    """The simulated driver cannot be had."""


class Native:
    """The calls of one kind of device. Everything but `open` needs it to be open."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.synchronizations: list[Synchronization] = []
        self._number = KINDS.index(kind)
        self._library = _load()
        for op in LATER:
            self._library.simulator_allow(self._number, f"aten::{op}".encode(), 1)
        for op in WAITING:
            self._library.simulator_allow(self._number, f"aten::{op}".encode(), 2)

    def open(
        self, *, seed: int, devices: int, lazy: bool, unpinned_waits: bool, memory: int
    ) -> None:
        """Begin a simulation."""
        self.synchronizations = []
        self._check(
            self._library.simulator_open(
                self._number, seed, devices, int(lazy), int(unpinned_waits), memory
            )
        )
        _OPEN[self._number] = self
        self.limit_shapes(None)
        self.forget_shapes()

    def close(self) -> None:
        """End it; what has not run never will."""
        self._library.simulator_close(self._number)

    def reseed(self, seed: int) -> None:
        """Begin another series of choices."""
        self._library.simulator_reseed(self._number, seed)

    def tick(self) -> bool:
        """Run one piece of work; False if there is none that may run."""
        return bool(self._library.simulator_tick(self._number))

    def drain(self) -> None:
        """Run everything, with what is only recorded."""
        self._check(self._library.simulator_drain(self._number))

    def clock(self, kernel_s: float, byte_s: float) -> float:
        """Start the virtual clock anew; return the time that it showed."""
        return float(self._library.simulator_clock(self._number, kernel_s, byte_s))

    def background(self, *, on: bool) -> None:
        """Let a thread run work, or stop it."""
        self._library.simulator_background(self._number, int(on))

    def mark_step(self) -> None:
        """Start what is recorded."""
        self._check(self._library.simulator_mark_step(self._number))

    def pending(self) -> int:
        """Return how many pieces of work have not run."""
        return int(self._library.simulator_pending(self._number))

    def recorded(self) -> int:
        """Return how many of them have not been started either."""
        return int(self._library.simulator_recorded(self._number))

    def device(self) -> int:
        """Return this thread's device."""
        return int(self._library.simulator_device(self._number))

    def set_device(self, index: int) -> None:
        """Set this thread's device."""
        self._check(self._library.simulator_set_device(self._number, index))

    def stream(self, device: int) -> int:
        """Return the id of this thread's stream."""
        return int(self._library.simulator_stream(self._number, device))

    def set_stream(self, device: int, stream: int) -> None:
        """Set this thread's stream."""
        self._check(self._library.simulator_set_stream(self._number, device, stream))

    def synchronize(self, device: int) -> None:
        """Wait for all work that was started."""
        self._check(self._library.simulator_synchronize(self._number, device))

    def allocated(self, device: int) -> int:
        """Return the bytes that tensors hold."""
        return int(self._library.simulator_allocated(self._number, device))

    def peak(self, device: int) -> int:
        """Return the most bytes that tensors held."""
        return int(self._library.simulator_peak(self._number, device))

    def pin(self, address: int, size: int) -> None:
        """Take host memory for pinned from now on."""
        self._library.simulator_pin(address, size)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._library.simulator_unpin(address)

    def fail(self, call: str, nth: int, times: int) -> None:
        """Let so many calls of a kind fail from the nth on."""
        self._library.simulator_fail(self._number, CALLS.index(call), nth, times)

    def failed(self) -> int:
        """Return how many calls failed since `fail`."""
        return int(self._library.simulator_failed(self._number))

    def new_event(self) -> None:
        """Count an event."""
        self._check(self._library.simulator_new_event(self._number))

    def begin_capture(self) -> None:
        """Let this thread capture a graph, in the global mode."""
        self._library.simulator_begin_capture(self._number)

    def end_capture(self) -> bool:
        """End the capture; return whether it is valid."""
        return bool(self._library.simulator_end_capture(self._number))

    def contexts(self) -> set[int]:
        """Return the devices on which something made a context."""
        bits = int(self._library.simulator_contexts(self._number))
        return {device for device in range(bits.bit_length()) if bits >> device & 1}

    def open_driver(self, *, vendor: str, version: int, registered_bytes: int) -> None:
        """Load the driver's library, and let it work; without it there is none.

        Raises `NoDriverError` if the process has another one.
        """
        self._library.simulator_open_driver(version, int(vendor == "cuda"), registered_bytes)
        folder = build.library().with_suffix("")
        name = build.VENDORS[vendor]
        driver = ctypes.CDLL(str(folder / name))
        driver.simulator_attach(ctypes.c_void_p(self._library.simulator_driver()))
        if vendor == "hip":
            ctypes.CDLL(str(folder / "second.so"))
        if ctypes.CDLL(name)._handle != driver._handle:
            raise NoDriverError(f"this process has a {name} that is not simulated")

    def runtime_host_register(self, address: int, size: int) -> int:
        """Do what the runtime's call does, which leaves its error behind in this thread."""
        return int(self._library.simulator_runtime_host_register(address, size))

    def shapes(self) -> Counter[str]:
        """Return the shapes of all work that was issued."""
        found: Counter[str] = Counter()

        def add(shape: bytes, count: int) -> None:
            found[shape.decode()] = count

        self._library.simulator_shapes(self._number, _ON_SHAPE(add))
        return found

    def graphs(self) -> int:
        """Return how many unlike graphs were recorded, whole, in lazy mode."""
        return int(self._library.simulator_graphs(self._number))

    def forget_shapes(self) -> None:
        """Count shapes anew."""
        self._library.simulator_forget_shapes(self._number)

    def limit_shapes(self, limit: int | None) -> None:
        """Make shapes beyond so many new ones from now on errors."""
        self._library.simulator_limit_shapes(self._number, -1 if limit is None else limit)

    @staticmethod
    def _check(message: bytes | None) -> None:
        if message is not None:
            raise RuntimeError(message.decode())


_OPEN: dict[int, Native] = {}
_ON_SYNCHRONIZATION = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
_ON_SHAPE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)


def _on_synchronization(number: int, what: bytes) -> None:
    frame = sys._getframe().f_back
    while frame and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        if Path(frame.f_code.co_filename).name.startswith("test_"):
            break  # of this folder, but a user
        frame = frame.f_back
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "?"
    seen = Synchronization(what.decode(), where, threading.current_thread().name)
    _OPEN[number].synchronizations.append(seen)


_CALLBACK = _ON_SYNCHRONIZATION(_on_synchronization)  # kept for as long as the extension may call


@functools.cache
def _load() -> ctypes.CDLL:
    """Build and load the extension; it stays loaded, and does nothing while it is not open."""
    library = ctypes.CDLL(str(build.library()))
    number, size, text = ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "register": (None, []),
        "on_synchronization": (None, [_ON_SYNCHRONIZATION]),
        "allow": (None, [number, text, number]),
        "open": (text, [number, size, number, number, number, size]),
        "close": (None, [number]),
        "reseed": (None, [number, size]),
        "tick": (number, [number]),
        "background": (None, [number, number]),
        "pending": (size, [number]),
        "recorded": (size, [number]),
        "drain": (text, [number]),
        "clock": (ctypes.c_double, [number, ctypes.c_double, ctypes.c_double]),
        "mark_step": (text, [number]),
        "device": (number, [number]),
        "set_device": (text, [number, number]),
        "stream": (ctypes.c_int64, [number, number]),
        "set_stream": (text, [number, number, ctypes.c_int64]),
        "synchronize": (text, [number, number]),
        "allocated": (size, [number, number]),
        "peak": (size, [number, number]),
        "pin": (None, [size, size]),
        "unpin": (None, [size]),
        "shapes": (None, [number, _ON_SHAPE]),
        "graphs": (size, [number]),
        "fail": (None, [number, number, ctypes.c_int64, ctypes.c_int64]),
        "failed": (ctypes.c_int64, [number]),
        "new_event": (text, [number]),
        "begin_capture": (None, [number]),
        "end_capture": (number, [number]),
        "contexts": (ctypes.c_uint32, [number]),
        "open_driver": (None, [number, number, size]),
        "driver": (ctypes.c_void_p, []),
        "runtime_host_register": (number, [size, size]),
        "forget_shapes": (None, [number]),
        "limit_shapes": (None, [number, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function: Callable[..., object] = getattr(library, f"simulator_{name}")
        function.restype = result  # type: ignore[attr-defined]
        function.argtypes = arguments  # type: ignore[attr-defined]
    library.simulator_register()
    library.simulator_on_synchronization(_CALLBACK)
    return library
