# SPDX-License-Identifier: Apache-2.0
"""Every device that the tests can have here: real ones that are present, and simulated ones."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
import torch

from kvhaven.devices import cpu_copies, cuda, staging, streams
from kvhaven.devices.base import Device
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.detect import KINDS, open_device
from tests.simulators import simulated

REAL: Final = [name for name in ("cuda", "rocm") if not KINDS[name].unavailable()]
SIMULATED: Final = [
    "hpu-eager",
    "hpu-lazy",
    "hpu-compile",
    "xpu",
    "xpu-small-pieces",
    "cuda-12.4",
    "cuda-12.8",
    "cuda-13.0",
    "cuda-12.8-small-batches",
    "cuda-12.8-unregistered",
    "rocm-7",
]
DRIVERS: Final = {"12.4": 12040, "12.8": 12080, "13.0": 13000}
"""CUDA's versions: without batches, with them, and with another signature of them."""
WORDS: Final = ["cpu", "cpu-3-threads", *REAL, *SIMULATED]


class Opened(NamedTuple):
    """A device; `simulation` is what drives it if it is simulated."""

    device: Device
    simulation: Any = None

    @property
    def torch_type(self) -> str:
        """What torch calls it."""
        return KINDS[self.device.name].torch_type

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the device, with the same strides."""
        return values.to(self.torch_type)


@contextlib.contextmanager
def opened(word: str, seed: int = 0, index: int = 0, **options: Any) -> Iterator[Opened]:
    """Open the device of a word of `WORDS`; the order of late work is the seed's.

    A simulated one has that index, and takes further options of `simulated`.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        simulation = None
        if word == "cpu-3-threads":  # one with many pieces to hash
            patch.setattr(cpu_copies, "HASH_BYTES", 700)
            device: Device = CpuDevice(copy_threads=3)
        elif word in {"cpu", *REAL}:
            patch.setattr(streams, "PART_BYTES", 500)  # so that stores on a GPU have several
            device = open_device(word, copy_threads=2)
        else:
            kind, _, variant = word.partition("-")
            if kind == "hpu":
                options["mode"] = variant
            if kind == "cuda":
                options["driver"] = DRIVERS[variant.partition("-")[0]]
            if variant.endswith("unregistered"):
                options["registered_bytes"] = 0
            if variant.endswith(("small-pieces", "unregistered")):
                patch.setattr(staging, "PIECE_BYTES", 2000)
            if variant.endswith("small-batches"):
                patch.setattr(cuda, "BATCH", 5)
                patch.setattr(cuda, "PLANNED", 20)
                patch.setattr(streams, "PART_BYTES", 500)
            simulation = stack.enter_context(simulated(kind, seed=seed, **options))  # type: ignore[arg-type]  # one of its words
            simulation.module.set_device(index)
            device = open_device(kind, copy_threads=2)
        stack.callback(device.close)
        yield Opened(device, simulation)
