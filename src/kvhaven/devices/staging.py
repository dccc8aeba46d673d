# SPDX-License-Identifier: Apache-2.0
"""Staging memory: whole blocks on their way between a device and the arena."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from kvhaven.devices.base import SKIP
from kvhaven.layouts import PagedLayout

PIECE_BYTES: Final = 256 * 2**20
"""A copy of more than this is done in pieces, so that staging memory stays bounded."""
_PIECES: Final = 4
"""How many pieces there may be at once: two for each direction."""


def cut(layout: PagedLayout, blocks: Sequence[Sequence[int]]) -> Iterator[range]:
    """Yield ranges of chunks, each of a piece's size at most, or of one chunk."""
    start = size = 0
    for chunk, ids in enumerate(blocks):
        more = layout.block_bytes * len(ids)
        if size and size + more > PIECE_BYTES:
            yield range(start, chunk)
            start, size = chunk, 0
        size += more
    yield range(start, len(blocks))


class StagingPool:
    """Buffers in host memory; `take` waits while all of them are in use.

    They are kept and used again, since pinning memory is slow. Thread-safe.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._left = threading.Semaphore(_PIECES)
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes."""
        self._left.acquire()
        try:
            with self._lock:
                fitting = [buffer for buffer in self._free if buffer.numel() >= size]
                if fitting:
                    buffer = min(fitting, key=torch.Tensor.numel)
                    self._free = [other for other in self._free if other is not buffer]
                    return buffer
                if self._free:  # all are too small: one of them makes room
                    self._free.pop(0)
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except BaseException:
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
    """Some chunks' blocks in a staging buffer, `[layer][block][page]`, without those to skip.

    `blocks` are the device's block ids in the buffer's order; `layout` describes the buffer as
    if it were the engine's memory, with `places` as the block ids of each chunk there.
    """

    def __init__(
        self, layout: PagedLayout, chunks: Sequence[Sequence[int]], pool: StagingPool
    ) -> None:
        self.blocks = [block for chunk in chunks for block in chunk if block != SKIP]
        places = iter(range(len(self.blocks)))
        self.places = [
            [SKIP if block == SKIP else next(places) for block in chunk] for chunk in chunks
        ]
        self._pool = pool
        self._buffer = pool.take(max(1, layout.payload_bytes(len(self.blocks))))
        self.address = self._buffer.data_ptr()
        self.layout = staged(layout, self._buffer, len(self.blocks))

    def give_back(self) -> None:
        """Give the buffer back to its pool."""
        self._pool.give_back(self._buffer)


def staged(layout: PagedLayout, buffer: torch.Tensor, blocks: int) -> PagedLayout:
    """Return the layout of a payload `[layer][block][page]` of so many blocks in a buffer."""
    runs, start = [], buffer.data_ptr()
    for run in layout.layers:
        runs.append(replace(run, pointer=start, block_stride_bytes=run.page_bytes))
        start += run.page_bytes * blocks
    return replace(
        layout, layers=tuple(runs), num_blocks=max(1, blocks), tensors=(buffer,) * len(runs)
    )
