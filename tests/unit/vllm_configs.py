# SPDX-License-Identifier: Apache-2.0
"""vLLM's own configuration objects for tests, of a tiny model without weights."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 257,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""The tiny model's configuration."""


def write_model(folder: Path, **changed: Any) -> Path:
    """Write a model's folder, with some entries of its configuration changed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | changed))
    return folder


def engine_config(model: Path, **arguments: Any) -> Any:
    """Return the `VllmConfig` that vLLM makes for its arguments, without starting an engine."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with mock.patch.dict(os.environ, environment):  # vLLM sets variables of its own
        from vllm.engine.arg_utils import EngineArgs

        given = {"dtype": "float32", "max_model_len": 1024, "skip_tokenizer_init": True}
        return EngineArgs(**({"model": str(model)} | given | arguments)).create_engine_config()
