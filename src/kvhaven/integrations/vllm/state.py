# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep a recurrent state (Mamba, linear attention): refusals and identity."""

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvhaven.config import Resolved, Settings
from kvhaven.errors import IncompatibleEngineError
from kvhaven.integrations.vllm.platforms import platform_of
from kvhaven.types import ShardId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

STATE_KIND = "MambaSpec"
"""The class of the specs of all recurrent states in vLLM, also of linear attention."""

_KEEPS = "align"
"""The mode of vLLM in which its prefix cache keeps states at the ends of blocks."""
HANDS_STATES_OFF = hasattr(base.KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
"""Whether vLLM is 0.32 or newer, with which this was tested."""
_WITHOUT = "Or serve it without KVHaven: leave --kv-transfer-config out."


def specs_of(spec: Any) -> list[Any]:
    """Return the specs of a KV group's layers, without repetitions that vLLM leaves out."""
    nested = getattr(spec, "kv_cache_specs", None)
    return list(nested.values()) if nested else [spec]


def is_state(spec: Any) -> bool:
    """Return whether all layers of a KV group keep a recurrent state."""
    return all(type(part).__name__ == STATE_KIND for part in specs_of(spec))


def has_states(kv_cache: "KVCacheConfig") -> bool:
    """Return whether a KV group keeps recurrent states."""
    return any(is_state(group.kv_cache_spec) for group in kv_cache.kv_cache_groups)


def require_states_kept(config: "VllmConfig") -> None:
    """Raise `IncompatibleEngineError` if a model's states cannot be cached, by its configuration.

    It runs before vLLM partitions the KV, which fails without useful advice for some of these.
    """
    model, cache = config.model_config, config.cache_config
    has = f"{model.model}: keeps a recurrent state (got architecture {model.architecture})"
    if not HANDS_STATES_OFF:
        raise IncompatibleEngineError(
            f"{has}, which KVHaven caches with vLLM 0.32 or newer. Install one. {_WITHOUT}"
        )
    if not cache.enable_prefix_caching or cache.mamba_cache_mode != _KEEPS:
        caching = "on" if cache.enable_prefix_caching else "off"
        raise IncompatibleEngineError(
            f"{has}, and vLLM keeps no states to save (got prefix caching {caching}, "
            f"mamba_cache_mode {cache.mamba_cache_mode!r}). Set --enable-prefix-caching and "
            f"--mamba-cache-mode {_KEEPS}. {_WITHOUT}"
        )
    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise IncompatibleEngineError(
            f"{has}, which needs vLLM's hybrid KV manager. Leave "
            f"--disable-hybrid-kv-cache-manager out, and use the connector KVHavenConnector. "
            f"{_WITHOUT}"
        )
    speculative = config.speculative_config
    if speculative is not None:
        raise IncompatibleEngineError(
            f"{has}, and speculation by {speculative.method}, with which states change their "
            f"blocks; this is not served yet. Leave --speculative-config out. {_WITHOUT}"
        )
    if getattr(config, "use_v2_model_runner", False):
        raise IncompatibleEngineError(
            f"{has}, and vLLM's V2 model runner copies states into new blocks before a connector "
            "can fence the saves that still read them. Set VLLM_USE_V2_MODEL_RUNNER=0. "
            f"{_WITHOUT}"
        )
    if not platform_of(config).hears_workers:
        raise IncompatibleEngineError(
            f"{has}, and this platform's runner ({config.device_config.device_type}) does not "
            f"report failed loads. {_WITHOUT}"
        )


def require_state_groups(config: "VllmConfig", kv_cache: "KVCacheConfig", has: str) -> None:
    """Raise `IncompatibleEngineError` for groups with states that are not served.

    `has` are the model and its groups in words. All blocks must have the same number of tokens, and
    vLLM's hits must end with a block: then it copies no states of a part of a block.
    """
    require_states_kept(config)
    sizes = sorted({group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups})
    if len(sizes) > 1:
        raise IncompatibleEngineError(
            f"{has}, with blocks of {sizes} tokens; expected one size for all groups. Set "
            f"--mamba-block-size to the size of the attention's blocks. {_WITHOUT}"
        )
    unit = getattr(config.cache_config, "prefix_match_unit", None)
    if unit not in {None, *sizes}:
        raise IncompatibleEngineError(
            f"{has}, and prefix_match_unit is {unit}; expected the block of {sizes[0]} tokens, as "
            f"states within a block are not served. Leave --prefix-match-unit out. {_WITHOUT}"
        )
    for mamba in _states(kv_cache):
        if mamba.mamba_cache_mode != _KEEPS or mamba.num_speculative_blocks:
            raise IncompatibleEngineError(
                f"{has}, with states in mode {mamba.mamba_cache_mode!r} and "
                f"{mamba.num_speculative_blocks} blocks for speculation; expected {_KEEPS!r} and "
                f"none. {_WITHOUT}"
            )


def with_chunk_size(resolved: Resolved, kv_cache: "KVCacheConfig") -> Resolved:
    """Return the settings of an engine, for models with states with the chunk size that they need.

    vLLM keeps states at the ends of blocks, whose size it derives from the model. If `chunk_size`
    is not set, a chunk is one block. Raises `IncompatibleEngineError` if it does not suit.
    """
    if not has_states(kv_cache):
        return resolved
    settings = resolved.settings
    block = math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache.kv_cache_groups))
    origin = resolved.origins["chunk_size"]
    if origin == "default":
        settings = msgspec.structs.replace(settings, chunk_size=block)
        return Resolved(settings, resolved.origins, resolved.notes)
    if settings.chunk_size % block:
        raise IncompatibleEngineError(
            f"chunk_size is {settings.chunk_size} tokens ({origin}), and vLLM keeps this model's "
            f"recurrent state every {block} tokens; expected a multiple of {block}. Leave "
            f"chunk_size out: a chunk is then {block} tokens"
        )
    if settings.chunk_size > block:
        note = (
            f"chunk_size is {settings.chunk_size} tokens, and vLLM keeps this model's recurrent "
            f"state at multiples of {block}: only those at the end of a chunk are saved. Leave "
            "chunk_size out for the most hits"
        )
        return Resolved(settings, resolved.origins, (*resolved.notes, note))
    return resolved


def require_state_format(settings: Settings, kv_cache: "KVCacheConfig") -> None:
    """Raise `IncompatibleEngineError` for a model with states in the portable format."""
    if settings.format == "portable" and has_states(kv_cache):
        raise IncompatibleEngineError(
            "format is portable, and the model keeps a recurrent state, which has no portable "
            "form; set format: paged"
        )


def state_fields(kv_cache: "KVCacheConfig") -> dict[str, str]:
    """Return the namespace fields that determine the bytes of states, except for their number."""
    forms = []
    for mamba in _states(kv_cache):
        dtypes = [str(dtype).removeprefix("torch.") for dtype in mamba.dtypes]
        pairs = zip(dtypes, mamba.shapes, strict=True)
        states = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in pairs)
        forms.append(f"{mamba.mamba_type.name} {mamba.mamba_cache_mode}: {states}")
    return {"state": "; ".join(dict.fromkeys(forms))}


def state_shard(config: "VllmConfig", rank: int) -> ShardId:
    """Return the shard of a rank's states: its layers, and its part of them by tensor parallelism.

    They have heads of their own, so a rank's number is in the place of its KV heads.
    """
    parallel = config.parallel_config
    first, end = config.model_config.get_layers_start_end_indices(parallel)
    part = rank % parallel.tensor_parallel_size
    return ShardId(0, (first, end), (part, part + 1))


def _states(kv_cache: "KVCacheConfig") -> "Iterator[Any]":
    for group in kv_cache.kv_cache_groups:
        if is_state(group.kv_cache_spec):
            yield from specs_of(group.kv_cache_spec)
