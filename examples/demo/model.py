# SPDX-License-Identifier: Apache-2.0
"""A small Llama and a byte-level tokenizer, made locally: random, but it can quote its prompt.

Nothing was trained. The weights are drawn from a seed such that the model is an *induction*
model: it looks for the place in its prompt that was written before like the last few letters,
and goes on as that place did. So its output depends on the KV of the whole prompt, at the very
positions, in every layer and head; it is text a reader can check; and the next token stands out
clearly, so that rounding (another chunking of the prefill, another number of threads) does not
change it. A model with plainly random weights has none of that: it says the same token for ever,
or flips between tokens that are equally likely.

How the residual stream is divided (dimensions): a constant (1), the token's code (one head's
size), the codes of the tokens before it (one part for each head: 1 back, 2 back, ...), and the
code of the token to say. Codes are random signs.

- Layer 0: head `j` looks `j + 1` tokens back (rotary frequencies make that a sharp peak) and
  copies that token's code.
- Layers 1 and up: every KV head compares, by a random projection of its own in the rotary
  dimensions that hardly rotate, the tokens *up to* the asking one with the tokens *before* each
  other one, and copies the code of what came next there. All heads vote.
- MLPs are random and small.
"""

import hashlib
import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_TURNING = 6
"""Rotary pairs that tell positions; the others hardly turn and compare contents."""
_STRAIGHT = 0.3
"""How far the others turn over the whole context, at most (radians)."""
_LOOK_BACK = 25.0
"""Sharpness of layer 0: logits by which the right distance beats its neighbours."""
_MATCH = 10.0
"""Sharpness of the other layers: logits for each token that matches."""
_VOTE = 6.0
"""Logits by which the token that all heads vote for stands out."""
_CONSTANT = 8.0


@dataclass(frozen=True)
class Shape:
    """Size of a model. The default has 25 million parameters and 16 KiB of KV a token.

    `hidden / heads`, the size of a head, is also that of a token's code: 32 at least. There
    are as many tokens to match as there are heads: 4 at least.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    max_length: int = 16384
    seed: int = 0


def make_model(folder: Path, shape: Shape | None = None) -> Path:
    """Write config, weights (bf16, from the seed) and tokenizer to `folder`, unless there.

    A model made by another version of this file, or of another shape, is made anew.
    """
    shape = shape or Shape()
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = json.dumps({"shape": asdict(shape), "recipe": recipe})
    done = folder / "made.json"
    if done.exists() and done.read_text() == stamp:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocabulary = _save_tokenizer(folder)
    _save_weights(folder, shape, vocabulary)
    done.write_text(stamp)
    return folder


def _save_tokenizer(folder: Path) -> int:
    """Write a tokenizer with a token for each byte, and an end; return how many there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - slow
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)} | {"<eos>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return len(vocabulary)


def _save_weights(folder: Path, shape: Shape, vocabulary: int) -> None:
    import torch  # noqa: PLC0415 - slow
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow

    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_base(shape)},
        eos_token_id=vocabulary - 1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _write_circuit(model, shape, vocabulary)
    model.to(torch.bfloat16).save_pretrained(folder)


def _write_circuit(model: Any, shape: Shape, vocabulary: int) -> None:
    """Replace the model's attention, embedding and output weights by the circuit above.

    `Any`: transformers has no types that could be followed.
    """
    import torch  # noqa: PLC0415 - slow

    head = shape.hidden // shape.heads
    lag = (shape.hidden - 1 - 2 * head) // shape.heads
    pairs = head // 2
    turns = _rope_base(shape) ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    turning, straight = range(_TURNING), range(_TURNING, pairs)
    content = torch.tensor([*straight, *(p + pairs for p in straight)])

    # Where things lie in the residual stream.
    token = slice(1, 1 + head)
    said = slice(1 + head, 1 + 2 * head)
    back = [slice(1 + 2 * head + j * lag, 1 + 2 * head + (j + 1) * lag) for j in range(shape.heads)]

    code_vc = torch.sign(torch.randn(vocabulary, head))
    shorten_lc = torch.linalg.qr(torch.randn(head, head))[0][:lag] * math.sqrt(head / lag)

    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    model.model.embed_tokens.weight[:, token] = code_vc
    model.lm_head.weight.zero_()

    # No two heads count the same, so that votes are never tied.
    votes = torch.rand(shape.layers - 1, shape.heads) + 0.2
    votes /= votes.sum()
    scale = math.sqrt(head)
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        # A code's entries are 1 before the norm; what the norm makes of them is undone here.
        norm = _rms(shape, head, lag, after_first=index > 0)
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(attention, projection).weight.zero_()
        query_hd = attention.q_proj.weight.view(shape.heads, head, shape.hidden)
        key_hd = attention.k_proj.weight.view(shape.kv_heads, head, shape.hidden)
        value_hd = attention.v_proj.weight.view(shape.kv_heads, head, shape.hidden)
        output_dh = attention.o_proj.weight.view(shape.hidden, shape.heads, head)
        for kv in range(shape.kv_heads):
            value_hd[kv, :, token] = torch.eye(head) * norm
        if index == 0:
            gap = float(sum(1 - math.cos(turns[p]) for p in turning))
            sharp = math.sqrt(_LOOK_BACK / gap * scale) * norm / _CONSTANT
            for kv in range(shape.kv_heads):
                key_hd[kv, turning, 0] = sharp
            for j in range(shape.heads):
                for p in turning:
                    query_hd[j, p, 0] = math.cos(turns[p] * (j + 1)) * sharp
                    query_hd[j, p + pairs, 0] = -math.sin(turns[p] * (j + 1)) * sharp
                output_dh[back[j], j] = shorten_lc
        else:
            per_kv = shape.heads // shape.kv_heads
            for kv in range(shape.kv_heads):
                for j in range(shape.heads):
                    # Random, of length 1 for a code: each token that matches counts `_MATCH`.
                    compare_dl = torch.randn(len(content), lag) / math.sqrt(len(content) * head)
                    compare_dl *= math.sqrt(_MATCH * scale) * norm
                    key_hd[kv, content, back[j]] = compare_dl
                    for query in range(kv * per_kv, (kv + 1) * per_kv):
                        if j == 0:
                            query_hd[query, content, token] = compare_dl @ shorten_lc
                        else:
                            query_hd[query, content, back[j - 1]] = compare_dl
            for query in range(shape.heads):
                output_dh[said, query] = torch.eye(head) * votes[index - 1, query]
        layer.mlp.down_proj.weight.mul_(0.5)
    last = _rms(shape, head, lag, after_first=True)
    model.lm_head.weight[:, said] = code_vc * (_VOTE / head * 2 * last)


def _rope_base(shape: Shape) -> float:
    pairs = shape.hidden // shape.heads // 2
    return float((shape.max_length / _STRAIGHT) ** (pairs / _TURNING))


def _rms(shape: Shape, head: int, lag: int, *, after_first: bool) -> float:
    """Return the root mean square of the residual stream, about."""
    squares = _CONSTANT**2 + head
    if after_first:
        squares += shape.heads * head
    return math.sqrt(squares / shape.hidden)
