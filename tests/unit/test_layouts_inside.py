# SPDX-License-Identifier: Apache-2.0
"""What backends keep in their pages: known ones are located, all others refused."""

import functools
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
import torch

from kvhaven.errors import LayoutError
from kvhaven.layouts import HeadGeometry, PagedLayout, describe_kv_caches, head_geometry
from kvhaven.layouts.attention_backends import LATENT, PLAIN, PRIVATE
from tests.layouts import KINDS, Sizes, engine

BLOCKS, HEADS, TOKENS, DIM = 4, 2, 8, 4


def layout_of(
    shape: tuple[int, ...] = (BLOCKS, HEADS, TOKENS, 2 * DIM),
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = TOKENS,
) -> PagedLayout:
    tensor = torch.zeros(shape, dtype=dtype)
    page = tensor.numel() * tensor.element_size() // BLOCKS
    return describe_kv_caches(
        {"l0": tensor}, layer_specs={"l0": (page, tokens)}, num_blocks=BLOCKS, kernel_tag=""
    )


geometry_of = functools.partial(head_geometry, kernel_tag="", heads=HEADS, head_dims=(DIM, DIM))


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_where_the_engine_has_it(kind: str) -> None:
    """Addresses by the geometry's strides against those of the engine's own views."""
    rank = engine(kind, Sizes(layers=2, blocks=3, tokens=8, heads=2, head_dim=4))
    geometry = rank.portable.geometry
    assert geometry.kernel_blocks == rank.kind.kernel_blocks
    assert geometry.heads == rank.sizes.heads
    assert geometry.kernel_block_size * geometry.kernel_blocks == rank.sizes.tokens
    assert [plane.name for plane in geometry.planes] == (
        ["latent"] if rank.kind.latent else ["K", "V"]
    )
    for planes, views in zip(geometry.layers, rank.caches.planes, strict=True):
        for plane, view in zip(planes, views, strict=True):
            slots = view.flatten(0, -4) if view.dim() > 4 else view  # kernel blocks, tokens, ...
            for index in itertools.product(*map(range, slots.shape)):
                block, token, head, element = index
                found = plane.pointer + sum(
                    at * stride
                    for at, stride in zip((block, head, token, element), plane.strides, strict=True)
                )
                assert found == slots[index].data_ptr()


def test_every_known_backend_is_one_of_vllms_or_gaudis() -> None:
    assert not PLAIN & LATENT
    assert not (PLAIN | LATENT) & set(PRIVATE)
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(found.submodule_search_locations[0]) / "v1" / "attention" / "backends"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    classes = set(re.findall(r"^class (\w+)", sources, re.MULTILINE))
    unknown = (PLAIN | LATENT | set(PRIVATE)) - classes
    assert {name for name in unknown if not name.startswith("HPU")} == set()


@pytest.mark.parametrize("backend", sorted(PRIVATE))
def test_pages_that_are_private_to_a_kernel_are_refused(backend: str) -> None:
    with pytest.raises(LayoutError, match=rf"{backend}: .* is private .*Set format: paged"):
        geometry_of(layout_of(), backend=backend)


def test_backends_that_nobody_looked_into_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"NewBackend: unknown .* FlashInferBackend.*paged"):
        geometry_of(layout_of(), backend="NewBackend")


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ("cpu-x86_64+avx512+amx", "with AMX it packs bfloat16 K"),
        ("cpu-aarch64+default", "x86_64 only"),
        ("", "x86_64 only"),
    ],
)
def test_a_cpu_whose_kernels_pack_k_is_refused(tag: str, reason: str) -> None:
    layout = layout_of(dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=rf"CPUAttentionBackend on .*{reason}.*format: paged"):
        geometry_of(layout, backend="CPUAttentionBackend", kernel_tag=tag)


@pytest.mark.parametrize(
    "backend", ["FlashAttentionBackend", "FlashMLABackend", "CPUAttentionBackend"]
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_kv_of_fewer_than_16_bits_is_refused(backend: str, dtype: torch.dtype) -> None:
    """fp8 (MLA's too) and nvfp4: their scales are elsewhere, or in the page."""
    dims = (2 * DIM,) if "MLA" in backend else (DIM, DIM)
    with pytest.raises(LayoutError, match="its scales are not stored"):
        geometry_of(
            layout_of(dtype=dtype), backend=backend, head_dims=dims, kernel_tag="cpu-x86_64"
        )


def test_what_does_not_agree_with_the_engines_specs_is_refused() -> None:
    plain = functools.partial(geometry_of, backend="FlashAttentionBackend")
    with pytest.raises(LayoutError, match="8 elements of content; the engine's specs say 4 and 8"):
        plain(layout_of(), head_dims=(DIM, 2 * DIM))
    with pytest.raises(LayoutError, match="2 heads of 4 elements; the engine's specs say 4 of"):
        plain(layout_of(), heads=4)
    with pytest.raises(LayoutError, match=r"keeps K and V, but head_dims are \(8,\)"):
        plain(layout_of(), head_dims=(8,))
    with pytest.raises(LayoutError, match="1 planes, but FlashAttentionBackend keeps 2"):
        plain(layout_of((BLOCKS, TOKENS, 2 * DIM)))
    with pytest.raises(LayoutError, match=r"1 kernel blocks of 8 tokens are not .* block of 16"):
        plain(layout_of(tokens=2 * TOKENS))


def test_shuffled_pages_of_two_heads_are_told_by_the_backends_name_alone() -> None:
    """AITER's `[B, 2, N, heads * head_dim]` may have the very shape of K next to V."""
    shape = (BLOCKS, 2, TOKENS, 2 * DIM)
    assert geometry_of(layout_of(shape), backend="FlashAttentionBackend").heads == 2
    with pytest.raises(LayoutError, match="AITER may shuffle"):
        geometry_of(layout_of(shape), backend="AiterFlashAttentionBackend")


def test_layers_that_are_not_alike_are_refused() -> None:
    def of(heads: int) -> torch.Tensor:
        return torch.zeros(BLOCKS, heads, TOKENS, 2 * DIM, dtype=torch.bfloat16)

    page = TOKENS * 2 * DIM * 2
    layout = describe_kv_caches(
        {"a": of(2), "b": of(2).float()},
        layer_specs={"a": (2 * page, TOKENS), "b": (4 * page, TOKENS)},
        num_blocks=BLOCKS,
        kernel_tag="",
    )
    with pytest.raises(LayoutError, match=r"K of b is .*float32.*that of a .*bfloat16.*paged"):
        geometry_of(layout, backend="FlashAttentionBackend")


def test_cpu_pages_that_are_not_one_piece_a_head_are_refused() -> None:
    cpu = functools.partial(
        geometry_of, backend="CPUAttentionBackend", kernel_tag="cpu-x86_64+avx2"
    )
    tensor = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
    layout = describe_kv_caches(
        {"l0": tensor},
        layer_specs={"l0": (tensor[0].numel() * 2, TOKENS)},
        num_blocks=BLOCKS,
        kernel_tag="",
    )
    with pytest.raises(LayoutError, match="not one piece of equal halves"):
        cpu(layout)
    with pytest.raises(LayoutError, match="not one piece of equal halves"):
        cpu(layout_of(), head_dims=(DIM + 2, DIM - 2))


def test_mla_has_one_plane_and_one_head() -> None:
    found: HeadGeometry = head_geometry(
        layout_of((BLOCKS, 1, TOKENS, 2 * DIM)),
        backend="TritonMLABackend",
        kernel_tag="",
        heads=1,
        head_dims=(2 * DIM,),
    )
    assert (found.heads, found.head_dims, found.dtype) == (1, (2 * DIM,), "bfloat16")
    assert [plane.name for plane in found.planes] == ["latent"]
