# SPDX-License-Identifier: Apache-2.0
"""Staging memory: buffers for whole blocks between a device and the arena."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from kvhaven.devices.base import SKIP
from kvhaven.devices.plan import Chunks
from kvhaven.errors import DeviceCopyError, LayoutError
from kvhaven.layouts import HeadGeometry, Layout, PagedLayout, PageRun, Plane, PortableLayout

PIECE_BYTES: Final = 256 * 2**20
"""Larger copies are split into pieces of this size, so that staging memory stays bounded."""
_PIECES: Final = 4
"""The number of pieces in use at a time, for both directions together."""
TAKE_S: Final = 60.0
"""Seconds that a copy waits for a buffer. A device that moves nothing for so long has failed."""


def cut(layout: Layout, chunks: Chunks) -> Iterator[Chunks]:
    """Yield all chunks in groups of at most the size of a piece, or of one chunk."""
    yield from chunks.groups(PIECE_BYTES // paged_of(layout).block_bytes)


class StagingPool:
    """Buffers in host memory; `take` waits while all of them are in use.

    The pool keeps and reuses them, because pinning memory is slow. Thread-safe.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._left = threading.Semaphore(_PIECES)
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes.

        Raises `DeviceCopyError` if no buffer is given back within `TAKE_S` seconds, and torch's
        exception if allocating one fails.
        """
        if not self._left.acquire(timeout=TAKE_S):
            raise DeviceCopyError(
                f"staging memory: all {_PIECES} buffers have been in use for {TAKE_S:.0f} s"
            )
        try:
            with self._lock:
                fitting = [buffer for buffer in self._free if buffer.numel() >= size]
                if fitting:
                    buffer = min(fitting, key=torch.Tensor.numel)
                    self._free = [other for other in self._free if other is not buffer]
                    return buffer
                if self._free:  # all are too small: a larger one replaces the first
                    self._free.pop(0)
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except BaseException:  # after any error, the buffer's place must not be lost
            self._left.release()
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; no copy may use it any more."""
        with self._lock:
            self._free.append(buffer)
        self._left.release()

    def close(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()


class Piece:
    """Blocks of some chunks in a staging buffer, `[layer][block][page]`, without those to skip.

    `layout` describes the buffer as if it were the engine's memory, and `places` are the block ids
    of each chunk in it.
    """

    def __init__(self, layout: Layout, chunks: Chunks, pool: StagingPool) -> None:
        kept = chunks.ids != SKIP
        self._blocks = chunks.ids[kept]
        places = np.where(kept, np.cumsum(kept) - 1, SKIP)
        self.places = Chunks(places, chunks.counts, chunks.hosts).lists()
        self._pool = pool
        size = paged_of(layout).payload_bytes(max(1, len(self._blocks)))
        self._buffer = pool.take(size)
        try:
            if isinstance(layout, PortableLayout) and layout.padded:
                # Whole blocks go to the device, and bytes left behind may be NaNs.
                self._buffer[:size].zero_()
            self.layout = staged(layout, self._buffer, len(self._blocks))
        except BaseException:  # after any error, the buffer must not be lost
            self.give_back()
            raise

    @property
    def chunks(self) -> Chunks:
        """The piece as one chunk: the device's block ids in the buffer's order, its address."""
        counts, hosts = np.array([[len(self._blocks)], [self._buffer.data_ptr()]])
        return Chunks(self._blocks, counts, hosts)

    def give_back(self) -> None:
        """Give the buffer back to its pool."""
        self._pool.give_back(self._buffer)


def paged_of(layout: Layout) -> PagedLayout:
    """Return the pages of the engine's memory, for either format."""
    if isinstance(layout, PortableLayout):
        return layout.paged
    assert isinstance(layout, PagedLayout)
    return layout


def staged(layout: Layout, buffer: torch.Tensor, blocks: int) -> Layout:
    """Return the layout of `blocks` blocks, `[run][block][page]`, in a buffer of bytes.

    The layout within pages is that of `layout`; only the places of the pages differ.
    """
    paged = paged_of(layout)
    blocks = max(1, blocks)
    runs, start = [], buffer.data_ptr()
    for run in paged.layers:
        runs.append(replace(run, pointer=start, block_stride_bytes=run.page_bytes))
        start += run.page_bytes * blocks
    tensors = (buffer,) * len(runs)
    there = replace(paged, layers=tuple(runs), num_blocks=blocks, tensors=tensors)
    if not isinstance(layout, PortableLayout):
        return there
    geometry = layout.geometry
    planes = tuple(
        tuple(_moved(plane, paged.layers, there, geometry.kernel_blocks, buffer) for plane in layer)
        for layer in geometry.layers
    )
    moved = HeadGeometry(planes, geometry.kernel_blocks)
    return replace(layout, paged=there, geometry=moved)


def _moved(
    plane: Plane, runs: Sequence[PageRun], there: PagedLayout, ratio: int, buffer: torch.Tensor
) -> Plane:
    """Return a plane as it lies in a buffer, with `ratio` kernel blocks in each of its blocks."""
    block, head, token, element = plane.strides

    def place(address: int) -> tuple[int, PageRun]:
        """Return the new place of an address of block 0, and the run that holds it."""
        for run, moved in zip(runs, there.layers, strict=True):
            if 0 <= address - run.pointer < run.page_bytes:
                return moved.pointer + address - run.pointer, moved
        raise LayoutError(f"{plane.name} of {plane.layer} lies outside of its layer's pages")

    start, run = place(plane.pointer)
    if plane.view.shape[1] > 1:
        head = place(plane.pointer + head)[0] - start
    if ratio == 1:
        block = run.page_bytes
    item = plane.item_bytes
    elements = buffer[: buffer.numel() // item * item].view(plane.view.dtype)
    view = elements.as_strided(
        (there.num_blocks * ratio, *plane.view.shape[1:]),
        [stride // item for stride in (block, head, token, element)],
        (start - buffer.data_ptr()) // item,
    )
    return replace(plane, view=view)
