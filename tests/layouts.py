# SPDX-License-Identifier: Apache-2.0
"""Every layout that an engine may have, built by torch alone, for the tests of layouts."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kvhaven.devices.plan import bytes_at
from kvhaven.layouts import (
    HeadGeometry,
    PagedLayout,
    PortableLayout,
    describe_kv_caches,
    head_geometry,
)
from kvhaven.layouts.groups import portable_layout

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""The dimensions `[L, B, H, N, C]` in the order of memory, as vLLM 0.29 and newer names them."""

Registered = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Sizes(NamedTuple):
    """How much KV one rank of an engine has."""

    layers: int = 2
    blocks: int = 6
    tokens: int = 16
    """Tokens in a block."""
    heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16


class Caches(NamedTuple):
    """KV tensors of an engine."""

    registered: list[Registered]
    """What the engine hands over for each layer."""
    planes: list[list[torch.Tensor]]
    """For each layer K and V (or the latent) as views `[blocks, tokens, heads, head_dim]`."""


class Kind(NamedTuple):
    """A layout as some engine has it."""

    backend: str
    build: Callable[[Sizes], Caches]
    form: str | None = None
    kernel_tag: str = ""
    latent: bool = False
    kernel_blocks: int = 1
    runs: int = 1
    """Runs of pages that the paged format needs a layer; 0 for one a head."""


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, so that nothing is right by chance."""
    item = dtype.itemsize
    raw = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * item), dtype=torch.uint8, generator=_RANDOM
    )
    return raw.view(dtype)


_RANDOM = torch.Generator().manual_seed(20)


def _ordered(order: str, sizes: Sizes, v_dim: int | None = None) -> Caches:
    """0.29 and newer: `[B, H, N, C]`, K next to V, in any order of memory."""
    value_dim = sizes.head_dim if v_dim is None else v_dim
    shape = (sizes.layers, sizes.blocks, sizes.heads, sizes.tokens, sizes.head_dim + value_dim)
    raw = filled(sizes.dtype, *(shape[dim] for dim in ORDERS[order]))
    views = list(raw.permute([ORDERS[order].index(dim) for dim in range(5)]))
    planes = [
        [view[..., : sizes.head_dim].transpose(1, 2), view[..., sizes.head_dim :].transpose(1, 2)]
        for view in views
    ]
    return Caches(list(views), planes if value_dim else [plane[:1] for plane in planes])


def _split(sizes: Sizes, kernel_blocks: int) -> Caches:
    """As LBHNC, but each of the engine's blocks is several of the kernel's."""
    tokens = sizes.tokens // kernel_blocks
    blocks = sizes.blocks * kernel_blocks
    whole = _ordered("LBHNC", sizes._replace(blocks=blocks, tokens=tokens))
    planes = [
        [
            plane.as_strided(
                (sizes.blocks, kernel_blocks, *plane.shape[1:]),
                (plane.stride(0) * kernel_blocks, *plane.stride()),
            )
            for plane in layer
        ]
        for layer in whole.planes
    ]
    return Caches(whole.registered, planes)


def _outside(sizes: Sizes) -> Caches:
    """FlashAttention to 0.22, an allocation a layer."""
    raw = [
        filled(sizes.dtype, 2, sizes.blocks, sizes.tokens, sizes.heads, sizes.head_dim)
        for _ in range(sizes.layers)
    ]
    return Caches(list(raw), [[layer[0], layer[1]] for layer in raw])


def _inside(sizes: Sizes, *, heads_first: bool) -> Caches:
    """FlashAttention, FlashInfer and Triton to 0.25."""
    tokens, heads = sizes.tokens, sizes.heads
    inner = (heads, tokens) if heads_first else (tokens, heads)
    raw = [
        filled(sizes.dtype, sizes.blocks, 2, *inner, sizes.head_dim) for _ in range(sizes.layers)
    ]
    views = [layer.transpose(2, 3) if heads_first else layer for layer in raw]
    return Caches(list(views), [[view[:, 0], view[:, 1]] for view in views])


def _cpu(sizes: Sizes) -> Caches:
    """0.29 and newer on a CPU: all K of a head and block in columns, then all V in rows."""
    half = sizes.tokens * sizes.head_dim
    raw = filled(sizes.dtype, sizes.layers, sizes.blocks, sizes.heads, 2 * half)
    views = raw.view(*raw.shape[:3], sizes.tokens, 2 * sizes.head_dim)
    keys = raw[..., :half].view(*raw.shape[:3], sizes.head_dim, sizes.tokens)
    values = raw[..., half:].view(*raw.shape[:3], sizes.tokens, sizes.head_dim)
    return Caches(
        list(views),
        [
            [key.permute(0, 3, 1, 2), value.permute(0, 2, 1, 3)]
            for key, value in zip(keys, values, strict=True)
        ],
    )


def _old_cpu(sizes: Sizes) -> Caches:
    """The CPU to 0.22."""
    shape = (2, sizes.blocks, sizes.heads, sizes.tokens, sizes.head_dim)
    raw = [filled(sizes.dtype, *shape) for _ in range(sizes.layers)]
    columns = [
        layer[0].view(*shape[1:3], sizes.head_dim, sizes.tokens).permute(0, 3, 1, 2)
        for layer in raw
    ]
    return Caches(
        list(raw),
        [[key, layer[1].permute(0, 2, 1, 3)] for key, layer in zip(columns, raw, strict=True)],
    )


def _latent(sizes: Sizes) -> Caches:
    """MLA before 0.29, and on Gaudi."""
    raw = [
        filled(sizes.dtype, sizes.blocks, sizes.tokens, sizes.head_dim) for _ in range(sizes.layers)
    ]
    return Caches(list(raw), [[layer.unsqueeze(2)] for layer in raw])


def _gaudi(sizes: Sizes) -> Caches:
    """Gaudi: `[slots and some padding, heads, head_dim]`, K and V apart, seen by blocks."""
    slots = sizes.blocks * sizes.tokens
    pairs: list[Registered] = []
    planes = []
    for _ in range(sizes.layers):
        both = [
            filled(sizes.dtype, slots + 3, sizes.heads, sizes.head_dim)[:slots].view(
                sizes.blocks, sizes.tokens, sizes.heads, sizes.head_dim
            )
            for _ in range(2)
        ]
        pairs.append((both[0], both[1]))
        planes.append(both)
    return Caches(pairs, planes)


KINDS: dict[str, Kind] = {
    "LBHNC": Kind("FlashAttentionBackend", functools.partial(_ordered, "LBHNC")),
    "LBNHC": Kind("TritonAttentionBackend", functools.partial(_ordered, "LBNHC")),
    "LHBNC": Kind("RocmAiterUnifiedAttentionBackend", functools.partial(_ordered, "LHBNC"), runs=0),
    "BLHNC": Kind("FlashInferBackend", functools.partial(_ordered, "BLHNC")),
    "BLNHC": Kind("FlashAttentionBackend", functools.partial(_ordered, "BLNHC")),
    "BHLNC": Kind("FlexAttentionBackend", functools.partial(_ordered, "BHLNC"), runs=0),
    "kernel blocks": Kind(
        "FlashAttentionBackend", functools.partial(_split, kernel_blocks=4), kernel_blocks=4
    ),
    "unlike K and V": Kind(
        "FlashAttentionDiffKVBackend", functools.partial(_ordered, "LBNHC", v_dim=4)
    ),
    "FlashAttention 0.22": Kind("FlashAttentionBackend", _outside, "2BNHD", runs=2),
    "FlashAttention 0.25": Kind(
        "FlashAttentionBackend", functools.partial(_inside, heads_first=False), "B2NHD"
    ),
    "FlashInfer 0.25, HND": Kind(
        "FlashInferBackend", functools.partial(_inside, heads_first=True), "B2NHD"
    ),
    "CPU": Kind("CPUAttentionBackend", _cpu, kernel_tag="cpu-x86_64+avx512"),
    "CPU 0.22": Kind(
        "CPUAttentionBackend", _old_cpu, "2BHND", kernel_tag="cpu-x86_64+avx2", runs=2
    ),
    "MLA": Kind("FlashMLABackend", functools.partial(_ordered, "LBHNC", v_dim=0), latent=True),
    "MLA 0.28": Kind("TritonMLABackend", _latent, latent=True),
    "Gaudi": Kind("HPUAttentionBackendV1", _gaudi, kernel_tag="hpu", runs=2),
    "Gaudi MLA": Kind("HPUMLAAttentionBackend", _latent, kernel_tag="hpu", latent=True),
}


class Engine(NamedTuple):
    """One rank's KV, with its layouts."""

    kind: Kind
    sizes: Sizes
    caches: Caches
    paged: PagedLayout
    portable: PortableLayout


def engine(name: str, sizes: Sizes = Sizes()) -> Engine:  # noqa: B008 - it cannot be changed
    """Build the KV tensors of a kind, with random content."""
    kind = KINDS[name]
    sizes = sizes._replace(heads=1) if kind.latent else sizes
    caches = kind.build(sizes)
    paged, portable = described(kind, sizes, caches, caches.registered)
    return Engine(kind, sizes, caches, paged, portable)


def described(
    kind: Kind, sizes: Sizes, caches: Caches, registered: Sequence[Registered]
) -> tuple[PagedLayout, PortableLayout]:
    """Return both layouts of tensors that are the registered ones of `caches`, or equal them."""
    head_dims = [plane.shape[-1] for plane in caches.planes[0]]
    page_bytes = sizes.tokens * sizes.heads * sum(head_dims) * sizes.dtype.itemsize
    tensors = {f"layers.{index}": layer for index, layer in enumerate(registered)}
    paged = describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (page_bytes, sizes.tokens)),
        num_blocks=sizes.blocks,
        kernel_tag=kind.kernel_tag,
        form=kind.form,
    )
    geometry = head_geometry(
        paged,
        backend=kind.backend,
        kernel_tag=kind.kernel_tag,
        heads=sizes.heads,
        head_dims=head_dims,
    )
    return paged, PortableLayout(paged, geometry)


def grouped(layout: PortableLayout, groups: Sequence[Sequence[int]]) -> PortableLayout:
    """Return the layout of KV groups that share the memory of one group's layers.

    `groups` are the layers of each by their numbers in the model, in the order of the memory.
    """
    geometry = layout.geometry
    renamed = [
        HeadGeometry(
            tuple(
                tuple(replace(plane, layer=f"layers.{number}") for plane in planes)
                for number, planes in zip(numbers, geometry.layers, strict=False)
            ),
            geometry.kernel_blocks,
        )
        for numbers in groups
    ]
    return portable_layout(layout.paged, renamed)


def contents(caches: Caches, blocks: Sequence[int]) -> list[list[torch.Tensor]]:
    """KV of blocks as bits, `[blocks * tokens, heads, head_dim]` for each layer and plane."""
    return [
        [_bits(plane)[list(blocks)].flatten(0, -3).clone() for plane in layer]
        for layer in caches.planes
    ]


def reference_shards(
    caches: Caches, blocks: Sequence[int], tokens: int | None = None
) -> list[torch.Tensor]:
    """The canonical shard of each head, as bytes: `[layer][plane][token][head_dim]`.

    With `tokens`, of a tail: of the first so many tokens.
    """
    kv = contents(caches, blocks)
    heads = kv[0][0].shape[1]
    return [
        torch.cat(
            [
                plane[:tokens, head].contiguous().view(torch.uint8).flatten()
                for layer in kv
                for plane in layer
            ]
        )
        for head in range(heads)
    ]


def all_bytes(caches: Caches) -> list[torch.Tensor]:
    """Every byte of the allocations that hold the KV, beside it too."""
    tensors = [
        tensor
        for registered in caches.registered
        for tensor in ([registered] if isinstance(registered, torch.Tensor) else registered)
    ]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return [
        torch.from_numpy(bytes_at(address, tensor.untyped_storage().nbytes()).copy())
        for address, tensor in storages.items()
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
