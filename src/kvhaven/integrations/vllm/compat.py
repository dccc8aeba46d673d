# SPDX-License-Identifier: Apache-2.0
"""Differences between versions and configurations of vLLM, detected without version numbers."""

import inspect
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import vllm
import vllm.envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvhaven.errors import IncompatibleEngineError
from kvhaven.integrations.vllm import FLAT_NAME, NAME, OLDEST_VLLM
from kvhaven.integrations.vllm.parts import (
    FULL_KINDS,
    WITHOUT,
    kinds_of,
    require_supported_groups,
)
from kvhaven.integrations.vllm.state import require_states_kept
from kvhaven.types import ShardId

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

_NEEDED = (
    "on_new_request",
    "handle_preemptions",
    "build_connector_worker_meta",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "bind_gpu_block_pool",
)
"""Methods of the base class that KVHaven requires for correctness."""

_NO_INVARIANT_REUSE = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Backends for which vLLM turns prefix caching off with VLLM_BATCH_INVARIANT."""

_HOOKED = ("NONE", "PIECEWISE")
"""Modes of CUDA graphs in which attention layers run in Python."""

_MULTI: Final = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

_KEEP_NONE: Final = frozenset(
    {
        *(NAME, FLAT_NAME, "NixlConnector", "NixlPullConnector", "NixlPushConnector"),
        *("MooncakeConnector", "MoRIIOConnector"),
    }
)
"""Connectors whose loads are of KV that another engine has now; and KVHaven, which verifies it."""


def drops_outputs_in_flight() -> bool:
    """Return whether vLLM forgets what it computes behind the end of a session's turn.

    Only its source tells: 0.32 names the last token that counts, 0.29 has nothing of it.
    """
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415 - imports much

    method = getattr(Scheduler, "_handle_stopped_request", None)
    try:
        return method is not None and "safe_frontier" in inspect.getsource(method)
    except (OSError, TypeError):  # its source is not there
        return False


def enclosing_connector() -> Any | None:
    """Return the MultiConnector that makes this connector, from the callers; None without one."""
    multi = getattr(sys.modules.get(_MULTI), "MultiConnector", None)
    frame = sys._getframe() if multi is not None else None  # noqa: SLF001  the way to callers
    found = None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if multi is not None and isinstance(caller, multi):
            found = caller
        frame = frame.f_back
    return found


def beside_stores() -> bool:
    """Return whether the engine has other connectors that keep KV. Call it at the start only."""
    multi = enclosing_connector()
    if multi is None:
        return False
    transfer = multi._vllm_config.kv_transfer_config  # noqa: SLF001  of the base class
    return not _KEEP_NONE.issuperset(_connectors_in(transfer.kv_connector_extra_config))


def _connectors_in(options: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the names of a MultiConnector's connectors, by its options, which may be nested."""
    for child in options.get("connectors", ()):
        if child.get("kv_connector") == "MultiConnector":
            yield from _connectors_in(child.get("kv_connector_extra_config", {}))
        else:
            yield child.get("kv_connector")


def failure_policy(config: "VllmConfig") -> str:
    """Return what vLLM does about failed loads: `fail` or `recompute`. Call it at the start only.

    A MultiConnector hands each of its connectors a configuration with the default policy, whereas
    vLLM's scheduler follows that of the engine.
    """
    multi = enclosing_connector()
    if multi is not None:
        config = multi._vllm_config  # noqa: SLF001  of the base class
    transfer = config.kv_transfer_config
    assert transfer is not None
    return str(transfer.kv_load_failure_policy)


def require_supported_vllm() -> None:
    """Raise `IncompatibleEngineError` for an older vLLM, or one without methods that are required.

    A build from sources without git's tags has a version below 0.2, which says nothing.
    """
    missing = [name for name in _NEEDED if not hasattr(KVConnectorBase_V1, name)]
    parameters = inspect.signature(KVConnectorBase_V1.__init__).parameters
    if "kv_cache_config" not in parameters:
        missing.append("the constructor's kv_cache_config")
    release = re.match(r"(\d+)\.(\d+)", str(vllm.__version__))
    version = tuple(map(int, release.groups())) if release else (0, 0)
    oldest = tuple(map(int, OLDEST_VLLM.split(".")))
    if missing or (0, 2) <= version < oldest:
        lacks = f" (it lacks {', '.join(missing)})" if missing else ""
        raise IncompatibleEngineError(
            f"vLLM {vllm.__version__}: its connector interface is not supported{lacks}; expected "
            f"vLLM {OLDEST_VLLM} or newer. Install one, or serve without KVHaven: leave "
            "--kv-transfer-config out."
        )


def require_supported_model(config: "VllmConfig") -> None:
    """Raise `IncompatibleEngineError`, with advice, for models that are not served.

    Uses only the configuration, so that it can run before vLLM partitions the KV: for some of
    these models vLLM then raises an error without useful advice.
    """
    model, device = config.model_config, str(config.device_config.device_type)
    if getattr(model, "is_attention_free", False):
        raise IncompatibleEngineError(
            f"{model.model}: has no attention (got architecture {model.architecture}), so no KV to "
            f"cache. {WITHOUT}"
        )
    if getattr(model, "is_hybrid", False):
        require_states_kept(config)
    if not getattr(model, "is_prefix_caching_supported", True):
        raise IncompatibleEngineError(
            f"{model.model}: vLLM needs every token computed, as this model or its pooling does "
            f"not support prefix caching (got runner {model.runner_type}). {WITHOUT}"
        )
    if getattr(model, "rswa_window", None) is not None:
        raise IncompatibleEngineError(
            f"{model.model}: attends to a window of its generated tokens (got rswa_window "
            f"{model.rswa_window}), so the tokens before such a token do not determine its KV, "
            f"and vLLM turns prefix caching off. {WITHOUT}"
        )
    scheduler = config.scheduler_config
    if (
        getattr(model, "is_mm_prefix_lm", False)
        and scheduler.is_multimodal_model
        and not scheduler.disable_chunked_mm_input
    ):
        raise IncompatibleEngineError(
            f"{model.model}: the tokens of an image attend to each other in both directions, and "
            "this platform's vLLM may compute an image in several steps, so that its KV depends on "
            f"where it was split. Set --disable-chunked-mm-input. {WITHOUT}"
        )
    if device == "cpu" and platform.machine().startswith("riscv"):
        raise IncompatibleEngineError(
            f"{model.model}: runs on a RISC-V CPU (got {platform.machine()}), where vLLM does not "
            f"support prefix caching. {WITHOUT}"
        )
    if device == "cpu" and model.use_mla and not config.cache_config.enable_prefix_caching:
        raise IncompatibleEngineError(
            f"{model.model}: uses multi-head latent attention on a CPU with prefix caching off. "
            "Without AMX vLLM turns it off itself: its kernels for prefill and decode give "
            "different results for the same tokens, so KV cannot be reused. Serve this model "
            "without KVHaven, or on a CPU with AMX and --enable-prefix-caching."
        )


def require_reuse(backend: type[Any]) -> None:
    """Raise `IncompatibleEngineError` if vLLM turned prefix caching off because of a kernel.

    `backend` is the class of the layers' attention backend; plugins may not define its name.
    """
    name = backend.get_name() if hasattr(backend, "get_name") else backend.__name__
    if getattr(vllm.envs, "VLLM_BATCH_INVARIANT", False) and name in _NO_INVARIANT_REUSE:
        raise IncompatibleEngineError(
            f"VLLM_BATCH_INVARIANT is set and the attention backend is {name}: vLLM does not "
            "support prefix caching with both. Choose another with --attention-backend, unset the "
            "variable, or serve it without KVHaven."
        )


def require_stable_kernels(config: "VllmConfig", layers: Iterable[str]) -> None:
    """Raise `IncompatibleEngineError` if layers of one KV group make results unstable.

    Without vLLM's hybrid KV manager, which a connector turns off, layers with and without a
    sliding window are in one group. vLLM's CPU kernel (0.32) then splits the KV of all layers in
    the same way among its threads. If a part lies completely outside a layer's window, attention
    sinks are added to uninitialized memory, and decoding gives different tokens in each run. This
    occurs with gpt-oss, also without a connector, and not without the split.
    """
    if str(config.device_config.device_type) != "cpu" or not _splits_kv_on_cpu():
        return
    known = config.compilation_config.static_forward_context
    kernels = [getattr(known[layer], "impl", None) for layer in layers if layer in known]
    windows = {getattr(kernel, "sliding_window", None) for kernel in kernels}
    sinks = any(getattr(kernel, "sinks", None) is not None for kernel in kernels)
    if sinks and len(windows) > 1:
        raise IncompatibleEngineError(
            f"{config.model_config.model}: its layers have attention sinks and different sliding "
            "windows, and vLLM's CPU kernel gives unstable results for these in one KV group, "
            "which a connector needs. Set VLLM_CPU_ATTN_SPLIT_KV=0, or serve it without KVHaven."
        )


def require_supported_engine(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    """Raise `IncompatibleEngineError`, with advice, for configurations that are not served."""
    parallel = config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            raise IncompatibleEngineError(
                f"{setting} is {getattr(parallel, setting)}: a block's tokens are then spread over "
                "ranks, which KVHaven does not support yet; set it to 1"
            )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise IncompatibleEngineError(
            "enable_fault_tolerance is set: after a fault of an expert's rank, vLLM continues with "
            "KV of the steps that it dropped, and does not tell connectors of them. Leave "
            f"--enable-fault-tolerance out. {WITHOUT}"
        )
    outputs = getattr(config, "aux_output_config", config.model_config)  # else older vLLM
    if getattr(outputs, "enable_return_routed_experts", False):
        raise IncompatibleEngineError(
            "enable_return_routed_experts is set: vLLM returns the experts of all tokens of a "
            "prompt, which it does not have for tokens that it did not compute. Leave "
            f"--enable-return-routed-experts out. {WITHOUT}"
        )
    require_supported_model(config)
    groups = kv_cache.kv_cache_groups
    kinds = sorted({kind for group in groups for kind in kinds_of(group.kv_cache_spec)})
    if not groups:
        raise IncompatibleEngineError(
            f"{config.model_config.model}: keeps no KV (an encoder, or a model without attention), "
            f"so there is nothing to cache. {WITHOUT}"
        )
    if len(groups) != 1:
        require_supported_groups(config, kv_cache)
        kinds = []
    strange = [kind for kind in kinds if kind not in FULL_KINDS]
    if strange:
        window = getattr(groups[0].kv_cache_spec, "sliding_window", None)
        way_out = (
            f"For contexts of at most {window} tokens set --disable-sliding-window and "
            f"--max-model-len {window}; or serve it without KVHaven."
            if window is not None
            else WITHOUT
        )
        raise IncompatibleEngineError(
            f"{config.model_config.model}: its KV is {', '.join(strange)}, which drops blocks of "
            f"the prefix; expected {' or '.join(FULL_KINDS)}, as others are not served yet. "
            f"{way_out}"
        )
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups):
        raise IncompatibleEngineError(
            "the model's attention is not causal: the KV of a prefix depends on later tokens, "
            "so it cannot be cached"
        )
    if getattr(config, "use_v2_model_runner", False) and getattr(
        kv_cache, "needs_kv_cache_zeroing", False
    ):
        raise IncompatibleEngineError(
            "the KV caches have mixed precision, and vLLM's V2 model runner zeroes new blocks "
            "before a connector can fence the saves that still read them; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def shard_id(config: "VllmConfig", rank: int) -> ShardId:
    """Return the part of a chunk that the rank holds: its layers and its KV heads."""
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


def drops_last_block(config: "VllmConfig") -> bool:
    """Return whether vLLM recomputes the last block of each hit in its prefix cache.

    Drafters that use the target's hidden states (EAGLE, MTP, ...) shift their input by one, so
    the KV of a token is computed from the token after it. The block's hash therefore does not
    determine the KV of its last token, and vLLM excludes the last block of a hit. For earlier
    blocks, the following token is in the next block, which is part of the hit.
    """
    speculative = config.speculative_config
    if speculative is None:
        return False
    if hasattr(speculative, "use_eagle_block_drop"):  # not in vLLM 0.29: it always does
        return bool(speculative.use_eagle_block_drop())
    return bool(speculative.use_eagle())


def is_last_stage(config: "VllmConfig") -> bool:
    """Return whether a worker's rank is in the last pipeline stage, which samples and drafts."""
    parallel = config.parallel_config
    stage = int(parallel.rank) // int(parallel.tensor_parallel_size)
    return stage == int(parallel.pipeline_parallel_size) - 1


def calls_layer_hooks(context: "ForwardContext | None") -> bool:
    """Return whether a forward calls `wait_for_layer_load` in each attention layer, in one thread.

    It does not if it replays a FULL CUDA graph, and if there is nothing to attend to. Of a batch in
    two microbatches, which have a list of metadata, two threads call it.
    """
    metadata = getattr(context, "attn_metadata", None)
    mode = getattr(context, "cudagraph_runtime_mode", None)
    return isinstance(metadata, dict) and bool(metadata) and getattr(mode, "name", "") in _HOOKED


def attention_backend(config: "VllmConfig", layers: Iterable[str]) -> type[Any] | None:
    """Return the attention backend's class of these layers, None if vLLM does not report it.

    vLLM derives backends for chunked local attention from others with the same page layout; the
    result is then the common base. Raises `IncompatibleEngineError` if there is none.
    """
    known = config.compilation_config.static_forward_context
    found = {known[layer].get_attn_backend() for layer in layers if layer in known}
    common = [one for one in found if all(issubclass(other, one) for other in found)]
    if found and not common:
        names = ", ".join(sorted(backend.__name__ for backend in found))
        raise IncompatibleEngineError(
            f"the layers of one KV group have several attention backends (got {names}); expected "
            "one. Choose it with --attention-backend, or serve the model without KVHaven."
        )
    return common[0] if common else None


def own_layers(config: "VllmConfig", layers: Iterable[str]) -> set[str]:
    """Return the layers that have their own KV; the others read the KV of an earlier layer."""
    known = config.compilation_config.static_forward_context
    return {
        layer
        for layer in layers
        if getattr(known.get(layer), "kv_sharing_target_layer_name", None) is None
    }


def kv_form(backend: type[Any] | None) -> str | None:
    """Return the form of five-dimensional KV tensors, as a name in `layouts.tensor_shapes`.

    vLLM up to 0.28 had K and V in a separate dimension. The shape that the backend requires shows
    its position, since each size in the probe is unique. None if there is no such dimension.
    """
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return None
    blocks, tokens, heads, elements = 1009, 16, 5, 64
    try:
        shape = tuple(shape_of(blocks, tokens, heads, elements))
    except (TypeError, ValueError, NotImplementedError):
        return None  # newer backends have more parameters, and four dimensions
    return {
        (2, blocks, tokens, heads, elements): "2BNHD",
        (blocks, 2, tokens, heads, elements): "B2NHD",
        (2, blocks, heads, tokens, elements): "2BHND",
    }.get(shape)


def _splits_kv_on_cpu() -> bool:
    """Return whether vLLM's CPU attention splits the KV of a request among its threads."""
    return bool(getattr(vllm.envs, "VLLM_CPU_ATTN_SPLIT_KV", False))


# Checked on import: modules that are imported after this one use names that older versions lack.
require_supported_vllm()
