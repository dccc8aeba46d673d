# SPDX-License-Identifier: Apache-2.0
"""The paged layout: where the page of each layer and block lies in the engine's KV tensors."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from kvhaven.errors import LayoutError


@dataclass(frozen=True)
class PageRun:
    """The pages of one layer: page `b` has `page_bytes` bytes at `pointer + b * stride`."""

    layer: str
    """Name of the first layer that owns these bytes (others may alias them)."""
    pointer: int
    """Device address of block 0."""
    block_stride_bytes: int
    page_bytes: int

    @property
    def dense(self) -> bool:
        """Whether neighbouring blocks touch, so that they can be copied as one piece."""
        return self.block_stride_bytes == self.page_bytes

    @property
    def span_bytes(self) -> tuple[int, int]:
        """Stride and page size: layers that agree on both share their copy plan."""
        return self.block_stride_bytes, self.page_bytes


@dataclass(frozen=True, eq=False)
class PagedLayout:
    """All pages of one rank's KV caches, for the blocks of one KV group.

    A shard's payload in the paged format is `[layer][block][page]`: for each of `layers` in
    order, the pages of the chunk's blocks in order, without gaps.
    """

    layers: tuple[PageRun, ...]
    num_blocks: int
    block_size: int
    """Tokens in a block."""
    fingerprint: str
    """Equal only for layouts whose payloads may be exchanged byte by byte (hex SHA-256)."""
    description: str
    """What the fingerprint was computed from, for people and for the namespace's fields."""
    tensors: tuple[torch.Tensor, ...]
    """The engine's own tensors, one for each of `layers`; holding them keeps the bytes alive."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(run.page_bytes for run in self.layers)

    def payload_bytes(self, blocks: int) -> int:
        """Return the size of a payload of that many blocks."""
        return self.block_bytes * blocks


def describe_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    *,
    layer_specs: Mapping[str, tuple[int, int]],
    num_blocks: int,
    kernel_tag: str,
) -> PagedLayout:
    """Work out the paged layout of the tensors that vLLM 0.29 and newer registers.

    Each tensor is a view `[B, H, N, C]`: blocks, KV heads of the rank, tokens, content (K next
    to V). B is `num_blocks`, or a multiple where the kernel's blocks are smaller than the
    engine's. `layer_specs` gives each layer's `(page_size_bytes, block_size)` by the engine's
    own specs, the block size in tokens; `kernel_tag` is what the inside of a page depends on
    besides its shape (`Device.kernel_tag`, an attention backend).

    Layers that alias the same bytes (cross-layer KV sharing) become one. Raises `LayoutError`,
    with the numbers, for everything that does not add up; nothing is guessed.
    """
    if not kv_caches:
        raise LayoutError("the engine registered no KV caches")
    runs: dict[tuple[int, int, int], PageRun] = {}
    tensors, forms, block_sizes = [], [], set()
    for layer, tensor in kv_caches.items():
        if layer not in layer_specs:
            raise LayoutError(f"{layer}: registered, but the engine gives no KV spec for it")
        page_bytes, block_size = layer_specs[layer]
        block_sizes.add(block_size)
        run, form = _read_layer(layer, tensor, page_bytes, num_blocks)
        place = (run.pointer, *run.span_bytes)
        if place not in runs:
            runs[place] = run
            tensors.append(tensor)
            forms.append(form)
    if len(block_sizes) > 1:
        raise LayoutError(f"layers of unlike block sizes ({sorted(block_sizes)} tokens)")
    layers = tuple(runs.values())
    _refuse_overlaps(layers, num_blocks)
    grouped = ((form, len(list(same))) for form, same in itertools.groupby(forms))
    (block_size,) = block_sizes
    description = f"paged block={block_size} kernel={kernel_tag or 'any'} " + ", ".join(
        f"{count} x {form}" for form, count in grouped
    )
    return PagedLayout(
        layers=layers,
        num_blocks=num_blocks,
        block_size=block_size,
        fingerprint=sha256(description.encode()).hexdigest(),
        description=description,
        tensors=tuple(tensors),
    )


def page_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's dimensions in the order of memory, outermost first, without size 1."""
    strides = tensor.stride()
    order = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return tuple(sorted(order, key=lambda dim: -strides[dim]))


def _read_layer(
    layer: str, tensor: torch.Tensor, spec_page_bytes: int, num_blocks: int
) -> tuple[PageRun, str]:
    """Return the pages of a layer, and in words what the inside of a page looks like."""
    item = tensor.element_size()
    found = (
        f"{layer}: shape {tuple(tensor.shape)}, strides {tensor.stride()} of {tensor.dtype} "
        f"({item} bytes), {num_blocks} blocks, {spec_page_bytes} bytes a page by its spec"
    )
    if tensor.dim() < 2 or tensor.numel() == 0 or tensor.stride(-1) != 1:  # noqa: PLR2004 - [B, C]
        raise LayoutError(f"{found}; expected [blocks, heads, tokens, content], content dense")
    if tensor.shape[0] % num_blocks:
        raise LayoutError(
            f"{found}; the first dimension is not the blocks (K and V apart, as older engines "
            "have it, are not served; vLLM 0.29 and newer is)"
        )
    ratio = tensor.shape[0] // num_blocks
    content = [(tensor.stride(dim), tensor.shape[dim]) for dim in page_order(tensor) if dim]
    dense = 1
    for stride, size in reversed(content):
        if stride != dense:
            raise LayoutError(
                f"{found}; a page is not one piece of memory (a stride of {stride} elements "
                f"where {dense} would follow): heads or layers lie between. Ask the engine for "
                "another layout: VLLM_KV_CACHE_LAYOUT=LBHNC (HND) or LBNHC (NHD)"
            )
        dense *= size
    part_bytes, stride_bytes = dense * item, tensor.stride(0) * item
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
    if page_bytes != spec_page_bytes:
        raise LayoutError(
            f"{found}; the tensor has {page_bytes} bytes a page: several layers or padding "
            "share a page"
        )
    block_stride = stride_bytes * ratio if num_blocks > 1 else page_bytes
    order = "".join(str(dim) for dim in page_order(tensor) if dim)
    inside = "x".join(str(size) for size in tensor.shape[1:])
    dtype = str(tensor.dtype).removeprefix("torch.")
    form = f"{dtype}[{ratio}x{inside}] order {order}, {page_bytes} bytes"
    return PageRun(layer, tensor.data_ptr(), block_stride, page_bytes), form


def _refuse_overlaps(layers: Sequence[PageRun], num_blocks: int) -> None:
    """Refuse two layers that share some bytes of a page; unlike strides may not interleave."""
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
