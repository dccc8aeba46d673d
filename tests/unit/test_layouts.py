# SPDX-License-Identifier: Apache-2.0
"""Layouts: what is understood, and that everything else is refused with its numbers."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256

import pytest
import torch

from kvhaven.errors import LayoutError
from kvhaven.layouts import PagedLayout, describe_kv_caches
from tests.layouts import ORDERS

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 6, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT * 2


def caches(
    order: str = "LBHNC", heads: int = HEADS, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Views [B, H, N, C] into one allocation, in a physical order of vLLM 0.29 and newer."""
    shape = (LAYERS, BLOCKS, heads, TOKENS, CONTENT)
    physical = [shape[dim] for dim in ORDERS[order]]
    raw = torch.zeros(math.prod(shape), dtype=dtype).view(physical)
    logical = raw.permute([ORDERS[order].index(dim) for dim in range(5)])
    return {f"layer.{index}": logical[index] for index in range(LAYERS)}


def describe(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    page: int = PAGE,
    kernel_tag: str = "test",
    form: str | None = None,
    **wanted: int,
) -> PagedLayout:
    return describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (page, wanted.get("block_size", TOKENS))),
        num_blocks=wanted.get("num_blocks", BLOCKS),
        kernel_tag=kernel_tag,
        form=form,
    )


@pytest.mark.parametrize(
    ("order", "stride", "next_layer"),
    [
        ("LBHNC", PAGE, PAGE * BLOCKS),
        ("LBNHC", PAGE, PAGE * BLOCKS),
        ("BLHNC", PAGE * LAYERS, PAGE),
        ("BLNHC", PAGE * LAYERS, PAGE),
    ],
)
def test_orders_with_whole_pages_are_read(order: str, stride: int, next_layer: int) -> None:
    tensors = caches(order)
    layout = describe(tensors)
    base = tensors["layer.0"].data_ptr()
    assert [
        (run.layer, run.pointer - base, run.block_stride_bytes, run.page_bytes)
        for run in layout.layers
    ] == [(f"layer.{index}", index * next_layer, stride, PAGE) for index in range(LAYERS)]
    assert (layout.num_blocks, layout.block_size) == (BLOCKS, TOKENS)
    assert layout.block_bytes == LAYERS * PAGE
    assert layout.payload_bytes(4) == 4 * LAYERS * PAGE


@pytest.mark.parametrize(
    ("order", "stride", "next_head", "next_layer"),
    [
        ("LHBNC", PAGE // HEADS, PAGE // HEADS * BLOCKS, PAGE * BLOCKS),
        ("BHLNC", PAGE * LAYERS, PAGE // HEADS * LAYERS, PAGE // HEADS),
    ],
)
def test_orders_that_break_a_page_by_head_are_a_run_for_each_head(
    order: str, stride: int, next_head: int, next_layer: int
) -> None:
    tensors = caches(order)
    layout = describe(tensors)
    base = tensors["layer.0"].data_ptr()
    assert [
        (run.layer, run.pointer - base, run.block_stride_bytes, run.page_bytes)
        for run in layout.layers
    ] == [
        (f"layer.{layer} head {head}", layer * next_layer + head * next_head, stride, PAGE // HEADS)
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    assert layout.block_bytes == LAYERS * PAGE


APART = {
    "2BNHD": torch.zeros(2, BLOCKS, TOKENS, HEADS, CONTENT // 2, dtype=torch.bfloat16),
    "2BHND": torch.zeros(2, BLOCKS, HEADS, TOKENS, CONTENT // 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("form", APART)
def test_k_and_v_apart_are_two_runs_a_layer(form: str) -> None:
    layout = describe({"l": APART[form]}, form=form)
    assert [(run.layer, run.pointer - APART[form].data_ptr()) for run in layout.layers] == [
        ("l K", 0),
        ("l V", BLOCKS * PAGE // 2),
    ]
    assert {run.span_bytes for run in layout.layers} == {(PAGE // 2, PAGE // 2)}
    assert [tensor.shape[0] for tensor in layout.tensors] == [BLOCKS, BLOCKS]
    assert layout.block_bytes == PAGE


def test_a_pair_of_tensors_is_two_runs_and_k_comes_first() -> None:
    key, value = (
        torch.zeros(BLOCKS * TOKENS + 5, HEADS, CONTENT // 2, dtype=torch.bfloat16)[
            : BLOCKS * TOKENS
        ].view(BLOCKS, TOKENS, HEADS, CONTENT // 2)
        for _ in range(2)
    )
    for pair in ((key, value), [key, value]):
        layout = describe({"l": pair})
        assert [run.pointer for run in layout.layers] == [key.data_ptr(), value.data_ptr()]
    assert layout.fingerprint == describe({"l": APART["2BNHD"]}, form="2BNHD").fingerprint
    assert layout.fingerprint != describe(caches()).fingerprint


def test_planes_inside_a_block_are_one_run() -> None:
    tensor = torch.zeros(BLOCKS, 2, TOKENS, HEADS, CONTENT // 2, dtype=torch.bfloat16)
    (run,) = describe({"l": tensor}, form="B2NHD").layers
    assert run.span_bytes == (PAGE, PAGE)
    heads_first = describe({"l": tensor.transpose(2, 3)}, form="B2NHD", block_size=HEADS)
    assert heads_first.block_bytes == PAGE


def test_with_two_blocks_only_the_form_tells_planes_from_blocks() -> None:
    tensor = torch.zeros(2, 2, TOKENS, HEADS, CONTENT // 2, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match="5 dimensions, form not given"):
        describe({"l": tensor}, num_blocks=2)
    apart = describe({"l": tensor}, form="2BNHD", num_blocks=2)
    inside = describe({"l": tensor}, form="B2NHD", num_blocks=2)
    assert [len(apart.layers), len(inside.layers)] == [2, 1]
    assert apart.fingerprint != inside.fingerprint


def test_a_layout_is_described_with_its_number_of_layers() -> None:
    assert describe(caches()).description == (
        "paged block=4 kernel=test 3 x bfloat16[1x2x4x8] order 123, 128 bytes"
    )


def test_fingerprints_stay() -> None:
    """Caches on disk outlive an update."""
    text = b"paged block=4 kernel=test bfloat16[1x2x4x8] order 123, 128 bytes"
    assert describe(caches()).fingerprint == sha256(text).hexdigest()


def test_pipeline_stages_of_unlike_numbers_of_layers_have_one_fingerprint() -> None:
    stages = [dict(list(caches().items())[:layers]) for layers in (2, 1)]
    one, two = (describe(stage) for stage in stages)
    assert one.fingerprint == two.fingerprint
    assert one.block_bytes == 2 * two.block_bytes


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_with_one_head_no_order_breaks_a_page(order: str) -> None:
    assert describe(caches(order, heads=1), PAGE // HEADS).block_bytes == LAYERS * PAGE // HEADS


def test_the_tensor_that_vllm_0_32_has_on_a_cpu_is_read() -> None:
    raw = torch.zeros(8 * 4 * 32768, dtype=torch.bfloat16).view(8, 4, 2, 128, 128)
    layout = describe(
        {f"l{index}": raw[index] for index in range(8)}, 65536, num_blocks=4, block_size=128
    )
    assert layout.block_bytes == 8 * 65536
    assert layout.layers[1].pointer - layout.layers[0].pointer == 4 * 65536
    assert raw[0].stride() == (32768, 16384, 128, 1)


def test_mla_pages_are_read() -> None:
    tensor = torch.zeros(BLOCKS, 1, 16, 576, dtype=torch.float16)
    assert describe({"mla": tensor}, 16 * 576 * 2).block_bytes == 16 * 576 * 2


def test_kernel_blocks_are_joined_to_the_engines_blocks() -> None:
    tensor = torch.zeros(BLOCKS * 2, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)
    (run,) = describe({"layer": tensor}, 2 * PAGE, block_size=2 * TOKENS).layers
    assert (run.page_bytes, run.block_stride_bytes) == (2 * PAGE, 2 * PAGE)


def test_layers_that_alias_the_same_bytes_are_one() -> None:
    tensors = caches()
    tensors["shared"] = tensors["layer.1"]
    layout = describe(tensors)
    assert [run.layer for run in layout.layers] == ["layer.0", "layer.1", "layer.2"]
    assert len(layout.tensors) == LAYERS


def test_the_fingerprint_is_about_payloads_not_about_places() -> None:
    """LBHNC and BLHNC place pages differently, but their payloads are alike."""
    reference = describe(caches()).fingerprint
    assert describe(caches("BLHNC")).fingerprint == reference
    unlike = [
        describe(caches("LBNHC")),
        describe(caches(dtype=torch.float16)),
        describe(caches(), kernel_tag="cpu-x86_64+avx512+amx"),
        describe(caches(), block_size=2 * TOKENS),
        describe(caches(heads=1), PAGE // HEADS),
    ]
    assert len({reference, *(layout.fingerprint for layout in unlike)}) == len(unlike) + 1


def overlapping() -> dict[str, torch.Tensor]:
    raw = torch.zeros(BLOCKS * PAGE, dtype=torch.bfloat16)
    shape, strides = (BLOCKS, HEADS, TOKENS, CONTENT), (PAGE // 2, TOKENS * CONTENT, CONTENT, 1)
    return {
        "one": raw.as_strided(shape, strides),
        "other": raw.as_strided(shape, strides, PAGE // 4),
    }


REFUSED = {
    "nothing": ({}, PAGE, "no KV caches"),
    "K and V apart, form not given": (
        {"l": APART["2BHND"]},
        PAGE,
        r"unknown tensor form; expected one of .*2BNHD \(one tensor.*FlashAttention to 0\.22\)",
    ),
    "not the engine's blocks": (
        {"l": torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)},
        PAGE,
        "dimension 0 is not the engine's 6 blocks, nor a multiple",
    ),
    "page size by its spec": (
        caches(),
        2 * PAGE,
        f"{2 * PAGE} bytes a page by its spec.* has {PAGE}",
    ),
    "blocks overlap": (
        {
            "l": torch.zeros(10_000, dtype=torch.bfloat16).as_strided(
                (BLOCKS, HEADS, TOKENS, CONTENT), (32, TOKENS * CONTENT, CONTENT, 1)
            )
        },
        PAGE,
        "they overlap",
    ),
    "layers overlap": (overlapping(), PAGE, "one and other share bytes.*64 bytes apart"),
    "gaps in a page": (
        {"l": torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CONTENT, dtype=torch.bfloat16)[..., :CONTENT]},
        PAGE,
        "not one piece of memory",
    ),
    "content not dense": (
        {"l": torch.zeros(BLOCKS, HEADS, CONTENT, TOKENS, dtype=torch.bfloat16).transpose(2, 3)},
        PAGE,
        r"dense last dimension \(the content\)",
    ),
    "kernel blocks apart": (
        {"l": torch.zeros(2 * BLOCKS, 2, HEADS, TOKENS, CONTENT, dtype=torch.bfloat16)[:, 0]},
        2 * PAGE,
        "2 kernel blocks make one block",
    ),
}


OTHER_FORMS: list[tuple[str | None, object, str]] = [
    ("2BNHD", torch.zeros(BLOCKS, 2, TOKENS, HEADS, 4), r"2 \(K and V\) in dimension 0"),
    ("2BNHD", torch.zeros(2, BLOCKS + 1, TOKENS, HEADS, 4), r"dimension 1 is not the engine's 6"),
    ("B2NHD", torch.zeros(BLOCKS, 3, TOKENS, HEADS, 4), r"2 \(K and V\) in dimension 1"),
    ("B2NHD", caches()["layer.0"], r"expected 5 dimensions"),
    ("BNC", caches()["layer.0"], r"expected 3 dimensions"),
    ("BNHD", caches()["layer.0"], r"1 tensors a layer, but BNHD has 2"),
    ("BHNC", tuple(caches().values())[:2], r"2 tensors a layer, but BHNC has 1"),
    (None, tuple(caches().values())[:3], r"3 tensors a layer, but BNHD has 2"),
    (None, (torch.zeros(6, 4, 2, 8), torch.zeros(6, 4, 3, 8)), "differ in more than head_dim"),
    (None, (torch.zeros(6, 4, 2, 8), None), "registered Tensor and NoneType"),
    (None, torch.zeros(6, 8), "2 dimensions, form not given"),
    ("NBHD", caches()["layer.0"], "unknown tensor form"),
]


@pytest.mark.parametrize(("form", "registered", "message"), OTHER_FORMS)
def test_shapes_that_are_not_of_the_form_are_refused(
    form: str | None, registered: torch.Tensor, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        describe({"l": registered}, form=form)


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_add_up_is_refused(
    case: tuple[dict[str, torch.Tensor], int, str],
) -> None:
    tensors, page, message = case
    with pytest.raises(LayoutError, match=message) as refusal:
        describe(tensors, page)
    if "shape" in str(refusal.value):
        assert re.search(r"shape \(.*strides \(.*blocks", str(refusal.value))


def test_a_layer_without_a_spec_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layer\.0.*no KV spec"):
        describe_kv_caches(caches(), layer_specs={}, num_blocks=BLOCKS, kernel_tag="")


def test_layers_of_unlike_block_sizes_are_refused() -> None:
    tensors = caches()
    specs = {name: (PAGE, TOKENS * (1 + index)) for index, name in enumerate(tensors)}
    with pytest.raises(LayoutError, match=r"different block sizes \(\[4, 8, 12\] tokens\)"):
        describe_kv_caches(tensors, layer_specs=specs, num_blocks=BLOCKS, kernel_tag="")


def test_a_layout_is_not_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        describe(caches()).num_blocks = 3  # type: ignore[misc]
