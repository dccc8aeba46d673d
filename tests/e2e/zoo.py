# SPDX-License-Identifier: Apache-2.0
"""The zoo: tiny models of many architectures and features, and how each one is to fare.

`SERVED` and `REFUSED` are the tables of `test_models.py`; docs/support.md has a row for each name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
_SMALL_HEADS = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_REAL_HEADS = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
"""The latent heads of DeepSeek V2 and V3: vLLM's kernels for AMX take no smaller ones."""
_DEEPSEEK_V2 = _COMMON | {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": None, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DEEPSEEK_V3 = _COMMON | {
    # Queries through a latent, too; experts in groups, chosen by sigmoid and a bias; YaRN.
    "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 96, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_mtp_layers": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256,
    },
}  # fmt: skip

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
    "qwen3-next-long": ("Qwen3Next", _COMMON | {
        "num_hidden_layers": 7, "layer_types": _MOSTLY_LINEAR, "max_position_embeddings": 16384,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 257,
    }),
    "deepseek-v2": ("DeepseekV2", _DEEPSEEK_V2 | _SMALL_HEADS),
    "deepseek-v2-amx": ("DeepseekV2", _DEEPSEEK_V2 | _REAL_HEADS),
    "deepseek-v3": ("DeepseekV3", _DEEPSEEK_V3 | _SMALL_HEADS),
    "deepseek-v3-amx": ("DeepseekV3", _DEEPSEEK_V3 | _REAL_HEADS),
    "bert": ("Bert", {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 512,
    }),
    "mistral": ("Mistral", _COMMON | {"num_hidden_layers": 2, "sliding_window": 64}),
    "mistral-full": ("Mistral", _COMMON | {"num_hidden_layers": 2, "sliding_window": None}),
}  # fmt: skip
"""By name: the prefix of transformers' configuration class, and its arguments."""

_ARCHITECTURES = {"gemma3": "Gemma3ForCausalLM", "llama4": "Llama4ForCausalLM", "bert": "BertModel"}
_ARCHITECTURES["gemma3n"] = "Gemma3nForCausalLM"
_ARCHITECTURES["gemma3-hybrid"] = "Gemma3ForCausalLM"
_ARCHITECTURES["llama4-hybrid"] = "Llama4ForCausalLM"


class Served(NamedTuple):
    """A model or a feature that is served, and how it is tried."""

    what: str
    """For the documentation."""
    model: str
    """A key of `CONFIGURATIONS`, or `llama` or `vision`."""
    dtype: str = "float32"
    options: Mapping[str, Any] = {}
    """Of vLLM's `LLM`."""
    environment: Mapping[str, str] = {}
    feature: str = ""
    """Of requests; see `zoo_engine.py`."""
    chunk: int | None = 64
    """None: vLLM's block."""
    ranks: tuple[int, ...] = (1,)
    """Tensor-parallel degrees that are tried."""
    needs: str = ""
    """A flag of the CPU."""
    drafter: str = ""
    """vLLM's method of speculation, by a drafter that has KV of its own."""

    @property
    def exact(self) -> bool:
        """Whether rounding depends on the ends of steps, so that only equal hits compare."""
        return self.dtype != "float32" or "kv_cache_dtype" in self.options


class Refused(NamedTuple):
    """A model that is not served."""

    what: str
    """For the documentation."""
    model: str
    says: str
    """Words of the error. Each tells the user what to do, if the error is KVHaven's."""
    options: Mapping[str, Any] = {}
    ours: bool = True
    """Whether KVHaven refuses it. Else vLLM's CPU build does, with and without KVHaven."""


_FLAT = {"disable_hybrid_kv_cache_manager": True}
_WHOLE_KV = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
_TOKENIZER = {"skip_tokenizer_init": False}
_LORA = _TOKENIZER | {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
_NGRAMS = _TOKENIZER | {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    },
}
_STATES = {"enable_prefix_caching": True, "num_gpu_blocks_override": 250}
_MLA = {"enable_prefix_caching": True}
_ONE_AND_TWO = (1, 2)

SERVED = {
    "llama": Served("Llama: full attention", "llama", ranks=_ONE_AND_TWO),
    "mistral full": Served("Mistral without a window", "mistral-full"),
    "gemma3": Served("Gemma 3: every other layer has a window", "gemma3"),
    "gemma3n": Served("Gemma 3n: windows, and layers that share KV", "gemma3n"),
    "llama4": Served("Llama 4: chunked local attention", "llama4"),
    "llama4 flat": Served("the same in one KV group", "llama4", options=_FLAT),
    "gpt-oss": Served("gpt-oss: windows and attention sinks", "gpt-oss"),
    "gpt-oss flat": Served(
        "the same in one KV group, VLLM_CPU_ATTN_SPLIT_KV=0", "gpt-oss",
        options=_FLAT, environment=_WHOLE_KV,
    ),
    "qwen3-next": Served(
        "Qwen3-Next: recurrent states", "qwen3-next-hybrid", "bfloat16", _STATES, chunk=None,
        ranks=_ONE_AND_TWO,
    ),
    "deepseek-v2": Served(
        "DeepSeek V2: multi-head latent attention, on a CPU with AMX", "deepseek-v2-amx",
        "bfloat16", _MLA, needs="amx_tile", ranks=_ONE_AND_TWO,
    ),
    "deepseek-v3": Served(
        "DeepSeek V3: the same, with grouped experts chosen by a bias", "deepseek-v3-amx",
        "bfloat16", _MLA, needs="amx_tile", ranks=_ONE_AND_TWO,
    ),
    "fp8": Served(
        "KV in fp8 (e4m3)", "llama", options={"kv_cache_dtype": "fp8"}, ranks=_ONE_AND_TWO
    ),
    "fp8_e5m2": Served("KV in fp8 (e5m2)", "llama", options={"kv_cache_dtype": "fp8_e5m2"}),
    "gemma3 fp8": Served(
        "windows, with KV in fp8", "gemma3", options={"kv_cache_dtype": "fp8"}
    ),
    "lora": Served(
        "a LoRA adapter", "llama", options=_LORA, feature="lora", ranks=_ONE_AND_TWO
    ),
    "n-gram": Served("n-gram speculation", "llama", options=_NGRAMS, ranks=_ONE_AND_TWO),
    "draft model": Served(
        "speculation by a draft model", "llama", options=_TOKENIZER, drafter="draft_model"
    ),
    "eagle": Served("speculation by EAGLE", "llama", options=_TOKENIZER, drafter="eagle"),
    "deepseek-v3 mtp": Served(
        "DeepSeek V3 with speculation by its own layer (MTP)", "deepseek-v3-amx", "bfloat16",
        _MLA, needs="amx_tile", drafter="mtp",
    ),
    "salts": Served("cache salts", "llama", feature="salts", ranks=_ONE_AND_TWO),
    "prompt_logprobs": Served(
        "log-probabilities of the prompt: every token is computed", "llama",
        feature="prompt_logprobs",
    ),
    "pictures": Served(
        "pictures (Idefics 3)", "vision", options=_TOKENIZER, feature="pictures",
        ranks=_ONE_AND_TWO,
    ),
    "pooling": Served(
        "embeddings (Llama)", "llama", options=_TOKENIZER | {"runner": "pooling"},
        feature="pooling", ranks=_ONE_AND_TWO,
    ),
}  # fmt: skip
"""By name. `flat` is without vLLM's hybrid KV manager."""

REFUSED = {
    "granite4": Refused(
        "Granite 4: Mamba 2", "granite4", "is out of bounds for dimension 0 with size 1",
        ours=False,
    ),
    "granite4 flat": Refused(
        "the same in one KV group", "granite4", "needs vLLM's hybrid KV manager", _FLAT
    ),
    "mistral": Refused(
        "Mistral with a window in all layers", "mistral",
        "For contexts of at most 64 tokens set --disable-sliding-window",
    ),
    "deepseek-v2 reference": Refused(
        "DeepSeek V2 on a CPU without AMX", "deepseek-v2",
        "uses multi-head latent attention on a CPU with prefix caching off",
        {"attention_config": {"backend": "CPU_MLA"}},
    ),
    "deepseek-v3 reference": Refused(
        "DeepSeek V3 on a CPU without AMX", "deepseek-v3",
        "uses multi-head latent attention on a CPU with prefix caching off",
        {"attention_config": {"backend": "CPU_MLA"}},
    ),
    "bert": Refused(
        "BERT: an encoder", "bert",
        "Serve this model without KVHaven: leave --kv-transfer-config out",
    ),
    "gpt-oss split": Refused(
        "gpt-oss in one KV group", "gpt-oss",
        "Set VLLM_CPU_ATTN_SPLIT_KV=0, or serve it without KVHaven", _FLAT,
    ),
}  # fmt: skip

SHORT = {"gemma3", "llama4", "granite4 flat", "mistral"}
"""The names that the short form tries."""


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
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    if prefix == "DeepseekV3":
        _add_predictor(folder, config)
    return folder


def _add_predictor(folder: Path, config: Any) -> None:
    """Add the layer that predicts a further token, a copy of the last one.

    transformers leaves it out. `Any`: one of its configurations.
    """
    import torch
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    last, added = (f"model.layers.{config.num_hidden_layers - at}." for at in (1, 0))
    for name in [name for name in weights if name.startswith(last)]:
        weights[added + name.removeprefix(last)] = weights[name].clone()
    size = config.hidden_size
    weights[f"{added}eh_proj.weight"] = torch.randn(size, 2 * size) / (2 * size) ** 0.5
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{added}{norm}.weight"] = torch.ones(size)
    weights[f"{added}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{added}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})


def make_eagle(folder: Path, target: Path) -> Path:
    """Write a drafter of EAGLE's form for a Llama: a random layer on the target's last one."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config: Any = transformers.LlamaConfig.from_pretrained(target)
    config.num_hidden_layers = 1
    config.save_pretrained(folder)
    torch.manual_seed(0)
    size = config.hidden_size
    layer = transformers.LlamaModel(config).layers[0]
    weights = {
        f"layers.0.{name}": torch.randn_like(weight) / weight.shape[-1] ** 0.5
        for name, weight in layer.state_dict().items()
        if weight.dim() > 1
    }
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    weights["fc.weight"] = torch.randn(size, 2 * size) / (2 * size) ** 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
