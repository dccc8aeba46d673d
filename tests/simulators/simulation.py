# SPDX-License-Identifier: Apache-2.0
"""`simulated`: a device type of torch whose work is late, in an order that a seed chooses."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.simulators.build import NoCompilerError
from tests.simulators.install import hpu_installed, pinning_installed, xpu_installed
from tests.simulators.modules import DeviceFunctions
from tests.simulators.native import Native, Synchronization

Kind = Literal["hpu", "xpu"]
Mode = Literal["lazy", "eager", "compile"]

POISON = 0xA5
"""The byte that shows in memory which has not been written yet, or no longer belongs to you."""


class Simulation:
    """A simulated kind of device, for the test's side."""

    def __init__(self, native: Native, mode: Mode) -> None:
        self._native = native
        self.kind = native.kind
        self.mode = mode
        self.module: Any = None
        """`torch.hpu` or `torch.xpu`, which type checkers do not know."""

    def tick(self, n: int = 1) -> bool:
        """Run `n` pieces of work, chosen at random; False if there was nothing that may run."""
        return all(self._native.tick() for _ in range(n))

    def drain(self) -> None:
        """Run all work, with what is only recorded. Raises what it failed with."""
        self._native.drain()

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
) -> Iterator[Simulation]:
    """Give torch a device type `hpu` or `xpu` for the time; both can be on together.

    `mode` is HPU's: in `lazy` mode work starts with `mark_step`. With `unpinned_waits`, XPU's
    asynchronous copies of host memory that is not pinned wait for the device, as with real
    drivers; without it they are late like any other. `memory_bytes` is what each device has.

    Skips the test where there is no C++ compiler.
    """
    try:
        native = Native(kind)
    except NoCompilerError as error:
        pytest.skip(str(error))
    if kind == "xpu" and mode == "lazy":
        raise ValueError("XPU has no lazy mode")
    native.open(
        seed=seed,
        devices=devices,
        lazy=mode == "lazy",
        unpinned_waits=kind == "xpu" and unpinned_waits,
        memory=memory_bytes,
    )
    simulation = Simulation(native, mode)
    functions = DeviceFunctions(native, devices, memory_bytes)
    installed = (
        hpu_installed(functions, mode, native.mark_step)
        if kind == "hpu"
        else xpu_installed(functions)
    )
    try:
        with installed as simulation.module, pinning_installed():
            yield simulation
            native.drain()  # what failed and nobody waited for fails the test
    finally:
        native.close()
