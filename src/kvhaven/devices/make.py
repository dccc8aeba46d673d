# SPDX-License-Identifier: Apache-2.0
"""What differs between makes of accelerators: a new one is one file that has this."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvhaven.layouts import PagedLayout


class Make(Protocol):
    """What differs between makes of accelerators. `StreamDevice` does all else.

    `torch_api` is torch's module for it (`torch.cuda`, `torch.xpu`, `torch.hpu`), of which
    streams, events and the current device are used. Every call but `register` and
    `unregister` comes with the device made current.
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
    def stages(self) -> bool:
        """Whether paged copies go through staging memory too, and not straight to the arena."""

    @property
    def stores_end_in_call(self) -> bool:
        """Whether a store is waited for: the engine would not hear later that it has ended."""

    @property
    def submits_in_thread(self) -> bool:
        """Whether staged loads may be submitted from a thread that is not the engine's."""

    @property
    def pins_staging(self) -> bool:
        """Whether staging memory is pinned."""

    def event(self) -> Any:
        """Return a new event, for which a thread waits asleep where the make can do that."""

    def copy(
        self, layout: PagedLayout, blocks: Sequence[int], host: int, *, to_host: bool
    ) -> object:
        """Put the copy of blocks on the current stream.

        `host` is the address of a payload `[layer][block][page]`. It stays valid until the
        stream has passed the copy, and so does what is returned. May raise anything; then a
        part of the copy may be under way. Without `stages`, `blocks` of a load may have `SKIP`.
        """

    def flush(self) -> None:
        """Start what was only recorded so far, if this make records."""

    def register(self, address: int, size: int) -> None:
        """`Device.register_host`."""

    def unregister(self, address: int, size: int) -> None:
        """`Device.unregister_host`."""
