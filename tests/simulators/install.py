# SPDX-License-Identifier: Apache-2.0
"""Putting the modules of a simulated device where programs look for them, and taking them away."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from tests.simulators.modules import DeviceFunctions

_FACTORIES = ("empty", "zeros", "ones", "full", "empty_strided", "rand", "randn", "arange")


@contextlib.contextmanager
def hpu_installed(
    functions: DeviceFunctions, mode: str, mark_step: Callable[[], None]
) -> Iterator[Any]:
    """Offer `torch.hpu` and the part of `habana_frameworks` that programs for vLLM use."""
    names = functions.names()
    hpu = _module("torch.hpu", **names)
    # As in Intel's package, this one and torch.hpu offer the same.
    habana_hpu = _module("habana_frameworks.torch.hpu", **names)
    core = _module("habana_frameworks.torch.core", mark_step=mark_step)
    internal = _module("habana_frameworks.torch.utils.internal", is_lazy=lambda: mode == "lazy")
    utils = _module("habana_frameworks.torch.utils", internal=internal)
    habana = _module("habana_frameworks.torch", core=core, hpu=habana_hpu, utils=utils)
    for package in (habana, utils):
        package.__path__ = []
    root = _module("habana_frameworks", torch=habana)
    root.__path__ = []
    modules = {
        module.__name__: module for module in (root, habana, core, habana_hpu, utils, internal)
    }
    before = {name: sys.modules.get(name) for name in modules}
    torch._register_device_module("hpu", hpu)  # type: ignore[no-untyped-call]
    torch.get_device_module.cache_clear()
    sys.modules.update(modules)
    try:
        yield hpu
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        del sys.modules["torch.hpu"]
        delattr(torch, "hpu")
        torch.get_device_module.cache_clear()


@contextlib.contextmanager
def xpu_installed(functions: DeviceFunctions) -> Iterator[Any]:
    """Let `torch.xpu`, which a torch for CPUs has without anything behind it, work."""
    with patched(torch.xpu, functions.names()), patched(torch.xpu.memory, _of_memory(functions)):
        yield torch.xpu


@contextlib.contextmanager
def cuda_installed(functions: DeviceFunctions, vendor: str) -> Iterator[Any]:
    """Let `torch.cuda` work, for NVIDIA's GPUs or AMD's; torch calls both by that name."""
    version = {"cuda": "12.8", "hip": None} if vendor == "cuda" else {"cuda": None, "hip": "7.0"}
    with (
        patched(torch.cuda, functions.names()),
        patched(torch.cuda.memory, _of_memory(functions)),
        patched(torch.version, version),
    ):
        yield torch.cuda


@contextlib.contextmanager
def pinning_installed() -> Iterator[None]:
    """Let factories take `pin_memory=True`; whether it works is the extension's to say.

    Once vLLM's CPU worker is imported, `Tensor.pin_memory` does nothing any more.
    """

    def pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def made(*args: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
            tensor = factory(*args, **options)
            return tensor.pin_memory() if pin_memory else tensor

        return made

    pins = {"pin_memory": torch._C.TensorBase.pin_memory}
    with (
        patched(torch.Tensor, pins),
        patched(torch, {name: pinning(getattr(torch, name)) for name in _FACTORIES}),
    ):
        yield


@contextlib.contextmanager
def patched(module: Any, names: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a module for the time."""
    absent = object()
    before = {name: getattr(module, name, absent) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _module(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name, "A stand-in of tests/simulators.")
    vars(module).update(contents)
    return module


def _of_memory(functions: DeviceFunctions) -> dict[str, Any]:
    return {name: value for name, value in functions.names().items() if "mem" in name}
