# SPDX-License-Identifier: Apache-2.0
"""What differs between versions and set-ups of vLLM, found by looking, not by version numbers."""

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvhaven.errors import IncompatibleEngineError, UnreportedLoadError
from kvhaven.types import ShardId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_NEEDED = (
    "on_new_request",
    "handle_preemptions",
    "build_connector_worker_meta",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "bind_gpu_block_pool",
)
"""Methods of the base class without which KVHaven would be wrong (vLLM 0.22 has them all)."""

_SERVED_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of KV that are known to be right; sub-classes of them may drop blocks, so by name."""


def require_supported_vllm() -> None:
    """Raise `IncompatibleEngineError` when this vLLM lacks what the connector builds on."""
    missing = [name for name in _NEEDED if not hasattr(KVConnectorBase_V1, name)]
    parameters = inspect.signature(KVConnectorBase_V1.__init__).parameters
    if "kv_cache_config" not in parameters:
        missing.append("the constructor's kv_cache_config")
    if missing:
        raise IncompatibleEngineError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)} in its connector interface; "
            "KVHaven needs vLLM 0.22 or newer and was proved on 0.32"
        )


def require_supported_engine(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    """Raise `IncompatibleEngineError` for set-ups that are not served, with what to change."""
    parallel = config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            raise IncompatibleEngineError(
                f"{setting} is {getattr(parallel, setting)}: a block's tokens are spread over "
                "ranks then, which KVHaven does not read yet; set it to 1"
            )
    groups = kv_cache.kv_cache_groups
    kinds = sorted({kind for group in groups for kind in _kinds(group.kv_cache_spec)})
    if len(groups) != 1:
        raise IncompatibleEngineError(
            f"the model has {len(groups)} KV groups ({', '.join(kinds)}); hybrid models are not "
            "served yet. If all its layers are attention, --disable-hybrid-kv-cache-manager "
            "makes them one group"
        )
    strange = [kind for kind in kinds if kind not in _SERVED_KINDS]
    if strange:
        raise IncompatibleEngineError(
            f"the model's KV is {', '.join(strange)}; KVHaven can only cache attention that "
            f"keeps every block of the prefix ({', '.join(_SERVED_KINDS)}) yet"
        )
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups):
        raise IncompatibleEngineError(
            "the model's attention is not causal: the KV of a prefix depends on what follows it, "
            "so it cannot be cached"
        )
    if not getattr(config.model_config, "is_prefix_caching_supported", True):
        raise IncompatibleEngineError(
            "vLLM says that this model (or its pooling) does not support prefix caching: it "
            "needs every token computed; leave KVHaven out"
        )
    if getattr(config, "use_v2_model_runner", False) and getattr(
        kv_cache, "needs_kv_cache_zeroing", False
    ):
        raise IncompatibleEngineError(
            "the KV caches are of mixed precision, and vLLM's V2 model runner zeroes new blocks "
            "before a connector can keep what is still read from them; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def require_chunk_size(chunk_size: int, block_size: int) -> None:
    """Raise `IncompatibleEngineError` when a chunk is not a whole number of blocks."""
    if chunk_size % block_size:
        raise IncompatibleEngineError(
            f"chunk_size is {chunk_size} tokens and the engine's block {block_size}: a chunk "
            f"must be a whole number of blocks; set chunk_size to a multiple of {block_size}, "
            "or the engine's --block-size to a divisor"
        )


def shard_id(config: "VllmConfig", rank: int) -> ShardId:
    """Return which part of a chunk the rank holds: its layers and its KV heads."""
    model, parallel = config.model_config, config.parallel_config
    tp = parallel.tensor_parallel_size
    first, end = model.get_layers_start_end_indices(parallel)
    heads = model.get_total_num_kv_heads()
    per_rank = model.get_num_kv_heads(parallel)
    tp_rank = rank % tp
    if model.use_mla:
        return ShardId(0, (first, end), (0, 1), tp_rank)
    replicas = max(1, tp // heads)
    first_head = tp_rank // replicas * per_rank
    return ShardId(0, (first, end), (first_head, first_head + per_rank), tp_rank % replicas)


def attention_backend(config: "VllmConfig", layers: Iterable[str]) -> type[Any] | None:
    """Return the attention backend's class of these layers, None where vLLM does not say.

    Raises `IncompatibleEngineError` when they have several.
    """
    known = config.compilation_config.static_forward_context
    found = {known[layer].get_attn_backend() for layer in layers if layer in known}
    if len(found) > 1:
        names = ", ".join(sorted(backend.__name__ for backend in found))
        raise IncompatibleEngineError(
            f"the layers of one KV group have several attention backends ({names}); choose one "
            "with --attention-backend"
        )
    return found.pop() if found else None


def kv_form(backend: type[Any] | None) -> str | None:
    """Return the form of KV tensors (a word of `layouts.forms`) that have five dimensions.

    vLLM to 0.28 had K and V side by side in a dimension of their own. Where it is, the backend
    says by the shape that it asks for; numbers that occur once give the dimensions away.
    """
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return None
    blocks, tokens, heads, elements = 1009, 16, 5, 64
    try:
        shape = tuple(shape_of(blocks, tokens, heads, elements))
    except (TypeError, ValueError, NotImplementedError):
        return None  # it wants to know more, as newer ones do: then they have four dimensions
    return {
        (2, blocks, tokens, heads, elements): "2BNHD",
        (blocks, 2, tokens, heads, elements): "B2NHD",
        (2, blocks, heads, tokens, elements): "2BHND",
    }.get(shape)


def never_raises(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a hook that vLLM calls in its loop return `default()` instead of raising.

    Anything that escapes there ends the engine and every request in it, and a cache must not
    do that: an error is logged with its trace, counted, and is a miss. `UnreportedLoadError`
    alone passes.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except UnreportedLoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the reason for this decorator
                report_error(args[0], hook.__name__, error)
                fallback: R = default()
                return fallback

        return guarded

    return decorate


def report_error(connector: Any, hook: str, error: Exception) -> None:
    """Log the first error of a hook, and count all (`connector.count_error`)."""
    seen: set[str] = connector.reported_errors
    if hook not in seen:
        seen.add(hook)
        logger.error("%s failed; further failures are only counted", hook, exc_info=error)
    connector.count_error()


def _kinds(spec: Any) -> set[str]:
    """Return the kinds of KV in a group, whose layers may be of several that are alike."""
    nested = getattr(spec, "kv_cache_specs", None)
    return {type(part).__name__ for part in (nested.values() if nested else (spec,))}
