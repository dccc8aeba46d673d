# SPDX-License-Identifier: Apache-2.0
"""Planning shared by the devices: argument checks of copies, and moves as arrays of addresses."""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvhaven.devices.base import SKIP
from kvhaven.errors import LayoutError
from kvhaven.layouts import Layout, PortableLayout
from kvhaven.layouts.base import IntArray
from kvhaven.types import Checksum


class Moves(NamedTuple):
    """Contiguous pieces of a copy: arrays of equal shapes."""

    host: npt.NDArray[np.uint64]
    """Host addresses."""
    device: npt.NDArray[np.uint64]
    """Device addresses."""
    size: npt.NDArray[np.uint64]
    """Bytes."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a copy as arrays, so that planning thousands of chunks takes few calls."""

    ids: IntArray
    """Block ids, chunk by chunk; `SKIP` for blocks that are not copied."""
    counts: IntArray
    """The number of block ids of each chunk."""
    hosts: IntArray
    """Host address of each chunk's first shard."""

    @classmethod
    def of(cls, blocks: Sequence[Sequence[int]], hosts: Sequence[int]) -> "Chunks":
        """Return chunks given in the form that `Device.store` takes."""
        ids = array("q", list(chain.from_iterable(blocks)))  # in half of the time of numpy
        return cls(
            np.asarray(ids, dtype=np.int64),
            np.fromiter(map(len, blocks), dtype=np.int64, count=len(blocks)),
            np.array(hosts, dtype=np.int64),
        )

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.counts)

    @cached_property
    def starts(self) -> IntArray:
        """The index in `ids` at which each chunk begins, and the end of the last one."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    def part(self, first: int, end: int) -> "Chunks":
        """Return the chunks from `first` up to, but without, `end`."""
        ids = self.ids[self.starts[first] : self.starts[end]]
        return Chunks(ids, self.counts[first:end], self.hosts[first:end])

    def groups(self, most: int) -> Iterator["Chunks"]:
        """Yield all chunks in groups of at most `most` blocks each, or of one chunk."""
        first = 0
        while first < len(self):
            room = self.starts[first] + most
            end = max(first + 1, int(np.searchsorted(self.starts, room, side="right")) - 1)
            yield self.part(first, end)
            first = end

    def lists(self) -> list[list[int]]:
        """Return the block ids of each chunk."""
        ids, starts = self.ids.tolist(), self.starts.tolist()
        return [ids[start:end] for start, end in pairwise(starts)]


def check_copy(
    layout: Layout,
    blocks: Sequence[Sequence[int]],
    addresses: Sequence[int],
    *,
    may_skip: bool,
) -> Chunks:
    """Return the chunks of a copy.

    Raises `LayoutError` unless each chunk has a host address and blocks, all of them the layout's;
    with `may_skip`, block ids may be `SKIP`.
    """
    if len(blocks) != len(addresses):
        raise LayoutError(
            f"copy: {len(blocks)} chunks, but {len(addresses)} host addresses; expected one each"
        )
    chunks = Chunks.of(blocks, addresses)
    if isinstance(layout, PortableLayout) and layout.tail:
        needed = -(-layout.tail // layout.block_size)
        if (chunks.counts != needed).any():
            raise LayoutError(
                f"copy: a tail of {layout.tail} tokens in {chunks.counts.tolist()} blocks; "
                f"expected {needed}"
            )
    if isinstance(layout, PortableLayout) and (chunks.counts % layout.groups).any():
        raise LayoutError(
            f"copy: chunks of {chunks.counts.tolist()} blocks, for {layout.groups} KV groups; "
            "expected equally many of each group"
        )
    if not chunks.counts.all():
        raise LayoutError("copy: a chunk without blocks; expected at least one block a chunk")
    if len(chunks):
        lowest = SKIP if may_skip else 0
        for block in (int(chunks.ids.min()), int(chunks.ids.max())):
            if not lowest <= block < layout.num_blocks:
                raise LayoutError(
                    f"copy: block {block} is not one of the engine's blocks; expected 0 to "
                    f"{layout.num_blocks - 1}"
                )
    return chunks


def kept_ranges(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the half-open ranges of positions whose block is not `SKIP`."""
    ranges, start = [], 0
    for position, block in enumerate((*blocks, SKIP)):
        if block == SKIP:
            if position > start:
                ranges.append((start, position))
            start = position + 1
    return ranges


def kernel_blocks(blocks: Sequence[int], ratio: int) -> list[int]:
    """Return the kernel blocks that make up the engine's blocks, `ratio` each; `SKIP` stays."""
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

    They are in the order of host memory. Otherwise as `plan_chunks`.
    """
    return plan_chunks(layout, Chunks.of([blocks], [host]))


def plan_chunks(layout: Layout, chunks: Chunks) -> Moves:
    """Return the moves of all chunks.

    Consecutive blocks of a chunk become one move if they are adjacent in every row. `SKIP` blocks
    are left out. Raises `LayoutError` for layouts without contiguous pieces.
    """
    pieces = layout.pieces
    ratio = pieces.kernel_blocks
    chunk_b = np.repeat(np.arange(len(chunks)), chunks.counts)
    position_b = np.arange(len(chunks.ids)) - chunks.starts[:-1][chunk_b]
    kept = np.flatnonzero(chunks.ids != SKIP)
    chunk_b, position_b, block_b = chunk_b[kept], position_b[kept], chunks.ids[kept]
    if ratio > 1:  # each block is `ratio` kernel blocks
        part = np.arange(ratio)
        chunk_b = np.repeat(chunk_b, ratio)
        position_b = (position_b[:, None] * ratio + part).ravel()
        block_b = (block_b[:, None] * ratio + part).ravel()
    length_b = np.ones_like(block_b)
    dense = pieces.per_block == 1 and np.array_equal(pieces.block_stride, pieces.size)
    if len(block_b) > 1 and dense:
        breaks = (np.diff(block_b) != 1) | (np.diff(position_b) != 1) | (np.diff(chunk_b) != 0)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        length_b = np.diff(np.concatenate((starts, [len(block_b)])))
        chunk_b, position_b, block_b = chunk_b[starts], position_b[starts], block_b[starts]
    counts_b, host_b = chunks.counts[chunk_b], chunks.hosts[chunk_b]
    host_rb = host_b + pieces.before[:, None] * counts_b
    if layout.shards > 1:
        strides = {count: layout.shard_stride(count) for count in set(chunks.counts.tolist())}
        stride_c = np.array([strides[count] for count in chunks.counts.tolist()], dtype=np.int64)
        host_rb += pieces.shard[:, None] * stride_c[chunk_b]
    host_rb += pieces.size[:, None] * (position_b * pieces.per_block)
    device_rb = pieces.device[:, None] + pieces.block_stride[:, None] * block_b
    size_rb = pieces.size[:, None] * length_b
    if pieces.per_block > 1:  # one piece per token
        within_t = np.arange(pieces.per_block)
        host_rb = host_rb[..., None] + pieces.size[:, None, None] * within_t
        device_rb = device_rb[..., None] + pieces.piece_stride[:, None, None] * within_t
        size_rb = np.broadcast_to(size_rb[..., None], host_rb.shape)
    return Moves(*(part.ravel().view(np.uint64) for part in (host_rb, device_rb, size_rb)))


def bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the memory at an address as an array that does not own it."""
    return np.frombuffer(
        memoryview((ctypes.c_char * size).from_address(address)).cast("B"), dtype=np.uint8
    )


def checksum_at(address: int, size: int) -> Checksum:
    """Return the checksum of host memory."""
    return Checksum(xxhash.xxh3_128_digest(bytes_at(address, size).data))
