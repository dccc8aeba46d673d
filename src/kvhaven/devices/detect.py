# SPDX-License-Identifier: Apache-2.0
"""Finding the device that the engine computes on."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from kvhaven.devices import cuda
from kvhaven.devices.base import Device
from kvhaven.devices.cpu import CpuDevice
from kvhaven.errors import IncompatibleEngineError

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of device."""

    unavailable: Callable[[], str]
    """Why there is none here; an empty text if there is."""
    open: Callable[[int], Device]
    """Makes the device; the argument is the number of copy threads."""


KINDS: dict[str, Kind] = {
    "cuda": Kind(cuda.unavailable, cuda.CudaDevice),
    "cpu": Kind(lambda: "", CpuDevice),
}
"""In the order of asking. HPU will have to come before CUDA: with PT_HPU_GPU_MIGRATION=1,
`torch.cuda.is_available()` is true on Gaudi."""


def open_device(kind: str = "auto", copy_threads: int = 1) -> Device:
    """Open the device of a kind, or with `auto` the first kind that there is.

    Where KV tensors exist, their `device.type` is the best `kind`: a machine with a GPU can
    run the engine's CPU build. Raises `IncompatibleEngineError`, with all that was looked for
    and why each was refused.
    """
    refused = []
    for name, found in KINDS.items():
        if kind not in {"auto", name}:
            continue
        reason = found.unavailable()
        if not reason:
            logger.info("device %s, %d copy threads", name, copy_threads)
            return found.open(copy_threads)
        refused.append(f"{name}: {reason}")
    looked = "; ".join(refused) or f"this is none of {', '.join(KINDS)}"
    raise IncompatibleEngineError(f"no device of kind {kind!r}: {looked}")
