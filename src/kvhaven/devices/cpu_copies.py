# SPDX-License-Identifier: Apache-2.0
"""How the CPU copies chunks: one pass over the bytes, hashed while they are in cache."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvhaven.devices.base import SKIP
from kvhaven.devices.plan import bytes_at, kept_ranges, kernel_blocks, plan_moves
from kvhaven.layouts import Layout, PagedLayout, Plane, PortableLayout
from kvhaven.types import Checksum

HASH_BYTES = 2**20
"""Copied bytes are hashed in pieces of about this size, while they are in the core's cache."""


class Copier(Protocol):
    """Copies chunks of one layout, one at a time, on any thread."""

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy a chunk to host memory; return the checksum of each shard as it landed there."""

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy a chunk's blocks, but those to skip, to the KV tensors."""


def copier_of(layout: Layout) -> Copier:
    """Return what copies the chunks of a layout fastest.

    It holds no reference to the layout itself: the device keeps copiers by layout, weakly.
    """
    if isinstance(layout, PortableLayout):
        return _HeadCopier(layout)
    assert isinstance(layout, PagedLayout)
    return _RowCopier(layout) if _RowCopier.fits(layout) else _MoveCopier(layout)


class _RowCopier:
    """Copies of pages that are rows of one piece of memory, as vLLM 0.29 and newer has them.

    Numpy gathers and scatters whole rows with one call for all layers and blocks, without the
    GIL. One `memmove` a page through ctypes costs half a microsecond each, and two threads of
    them fight for the GIL: measured at 16 KiB pages with two threads, 8 GB/s against 13.
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
        """Copy one chunk to host memory and return the checksum of what landed there."""
        rows_lb, payload_lbp = self._plan(blocks, target)
        digest = xxhash.xxh3_128()
        step = max(1, HASH_BYTES // max(1, len(blocks) * self._page))
        for layer in range(0, len(rows_lb), step):
            part = payload_lbp[layer : layer + step]
            # "clip" because "raise" copies through a buffer; the ids were checked.
            np.take(self._rows_rp, rows_lb[layer : layer + step], axis=0, out=part, mode="clip")
            digest.update(part.data)
        return [Checksum(digest.digest())]

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks, but those to skip, to the KV tensors."""
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
    """Copies of any other pages: one `memmove` for each piece."""

    def __init__(self, layout: PagedLayout) -> None:
        self._layout = replace(layout)

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy one chunk to host memory and return the checksum of what landed there."""
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
        """Copy one chunk's blocks, but those to skip, to the KV tensors."""
        for host, device, size in self._moves(blocks, source):
            ctypes.memmove(device, host, size)

    def _moves(self, blocks: Sequence[int], host: int) -> Iterator[tuple[int, int, int]]:
        plan = plan_moves(self._layout, blocks, host)
        return zip(plan.host.tolist(), plan.device.tolist(), plan.size.tolist(), strict=True)


class _HeadCopier:
    """Conversion between the engine's pages and shards of one KV head each.

    A block of all heads and many layers is one assignment between two strided arrays of
    elements: numpy joins dimensions that are dense on both sides into one `memcpy`, goes through
    others in the order of the target's memory, and lets the GIL go. That also turns K's columns
    into rows on the way (2 bytes at a time from a page that fits the first-level cache: measured
    at 6.5 GB/s a core, where rows go at 31).
    """

    def __init__(self, layout: PortableLayout) -> None:
        geometry = layout.geometry
        self._layout = replace(layout)
        self._heads = geometry.heads
        self._layers = len(geometry.layers)
        self._ratio = geometry.kernel_blocks
        self._planes = [
            _layer_stacks([layer[plane] for layer in geometry.layers])
            for plane in range(len(geometry.planes))
        ]

    def store(self, blocks: Sequence[int], target: int) -> list[Checksum]:
        """Copy one chunk to host memory and return the checksum of each head's shard."""
        ids = kernel_blocks(blocks, self._ratio)
        layer_bytes = self._layout.shard_bytes(len(blocks)) // self._layers
        stride = self._layout.shard_stride(len(blocks))
        digests = [xxhash.xxh3_128() for _ in range(self._heads)]
        step = max(1, HASH_BYTES // (self._heads * layer_bytes))
        for layer in range(0, self._layers, step):
            last = min(layer + step, self._layers)
            for kv_bhlnd, host_phlnd in self._arrays(len(blocks), target, layer, last):
                for position, block in enumerate(ids):
                    host_phlnd[position] = kv_bhlnd[block]
            for head, digest in enumerate(digests):
                start = target + head * stride + layer * layer_bytes
                digest.update(bytes_at(start, (last - layer) * layer_bytes).data)
        return [Checksum(digest.digest()) for digest in digests]

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks, but those to skip, to the KV tensors."""
        ids = kernel_blocks(blocks, self._ratio)
        for kv_bhlnd, host_phlnd in self._arrays(len(blocks), source, 0, self._layers):
            for position, block in enumerate(ids):
                if block != SKIP:
                    kv_bhlnd[block] = host_phlnd[position]

    def _arrays(
        self, blocks: int, host: int, first: int, last: int
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Yield the KV and the host memory of a range of layers, plane by plane.

        The first index is the block's id in the one, its position in the chunk in the other.
        """
        geometry, layout = self._layout.geometry, self._layout
        item, tokens = geometry.item_bytes, geometry.kernel_block_size
        chunk_tokens = layout.block_size * blocks
        layer_bytes = layout.shard_bytes(blocks) // self._layers
        start = host
        for head_dim, stacks in zip(geometry.head_dims, self._planes, strict=True):
            row = head_dim * item
            for at, kv_bhlnd in stacks:
                low, high = max(first, at), min(last, at + kv_bhlnd.shape[2])
                if low >= high:
                    continue
                host_phlnd = array_at(
                    start + low * layer_bytes,
                    item,
                    (blocks * self._ratio, self._heads, high - low, tokens, head_dim),
                    (tokens * row, layout.shard_stride(blocks), layer_bytes, row, item),
                )
                yield kv_bhlnd[:, :, low - at : high - at], host_phlnd
            start += chunk_tokens * row


def _layer_stacks(planes: Sequence[Plane]) -> list[tuple[int, npt.NDArray[np.uint8]]]:
    """Return arrays `[block, head, layer, token, head_dim]`, with the first layer of each.

    Layers that lie at equal distances with equal strides are one array: all of them where the
    engine has one allocation.
    """
    stacks, first = [], 0
    while first < len(planes):
        plane, end, distance = planes[first], first + 1, 0
        while end < len(planes) and planes[end].strides == plane.strides:
            step = planes[end].pointer - planes[end - 1].pointer
            if end > first + 1 and step != distance:
                break
            distance, end = step, end + 1
        block, head, token, element = plane.strides
        blocks, heads, tokens, head_dim = plane.view.shape
        array = array_at(
            plane.pointer,
            plane.item_bytes,
            (blocks, heads, end - first, tokens, head_dim),
            (block, head, distance, token, element),
        )
        stacks.append((first, array))
        first = end
    return stacks


def array_at(
    address: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """Return memory at an address as an array of elements of `item` bytes; it owns nothing."""
    return np.asarray(_Memory(address, item, shape, strides))


class _Memory:
    """Memory by numpy's array interface: it takes any strides."""

    def __init__(
        self, address: int, item: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|u{item}" if item == 1 else f"<u{item}",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
