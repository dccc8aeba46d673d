# SPDX-License-Identifier: Apache-2.0
"""What a device needs to know of a layout to copy chunks, whatever their format."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvhaven.types import align_up

IntArray = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """The dense pieces of memory that a block consists of, in `rows` of equal ones.

    All arrays have one entry a row. Row `r` has `per_block` pieces of `size[r]` bytes in each
    kernel block `k`, at `device[r] + k * block_stride[r] + piece * piece_stride[r]`. On the host
    a row's pieces follow each other without gaps, in the order `[block][piece]`.
    """

    device: IntArray
    """Device address of the row's first piece in block 0."""
    block_stride: IntArray
    """Bytes from a kernel block to the next."""
    piece_stride: IntArray
    """Bytes from a piece to the next in the same block."""
    size: IntArray
    shard: IntArray
    """The shard of the chunk in which the row's bytes are."""
    before: IntArray
    """Bytes of one engine block that come before this row in its shard."""
    per_block: int
    """Pieces of a row in each kernel block."""
    kernel_blocks: int
    """Kernel blocks in one of the engine's: engine block `b` is those from `b * kernel_blocks`."""


class Layout(Protocol):
    """The KV of one rank for the blocks of one KV group, in the paged or the portable format.

    Copies of a chunk of `n` blocks take host memory of `payload_bytes(n)` bytes: `shards`
    shards of `shard_bytes(n)` bytes each, that start `shard_stride(n)` bytes apart.
    """

    @property
    def num_blocks(self) -> int:
        """The engine's blocks: ids are 0 to `num_blocks - 1`."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def description(self) -> str:
        """The layout in words, with its numbers."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The engine's own tensors; holding them keeps the bytes alive."""

    @property
    def shards(self) -> int:
        """How many shards of a chunk this rank holds."""

    def shard_bytes(self, blocks: int) -> int:
        """Return the payload's size of each shard of a chunk of that many blocks."""

    def shard_stride(self, blocks: int) -> int:
        """Return the distance from a shard of a chunk to the next: a multiple of 4096."""

    def payload_bytes(self, blocks: int) -> int:
        """Return the size of the host memory of a chunk, from its first shard to its last."""

    @property
    def pieces(self) -> Pieces:
        """Where the bytes lie. Raises `LayoutError` if elements are not even next to each other."""


def shard_stride(shard_bytes: int) -> int:
    """Return the distance of shards of that size in a chunk's extent (`types.ShardTable`)."""
    return align_up(shard_bytes)
