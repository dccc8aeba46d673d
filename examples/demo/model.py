# SPDX-License-Identifier: Apache-2.0
"""A small Llama with random weights and a byte-level tokenizer, made locally."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Size of a model. The default has 25 million parameters and 16 KiB of KV a token."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    max_length: int = 16384
    seed: int = 0


def make_model(folder: Path, shape: Shape | None = None) -> Path:
    """Write config, weights (bf16, from the seed) and tokenizer to `folder`, unless there.

    Attention and output weights are scaled so that the next token depends on the whole
    prompt and is chosen clearly: equal KV gives equal output, wrong KV another one.
    """
    shape = shape or Shape()
    done = folder / "config.json"
    if done.exists():
        return folder
    import torch  # noqa: PLC0415 - slow
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"<eos>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)

    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_length,
        eos_token_id=vocabulary["<eos>"],
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4)
            layer.self_attn.k_proj.weight.mul_(4)
            layer.self_attn.o_proj.weight.mul_(4)
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder / "weights")
    for file in (folder / "weights").iterdir():
        if file.name != "config.json":
            file.rename(folder / file.name)
    (folder / "weights" / "config.json").rename(done)
    (folder / "weights").rmdir()
    return folder
