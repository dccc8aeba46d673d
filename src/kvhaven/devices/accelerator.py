# SPDX-License-Identifier: Apache-2.0
"""What differs between makes of accelerators: a new one is one file that has this."""

from typing import Any, Protocol

from kvhaven.devices.plan import Chunks
from kvhaven.layouts import PagedLayout


class AcceleratorBackend(Protocol):
    """What differs between makes of accelerators. `StreamDevice` does all else.

    `torch_api` is torch's module for it (`torch.cuda`, `torch.xpu`, `torch.hpu`), of which
    streams, events and the current device are used. Every call comes with the device made
    current by `select`.
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
        """Torch's module of the same name for each make; they have no common type."""

    @property
    def stores_end_in_call(self) -> bool:
        """Whether a store is waited for: the engine would not hear later that it has ended."""

    @property
    def submits_in_thread(self) -> bool:
        """Whether copies may be submitted from threads that are not the engine's."""

    @property
    def pins_staging(self) -> bool:
        """Whether staging memory is pinned."""

    def select(self, index: int) -> None:
        """Make a device the calling thread's current one."""

    def prepare_thread(self) -> None:
        """Prepare a thread that belongs to the device, and not to the engine."""

    def event(self) -> Any:
        """Return a new event, for which a thread waits asleep where the make can do that."""

    def reaches(self, layout: PagedLayout, chunks: Chunks) -> bool:
        """Return whether copies go straight to the chunks' host memory.

        Others go through staging memory.
        """

    def copy(
        self, layout: PagedLayout, chunks: Chunks, keep: list[object], *, to_host: bool
    ) -> None:
        """Put the copy of chunks on the current stream.

        Each has a payload `[layer][block][page]` in host memory, which stays valid until the
        stream has passed the copy, and so does what is added to `keep`. Either `reaches` is
        true of the chunks, and those of a load may have `SKIP`; or it is a single chunk
        without, in staging memory. May raise anything; then a part of the copy may be under way.
        """

    def flush(self) -> None:
        """Start what was only recorded so far, if this make records."""

    def register(self, address: int, size: int) -> None:
        """`Device.register_host`."""

    def unregister(self, address: int, size: int) -> None:
        """`Device.unregister_host`."""

    def close(self) -> None:
        """Unregister all memory that is still registered."""
