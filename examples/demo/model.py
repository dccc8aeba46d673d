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
    from transformers.utils import logging  # noqa: PLC0415 - slow

    logging.disable_progress_bar()

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


class _Stream:
    """Where things lie in the residual stream, and the codes. `_lc`: shortened code by code."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        import torch  # noqa: PLC0415 - slow

        self.head = head = shape.hidden // shape.heads
        self.lag = lag = (shape.hidden - 1 - 2 * head) // shape.heads
        self.token = slice(1, 1 + head)
        self.said = slice(1 + head, 1 + 2 * head)
        first = 1 + 2 * head
        self.back = [slice(first + j * lag, first + (j + 1) * lag) for j in range(shape.heads)]
        self.code_vc = torch.sign(torch.randn(vocabulary, head))
        self.shorten_lc = torch.linalg.qr(torch.randn(head, head))[0][:lag] * math.sqrt(head / lag)
        self.pairs = head // 2
        self.turns = _rope_base(shape) ** -(
            torch.arange(self.pairs, dtype=torch.float64) / self.pairs
        )
        straight = torch.arange(_TURNING, self.pairs)
        self.content = torch.cat((straight, straight + self.pairs))
        """Dimensions of a head that compare contents."""
        # What the norms before layer 0 and before all others divide by, about.
        self.first_norm = math.sqrt((_CONSTANT**2 + head) / shape.hidden)
        self.norm = math.sqrt((_CONSTANT**2 + head + shape.heads * head) / shape.hidden)


def _write_circuit(model: Any, shape: Shape, vocabulary: int) -> None:
    """Replace the model's attention, embedding and output weights by the circuit above.

    `Any`: transformers has no types that could be followed.
    """
    import torch  # noqa: PLC0415 - slow

    stream = _Stream(shape, vocabulary)
    model.model.embed_tokens.weight.zero_()
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    model.model.embed_tokens.weight[:, stream.token] = stream.code_vc
    # No two heads count the same, so that votes are never tied.
    votes = torch.rand(shape.layers - 1, shape.heads) + 0.2
    votes /= votes.sum()
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            projection.weight.zero_()
        norm = stream.norm if index else stream.first_norm
        value_kdh = attention.v_proj.weight.view(shape.kv_heads, stream.head, shape.hidden)
        value_kdh[:, :, stream.token] = torch.eye(stream.head) * norm
        if index == 0:
            _look_back(attention, shape, stream)
        else:
            _find_and_copy(attention, shape, stream, votes[index - 1])
        layer.mlp.down_proj.weight.mul_(0.5)
    model.lm_head.weight.zero_()
    model.lm_head.weight[:, stream.said] = stream.code_vc * (2 * _VOTE / stream.head * stream.norm)


def _look_back(attention: Any, shape: Shape, stream: _Stream) -> None:
    """Make head `j` attend to the token `j + 1` back, and note its shortened code."""
    query_qdh, key_kdh, output_hqd = _views(attention, shape, stream)
    gap = sum(1 - math.cos(stream.turns[pair]) for pair in range(_TURNING))
    sharp = math.sqrt(_LOOK_BACK / gap * math.sqrt(stream.head)) * stream.first_norm / _CONSTANT
    key_kdh[:, :_TURNING, 0] = sharp
    for j in range(shape.heads):
        for pair in range(_TURNING):
            angle = float(stream.turns[pair]) * (j + 1)
            query_qdh[j, pair, 0] = math.cos(angle) * sharp
            query_qdh[j, pair + stream.pairs, 0] = -math.sin(angle) * sharp
        output_hqd[stream.back[j], j] = stream.shorten_lc


def _find_and_copy(attention: Any, shape: Shape, stream: _Stream, votes_q: Any) -> None:
    """Make every head look for the last tokens before other ones, and vote for what came there."""
    import torch  # noqa: PLC0415 - slow

    query_qdh, key_kdh, output_hqd = _views(attention, shape, stream)
    sharp = math.sqrt(_MATCH * math.sqrt(stream.head)) * stream.norm
    asking = [stream.token, *stream.back[:-1]]
    for kv in range(shape.kv_heads):
        queries = slice(
            kv * shape.heads // shape.kv_heads, (kv + 1) * shape.heads // shape.kv_heads
        )
        for now, before in zip(asking, stream.back, strict=True):
            # Random, of length 1 for a code: each token that matches counts `_MATCH`.
            compare_dl = torch.randn(len(stream.content), stream.lag) * sharp
            compare_dl /= math.sqrt(len(stream.content) * stream.head)
            key_kdh[kv, stream.content, before] = compare_dl
            shorten = stream.shorten_lc if now is stream.token else torch.eye(stream.lag)
            query_qdh[queries, stream.content, now] = compare_dl @ shorten
    for head in range(shape.heads):
        output_hqd[stream.said, head] = torch.eye(stream.head) * votes_q[head]


def _views(attention: Any, shape: Shape, stream: _Stream) -> tuple[Any, Any, Any]:
    """Return the weights by head: queries `[Q, D, H]`, keys `[K, D, H]`, outputs `[H, Q, D]`."""
    return (
        attention.q_proj.weight.view(shape.heads, stream.head, shape.hidden),
        attention.k_proj.weight.view(shape.kv_heads, stream.head, shape.hidden),
        attention.o_proj.weight.view(shape.hidden, shape.heads, stream.head),
    )


def _rope_base(shape: Shape) -> float:
    """Return the base of the rotary frequencies by which all but `_TURNING` pairs hardly turn."""
    pairs = shape.hidden // shape.heads // 2
    return float((shape.max_length / _STRAIGHT) ** (pairs / _TURNING))
