# SPDX-License-Identifier: Apache-2.0
"""Portable KV: engines of unlike block sizes and tensor-parallel degrees read each other's."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Control
from tests.e2e.engines import NodeService, assert_nothing_held, assert_same, engine, prompts

pytestmark = pytest.mark.vllm

CHUNK = 128
SETTINGS = {"format": "portable", "chunk_size": CHUNK}
PREFILL: dict[str, Any] = {"block_size": 32, "in_process": True}
DECODE: dict[str, Any] = {
    "block_size": 64,
    "tensor_parallel_size": 2,
    "num_gpu_blocks_override": 256,
}


def test_a_prefill_and_a_decode_engine_that_are_unlike_share_portable_kv(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked, more = prompts(31, 6, least=200), prompts(32, 4, least=200)
    service = NodeService(
        short_dir / "s",
        tmp_path / "service.log",
        max_local_cpu_size="128MiB",
        local_disk=tmp_path / "disk",
    )
    service.start()
    settings = SETTINGS | {"service_address": str(service.socket)}
    try:
        with engine(model, tmp_path / "prefill.log", settings, **PREFILL) as prefill:
            service.await_ranks()
            assert_same(prefill.generate(asked, max_tokens=8), control(asked, max_tokens=8))
        with engine(model, tmp_path / "decode.log", settings, **DECODE) as decode:
            service.await_ranks(2)
            assert_all_from_cache(decode.generate(asked, max_tokens=8), asked, control)
            # What this one computes goes to disk, and through a killed service to the other.
            assert_same(decode.generate(more, max_tokens=8), control(more, max_tokens=8))
        service.flush()
        service.stop(signal.SIGKILL)
        service.start()
        with engine(model, tmp_path / "again.log", settings, **PREFILL) as prefill:
            service.await_ranks()
            assert_all_from_cache(prefill.generate(more, max_tokens=8), more, control)
            assert_all_from_cache(prefill.generate(asked, max_tokens=8), asked, control)
        assert_nothing_held(service.settled())
        (namespace,) = service.status().namespaces
        assert namespace.fields["format"] == "portable"
    finally:
        service.stop(signal.SIGKILL)


def assert_all_from_cache(
    found: list[dict[str, Any]], asked: list[list[int]], control: Control
) -> None:
    """Assert that outputs are the control's, and that no full chunk was computed again."""
    assert_same(found, control(asked, max_tokens=8))
    for prompt, one in zip(asked, found, strict=True):
        assert one["cached"] >= (len(prompt) - 1) // CHUNK * CHUNK
