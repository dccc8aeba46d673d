# SPDX-License-Identifier: Apache-2.0
"""Pytest plugin that runs the end-to-end tests' engines on a GPU.

    python -m pytest -p tests.e2e.on_gpu tests/e2e/test_oracle.py -k "text or speculation"

It needs a vLLM for the GPU, and KVHaven installed (vLLM finds the connector by its entry point).
docs/performance.md says what was run.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import engines, oracle, zygote

_OPTIONS: dict[str, Any] = {
    # Several engines share the GPU, and none of them measures the memory that others take.
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 256 << 20,
}
_FLOAT32, _BFLOAT16 = oracle.TOLERANCE, 0.25
"""Tolerances of the oracle. vLLM's kernels for adapters compute in no wider type than bfloat16;
there, rounding changed log-probabilities by up to 0.19 on an H200, and the breakages by 0.73 or
more."""
_start = engines.engine


def _engine(
    model: Path, log: Path, settings: dict[str, Any] | None, **options: Any
) -> AbstractContextManager[engines.Engine]:
    """Start an engine on the GPU, with the arguments of `engines.engine`."""
    more = dict(_OPTIONS)
    if options.get("program") == "oracle_process.py":
        more["enable_sleep_mode"] = True
    if options.get("enable_lora"):
        more["dtype"] = "bfloat16"
    return _start(model, log, settings, **more | options)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the oracle's tolerance to that of the test's engines."""
    adapters = "text" in getattr(item, "fixturenames", ())
    oracle.TOLERANCE = _BFLOAT16 if adapters else _FLOAT32


# Modules of tests, and conftest.py, import it later.
pytest.MonkeyPatch().setattr(engines, "engine", _engine)
zygote.IMPORTED[-1] = "vllm.v1.worker.gpu_worker"
os.environ["TRITON_F32_DEFAULT"] = "ieee"  # otherwise products have 10 bits of mantissa
