# SPDX-License-Identifier: Apache-2.0
"""`simulated`: a device type of torch whose work is late, in an order that a seed chooses."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch

from tests.simulators.build import NoCompilerError
from tests.simulators.install import (
    cuda_installed,
    hpu_installed,
    pinning_installed,
    xpu_installed,
)
from tests.simulators.modules import DeviceFunctions
from tests.simulators.native import Native, NoDriverError, Synchronization

Kind = Literal["hpu", "xpu", "cuda", "rocm"]
Mode = Literal["lazy", "eager", "compile"]

_HAS_CUDA = bool(torch.version.cuda or torch.version.hip)  # before anything simulates it
_HAS_GPU = _HAS_CUDA and torch.cuda.is_available()

POISON = 0xA5
"""The byte that shows in memory which has not been written yet, or no longer belongs to you."""


class Simulation:
    """A simulated kind of device, for the test's side."""

    def __init__(self, native: Native, kind: Kind, mode: Mode) -> None:
        self._native = native
        self.kind = kind
        self.torch_type = native.kind
        """What torch calls it: `cuda` for `rocm`, too."""
        self.mode = mode
        self.module: Any = None
        """`torch.hpu`, `torch.xpu` or `torch.cuda`, as which type checkers do not know it."""

    def tick(self, n: int = 1) -> bool:
        """Run `n` pieces of work, chosen at random; False if there was nothing that may run."""
        return all(self._native.tick() for _ in range(n))

    def drain(self) -> None:
        """Run all work, with what is only recorded. Raises what it failed with."""
        self._native.drain()

    def time(self, act: Callable[[], None], *, kernel_s: float, bytes_s: float) -> float:
        """Return how long the device would take for what `act` submits, by a virtual clock.

        A kernel takes `kernel_s` seconds and a driver's copies their share of `bytes_s` bytes a
        second; streams run at the same time, as far as events let them. The host takes no time.
        """
        self.drain()
        self._native.clock(kernel_s, 1 / bytes_s)
        act()
        self.drain()
        return self._native.clock(0.0, 0.0)

    def run_background(self) -> None:
        """Let a thread run work from now on, until `stop_background` or the end."""
        self._native.background(on=True)

    def stop_background(self) -> None:
        """Let work run only where somebody waits or ticks."""
        self._native.background(on=False)

    def reset(self, seed: int) -> None:
        """Run all work, choose by another seed from now on, and forget what was counted."""
        self.drain()
        self._native.reseed(seed)
        self._native.synchronizations.clear()
        self._native.forget_shapes()

    @property
    def pending(self) -> int:
        """How many pieces of work have not run."""
        return self._native.pending()

    @property
    def recorded(self) -> int:
        """How many of them were not even started, for want of a mark_step (lazy mode)."""
        return self._native.recorded()

    @property
    def synchronizations(self) -> list[Synchronization]:
        """The calls that waited for the device, in order. May be cleared."""
        return self._native.synchronizations

    @property
    def graph_shapes(self) -> Counter[str]:
        """How often work of each shape was issued: what a graph compiler compiles once.

        The words are the operator's name (`copy_from_host`, `copy_to_host` and `copy_on_device`
        for copies), then for each tensor its type, sizes and, where they matter, strides, and
        in lazy mode its storage offset, then sizes and dimensions that were given. Values of
        tensors and numbers are no part of it.
        """
        return self._native.shapes()

    @property
    def graphs(self) -> int:
        """How many unlike sequences of work were recorded between mark_steps (lazy mode)."""
        return self._native.graphs()

    def forget_shapes(self) -> None:
        """Count shapes and graphs anew."""
        self._native.forget_shapes()

    def limit_shapes(self, limit: int | None) -> None:
        """Raise RuntimeError where more than `limit` new shapes are issued from now on."""
        self._native.limit_shapes(limit)

    @contextlib.contextmanager
    def failing(self, call: str, nth: int = 1, times: int = 1) -> Iterator[Callable[[], int]]:
        """Let calls of a kind (`native.CALLS`) fail, from the nth on so many times.

        Gives how many have failed. It is any thread's calls that count.
        """
        self._native.fail(call, nth, times)
        try:
            yield self._native.failed
        finally:
            self._native.fail(call, 1, 0)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Let this thread capture a graph, in torch's default mode. Raises if it becomes void.

        While it lasts, calls that wait for the device or pin memory are errors in every thread
        whose mode was not changed, and end the capture.
        """
        self._native.begin_capture()
        valid = False
        try:
            yield
        finally:
            valid = self._native.end_capture()
        if not valid:
            raise RuntimeError("operation failed due to a previous error during capture")

    @property
    def contexts(self) -> set[int]:
        """The devices on which something made a context, as calls of CUDA do."""
        return self._native.contexts()

    def pin(self, address: int, size: int) -> None:
        """Take host memory for pinned, as if it was registered with the driver."""
        self._native.pin(address, size)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._native.unpin(address)


@contextlib.contextmanager
def simulated(
    kind: Kind,
    *,
    seed: int = 0,
    mode: Mode = "eager",
    devices: int = 1,
    unpinned_waits: bool = True,
    memory_bytes: int = 4 * 2**30,
    driver: int = 12080,
    registered_bytes: int = 2**40,
) -> Iterator[Simulation]:
    """Give torch a device type `hpu`, `xpu` or `cuda` for the time; all can be on together.

    `mode` is HPU's: in `lazy` mode work starts with `mark_step`. With `unpinned_waits`,
    asynchronous copies of host memory that is not pinned wait for the device, as with real
    drivers of XPU and CUDA; without it they are late like any other. `memory_bytes` is what each
    device has.

    `cuda` and `rocm` come with a driver's library, and torch says that it is built for them.
    `driver` is CUDA's version; more host memory than `registered_bytes` cannot be pinned.

    Skips the test where there is no C++ compiler, where torch is built for what is simulated, and
    where there is a GPU: the library of the simulators would replace torch's own functions for it.
    """
    if _HAS_GPU:
        pytest.skip(f"the GPU is tested, not simulated devices: {torch.cuda.get_device_name()}")
    torch_type = "cuda" if kind == "rocm" else kind
    if torch_type == "cuda" and _HAS_CUDA:
        pytest.skip(f"torch {torch.__version__} has a CUDA of its own")
    try:
        native = Native(torch_type)
    except NoCompilerError as error:
        pytest.skip(str(error))
    if kind != "hpu" and mode == "lazy":
        raise ValueError(f"{kind} has no lazy mode")
    native.open(
        seed=seed,
        devices=devices,
        lazy=mode == "lazy",
        unpinned_waits=kind != "hpu" and unpinned_waits,
        memory=memory_bytes,
    )
    simulation = Simulation(native, kind, mode)
    functions = DeviceFunctions(native, devices, memory_bytes)
    try:
        if kind == "hpu":
            installed = hpu_installed(functions, mode, native.mark_step)
        elif kind == "xpu":
            installed = xpu_installed(functions)
        else:
            vendor = "cuda" if kind == "cuda" else "hip"
            native.open_driver(vendor=vendor, version=driver, registered_bytes=registered_bytes)
            installed = cuda_installed(functions, vendor)
        with installed as simulation.module, pinning_installed():
            yield simulation
            native.drain()  # what failed and nobody waited for fails the test
    except NoDriverError as error:
        pytest.skip(str(error))
    finally:
        native.close()
