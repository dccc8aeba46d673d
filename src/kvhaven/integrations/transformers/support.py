# SPDX-License-Identifier: Apache-2.0
"""Checks of models and of calls of `generate`: whether their KV can be cached correctly."""

import inspect
import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.model_config import rotary_kinds
from kvhaven.integrations.transformers.blocks import LayerShape

_WITHOUT: Final = "Use model.generate for it."
_LENGTH_MATTERS: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embedding for which a token's KV depends on the tokens after it."""

_ARGUMENTS: Final = frozenset(
    {
        *("attention_mask", "generation_config", "logits_processor", "stopping_criteria"),
        *("streamer", "prefix_allowed_tokens_fn", "tokenizer", "use_model_defaults"),
    }
)
"""Arguments of `generate` that are not generation settings and do not change KV."""
_SAMPLING: Final = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
        *("stop_strings", "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h"),
        *("typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "bad_words_ids"),
        *("encoder_repetition_penalty", "no_repeat_ngram_size", "renormalize_logits"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("sequence_bias", "output_scores", "output_logits", "return_dict_in_generate"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "watermarking_config"),
        *("length_penalty", "early_stopping", "transformers_version"),
    }
)
"""Generation settings that select tokens and do not change KV. Others must be off."""
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "use_cache": (None, True),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (None, 1)),
}
"""Values that mean off for other generation settings; the default is None or False."""
_TEST_TOKENS: Final = 32
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_pre_hooks")


def require_supported(model: Any) -> None:
    """Raise `IncompatibleEngineError` unless KV depends only on tokens and changes are visible."""
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        _refuse(f"{name}: an encoder-decoder model; its KV depends on the encoder's input")
    if config.get_text_config(decoder=True) is not config:
        _refuse(f"{name}: a model with several parts; its KV may depend on more than tokens")
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        _refuse(f"{name}: created in torch.inference_mode, so changes cannot be detected")
    if getattr(model, "hf_quantizer", None) is not None:
        _refuse(f"{name}: quantized weights, which their tensors do not identify completely")
    if any(type(parameter.data) is not torch.Tensor for parameter in model.parameters()):
        _refuse(f"{name}: parameters that are not plain tensors of torch")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        _refuse(f"{name}: parameters on several devices (got {sorted(map(str, devices))})")
    text = config.get_text_config(decoder=True)
    kinds = rotary_kinds(getattr(text, "rope_parameters", None))
    kinds |= rotary_kinds(getattr(text, "rope_scaling", None))
    if kinds & _LENGTH_MATTERS:
        _refuse(f"{name}: rotary embedding {sorted(kinds)}, which depends on the prompt's length")
    layers = {type(layer) for layer in DynamicCache(config=text).layers}
    if others := layers - {DynamicLayer}:
        names = ", ".join(sorted(layer.__name__ for layer in others))
        _refuse(f"{name}: cache layers other than full attention (got {names})")


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of each layer's KV, from the cache after a forward of one token.

    Raises `IncompatibleEngineError` if the cache has an unknown form.
    """
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = _computed(model, token)
    shapes = []
    for at, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.keys.dim() != 4:  # noqa: PLR2004 - batch, heads, tokens, elements
            _refuse(f"{type(model).__name__}: layer {at} has no KV of its own in the cache")
        keys, values = layer.keys, layer.values
        alike = keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
        if not alike or keys.shape[0] != 1 or keys.shape[2] != 1:
            _refuse(
                f"{type(model).__name__}: layer {at} has KV of an unknown form (got K "
                f"{tuple(keys.shape)} of {keys.dtype}, V {tuple(values.shape)} of {values.dtype})"
            )
        shapes.append(
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device)
        )
    return shapes


def require_causal(model: Any) -> None:
    """Raise `IncompatibleEngineError` if the KV of a token depends on the tokens after it."""
    size = min(int(model.config.vocab_size), 1 << 15)
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size, (1, _TEST_TOKENS), generator=dice).to(model.device)
    other = ids.clone()
    half = _TEST_TOKENS // 2
    other[:, half:] = (ids[:, half:] + 1) % size
    whole, changed = _computed(model, ids), _computed(model, other)
    for one, two in zip(whole.layers, changed.layers, strict=True):
        for a, b in ((one.keys, two.keys), (one.values, two.values)):
            before, after = a[:, :, :half].float(), b[:, :, :half].float()
            allowed = min(0.05, 1000 * torch.finfo(a.dtype).eps) * float(before.abs().max())
            if not float((before - after).abs().max()) <= allowed:
                _refuse(f"{type(model).__name__}: the KV of a token depends on the tokens after it")


def _computed(model: Any, ids: torch.Tensor) -> DynamicCache:
    """Return the cache after a forward. Raises `IncompatibleEngineError` if the forward fails."""
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    except Exception as error:
        raise IncompatibleEngineError(
            f"{type(model).__name__}: a forward with a cache failed (got {error!r}); expected a "
            f"decoder that accepts {cache_argument(model)}. {_WITHOUT}"
        ) from error
    return cache


def cache_argument(model: Any) -> str:
    """Return the name of the argument by which a model takes a cache: another since 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def reason_against_call(model: Any, ids: Any, arguments: Mapping[str, Any]) -> str:
    """Return why a call of `generate` is not cached; empty if it can be."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel():  # noqa: PLR2004 - batch and tokens
        return "no token ids of shape [batch, tokens]"
    if ids.is_floating_point() or bool((ids < 0).any()):
        return "token ids that are negative or not integers"
    return _reason_of_model(model) or _reason_of_arguments(model, ids, arguments)


def _reason_of_model(model: Any) -> str:
    if model.training:
        return "the model is in training mode; call model.eval()"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is enabled"
    for module in model.modules():
        if type(module).__module__.split(".")[0] == "peft":
            return "the model has adapters, which may change between calls"
        if "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS):
            return "modules of the model have hooks, or a forward that is not their class's"
    return ""


def _reason_of_arguments(model: Any, ids: torch.Tensor, arguments: Mapping[str, Any]) -> str:
    given = arguments.get("generation_config")
    sources = [
        model.generation_config.to_diff_dict(),  # defaults for the others
        given.to_diff_dict() if given is not None else {},
        {name: value for name, value in arguments.items() if name not in _ARGUMENTS},
    ]
    for name, value in itertools.chain.from_iterable(source.items() for source in sources):
        if not (name in _SAMPLING or name.startswith("_") or _is_off(name, value)):
            return f"the argument {name}={value!r:.40}"
    mask = arguments.get("attention_mask")
    if mask is not None and not (mask.shape == ids.shape and bool((mask == 1).all())):
        return "an attention mask that excludes tokens (padding)"
    for pad in (source.get("pad_token_id") for source in sources):
        if mask is None and pad is not None and bool((ids == int(pad)).any()):
            return "padding tokens without an attention mask"
    return ""


def _is_off(name: str, value: object) -> bool:
    """Return whether a generation setting has a value that means off."""
    off = _NEUTRAL.get(name, (None, False))
    return any(type(value) is type(other) and value == other for other in off)


def _refuse(problem: str) -> None:
    raise IncompatibleEngineError(f"{problem}; expected a decoder with full attention. {_WITHOUT}")
