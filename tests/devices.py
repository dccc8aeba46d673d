# SPDX-License-Identifier: Apache-2.0
"""Every device that the tests can have here: real ones that are present, and simulated ones."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
import torch

from kvhaven.devices import cpu_copies, staging
from kvhaven.devices.base import Device
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.detect import KINDS, open_device
from tests.simulators import simulated

REAL: Final = [name for name in ("cuda", "rocm") if not KINDS[name].unavailable()]
SIMULATED: Final = ["hpu-eager", "hpu-lazy", "hpu-compile", "xpu", "xpu-small-pieces"]
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
def opened(word: str, seed: int = 0) -> Iterator[Opened]:
    """Open the device of a word of `WORDS`; the order of late work is the seed's."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        simulation = None
        if word == "cpu-3-threads":  # one with many pieces to hash
            patch.setattr(cpu_copies, "HASH_BYTES", 700)
            device: Device = CpuDevice(copy_threads=3)
        elif word in {"cpu", *REAL}:
            device = open_device(word, copy_threads=2)
        else:
            kind, _, variant = word.partition("-")
            if variant == "small-pieces":
                patch.setattr(staging, "PIECE_BYTES", 2000)
            mode = variant if kind == "hpu" else "eager"
            simulation = stack.enter_context(
                simulated("hpu" if kind == "hpu" else "xpu", seed=seed, mode=mode)  # type: ignore[arg-type]  # one of its words
            )
            device = open_device(kind, copy_threads=2)
        stack.callback(device.close)
        yield Opened(device, simulation)
