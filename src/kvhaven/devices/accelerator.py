# SPDX-License-Identifier: Apache-2.0
"""The backend contract of accelerators: all that differs between vendors, in one file for each."""

from typing import Any, Protocol

from kvhaven.devices.plan import Chunks
from kvhaven.layouts import PagedLayout


class AcceleratorBackend(Protocol):
    """All that differs between accelerator vendors. `StreamDevice` does the rest.

    `torch_api` is torch's module for the vendor (`torch.cuda`, `torch.xpu`, `torch.hpu`), whose
    streams, events and current device are used. Before every call, `select` makes the device
    current.
    """

    @property
    def name(self) -> str:
        """`Device.name`."""

    @property
    def collective_backend(self) -> str:
        """`Device.collective_backend`."""

    @property
    def kernel_tag(self) -> str:
        """`Device.kernel_tag`."""

    @property
    def torch_api(self) -> Any:
        """Torch's module for the vendor; these modules have no common type."""

    @property
    def stores_end_in_call(self) -> bool:
        """Whether `store` waits for its copy, because the engine could not report a later end."""

    @property
    def submits_in_thread(self) -> bool:
        """Whether threads other than the engine's may submit copies."""

    @property
    def pins_staging(self) -> bool:
        """Whether staging memory is pinned."""

    def select(self, index: int) -> None:
        """Make a device the calling thread's current one."""

    def prepare_thread(self) -> None:
        """Prepare a thread that belongs to the device rather than to the engine."""

    def event(self) -> Any:
        """Return a new event; a thread that waits for it sleeps if the vendor supports that."""

    def reaches(self, layout: PagedLayout, chunks: Chunks) -> bool:
        """Return whether copies go directly to the chunks' host memory.

        Others go through staging memory.
        """

    def copy(
        self, layout: PagedLayout, chunks: Chunks, keep: list[object], *, to_host: bool
    ) -> None:
        """Submit the copy of chunks to the current stream.

        Each has a payload `[layer][block][page]` in host memory, which stays valid until the stream
        has passed the copy, as do the objects added to `keep`. Either `reaches` is true of the
        chunks, and those of a load may have `SKIP`; or there is a single chunk without `SKIP`, in
        staging memory. May raise any exception; then a part of the copy may be running.
        """

    def flush(self) -> None:
        """Start work that was only recorded so far, if the vendor's runtime records work."""

    def register(self, address: int, size: int) -> None:
        """`Device.register_host`."""

    def unregister(self, address: int, size: int) -> None:
        """`Device.unregister_host`."""

    def close(self) -> None:
        """Unregister all memory that is still registered."""
