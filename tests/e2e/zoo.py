# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many architectures: configuration, and random weights where they are served."""

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_UNEVEN = (["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"]
"""Five layers with a window, two without: vLLM makes groups of two, one of them half empty."""
_LINEAR, _FULL = "linear_attention", "full_attention"
_MOSTLY_LINEAR = [_LINEAR, _LINEAR, _FULL, _LINEAR, _FULL, _LINEAR, _LINEAR]
"""Five layers with a recurrent state, two without: three KV groups of states, one half empty."""

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3Text", _COMMON | {
        "num_hidden_layers": 2, "layer_types": _ALTERNATING, "sliding_window": 64,
        "query_pre_attn_scalar": 32,
    }),
    "gemma3n": ("Gemma3nText", _COMMON | {
        "num_hidden_layers": 4, "layer_types": _ALTERNATING * 2, "sliding_window": 64,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    }),
    "llama4": ("Llama4Text", _COMMON | {
        "num_hidden_layers": 4, "attention_chunk_size": 64, "intermediate_size_mlp": 128,
        "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4,
    }),
    "gpt-oss": ("GptOss", _COMMON | {
        "num_hidden_layers": 2, "layer_types": _ALTERNATING, "sliding_window": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "gemma3-hybrid": ("Gemma3Text", _COMMON | {
        "num_hidden_layers": 7, "layer_types": _UNEVEN, "sliding_window": 160,
        "query_pre_attn_scalar": 32, "max_position_embeddings": 2048,
    }),
    "gpt-oss-hybrid": ("GptOss", _COMMON | {
        "num_hidden_layers": 4, "layer_types": _ALTERNATING * 2, "sliding_window": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    }),
    "gpt-oss-uneven": ("GptOss", _COMMON | {
        "num_hidden_layers": 4, "layer_types": _ALTERNATING * 2, "sliding_window": 100,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    }),
    "llama4-hybrid": ("Llama4Text", _COMMON | {
        "num_hidden_layers": 4, "attention_chunk_size": 192, "intermediate_size_mlp": 128,
        "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 4, "max_position_embeddings": 2048,
    }),
    "granite4": ("GraniteMoeHybrid", _COMMON | {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 64, "mamba_n_heads": 8,
        "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
        "hidden_size": 128,
    }),
    "qwen3-next-hybrid": ("Qwen3Next", _COMMON | {
        "num_hidden_layers": 7, "layer_types": _MOSTLY_LINEAR, "max_position_embeddings": 2048,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "num_key_value_heads": 4, "head_dim": 64,
    }),
    "deepseek-v2": ("DeepseekV2", _COMMON | {
        "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    }),
    "bert": ("Bert", {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512,
    }),
    "mistral": ("Mistral", _COMMON | {"num_hidden_layers": 2, "sliding_window": 64}),
}  # fmt: skip
"""By name: the prefix of transformers' configuration class, and its arguments."""

_ARCHITECTURES = {"gemma3": "Gemma3ForCausalLM", "llama4": "Llama4ForCausalLM", "bert": "BertModel"}
_ARCHITECTURES["gemma3n"] = "Gemma3nForCausalLM"
_ARCHITECTURES["gemma3-hybrid"] = "Gemma3ForCausalLM"
_ARCHITECTURES["llama4-hybrid"] = "Llama4ForCausalLM"


def make_zoo_model(folder: Path, name: str, *, weights: bool) -> Path:
    """Write a model's configuration, and its random weights if they are wanted."""
    import torch
    import transformers

    prefix, arguments = CONFIGURATIONS[name]
    architecture = _ARCHITECTURES.get(name, f"{prefix}ForCausalLM")
    config = getattr(transformers, f"{prefix}Config")(**arguments)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if not weights:
        return folder
    torch.manual_seed(0)
    model: Any = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
