# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own CPU kernel writes into a page, against what we say is in there."""

import importlib.util

import pytest
import torch

from kvhaven.devices.cpu import CpuDevice
from kvhaven.errors import LayoutError
from kvhaven.layouts import HeadGeometry, describe_kv_caches, head_geometry

BLOCKS = 3


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """Load the extension that vLLM's CPU platform loads: a process can load one of them."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is not a build for CPUs")


def written_by_the_kernel(
    key_cache: torch.Tensor, value_cache: torch.Tensor, isa: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the kernel write random K and V, slot by slot in random order; return both."""
    blocks, heads, tokens, head_dim = key_cache.shape
    key, value = (
        torch.randn(blocks * tokens, heads, head_dim).to(key_cache.dtype) for _ in range(2)
    )
    slots = torch.randperm(blocks * tokens)
    torch.ops._C.cpu_attn_reshape_and_cache(
        key[slots].contiguous(),
        value[slots].contiguous(),
        key_cache,
        value_cache,
        slots,
        isa,
        1.0,
        1.0,
        "auto",
    )
    return key, value


def assert_found(geometry: HeadGeometry, key: torch.Tensor, value: torch.Tensor) -> None:
    for plane, wanted in zip(geometry.planes, (key, value), strict=True):
        found = plane.view.transpose(1, 2).flatten(0, 1)  # to [slot, head, head_dim]
        assert torch.equal(found, wanted), plane.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("isa", "tokens", "head_dim"),
    [("vec", 32, 64), ("vec", 128, 128), ("vec16", 32, 80), ("vec16", 48, 64), ("vec", 64, 32)],
)
@pytest.mark.parametrize("heads", [1, 4])
def test_pages_of_the_cpu_kernel_are_read_right(
    dtype: torch.dtype, isa: str, tokens: int, head_dim: int, heads: int
) -> None:
    """As `CPUAttentionBackendImpl.do_kv_cache_update` calls it in vLLM 0.32."""
    view = torch.zeros(BLOCKS, heads, tokens, 2 * head_dim, dtype=dtype)
    keys, values = view.view(BLOCKS, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    key, value = written_by_the_kernel(keys, values, isa)
    layout = describe_kv_caches(
        {"l": view},
        layer_specs={"l": (view[0].numel() * view.element_size(), tokens)},
        num_blocks=BLOCKS,
        kernel_tag="cpu-x86_64",
    )
    geometry = head_geometry(
        layout,
        backend="CPUAttentionBackend",
        kernel_tag="cpu-x86_64",
        heads=heads,
        head_dims=(head_dim, head_dim),
    )
    assert_found(geometry, key, value)


def test_k_is_in_columns_and_v_in_rows() -> None:
    """The bytes themselves: [head][head_dim][token] of K, then [head][token][head_dim] of V."""
    view = torch.zeros(1, 1, 32, 64, dtype=torch.bfloat16)
    keys, values = view.view(1, 1, 64, 32).chunk(2, dim=2)
    key, value = written_by_the_kernel(keys, values, "vec")
    memory = view.flatten()
    assert torch.equal(memory[: 32 * 32].view(32, 32), key[:, 0].T)
    assert torch.equal(memory[32 * 32 :].view(32, 32), value[:, 0])


def test_pages_of_the_older_form_are_read_right() -> None:
    """`(2, nb, H, bs, D)`, as vLLM had it to 0.22, by the same kernel."""
    view = torch.zeros(2, BLOCKS, 2, 32, 64, dtype=torch.bfloat16)
    key, value = written_by_the_kernel(view[0], view[1], "vec")
    layout = describe_kv_caches(
        {"l": view},
        layer_specs={"l": (2 * view[0, 0].numel() * 2, 32)},
        num_blocks=BLOCKS,
        kernel_tag="cpu-x86_64",
        form="2BHND",
    )
    geometry = head_geometry(
        layout,
        backend="CPUAttentionBackend",
        kernel_tag="cpu-x86_64+avx2",
        heads=2,
        head_dims=(64, 64),
    )
    assert_found(geometry, key, value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_this_machine_is_understood_unless_its_kernel_packs_k(dtype: torch.dtype) -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    view = torch.zeros(BLOCKS, 2, 32, 128, dtype=dtype)
    tag = CpuDevice().kernel_tag
    page = view[0].numel() * view.element_size()
    layout = describe_kv_caches(
        {"l": view}, layer_specs={"l": (page, 32)}, num_blocks=BLOCKS, kernel_tag=tag
    )

    def geometry() -> HeadGeometry:
        return head_geometry(
            layout,
            backend="CPUAttentionBackend",
            kernel_tag=tag,
            heads=2,
            head_dims=(64, 64),
        )

    isa = _get_attn_isa(dtype, 32, 64)
    assert isa in {"vec", "amx"}
    if isa == "amx":
        with pytest.raises(LayoutError, match="with AMX it packs bfloat16 K"):
            geometry()
    else:
        assert geometry().heads == 2
