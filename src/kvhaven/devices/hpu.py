# SPDX-License-Identifier: Apache-2.0
"""Intel Gaudi, by Habana's bridge for torch: the only file that imports it.

Its runtime compiles graphs, so blocks are gathered by index in groups of a few fixed sizes
(`gather`). In lazy mode, work is only recorded until `mark_step`, which starts it and waits for
nothing. Host memory cannot be pinned. Gaudi's model runner cannot report saves that end after their
step, so `store` waits for its copy.

Tested on the simulated device in `tests/simulators`, which is stricter about order than a real one;
untested on hardware.
"""

import importlib
from typing import Any

from kvhaven.devices.gather import IndexCopier
from kvhaven.devices.plan import Chunks
from kvhaven.devices.streams import StreamDevice
from kvhaven.errors import IncompatibleEngineError
from kvhaven.layouts import PagedLayout

_BRIDGE = "habana_frameworks.torch"


class _Hpu:
    """The `AcceleratorBackend` of Gaudi.

    The engine's own thread submits loads, because recorded work belongs to a thread.
    """

    name = "hpu"
    collective_backend = "hccl"
    kernel_tag = "hpu"
    stores_end_in_call = True
    submits_in_thread = False
    pins_staging = False

    def __init__(self) -> None:
        self.torch_api = importlib.import_module(f"{_BRIDGE}.hpu")
        self._core = importlib.import_module(f"{_BRIDGE}.core")
        self._copier = IndexCopier("hpu")

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
        """Start recorded work; in eager and compiled mode there is none."""
        self._core.mark_step()

    def register(self, address: int, size: int) -> None:
        """Do nothing: Gaudi has no pinned host memory."""

    def unregister(self, address: int, size: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_hpu(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open a Gaudi. Raises `IncompatibleEngineError` if there is no device of that index."""
    if reason := unavailable():
        raise IncompatibleEngineError(f"no HPU: {reason}")
    return StreamDevice(_Hpu(), copy_threads, index)


def unavailable() -> str:
    """Return why no Gaudi can be used, or an empty string if one can."""
    try:
        bridge: Any = importlib.import_module(f"{_BRIDGE}.hpu")
    except ImportError as error:
        return f"{_BRIDGE} (Habana's bridge for torch) cannot be imported: {error}"
    try:
        available = bool(bridge.is_available())
    except Exception as error:  # noqa: BLE001 - the start of a driver may raise anything
        return f"{_BRIDGE} could not be used: {error!r}"
    return "" if available else "torch.hpu.is_available() is False (no device, or no driver)"
