# SPDX-License-Identifier: Apache-2.0
"""Page layouts of attention backends: the planes in a page, and their places.

Taken from the sources of vLLM 0.32 and vllm-gaudi (how each backend splits K from V), and tested
where a machine was available (`tests/unit/test_layouts_cpu_kernel.py`). A backend that is not
listed here is refused.
"""

from collections.abc import Sequence

import torch

from kvhaven.errors import LayoutError
from kvhaven.layouts.geometry import HeadGeometry, Plane, require_alike
from kvhaven.layouts.paged import PagedLayout
from kvhaven.layouts.tensor_shapes import LayerCache, Part

_CPU = "CPUAttentionBackend"

PLAIN = frozenset(
    {
        "FlashAttentionBackend",
        "FlashAttentionDiffKVBackend",
        "FlashInferBackend",
        "FlexAttentionBackend",
        "HPUAttentionBackend",
        "HPUAttentionBackendV1",
        "RocmAiterUnifiedAttentionBackend",
        "TritonAttentionBackend",
        "TritonAttentionDiffKVBackend",
    }
)
"""Backends that keep K and V of a head and token dense, where the tensor's shape says: next to each
other in the content, or as planes. By class name, because several backends share a name: ROCm's
AITER backend calls itself FLASH_ATTN."""

LATENT = frozenset(
    {
        "AMXMLABackend",
        "CPUMLABackend",
        "CutlassMLABackend",
        "FlashAttnMLABackend",
        "FlashInferMLABackend",
        "FlashMLABackend",
        "HPUMLAAttentionBackend",
        "TritonMLABackend",
        "XPUFlashAttnMLABackend",
    }
)
"""MLA backends, which keep one dense latent per token."""

PRIVATE = {
    "AiterFlashAttentionBackend": "AITER may shuffle K and V to the order of its kernels",
    "RocmAttentionBackend": "its kernels keep K in slices of 16 bytes of all tokens",
    "RocmSegmentedAttentionBackend": "it keeps the heads in the content",
    "B12xPagedAttentionBackend": "it keeps the heads in the content",
    "HpcAttentionBackend": "the page layout of its kernels was not examined",
    "TurboQuantAttentionBackend": "its pages are quantised and carry their scales",
    "UltraQuantAttentionBackend": "its pages are quantised and carry their scales",
    "FlashMLASparseBackend": "its pages may be quantised and carry their scales",
}
"""Backends whose page layout is private, with the reason."""


def head_geometry(
    layout: PagedLayout,
    *,
    backend: str,
    kernel_tag: str,
    heads: int,
    head_dims: Sequence[int],
) -> HeadGeometry:
    """Return the place of every head and token of a layout.

    `backend` is the class name of the engine's attention backend, `kernel_tag` the device's.
    `heads` and `head_dims` are this rank's KV heads and the elements of K and of V (of the latent
    alone for MLA) by the engine's own specs; the tensors must agree.

    Raises `LayoutError`, which names the setting to change, if the page layout is private to a
    kernel or unknown.
    """
    if backend in PRIVATE:
        raise _refusal(f"{backend}: its page layout is private ({PRIVATE[backend]})")
    if backend not in PLAIN | LATENT | {_CPU}:
        known = ", ".join(sorted(PLAIN | LATENT | {_CPU}))
        raise _refusal(f"{backend}: unknown page layout; expected one of {known}")
    if backend == _CPU:
        _require_plain_cpu(kernel_tag, layout)
    names = ("latent",) if backend in LATENT else ("K", "V")
    if len(head_dims) != len(names):
        raise _refusal(f"{backend} keeps {' and '.join(names)}, but head_dims are {head_dims}")
    geometry = HeadGeometry(
        tuple(_planes(cache, backend, names, heads, head_dims) for cache in layout.caches),
        kernel_blocks=layout.caches[0].size("B") // layout.num_blocks,
    )
    require_alike(geometry)
    tokens = geometry.kernel_block_size * geometry.kernel_blocks
    if tokens != layout.block_size:
        raise _refusal(
            f"{layout.caches[0].found}: {geometry.kernel_blocks} kernel blocks of "
            f"{geometry.kernel_block_size} tokens are not the engine's block of "
            f"{layout.block_size}"
        )
    return geometry


def _require_plain_cpu(kernel_tag: str, layout: PagedLayout) -> None:
    """Raise `LayoutError` for CPUs whose K is not in plain columns."""
    parts = kernel_tag.split("+")
    if parts[0] != "cpu-x86_64":
        raise _refusal(
            f"{_CPU} on {kernel_tag}: its page layout is known for x86_64 only (ARM's kernels pack "
            "K for bfloat16)"
        )
    # The tile instructions multiply bfloat16 only: vLLM uses other kernels for other types.
    packed = [cache for cache in layout.caches if cache.tensors[0].dtype is torch.bfloat16]
    if "amx" in parts and packed:
        raise _refusal(
            f"{_CPU} on {kernel_tag}: with AMX it packs bfloat16 K for the tile instructions (with "
            "--dtype float16 or float32 it does not)"
        )


def _planes(
    cache: LayerCache, backend: str, names: Sequence[str], heads: int, head_dims: Sequence[int]
) -> tuple[Plane, ...]:
    """Return the planes of a layer. Raises `LayoutError` if its shape does not agree."""
    for tensor in cache.tensors:
        if tensor.element_size() == 1:
            raise _refusal(
                f"{cache.found}: KV in fewer than 16 bits; its scales are not stored, and the "
                "meaning of its bytes differs between platforms"
            )
    views = [view for part in cache.parts() for view in _split(part, backend, cache, head_dims)]
    if len(views) != len(names):
        raise _refusal(f"{cache.found}: {len(views)} planes, but {backend} keeps {len(names)}")
    for view, head_dim in zip(views, head_dims, strict=True):
        if (view.shape[1], view.shape[3]) != (heads, head_dim):
            raise _refusal(
                f"{cache.found}: {view.shape[1]} heads of {view.shape[3]} elements; the engine's "
                f"specs say {heads} of {' and '.join(map(str, head_dims))}"
            )
    return tuple(Plane(cache.layer, name, view) for name, view in zip(names, views, strict=True))


def _split(
    part: Part, backend: str, cache: LayerCache, head_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return the planes in a part as views `[kernel blocks, heads, tokens, head_dim]`."""
    match part.dimensions:
        case "BNC":
            return [part.view.unsqueeze(1)]
        case "BNHD":
            return [part.view.transpose(1, 2)]
        case "B2NHD":
            return [plane.transpose(1, 2) for plane in part.view.unbind(1)]
        case "BHND":
            # vLLM's CPU backend to 0.22, whose kernel has always written K in columns.
            keys = backend == _CPU and part.name == "K"
            return [_columns(part.view, cache) if keys else part.view]
        case _:
            return _split_content(part.view, backend, cache, head_dims)


def _split_content(
    part: torch.Tensor, backend: str, cache: LayerCache, head_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Return the planes in the content of `BHNC`."""
    content = part.shape[3]
    if content != sum(head_dims):
        raise _refusal(
            f"{cache.found}: {content} elements of content; the engine's specs say "
            f"{' and '.join(map(str, head_dims))}"
        )
    if backend != _CPU:
        return [part[..., : head_dims[0]], part[..., head_dims[0] :]][: len(head_dims)]
    # In memory, a head of a block is all its K in columns, then all its V in rows, although
    # the tensor's shape has them alternate.
    tokens = part.shape[2]
    if part.stride()[2:] != (content, 1) or len(set(head_dims)) > 1:
        raise _refusal(
            f"{cache.found}: K and V of a head and block are not one piece of equal halves"
        )
    halves = part.as_strided(
        (*part.shape[:2], 2, tokens, content // 2),
        (*part.stride()[:2], tokens * content // 2, content // 2, 1),
    )
    return [_columns(halves[:, :, 0], cache), halves[:, :, 1]]


def _columns(rows: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """View dense memory `[tokens, head_dim]` of a head as its actual `[head_dim, tokens]`."""
    tokens, head_dim = rows.shape[2:]
    if rows.stride()[2:] != (head_dim, 1):
        raise _refusal(f"{cache.found}: K of a head and block is not one piece")
    return rows.as_strided(rows.shape, (*rows.stride()[:2], 1, tokens))


def _refusal(why: str) -> LayoutError:
    return LayoutError(f"{why}; the portable format cannot read this. Set format: paged")
