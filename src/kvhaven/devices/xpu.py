# SPDX-License-Identifier: Apache-2.0
"""Intel GPUs, by `torch.xpu`: copies through pinned staging memory, blocks gathered by index.

Tested on the simulated device in `tests/simulators`, which is stricter about order than a real one;
untested on hardware.
"""

from typing import Any

import torch

from kvhaven.devices.gather import IndexCopier
from kvhaven.devices.plan import Chunks
from kvhaven.devices.streams import StreamDevice
from kvhaven.layouts import PagedLayout


class _Xpu:
    """The `AcceleratorBackend` of Intel GPUs.

    The arena is not registered with the driver, because torch has no call for that. Instead,
    staging memory is pinned, and all copies use it.
    """

    name = "xpu"
    collective_backend = "xccl"
    kernel_tag = "xpu"
    stores_end_in_call = False
    submits_in_thread = True
    pins_staging = True

    def __init__(self) -> None:
        self.torch_api: Any = torch.xpu
        self._copier = IndexCopier("xpu")

    def select(self, index: int) -> None:
        """Make a device the calling thread's current one."""
        self.torch_api.set_device(index)

    def prepare_thread(self) -> None:
        """Do nothing."""

    def event(self) -> Any:
        """Return a new event."""
        return self.torch_api.Event()

    def reaches(self, layout: PagedLayout, chunks: Chunks) -> bool:  # noqa: ARG002 - the contract's
        """Return False: all copies go through staging memory."""
        return False

    def copy(
        self, layout: PagedLayout, chunks: Chunks, keep: list[object], *, to_host: bool
    ) -> None:
        """Gather or scatter on the device."""
        self._copier.copy(layout, chunks, keep, to_host=to_host)

    def flush(self) -> None:
        """Do nothing: work starts when it is submitted."""

    def register(self, address: int, size: int) -> None:
        """Do nothing: copies use staging memory."""

    def unregister(self, address: int, size: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_xpu(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open an Intel GPU. Raises `IncompatibleEngineError` if there is no GPU of that index."""
    return StreamDevice(_Xpu(), copy_threads, index)


def unavailable() -> str:
    """Return why no Intel GPU can be used, or an empty string if one can."""
    if not torch.xpu.is_available():
        return (
            f"torch.xpu.is_available() is False (torch {torch.__version__}; no GPU visible, no "
            "driver, or torch is built without XPU)"
        )
    return ""
