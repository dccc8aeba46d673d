# SPDX-License-Identifier: Apache-2.0
"""The paged layout: the place of each layer's and block's page in the engine's KV tensors."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np
import torch

from kvhaven.errors import LayoutError
from kvhaven.layouts.base import Pieces, shard_stride
from kvhaven.layouts.tensor_shapes import LayerCache, layer_cache
from kvhaven.types import align_up


@dataclass(frozen=True)
class PageRun:
    """Pages, one per block: page `b` has `page_bytes` at `pointer + b * block_stride_bytes`."""

    layer: str
    """Name of the first layer that owns these bytes (others may alias them).

    A layer has several runs if K and V, or its heads, lie apart outside of the blocks; then the
    name tells which: `layers.0 K`, `layers.0 head 3`.
    """
    pointer: int
    """Device address of block 0."""
    block_stride_bytes: int
    page_bytes: int

    @property
    def dense(self) -> bool:
        """Whether consecutive blocks are adjacent, so that they can be copied as one piece."""
        return self.block_stride_bytes == self.page_bytes

    @property
    def span_bytes(self) -> tuple[int, int]:
        """Stride and page size: layers with equal values share their copy plan."""
        return self.block_stride_bytes, self.page_bytes


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """All pages of one rank's KV caches, for the blocks of one KV group.

    A shard's payload in the paged format is `[run][block][page]`: for each of `layers` in order,
    the pages of the chunk's blocks in order, without gaps. A layer whose K and V lie apart has two
    runs, K before V; a layer whose heads lie apart has a run for each head.
    """

    layers: tuple[PageRun, ...]
    num_blocks: int
    block_size: int
    """Tokens in a block."""
    fingerprint: str
    """Hex SHA-256 of the form of pages; equal for ranks that hold other layers of the same model.

    It does not cover the number of layers: the shard table has the layers and their bytes.
    """
    description: str
    """The layout in words, with the number of layers."""
    tensors: tuple[torch.Tensor, ...]
    """The engine's own tensors, one view for each of `layers`; the first dimension is the
    blocks."""
    caches: tuple[LayerCache, ...]
    """The registered tensors, one entry per layer, without layers that only alias others."""

    shards = 1
    """This rank holds its whole part of a chunk in one shard."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(run.page_bytes for run in self.layers)

    def shard_bytes(self, blocks: int) -> int:
        """Return the size in bytes of a payload of `blocks` blocks."""
        return self.block_bytes * blocks

    def shard_stride(self, blocks: int) -> int:
        """Return the bytes that the payload takes up in a chunk's extent."""
        return shard_stride(self.shard_bytes(blocks))

    def payload_bytes(self, blocks: int) -> int:
        """Return the size in bytes of a payload of `blocks` blocks."""
        return self.shard_bytes(blocks)

    def of_tail(self, tokens: int, chunk_size: int) -> "PagedLayout":  # noqa: ARG002 - the contract's
        """Return this layout: a tail is a chunk of fewer blocks, the last one partly filled."""
        return self

    def tail_tokens(self, tokens: int) -> int:
        """Return the tokens of the tail's blocks."""
        return align_up(tokens, self.block_size)

    @cached_property
    def pieces(self) -> Pieces:
        """One piece per page."""
        page = np.array([run.page_bytes for run in self.layers], dtype=np.int64)
        return Pieces(
            device=np.array([run.pointer for run in self.layers], dtype=np.int64),
            block_stride=np.array([run.block_stride_bytes for run in self.layers], dtype=np.int64),
            piece_stride=page,
            size=page,
            shard=np.zeros_like(page),
            before=np.cumsum(page) - page,
            per_block=1,
            kernel_blocks=1,
        )


def describe_kv_caches(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    *,
    layer_specs: Mapping[str, tuple[int, int]],
    num_blocks: int,
    kernel_tag: str,
    form: str | None = None,
) -> PagedLayout:
    """Derive the paged layout of the tensors that an engine registers.

    Each layer has one tensor, or a pair of K and V. The `form`, a key of `tensor_shapes.FORMS`,
    names the dimensions and is known from the attention backend; without it, only forms that the
    number of dimensions determines are accepted: `BHNC` of vLLM 0.29 and newer, `BNC`, and pairs.
    The dimension of the blocks is `num_blocks` long, or a multiple of it if the kernel's blocks are
    smaller than the engine's. `layer_specs` gives each layer's `(page_size_bytes, block_size)` by
    the engine's own specs, the block size in tokens; `kernel_tag` distinguishes page layouts of
    equal shape (`Device.kernel_tag`, an attention backend).

    Layers that alias the same bytes (cross-layer KV sharing) become one. Raises `LayoutError`, with
    the numbers, for every inconsistency; nothing is guessed.
    """
    if not kv_caches:
        raise LayoutError("the engine registered no KV caches")
    layers: dict[tuple[tuple[int, ...], ...], _Layer] = {}
    block_sizes = set()
    for name, registered in kv_caches.items():
        if name not in layer_specs:
            raise LayoutError(f"{name}: registered, but the engine gives no KV spec for it")
        page_bytes, block_size = layer_specs[name]
        block_sizes.add(block_size)
        layer = _read_layer(layer_cache(name, registered, form, num_blocks), page_bytes)
        layers.setdefault(layer.place, layer)
    if len(block_sizes) > 1:
        raise LayoutError(
            f"layers of different block sizes ({sorted(block_sizes)} tokens); expected one size"
        )
    runs = tuple(run for layer in layers.values() for run in layer.runs)
    _refuse_overlaps(runs, num_blocks)
    forms = [layer.form for layer in layers.values()]
    (block_size,) = block_sizes
    common = f"paged block={block_size} kernel={kernel_tag or 'any'} "
    page = common + ", ".join(sorted(set(forms)))
    return PagedLayout(
        layers=runs,
        num_blocks=num_blocks,
        block_size=block_size,
        fingerprint=sha256(page.encode()).hexdigest(),
        description=common
        + ", ".join(f"{len(list(same))} x {form}" for form, same in itertools.groupby(forms)),
        tensors=tuple(part for layer in layers.values() for part in layer.parts),
        caches=tuple(layer.cache for layer in layers.values()),
    )


def page_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions in the order of memory, outermost first, without those of size 1."""
    strides = tensor.stride()
    order = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return tuple(sorted(order, key=lambda dim: -strides[dim]))


@dataclass(frozen=True, eq=False)
class _Layer:
    """The runs of one layer."""

    cache: LayerCache
    runs: tuple[PageRun, ...]
    parts: tuple[torch.Tensor, ...]
    """The tensor's part in each run; the first dimension is the blocks."""
    form: str
    """The form of its pages, in words."""

    @property
    def place(self) -> tuple[tuple[int, ...], ...]:
        """The place in memory; equal for layers that alias the same bytes."""
        return tuple((run.pointer, *run.span_bytes) for run in self.runs)


def _read_layer(cache: LayerCache, spec_page_bytes: int) -> _Layer:
    """Return the runs of a layer: as few as possible with dense pages."""
    found = f"{cache.found}, {spec_page_bytes} bytes a page by its spec"
    runs, parts, forms = [], [], []
    for plane, dimensions, view in cache.parts():
        for head, part in _dense_parts(view, dimensions, found):
            name = " ".join(filter(None, (cache.layer, plane, head)))
            run, inside = _read_part(name, part, cache.num_blocks, found)
            runs.append(run)
            parts.append(part)
            forms.append(inside)
    page_bytes = sum(run.page_bytes for run in runs)
    if page_bytes != spec_page_bytes:
        raise LayoutError(
            f"{found}; the tensor has {page_bytes} bytes a page: several layers or padding "
            "share a page"
        )
    different = " and ".join(dict.fromkeys(forms))
    form = different if len(runs) == 1 else f"{len(runs)} runs of {different}"
    return _Layer(cache, tuple(runs), tuple(parts), form)


def _dense_parts(
    tensor: torch.Tensor, dimensions: str, found: str
) -> list[tuple[str, torch.Tensor]]:
    """Return the parts of a tensor whose pages are one piece of memory each, with their names.

    The blocks are the tensor's first dimension. If heads lie outside of the blocks, or layers lie
    between heads (LHBNC, BHLNC), each head has its own page, and every head is a part.
    """
    dense = 1
    for dim in reversed([dim for dim in page_order(tensor) if dim]):
        if tensor.stride(dim) == dense:
            dense *= tensor.shape[dim]
            continue
        if dimensions[dim] != "H":
            raise LayoutError(
                f"{found}; a page is not one piece of memory (a stride of {tensor.stride(dim)} "
                f"elements where {dense} would follow): layers or padding lie between. Ask the "
                "engine for another layout: VLLM_KV_CACHE_LAYOUT=LBHNC (HND) or LBNHC (NHD)"
            )
        rest = dimensions.replace("H", "")
        return [
            (f"head {head}", part)
            for head in range(tensor.shape[dim])
            for _, part in _dense_parts(tensor.select(dim, head), rest, found)
        ]
    return [("", tensor)]


def _read_part(name: str, tensor: torch.Tensor, num_blocks: int, found: str) -> tuple[PageRun, str]:
    """Return a run of dense pages, and the form of a page in words."""
    item = tensor.element_size()
    ratio = tensor.shape[0] // num_blocks
    part_bytes, stride_bytes = math.prod(tensor.shape[1:]) * item, tensor.stride(0) * item
    page_bytes = part_bytes * ratio
    if ratio > 1 and stride_bytes != part_bytes:
        raise LayoutError(
            f"{found}; {ratio} kernel blocks make one block, but {part_bytes} bytes each lie "
            f"{stride_bytes} apart"
        )
    if tensor.shape[0] > 1 and stride_bytes < part_bytes:
        raise LayoutError(
            f"{found}; blocks of {part_bytes} bytes start every {stride_bytes} bytes: they overlap"
        )
    block_stride = stride_bytes * ratio if num_blocks > 1 else page_bytes
    order = "".join(str(dim) for dim in page_order(tensor) if dim)
    inside = "x".join(str(size) for size in tensor.shape[1:])
    dtype = str(tensor.dtype).removeprefix("torch.")
    form = f"{dtype}[{ratio}x{inside}] order {order}, {page_bytes} bytes"
    return PageRun(name, tensor.data_ptr(), block_stride, page_bytes), form


def _refuse_overlaps(layers: Sequence[PageRun], num_blocks: int) -> None:
    """Raise `LayoutError` if two layers share bytes of a page, also with different strides."""
    for one, other in itertools.combinations(layers, 2):
        low, high = sorted((one, other), key=lambda run: run.pointer)
        distance = high.pointer - low.pointer
        if distance >= low.block_stride_bytes * (num_blocks - 1) + low.page_bytes:
            continue
        stride = math.gcd(low.block_stride_bytes, high.block_stride_bytes)
        offset = distance % stride
        if offset < low.page_bytes or stride - offset < high.page_bytes:
            raise LayoutError(
                f"{low.layer} and {high.layer} share bytes of their pages: they start "
                f"{distance} bytes apart, with {low.page_bytes} and {high.page_bytes} bytes a "
                f"page every {low.block_stride_bytes} and {high.block_stride_bytes} bytes"
            )
