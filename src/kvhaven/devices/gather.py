# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks with torch alone: gathered on the device by index, in groups of fixed sizes.

For accelerators that compile graphs (Gaudi): the shapes of tensors are part of a compiled graph,
the values in an index tensor are not. So blocks are copied in groups of a few fixed sizes, largest
first, and a new number of blocks never causes a compilation.
"""

from collections.abc import Iterator
from typing import Final
from weakref import WeakKeyDictionary

import torch

from kvhaven.devices.plan import Chunks, bytes_at
from kvhaven.layouts import PagedLayout, PageRun

GROUPS: Final = (64, 8, 1)
"""Blocks gathered per group; with five operations a group, 15 shapes for a page size."""


class IndexCopier:
    """Copies of blocks between a device's KV tensors and a payload `[layer][block][page]`.

    All work is submitted to the current stream, without waiting. `device` is the torch device of
    the index tensors, for example `hpu`.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._pages: WeakKeyDictionary[PagedLayout, list[torch.Tensor]] = WeakKeyDictionary()

    def copy(
        self, layout: PagedLayout, chunks: Chunks, keep: list[object], *, to_host: bool
    ) -> None:
        """Copy the blocks of a single chunk to its payload in host memory, or back.

        Adds the host's index tensors to `keep`: they must live until the stream has passed them.
        """
        (host,), blocks = chunks.hosts.tolist(), chunks.ids
        payload = torch.from_numpy(bytes_at(host, layout.payload_bytes(len(blocks))))
        pages_l = self._pages_of(layout)
        for first, count in groups(len(blocks)):
            ids = torch.from_numpy(blocks[first : first + count].copy())
            keep.append(ids)
            index = ids.to(self._device, non_blocking=True)
            start = 0
            for pages, run in zip(pages_l, layout.layers, strict=True):
                at = start + first * run.page_bytes
                rows = payload[at : at + count * run.page_bytes].view(count, run.page_bytes)
                if to_host:
                    rows.copy_(pages.index_select(0, index), non_blocking=True)
                else:
                    pages.index_copy_(0, index, rows.to(self._device, non_blocking=True))
                start += run.page_bytes * len(blocks)

    def _pages_of(self, layout: PagedLayout) -> list[torch.Tensor]:
        """Return each layer's tensor as bytes, `[block][page]`."""
        pages = self._pages.get(layout)
        if pages is None:
            pages = [
                _page_rows(tensor, run, layout.num_blocks)
                for tensor, run in zip(layout.tensors, layout.layers, strict=True)
            ]
            self._pages[layout] = pages
        return pages


def _page_rows(tensor: torch.Tensor, run: PageRun, blocks: int) -> torch.Tensor:
    """View the pages of a run as bytes, `[block][page]`, through the tensor that holds them."""
    as_bytes = tensor.view(torch.uint8)
    start = as_bytes.storage_offset() + run.pointer - tensor.data_ptr()
    shape, strides = (blocks, run.page_bytes), (run.block_stride_bytes, 1)
    return as_bytes.as_strided(shape, strides, start)


def groups(blocks: int) -> Iterator[tuple[int, int]]:
    """Yield `(first, count)` of the groups in which a number of blocks is copied."""
    first = 0
    for count in GROUPS:
        while blocks - first >= count:
            yield first, count
            first += count
