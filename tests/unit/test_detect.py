# SPDX-License-Identifier: Apache-2.0
"""Which device is found, in which order, and what is said when there is none."""

from typing import Literal

import pytest
import torch

from kvhaven.config import Settings
from kvhaven.devices import cuda
from kvhaven.devices.detect import KINDS, open_device
from kvhaven.engine.connect import device_of
from kvhaven.errors import IncompatibleEngineError
from tests.simulators import simulated


def test_detection_finds_the_cpu_and_lists_what_it_looked_for() -> None:
    assert open_device("cpu", copy_threads=2).name == "cpu"
    with pytest.raises(IncompatibleEngineError, match=r"got 'tpu'.*one of auto, hpu, cuda"):
        open_device("tpu")
    with pytest.raises(IncompatibleEngineError, match="cpu: the engine's KV tensors are on xpu"):
        open_device("cpu", torch_type="xpu")
    if cuda.cuda_unavailable():
        assert open_device().name == "cpu"
        with pytest.raises(IncompatibleEngineError, match=r"cuda: torch .* is built without CUDA"):
            open_device("cuda")


def test_detection_says_of_each_kind_why_it_was_refused() -> None:
    with pytest.raises(IncompatibleEngineError) as refusal:
        open_device(torch_type="mtia")
    for name in KINDS:
        assert f"{name}: the engine's KV tensors are on mtia" in str(refusal.value)


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_nvidias_and_amds_gpus_are_told_apart(kind: Literal["cuda", "rocm"]) -> None:
    """Torch calls both `cuda`."""
    with simulated(kind):
        device = open_device(torch_type="cuda")
        assert device.name == device.kernel_tag == kind
        device.close()
        other = "rocm" if kind == "cuda" else "cuda"
        with pytest.raises(IncompatibleEngineError, match=f"{other}: torch .* is built"):
            open_device(other)


def test_gaudi_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """PT_HPU_GPU_MIGRATION=1 lets `torch.cuda.is_available()` be true on Gaudi."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with simulated("hpu"):
        device = open_device()
        assert device.name == "hpu"
        device.close()


@pytest.mark.parametrize("current", [0, 1])
def test_the_device_is_that_of_the_tensors_and_not_the_current_one(current: int) -> None:
    with simulated("cuda", devices=2) as simulation:
        simulation.module.set_device(current)
        tensors = {f"layer{at}": torch.zeros(8, device="cuda:1") for at in range(2)}
        device = device_of(Settings(), tensors)
        assert device.current() == 1
        device.close()
        with pytest.raises(IncompatibleEngineError, match="several devices"):
            device_of(Settings(), tensors | {"layer2": torch.zeros(8, device="cuda:0")})
