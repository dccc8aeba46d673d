# SPDX-License-Identifier: Apache-2.0
"""The layout contract: all that a device needs to copy chunks, in any format."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvhaven.types import align_up

IntArray = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """The dense pieces of memory that make up a block, in rows of equal pieces.

    All arrays have one entry per row. Row `r` has `per_block` pieces of `size[r]` bytes in each
    kernel block `k`, at `device[r] + k * block_stride[r] + piece * piece_stride[r]`. On the host, a
    row's pieces follow each other without gaps, in the order `[block][piece]`.
    """

    device: IntArray
    """Device address of the row's first piece in block 0."""
    block_stride: IntArray
    """Bytes from a kernel block to the next."""
    piece_stride: IntArray
    """Bytes from a piece to the next in the same block."""
    size: IntArray
    shard: IntArray
    """The shard of the chunk that holds the row's bytes."""
    before: IntArray
    """Bytes of one engine block that precede this row in its shard."""
    per_block: int
    """Pieces of a row in each kernel block."""
    kernel_blocks: int
    """Kernel blocks in an engine block: engine block `b` begins with kernel block `b *
    kernel_blocks`."""


class Layout(Protocol):
    """The KV of one rank for the blocks of one KV group, in the paged or the portable format.

    A chunk of `n` blocks takes `payload_bytes(n)` bytes of host memory: `shards` shards of
    `shard_bytes(n)` bytes each, which start `shard_stride(n)` bytes apart.
    """

    @property
    def num_blocks(self) -> int:
        """The number of engine blocks: ids are 0 to `num_blocks - 1`."""

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
        """The number of shards of a chunk that this rank holds."""

    def shard_bytes(self, blocks: int) -> int:
        """Return the payload size in bytes of each shard of a chunk of `blocks` blocks."""

    def shard_stride(self, blocks: int) -> int:
        """Return the bytes from one shard of a chunk to the next: a multiple of 4096."""

    def payload_bytes(self, blocks: int) -> int:
        """Return the bytes of host memory of a chunk, from its first shard to its last's end."""

    @property
    def pieces(self) -> Pieces:
        """The places of the bytes. Raises `LayoutError` if elements of a token are not adjacent."""

    def of_tail(self, tokens: int, chunk_size: int) -> "Layout":
        """Return the layout of tails of `tokens` tokens in the extents of chunks of `chunk_size`.

        A tail takes as many blocks as its tokens need. Each of its shards starts where that of a
        full chunk would.
        """

    def tail_tokens(self, tokens: int) -> int:
        """Return the number of tokens that are stored of a tail of `tokens` tokens.

        A shard of a tail has that share of the bytes of a full chunk's shard.
        """


def shard_stride(shard_bytes: int) -> int:
    """Return the distance in bytes of shards of that size in an extent (`types.ShardTable`)."""
    return align_up(shard_bytes)
