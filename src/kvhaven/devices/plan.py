# SPDX-License-Identifier: Apache-2.0
"""What the devices share: checks of a copy's arguments, and its moves as arrays of addresses."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvhaven.devices.base import SKIP
from kvhaven.errors import LayoutError
from kvhaven.layouts import Layout
from kvhaven.types import Checksum


class Moves(NamedTuple):
    """Contiguous pieces of a copy: arrays of one shape, in the order of the host's memory."""

    host: npt.NDArray[np.uint64]
    """Host addresses."""
    device: npt.NDArray[np.uint64]
    """Device addresses."""
    size: npt.NDArray[np.uint64]
    """Bytes."""


def check_copy(
    layout: Layout,
    blocks: Sequence[Sequence[int]],
    addresses: Sequence[int],
    *,
    may_skip: bool,
) -> None:
    """Raise `LayoutError` unless all block ids are the layout's, with one address a chunk."""
    if len(blocks) != len(addresses):
        raise LayoutError(f"blocks of {len(blocks)} chunks, but {len(addresses)} host addresses")
    lowest = SKIP if may_skip else 0
    for ids in blocks:
        if not ids:
            raise LayoutError("a chunk without blocks cannot be copied")
        for block in (min(ids), max(ids)):
            if not lowest <= block < layout.num_blocks:
                raise LayoutError(
                    f"block {block} is not one of the engine's, 0 to {layout.num_blocks - 1}"
                )


def kept_ranges(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of positions whose block is not to `SKIP`."""
    ranges, start = [], 0
    for position, block in enumerate((*blocks, SKIP)):
        if block == SKIP:
            if position > start:
                ranges.append((start, position))
            start = position + 1
    return ranges


def kernel_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Return the kernel's blocks that make up the engine's, `ratio` each; `SKIP` stays."""
    if ratio == 1:
        return list(blocks)
    return [
        SKIP if block == SKIP else block * ratio + part for block in blocks for part in range(ratio)
    ]


def shard_places(
    layout: Layout, blocks: Sequence[Sequence[int]], hosts: Sequence[int]
) -> list[tuple[int, int]]:
    """Return address and size of each shard's payload, chunk by chunk, shard by shard."""
    return [
        (host + shard * layout.shard_stride(len(ids)), layout.shard_bytes(len(ids)))
        for ids, host in zip(blocks, hosts, strict=True)
        for shard in range(layout.shards)
    ]


def plan_moves(layout: Layout, blocks: Sequence[int], host: int) -> Moves:
    """Return the moves of a chunk whose first shard is at the host address `host`.

    Blocks that follow each other become one move if they touch in every row. Blocks to `SKIP`
    are left out. Raises `LayoutError` for layouts that have no pieces to move.
    """
    pieces = layout.pieces
    ids = np.asarray(kernel_blocks(blocks, pieces.kernel_blocks), dtype=np.int64)
    position_p = np.flatnonzero(ids != SKIP)
    block_p = ids[position_p]
    length_p = np.ones_like(block_p)
    dense = pieces.per_block == 1 and np.array_equal(pieces.block_stride, pieces.size)
    if len(block_p) > 1 and dense:
        breaks = (np.diff(block_p) != 1) | (np.diff(position_p) != 1)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        length_p = np.diff(np.concatenate((starts, [len(block_p)])))
        position_p, block_p = position_p[starts], block_p[starts]
    stride = layout.shard_stride(len(blocks)) if layout.shards > 1 else 0
    row_r = host + pieces.shard * stride + pieces.before * len(blocks)
    within_t = np.arange(pieces.per_block, dtype=np.int64)
    host_rpt = row_r[:, None, None] + pieces.size[:, None, None] * (
        position_p[:, None] * pieces.per_block + within_t
    )
    device_rpt = (
        pieces.device[:, None, None]
        + pieces.block_stride[:, None, None] * block_p[:, None]
        + pieces.piece_stride[:, None, None] * within_t
    )
    size_rpt = np.broadcast_to(pieces.size[:, None, None] * length_p[:, None], host_rpt.shape)
    return Moves(*(part.ravel().astype(np.uint64) for part in (host_rpt, device_rpt, size_rpt)))


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the memory at an address as an array that does not own it."""
    return np.frombuffer(
        memoryview((ctypes.c_char * size).from_address(address)).cast("B"), dtype=np.uint8
    )


def checksum_at(address: int, size: int) -> Checksum:
    """Return the checksum of host memory."""
    return Checksum(xxhash.xxh3_128_digest(bytes_at(address, size).data))
