# SPDX-License-Identifier: Apache-2.0
"""CPU copies of chunks: one pass over the bytes, hashed while they are in cache."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvhaven.devices import native
from kvhaven.devices.base import SKIP
from kvhaven.devices.plan import bytes_at, kept_ranges, kernel_blocks, plan_moves
from kvhaven.layouts import Layout, PagedLayout, Plane, PortableLayout
from kvhaven.types import Checksum

_Array = npt.NDArray[Any]
"""Array of opaque items: the bytes of an element, or of a head and token."""

HASH_BYTES = 2**20
"""Copied bytes are hashed in pieces of about this size, while they are in the core's cache."""


class Copier(Protocol):
    """Copies of single chunks of one layout, from any thread."""

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy a chunk to host memory; return the checksum of each shard as stored there."""

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy a chunk's blocks to the KV tensors, except those with the id `SKIP`."""


def copier_of(layout: Layout) -> Copier:
    """Return the fastest copier for the chunks of a layout.

    It holds no reference to the layout itself: the device keeps copiers in a weak map by layout.
    """
    if isinstance(layout, PortableLayout):
        return _HeadCopier(layout)
    assert isinstance(layout, PagedLayout)
    return _RowCopier(layout) if _RowCopier.fits(layout) else _MoveCopier(layout)


class _RowCopier:
    """Copies of pages that are rows of one piece of memory, as in vLLM 0.29 and newer.

    Numpy gathers and scatters whole rows with one call for all layers and blocks, without the GIL.
    One `memmove` per page through ctypes costs half a microsecond each, and two threads of them
    contend for the GIL: measured at 16 KiB pages with two threads, 8 GB/s against 13.
    """

    def __init__(self, layout: PagedLayout) -> None:
        self._page = page = layout.layers[0].page_bytes
        base = min(run.pointer for run in layout.layers)
        end = max(
            run.pointer + run.block_stride_bytes * (layout.num_blocks - 1) + page
            for run in layout.layers
        )
        self._rows_rp = bytes_at(base, end - base).reshape(-1, page)
        self._first_row_l1 = np.array(
            [[(run.pointer - base) // page] for run in layout.layers], dtype=np.intp
        )
        self._rows_per_block_l1 = np.array(
            [[run.block_stride_bytes // page] for run in layout.layers], dtype=np.intp
        )

    @staticmethod
    def fits(layout: PagedLayout) -> bool:
        """Return whether all pages are rows of the same storage."""
        page, base = layout.layers[0].page_bytes, layout.layers[0].pointer
        storages = {tensor.untyped_storage().data_ptr() for tensor in layout.tensors}
        return len(storages) == 1 and all(
            run.page_bytes == page
            and run.block_stride_bytes % page == 0
            and (run.pointer - base) % page == 0
            for run in layout.layers
        )

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy one chunk to host memory and return the checksum of the bytes stored there."""
        rows_lb, payload_lbp = self._plan(blocks, target)
        digest = xxhash.xxh3_128()
        step = max(1, HASH_BYTES // max(1, len(blocks) * self._page))
        for layer in range(0, len(rows_lb), step):
            part = payload_lbp[layer : layer + step]
            # Mode "raise" would copy through a buffer; the ids were checked before.
            np.take(self._rows_rp, rows_lb[layer : layer + step], axis=0, out=part, mode="clip")
            digest.update(part.data)
        return [Checksum(digest.digest())]

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks to the KV tensors, except those with the id `SKIP`."""
        rows_lb, payload_lbp = self._plan(blocks, source)
        for first, end in kept_ranges(blocks):
            self._rows_rp[rows_lb[:, first:end]] = payload_lbp[:, first:end]

    def _plan(
        self, blocks: Sequence[int], host: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
        """Return the row of each layer and block, and the payload as an array."""
        rows_lb = self._first_row_l1 + self._rows_per_block_l1 * np.array(blocks, dtype=np.intp)
        payload = bytes_at(host, rows_lb.size * self._page)
        return rows_lb, payload.reshape(*rows_lb.shape, self._page)


class _MoveCopier:
    """Copies of all other paged layouts: one `memmove` for each piece."""

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = replace(layout)

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy one chunk to host memory and return the checksum of the bytes stored there."""
        payload = bytes_at(target, self._layout.payload_bytes(len(blocks)))
        digest = xxhash.xxh3_128()
        hashed = copied = 0
        for host, device, size in self._moves(blocks, target):
            ctypes.memmove(host, device, size)
            copied += size
            if copied - hashed >= HASH_BYTES:
                digest.update(payload[hashed:copied].data)
                hashed = copied
        digest.update(payload[hashed:].data)
        return [Checksum(digest.digest())]

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks to the KV tensors, except those with the id `SKIP`."""
        for host, device, size in self._moves(blocks, source):
            ctypes.memmove(device, host, size)

    def _moves(self, blocks: Sequence[int], host: int) -> Iterator[tuple[int, int, int]]:
        plan = plan_moves(self._layout, blocks, host)
        return zip(plan.host.tolist(), plan.device.tolist(), plan.size.tolist(), strict=True)


class _HeadCopier:
    """Conversion between the engine's pages and shards of one KV head each.

    Both are strided arrays of the same dimensions. Native code copies some layers of all blocks
    with one call (`native`); without it, numpy copies one block per assignment. Neither holds the
    GIL. Of a tail's last block, only the tail's tokens are copied. The layers of each KV group are
    copied from and to the group's own blocks.
    """

    def __init__(self, layout: PortableLayout) -> None:
        self._layout = replace(layout)
        self._layers = len(layout.geometry.layers)
        groups = layout.layer_groups or (0,) * self._layers
        self._stacks = [
            _stacks([at for at, own in enumerate(groups) if own == group], layout.geometry.layers)
            for group in range(layout.groups)
        ]

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy one chunk to host memory and return the checksum of each head's shard."""
        layout = self._layout
        stride = layout.shard_stride(len(blocks))
        shards = [target + head * stride for head in range(layout.shards)]
        layer_bytes = layout.shard_bytes(len(blocks)) // self._layers
        digests = [xxhash.xxh3_128() for _ in shards]
        step = max(1, HASH_BYTES // layer_bytes)
        for first in range(0, self._layers, step):
            last = min(first + step, self._layers)
            for group, ids in enumerate(self._ids(blocks)):
                for run in self._runs(len(ids)):
                    moves = [(ids[run.first + at], at) for at in range(run.blocks)]
                    for pairs in self._arrays(group, run, len(blocks), target, first, last):
                        _copy(pairs, moves)
            for shard, digest in zip(shards, digests, strict=True):
                start = shard + first * layer_bytes
                digest.update(bytes_at(start, (last - first) * layer_bytes).data)
        return [Checksum(digest.digest()) for digest in digests]

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks to the KV tensors, except those with the id `SKIP`."""
        for group, ids in enumerate(self._ids(blocks)):
            for run in self._runs(len(ids)):
                there = [(at, ids[run.first + at]) for at in range(run.blocks)]
                moves = [(at, block) for at, block in there if block != SKIP]
                for pairs in self._arrays(group, run, len(blocks), source, 0, self._layers):
                    _copy([(host, kv) for kv, host in pairs], moves)

    def _ids(self, blocks: Sequence[int]) -> list[list[int]]:
        """Return the kernel blocks of each group."""
        ids = kernel_blocks(blocks, self._layout.geometry.kernel_blocks)
        per_group = len(ids) // self._layout.groups
        return [ids[at : at + per_group] for at in range(0, len(ids), per_group)]

    def _runs(self, blocks: int) -> list["_Run"]:
        """Return the kernel blocks of a chunk in runs, of which equally many tokens are copied."""
        size, tail = self._layout.geometry.kernel_block_size, self._layout.tail
        if not tail:
            return [_Run(0, blocks, size)]
        full, rest = divmod(tail, size)
        runs = [_Run(0, full, size), _Run(full, 1, rest)]
        return [run for run in runs if run.blocks and run.tokens]

    def _arrays(
        self, group: int, run: "_Run", blocks: int, host: int, first: int, last: int
    ) -> Iterable[list[tuple[_Array, _Array]]]:
        """Return KV and host memory of a run in some layers, in lists of pairs with equal layers.

        The layers are those of a group among the shard's layers `first` to `last`.
        The first index of the KV is the block's id, that of the host memory its position in the
        run.
        """
        found: dict[tuple[int, int], list[tuple[_Array, _Array]]] = {}
        layout, geometry = self._layout, self._layout.geometry
        size = geometry.kernel_block_size
        tokens = layout.tail or blocks * layout.block_size // layout.groups
        layer_bytes = layout.shard_bytes(blocks) // self._layers
        for stack in self._stacks[group]:
            own = stack.layers_in(first, last)
            if not own:
                continue
            row, low = stack.row_bytes, stack.first + own.start * stack.step
            start = host + low * layer_bytes + stack.before * tokens + run.first * size * row
            _, _, _, planes, _, items = stack.kv.shape
            host_phlctd = array_at(
                start,
                stack.kv.dtype.str,
                (run.blocks, layout.heads, len(own), planes, run.tokens, items),
                (
                    size * row,
                    layout.shard_stride(blocks),
                    stack.step * layer_bytes,
                    tokens * row,
                    row,
                    stack.kv.itemsize,
                ),
            )
            kv = stack.kv[:, :, own.start : own.stop, :, : run.tokens]
            found.setdefault((low, len(own)), []).append((kv, host_phlctd))
        return found.values()


class _Run(NamedTuple):
    """Consecutive kernel blocks of a chunk, and how many tokens are copied of each."""

    first: int
    blocks: int
    tokens: int


def _copy(pairs: Sequence[tuple[_Array, _Array]], moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks from sources to targets; `moves` are pairs of a source and a target index."""
    if all(native.copies(source, target) for source, target in pairs):
        native.copy_heads(pairs, moves)
        return
    for source, target in pairs:
        for one, other in moves:  # both planes in one assignment: 1.5 times as fast as separately
            target[other] = source[one]


class _Stack(NamedTuple):
    """Layers and planes at equal distances and with equal strides: one array."""

    first: int
    """Index of the first layer in a shard."""
    step: int
    """From the index of a layer in a shard to that of the next."""
    before: int
    """Bytes of a head and token in a layer's shard that precede these planes."""
    row_bytes: int
    """Bytes of a head and token in a plane."""
    kv: _Array
    """`[kernel block, head, layer, plane, token, items of a row]`."""

    def layers_in(self, first: int, last: int) -> range:
        """Return which of its layers are among the layers `first` to `last` of a shard."""
        low, high = (max(0, -(-(at - self.first) // self.step)) for at in (first, last))
        return range(low, min(high, self.kv.shape[2]))


def _stacks(indices: Sequence[int], layers: Sequence[Sequence[Plane]]) -> list[_Stack]:
    """Return some layers, with all planes, in as few stacks as possible.

    A single one if the engine has one allocation and K lies like V. `indices` are those of the
    layers in a shard.
    """
    chosen = [layers[index] for index in indices]
    alike = len({(plane.head_dim, plane.strides) for layer in chosen for plane in layer}) == 1
    if alike:
        return _stacks_of(indices, chosen, 0)
    found, before = [], 0
    for number, plane in enumerate(layers[0]):
        found += _stacks_of(indices, [[layer[number]] for layer in chosen], before)
        before += plane.head_dim * plane.item_bytes
    return found


def _stacks_of(
    indices: Sequence[int], layers: Sequence[Sequence[Plane]], before: int
) -> list[_Stack]:
    stacks, first = [], 0
    while first < len(layers):
        end = first + 1
        while end < len(layers) and _goes_on(indices[first : end + 1], layers[first : end + 1]):
            end += 1
        stacks.append(_stack(indices[first:end], layers[first:end], before))
        first = end
    return stacks


def _goes_on(indices: Sequence[int], layers: Sequence[Sequence[Plane]]) -> bool:
    """Return whether the last layer follows its predecessor as the second follows the first."""
    steps = [
        [after.pointer - plane.pointer for plane, after in zip(one, other, strict=True)]
        for one, other in (layers[:2], layers[-2:])
    ]
    same = all(plane.strides == layers[0][0].strides for plane in layers[-1])
    same &= indices[1] - indices[0] == indices[-1] - indices[-2]
    return same and len(set(map(tuple, steps))) == 1 and len(set(steps[0])) == 1


def _stack(indices: Sequence[int], layers: Sequence[Sequence[Plane]], before: int) -> _Stack:
    planes = layers[0]
    plane, item = planes[0], planes[0].item_bytes
    block, head, token, element = plane.strides
    blocks, heads, tokens, head_dim = plane.view.shape
    row_bytes = head_dim * item
    items, count, stride = (
        (f"|V{row_bytes}", 1, row_bytes) if element == item else (f"<u{item}", head_dim, element)
    )
    kv = array_at(
        plane.pointer,
        items,
        (blocks, heads, len(layers), len(planes), tokens, count),
        (
            block,
            head,
            layers[1][0].pointer - plane.pointer if len(layers) > 1 else 0,
            planes[-1].pointer - plane.pointer,
            token,
            stride,
        ),
    )
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return _Stack(indices[0], step, before, row_bytes, kv)


def array_at(address: int, items: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Array:
    """Return a non-owning array of numpy's type `items` over the memory at an address."""
    return np.asarray(_Memory(address, items, shape, strides))


class _Memory:
    """Memory as numpy's array interface, which takes any strides."""

    def __init__(
        self, address: int, items: str, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": items,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
