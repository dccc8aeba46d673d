# SPDX-License-Identifier: Apache-2.0
"""Intel Gaudi, by Habana's bridge for torch: the only file that imports it.

Its runtime compiles graphs, so blocks are gathered by index in a few fixed counts (`gather`).
In lazy mode work is only recorded until `mark_step`, which starts it and waits for nothing. Host
memory cannot be pinned. Gaudi's model runner reports to nobody that a save has ended later, so
stores are waited for in the call.

Proven on the simulated device of `tests/simulators`, which is stricter about order than a real
one; never run on hardware by us.
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
    """What `StreamDevice` has to know of Gaudi.

    Loads are submitted by the engine's own thread: what is recorded belongs to a thread.
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
        """Start what was recorded; in eager and compiled mode there is nothing."""
        self._core.mark_step()

    def register(self, address: int, size: int) -> None:
        """Do nothing: Gaudi has no pinned host memory."""

    def unregister(self, address: int, size: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_hpu(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open a Gaudi. Raises `IncompatibleEngineError` if there is none of that index."""
    if reason := unavailable():
        raise IncompatibleEngineError(f"no HPU: {reason}")
    return StreamDevice(_Hpu(), copy_threads, index)


def unavailable() -> str:
    """Return why there is no Gaudi to use, or an empty text if there is one."""
    try:
        bridge: Any = importlib.import_module(f"{_BRIDGE}.hpu")
    except ImportError as error:
        return f"{_BRIDGE} (Habana's bridge for torch) cannot be imported: {error}"
    try:
        available = bool(bridge.is_available())
    except Exception as error:  # noqa: BLE001 - a driver's own start-up may raise anything
        return f"{_BRIDGE} could not be used: {error!r}"
    return "" if available else "torch.hpu.is_available() is False (no device, or no driver)"
