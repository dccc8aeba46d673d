# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin that runs the end-to-end tests' engines on a GPU.

    python -m pytest -p tests.e2e.on_gpu tests/e2e/test_oracle.py -k "text or speculation"

It needs a vLLM for the GPU, and KVHaven installed (vLLM finds the connector by its entry point).
docs/testing.md says what was run, and which tests count on a CPU.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

_OPTIONS: dict[str, Any] = {
    # Several engines share the GPU, and none of them measures the memory that others take.
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 256 << 20,
}
_BFLOAT16_TOLERANCE = 0.5
"""vLLM's kernels for adapters compute in no wider type. Wrong KV changes log-probabilities more."""


def pytest_configure() -> None:
    """Change the engines before test modules import them."""
    from tests.e2e import engines, zygote

    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # otherwise products have 10 bits of mantissa
    zygote.IMPORTED[-1] = "vllm.v1.worker.gpu_worker"
    start = engines.engine

    def engine(
        model: Path, log: Path, settings: dict[str, Any] | None, **options: Any
    ) -> "AbstractContextManager[engines.Engine]":
        more = dict(_OPTIONS)
        if options.get("program") == "oracle_process.py":
            more["enable_sleep_mode"] = True
        if options.get("enable_lora"):
            more["dtype"] = "bfloat16"
        return start(model, log, settings, **more | options)

    pytest.MonkeyPatch().setattr(engines, "engine", engine)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Widen the oracle's tolerance if its text with adapters is to be played."""
    from tests.e2e import oracle

    if any(item.name.startswith("test_text_with_adapters") for item in session.items):
        oracle.TOLERANCE = _BFLOAT16_TOLERANCE
