# SPDX-License-Identifier: Apache-2.0
"""Detection of the device that the engine computes on."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvhaven import plugins
from kvhaven.devices import cuda, hpu, xpu
from kvhaven.devices.base import Device
from kvhaven.devices.cpu import CpuDevice
from kvhaven.errors import ConfigError, IncompatibleEngineError

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of device."""

    torch_type: str
    """The type in torch: `torch.Tensor.device.type`."""
    unavailable: Callable[[], str]
    """Returns why the device cannot be used here; an empty string if it can."""
    open: Callable[[int], Device]
    """Opens the device; the argument is the number of copy threads."""


KINDS: dict[str, Kind] = {
    "hpu": Kind("hpu", hpu.unavailable, hpu.open_hpu),
    "cuda": Kind("cuda", cuda.cuda_unavailable, cuda.open_cuda),
    "rocm": Kind("cuda", cuda.rocm_unavailable, cuda.open_rocm),
    "xpu": Kind("xpu", xpu.unavailable, xpu.open_xpu),
    "cpu": Kind("cpu", lambda: "", CpuDevice),
}
"""In the order in which they are tried. HPU comes before CUDA: with PT_HPU_GPU_MIGRATION=1,
`torch.cuda.is_available()` is true on Gaudi."""


def open_device(kind: str = "auto", copy_threads: int = 1, *, torch_type: str = "") -> Device:
    """Open the device of a kind, or with `auto` the first kind that is available.

    `torch_type` is the `device.type` of the engine's KV tensors, if there are any: only kinds of
    that type are considered, since a machine with a GPU can run the engine's CPU build. Devices of
    other packages come after those of KVHaven, so that a broken package does not stop an engine
    that does not need it. Raises `IncompatibleEngineError`, which lists all kinds that were tried
    with the reason of each refusal, and `ConfigError` if the package of the `kind` cannot be
    imported.
    """
    others = plugins.installed(plugins.DEVICES)
    if kind not in {"auto", *KINDS, *others}:
        raise IncompatibleEngineError(
            f"device: unknown (got {kind!r}); expected one of auto, "
            f"{', '.join([*KINDS, *others])}. Correct it, or install the package that adds the "
            "device."
        )
    refused = []
    for name in [*KINDS, *others] if kind == "auto" else [kind]:
        try:
            found = KINDS.get(name) or plugins.load(others[name])
        except ConfigError as error:
            if kind != "auto":
                raise
            refused.append(f"{name}: {error}")
            continue
        if torch_type and found.torch_type != torch_type:
            reason = f"the engine's KV tensors are on {torch_type}"
        else:
            reason = found.unavailable()
        if not reason:
            logger.info("device %s, %d copy threads", name, copy_threads)
            return found.open(copy_threads)
        refused.append(f"{name}: {reason}")
    raise IncompatibleEngineError(f"no device for {kind!r}: {'; '.join(refused)}")
