# SPDX-License-Identifier: Apache-2.0
"""Architectures that are served, with right answers, and those that are refused, with advice.

Those of `SHORT` are always tried, the others with `KVHAVEN_EVENTS` set, as every night.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import CHUNK, PATIENT, Engine, assert_same, engine, prompts
from tests.e2e.test_engine import full_chunks
from tests.e2e.zoo import make_zoo_model

pytestmark = pytest.mark.vllm

SHORT = {"gemma3", "llama4", "granite4 flat", "mistral"}

WHOLE_KV = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}

SERVED: dict[str, dict[str, str]] = {
    "gemma3n": {},
    "gemma3": {},
    "llama4": {},
    "llama4 flat": {},
    "gpt-oss": {},
    "gpt-oss flat": WHOLE_KV,
}
"""With the environment that they need; the first one has layers that share KV, and windows.

`flat` is without vLLM's hybrid KV manager."""

REFUSED = {
    "granite4 flat": "needs vLLM's hybrid KV manager",
    "mistral": "For contexts of at most 64 tokens set --disable-sliding-window",
    "deepseek-v2": "uses multi-head latent attention on a CPU with prefix caching off",
    "bert": "Serve this model without KVHaven: leave --kv-transfer-config out",
    "gpt-oss flat": "Set VLLM_CPU_ATTN_SPLIT_KV=0, or serve it without KVHaven",
}
"""With what the refusal says among other things; each says what the user can do."""


def in_its_form(names: Iterable[str]) -> list[Any]:
    """Return parameters; those that are not of the short form are skipped there."""
    skip = pytest.mark.skipif(
        "KVHAVEN_EVENTS" not in os.environ, reason="of the long form (set KVHAVEN_EVENTS)"
    )
    return [pytest.param(name, marks=() if name in SHORT else skip) for name in names]


@pytest.fixture(scope="module")
def zoo(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("zoo") / "log"
    with engine(model, log, None, in_process=True, program="zoo_process.py") as started:
        yield started


def start(
    zoo: Engine, model: Path, short_dir: Path, environment: dict[str, str], **more: Any
) -> dict[str, Any]:
    """Start an engine with KVHaven; return its answers, cold and with hits, or its error."""
    settings = {
        "chunk_size": CHUNK,
        "max_local_cpu_size": "64MiB",
        "runtime_dir": str(short_dir),
        "model_fingerprint": "zoo",
    }
    options = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 32,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 128,
        "skip_tokenizer_init": True,
        "kv_transfer_config": {
            "kv_connector": "KVHavenConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings | PATIENT,
        },
    }
    asked = prompts(9, 4, least=150, most=400)
    result: dict[str, Any] = zoo.ask(
        "start", options=options | more, environment=environment, prompts=asked
    )
    for answers in result.values() if "error" not in result else ():
        for prompt, answer in zip(asked, answers, strict=True):
            answer["whole"] = full_chunks(prompt)
    return result


@pytest.mark.parametrize("name", in_its_form(SERVED))
def test_is_served(name: str, zoo: Engine, tmp_path: Path, short_dir: Path) -> None:
    name, _, flat = name.partition(" ")
    model = make_zoo_model(tmp_path / name, name, weights=True)
    more = {"disable_hybrid_kv_cache_manager": True} if flat else {}
    environment = SERVED[f"{name} {flat}".strip()]
    result = start(zoo, model, short_dir, environment, **more)
    assert "error" not in result, result["error"]
    assert [answer["cached"] >= answer["whole"] for answer in result["warm"]] == [True] * 4
    assert_same(result["warm"], result["cold"])
    assert len({answer["tokens"][0] for answer in result["cold"]}) > 1, "the model says one thing"


@pytest.mark.parametrize("name", in_its_form(REFUSED))
def test_is_refused_with_advice(name: str, zoo: Engine, tmp_path: Path, short_dir: Path) -> None:
    said = REFUSED[name]
    name, _, flat = name.partition(" ")
    model = make_zoo_model(tmp_path / name, name, weights=False)
    split = {"VLLM_CPU_ATTN_SPLIT_KV": "1"}
    more: dict[str, Any] = {"max_num_batched_tokens": 512, "load_format": "dummy"}
    more |= {"disable_hybrid_kv_cache_manager": True} if flat else {}
    result = start(zoo, model, short_dir, split, **more)
    assert "IncompatibleEngineError" in result["error"], result["error"]
    assert said in result["error"]
