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
from kvhaven.layouts import PagedLayout
from kvhaven.types import Checksum


class Moves(NamedTuple):
    """Contiguous pieces of a copy: arrays of one shape, `[layers x pieces]` in payload order."""

    host: npt.NDArray[np.uint64]
    """Host addresses."""
    device: npt.NDArray[np.uint64]
    """Device addresses."""
    size: npt.NDArray[np.uint64]
    """Bytes."""


def check_copy(
    layout: PagedLayout,
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


def plan_moves(layout: PagedLayout, blocks: Sequence[int], host: int) -> Moves:
    """Return the moves of a chunk whose payload is at the host address `host`.

    Blocks that follow each other become one move if the pages of all layers touch. Blocks to
    `SKIP` are left out.
    """
    position_p = np.flatnonzero(np.asarray(blocks, dtype=np.int64) != SKIP)
    block_p = np.asarray(blocks, dtype=np.int64)[position_p]
    length_p = np.ones_like(block_p)
    if len(block_p) > 1 and all(run.dense for run in layout.layers):
        breaks = (np.diff(block_p) != 1) | (np.diff(position_p) != 1)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        length_p = np.diff(np.concatenate((starts, [len(block_p)])))
        position_p, block_p = position_p[starts], block_p[starts]
    runs = layout.layers
    page_l1 = np.array([[run.page_bytes] for run in runs], dtype=np.uint64)
    stride_l1 = np.array([[run.block_stride_bytes] for run in runs], dtype=np.uint64)
    pointer_l1 = np.array([[run.pointer] for run in runs], dtype=np.uint64)
    before_l1 = np.cumsum(page_l1, axis=0, dtype=np.uint64) - page_l1
    base_l1 = np.uint64(host) + before_l1 * np.uint64(len(blocks))
    return Moves(
        host=(base_l1 + page_l1 * position_p.astype(np.uint64)).ravel(),
        device=(pointer_l1 + stride_l1 * block_p.astype(np.uint64)).ravel(),
        size=(page_l1 * length_p.astype(np.uint64)).ravel(),
    )


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the memory at an address as an array that does not own it."""
    return np.frombuffer(
        memoryview((ctypes.c_char * size).from_address(address)).cast("B"), dtype=np.uint8
    )


def checksum_at(address: int, size: int) -> Checksum:
    """Return the checksum of host memory."""
    return Checksum(xxhash.xxh3_128_digest(bytes_at(address, size).data))
