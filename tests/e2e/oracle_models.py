# SPDX-License-Identifier: Apache-2.0
"""Tiny models with eyes, adapters and pictures for the oracle, made from seeds."""

import json
from pathlib import Path
from typing import Any

IMAGE_TOKEN = 259
"""The token that stands for a picture in the vision model's prompts."""

_HEADS_OF = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
_SPECIAL = (
    *("<eos>", "<pad>", "<fake_token_around_image>", "<image>"),
    *("<end_of_utterance>", "<global-img>"),
)


def make_vision_model(folder: Path) -> Path:
    """Write an Idefics 3 of two layers, its processor and a tokenizer with a token for each byte.

    Its weights are plainly random, and large enough that a picture decides the next token.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, *_SPECIAL])}
    assert vocabulary["<image>"] == IMAGE_TOKEN
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=list(_SPECIAL[2:]),
    )
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 64}, do_image_splitting=False
    )
    Idefics3Processor(pictures, fast, image_seq_len=16).save_pretrained(folder)
    text = {
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": vocabulary["<pad>"],
        "eos_token_id": vocabulary["<eos>"],
        "bos_token_id": None,
    }
    eyes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
    }
    torch.manual_seed(0)
    model: Any = Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=eyes,
            text_config=text,
            image_token_id=IMAGE_TOKEN,
            scale_factor=2,
            pad_token_id=vocabulary["<pad>"],
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight[0].numel() ** 0.5)
    model.save_pretrained(folder)
    return folder


def picture(seed: int) -> Any:
    """Return a picture of 64 by 64 random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter for the tiny Llama as peft does, by renaming over what is there."""
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, size in _HEADS_OF.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 128, generator=chance) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 4, generator=chance) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "adapter_model.safetensors")
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(_HEADS_OF),
        "peft_type": "LORA",
        "bias": "none",
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
