# SPDX-License-Identifier: Apache-2.0
"""What each attention backend keeps inside of its pages, and where: the backends' own knowledge.

Read in the sources of vLLM 0.32 and vllm-gaudi, how each backend splits K from V, and run where
a machine was at hand (`tests/unit/test_layouts_cpu_kernel.py`). A backend that is not named here
is refused.
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
"""Backends that keep K and V of a head and token dense, where the tensor's shape says: next to
each other in the content, or as planes. By class name, since names are shared: ROCm's AITER
backend calls itself FLASH_ATTN."""

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
"""MLA backends, that keep one dense latent of a token."""

PRIVATE = {
    "AiterFlashAttentionBackend": "AITER may shuffle K and V to the order of its kernels",
    "RocmAttentionBackend": "its kernels keep K in slices of 16 bytes of all tokens",
    "RocmSegmentedAttentionBackend": "it keeps the heads in the content",
    "B12xPagedAttentionBackend": "it keeps the heads in the content",
    "HpcAttentionBackend": "what its kernels keep was not looked into",
    "TurboQuantAttentionBackend": "its pages are quantised and carry their scales",
    "UltraQuantAttentionBackend": "its pages are quantised and carry their scales",
    "FlashMLASparseBackend": "its pages may be quantised and carry their scales",
}
"""Backends whose pages are their own matter, and why."""


def head_geometry(
    layout: PagedLayout,
    *,
    backend: str,
    kernel_tag: str,
    heads: int,
    head_dims: Sequence[int],
) -> HeadGeometry:
    """Say where every head and token of a layout lies.

    `backend` is the class name of the engine's attention backend, `kernel_tag` the device's.
    `heads` and `head_dims` are this rank's KV heads and the elements of K and of V (of the
    latent alone for MLA) by the engine's own specs; the tensors must agree.

    Raises `LayoutError`, which says what to do, for pages whose inside is private to a kernel
    or not known.
    """
    if backend in PRIVATE:
        raise _refusal(f"{backend} is private inside of its pages ({PRIVATE[backend]})")
    if backend not in PLAIN | LATENT | {_CPU}:
        known = ", ".join(sorted(PLAIN | LATENT | {_CPU}))
        raise _refusal(f"what {backend} keeps in its pages is not known; known are {known}")
    if backend == _CPU:
        _require_plain_cpu(kernel_tag)
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


def _require_plain_cpu(kernel_tag: str) -> None:
    """Refuse CPUs whose K is not in plain columns."""
    parts = kernel_tag.split("+")
    if parts[0] != "cpu-x86_64":
        raise _refusal(
            f"{_CPU} on {kernel_tag}: its kernels were looked into on x86_64 only (ARM's pack K "
            "for bfloat16)"
        )
    if "amx" in parts:
        raise _refusal(f"{_CPU} on {kernel_tag}: with AMX it packs K for the tile instructions")


def _planes(
    cache: LayerCache, backend: str, names: Sequence[str], heads: int, head_dims: Sequence[int]
) -> tuple[Plane, ...]:
    """Return the planes of a layer. Raises `LayoutError` if its shape is another."""
    for tensor in cache.tensors:
        if tensor.element_size() == 1:
            raise _refusal(
                f"{cache.found}: KV in fewer than 16 bits; its scales are not stored, and what "
                "its bytes mean differs between platforms"
            )
    views = [view for part in cache.parts() for view in _split(part, backend, cache, head_dims)]
    if len(views) != len(names):
        raise _refusal(f"{cache.found}: {len(views)} planes, but {backend} keeps {len(names)}")
    for view, head_dim in zip(views, head_dims, strict=True):
        if (view.shape[1], view.shape[3]) != (heads, head_dim):
            raise _refusal(
                f"{cache.found}: {view.shape[1]} heads with {view.shape[3]} elements, the engine "
                f"says {heads} with {' and '.join(map(str, head_dims))}"
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
            # The CPU to 0.22. The kernel that writes it keeps K in columns since there is one.
            keys = backend == _CPU and part.name == "K"
            return [_columns(part.view, cache) if keys else part.view]
        case _:
            return _split_content(part.view, backend, cache, head_dims)


def _split_content(
    part: torch.Tensor, backend: str, cache: LayerCache, head_dims: Sequence[int]
) -> list[torch.Tensor]:
    """Split the content of `BHNC`."""
    content = part.shape[3]
    if content != sum(head_dims):
        raise _refusal(
            f"{cache.found}: {content} elements of content, the engine says "
            f"{' and '.join(map(str, head_dims))}"
        )
    if backend != _CPU:
        return [part[..., : head_dims[0]], part[..., head_dims[0] :]][: len(head_dims)]
    # In memory a head of a block is all its K in columns, then all its V in rows, although
    # the tensor's shape says that they alternate.
    tokens = part.shape[2]
    if part.stride()[2:] != (content, 1) or len(set(head_dims)) > 1:
        raise _refusal(f"{cache.found}: a head of a block is not one piece of K and V alike")
    halves = part.as_strided(
        (*part.shape[:2], 2, tokens, content // 2),
        (*part.stride()[:2], tokens * content // 2, content // 2, 1),
    )
    return [_columns(halves[:, :, 0], cache), halves[:, :, 1]]


def _columns(rows: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """View dense memory `[tokens, head_dim]` of a head as the `[head_dim, tokens]` that it is."""
    tokens, head_dim = rows.shape[2:]
    if rows.stride()[2:] != (head_dim, 1):
        raise _refusal(f"{cache.found}: K of a head and block is not one piece")
    return rows.as_strided(rows.shape, (*rows.stride()[:2], 1, tokens))


def _refusal(why: str) -> LayoutError:
    return LayoutError(f"{why}; the portable format needs that. Set format: paged")
