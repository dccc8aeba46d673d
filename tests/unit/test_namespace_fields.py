# SPDX-License-Identifier: Apache-2.0
"""A decision is there for every setting of vLLM; a new one fails here and counts meanwhile."""

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, get_origin

import pytest

from kvhaven.identity.setting_tables import ConfigFields
from kvhaven.integrations.vllm.namespace_environment import ENVIRONMENT
from kvhaven.integrations.vllm.namespace_fields import (
    CONFIG_FIELDS,
    UNREACHED_CLASSES,
)
from tests.unit.vllm_configs import engine_config, write_model

pytestmark = pytest.mark.slow

OTHER_VERSIONS = {
    "AttentionConfig": "use_fp4_indexer_cache indexer_tp_shard_min_rows minimax_m3_indexer_cp "
    "trtllm_ragged_backend",
    "CacheConfig": "calculate_kv_scales enable_mamba_fine_grained_prefix_cache "
    "simple_cpu_offload_num_blocks user_specified_mamba_block_size",
    "ECTransferConfig": "ec_parallel_size ec_rank",
    "KVTransferConfig": "kv_buffer_size kv_ip kv_parallel_size kv_rank",
    "KernelConfig": "enable_bf16x3_router_gemm monokernel",
    "ModelConfig": "enable_return_routed_experts",
    "ParallelConfig": "sd_worker_cls",
    "PassConfig": "enable_sp fuse_gemm_comms sp_min_token_num",
    "SpeculativeConfig": "disable_lookahead_block_hashes draft_lm_head_quantization "
    "fly_entropy_threshold fly_entropy_top_k fly_window_size xpress_topc",
    "VllmConfig": "watchdog_config",
    "WatchdogConfig": "check_interval dump_dir timeout",
}
"""Names in the table that vLLM 0.32 does not have; they were read in 0.29 to 0.33, and older."""
OTHER_VARIABLES = (
    "VLLM_MM_HASHER_ALGORITHM VLLM_NIXL_EP_MAX_NUM_RANKS VLLM_PREFIX_CACHE_RETENTION_INTERVAL "
    "VLLM_PLE_CPU_OFFLOAD VLLM_KIMI_K3_GEMM_RS VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 "
    "VLLM_XPU_ENABLE_XPU_GRAPH VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT "
    "VLLM_CHAT_TEMPLATE_FUEL VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD "
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES "
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_REQUEST_BODY_LOG_LEVEL "
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE "
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT"
)
"""The same for environment variables."""

HASHED_BY_VLLM = {
    "AuxOutputConfig": "enable_return_routed_experts",
    "AttentionConfig": "sparse_mla_prefill_workspace_factor",
    "CacheConfig": "kv_cache_layout kv_offloading_backend kv_offloading_size",
    "CompilationConfig": "compile_cache_save_format compile_ranges_endpoints compile_sizes "
    "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder "
    "cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora "
    "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
    "encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch "
    "encoder_cudagraph_token_budgets max_cudagraph_capture_size static_all_moe_layers",
    "EngramConfig": "cpu_offload dp_shared_memory embedding_across_dp use_thp",
    "LoRAConfig": "max_lora_cls_labels max_lora_rank max_loras",
    "ModelConfig": "allow_deprecated_quantization enable_cumem_allocator "
    "enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode is_submodel_config "
    "max_logprobs max_model_len model model_weights renderer_num_workers revision runner "
    "sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
    "trust_remote_code word_embeddings_untied_by_checkpoint",
    "OffloadConfig": "offload_backend prefetch uva",
    "ParallelConfig": "_allow_auto_resolve_cp_interleave_size cpu_distributed_timeout_seconds "
    "data_parallel_size dbo_decode_token_threshold dbo_prefill_token_threshold "
    "disable_nccl_for_dp_synchronization distributed_timeout_seconds dp_sync_interval "
    "elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep "
    "enable_ep_weight_filter enable_eplb enable_fault_tolerance eplb_config "
    "expert_placement_strategy fault_tolerance_config is_moe_model pipeline_parallel_size "
    "ubatch_size world_size",
    "SchedulerConfig": "max_num_batched_tokens max_num_seqs",
    "SpeculativeConfig": "enable_adaptive_verification",
}
"""Fields that go into the key of vLLM's compile cache and that we ignore all the same.

A compiled graph has more in it than the KV: sizes of buffers, what is returned, how often
processes synchronise. The reason of each stands in the table; a new one is to be looked at.
"""


def names(fields: ConfigFields) -> list[str]:
    """Return all names in a class's lists."""
    groups = (fields.paged, fields.ignored, fields.files, fields.refused)
    partly = [entry.partition(":")[0].strip() for entry in fields.partly.values()]
    listed = [name for group in groups for entry in group.values() for name in entry.split()]
    return fields.counts.split() + partly + listed


def ignored(fields: ConfigFields) -> set[str]:
    return {name for entry in fields.ignored.values() for name in entry.split()}


def config_classes() -> dict[str, type[Any]]:
    """Return the configuration classes of the installed vLLM."""
    package = importlib.import_module("vllm.config")
    found = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"vllm.config.{module_info.name}")
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields")):
                found[name] = kind
    return found


def fields_of(kind: type[Any]) -> set[str]:
    """Return a class's fields, those that only its constructor takes (InitVar) included."""
    declared = set(getattr(kind, "model_fields", {})) | set(
        getattr(kind, "__dataclass_fields__", {})
    )
    annotations = {name: hint for base in kind.__mro__ for name, hint in _annotations(base)}
    return {name for name in declared if get_origin(annotations.get(name)) is not ClassVar}


def _annotations(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    yield from inspect.get_annotations(kind).items()


def skip_other_versions() -> None:
    """Skip a test that compares with lists of names which were read against one version."""
    import vllm

    if not vllm.__version__.startswith("0.32."):
        pytest.skip("the lists of names are those that differ from vLLM 0.32")


UNREACHED = {name for entry in UNREACHED_CLASSES.values() for name in entry.split()}


def test_every_class_of_vllms_configuration_is_in_the_table() -> None:
    missing = config_classes().keys() - CONFIG_FIELDS.keys() - UNREACHED
    assert not missing, f"decide about {sorted(missing)} in namespace_fields.py"


def undecided(classes: dict[str, type[Any]]) -> list[str]:
    """Return the fields of these classes that are in none of the table's lists."""
    return sorted(
        f"{name}.{field}"
        for name, kind in classes.items()
        if name not in UNREACHED
        for field in fields_of(kind) - set(names(CONFIG_FIELDS.get(name, ConfigFields())))
    )


def test_every_field_of_every_class_is_in_one_of_its_lists() -> None:
    assert undecided(config_classes()) == [], "decide about them in namespace_fields.py"


def test_a_field_of_a_later_version_would_be_found() -> None:
    field, hint = dataclasses.field, dataclasses.InitVar[int]
    later = [
        dataclasses.make_dataclass("LoRAConfig", ["target_modules", "new"]),
        dataclasses.make_dataclass("ModelConfig", [("dtype", str), ("only", hint, field())]),
        dataclasses.make_dataclass("NewConfig", [("size", int), ("KIND", ClassVar[str], "x")]),
    ]
    assert undecided({kind.__name__: kind for kind in later}) == [
        "LoRAConfig.new",
        "ModelConfig.only",
        "NewConfig.size",
    ]


def test_every_attribute_of_a_real_configuration_is_in_a_list(tmp_path: Path) -> None:
    """vLLM's classes have attributes that are no fields."""
    missing: set[str] = set()

    def look(settings: Any) -> None:
        kind = type(settings).__name__
        kept = {
            name
            for name, member in inspect.getmembers_static(type(settings))
            if isinstance(member, functools.cached_property)
        }
        known = set(names(CONFIG_FIELDS[kind])) | kept
        missing.update(f"{kind}.{name}" for name in vars(settings).keys() - known)
        for value in vars(settings).values():
            if type(value).__name__ in CONFIG_FIELDS:
                look(value)

    look(engine_config(write_model(tmp_path / "model")))
    assert not missing, f"decide about {sorted(missing)} in namespace_fields.py"


def test_every_environment_variable_of_vllm_is_in_a_list() -> None:
    import vllm.envs

    missing = vllm.envs.environment_variables.keys() - set(names(ENVIRONMENT))
    assert not missing, f"decide about {sorted(missing)} in namespace_environment.py"


def test_no_name_is_in_two_lists() -> None:
    for kind, fields in {**CONFIG_FIELDS, "the environment": ENVIRONMENT}.items():
        twice = [name for name, count in Counter(names(fields)).items() if count > 1]
        assert not twice, kind


def test_every_name_is_one_of_vllm() -> None:
    """A typing error would leave a field undecided, or hide one of a later version."""
    skip_other_versions()
    classes = config_classes()
    for kind, fields in CONFIG_FIELDS.items():
        others = set(OTHER_VERSIONS.get(kind, "").split())
        known = fields_of(classes[kind]) if kind in classes else set()
        if kind == "ModelConfig":
            known |= {
                *("_architecture", "_hf_config_revision", "_model_info", "attention_chunk_size"),
                *("_pooler_config_sources", "_supports_multimodal_inputs_cache", "convert_type"),
                *("config_updated", "encoder_config", "hf_image_processor_config"),
                *("model_arch_config", "original_max_model_len", "runner_type"),
            }
        assert set(names(fields)) - known == others, kind


def test_every_variable_is_one_of_vllm() -> None:
    import vllm.envs

    skip_other_versions()
    assert set(names(ENVIRONMENT)) - vllm.envs.environment_variables.keys() == set(
        OTHER_VARIABLES.split()
    )


def hashed_by(kind: type[Any]) -> set[str]:
    """Return the fields that a class's own `compute_hash` takes in, as its source says."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.compute_hash)))
    calls = {getattr(node.func, "id", "") for node in ast.walk(tree) if isinstance(node, ast.Call)}
    if "get_hash_factors" in calls:
        literals = [
            {element.value for element in node.elts if isinstance(element, ast.Constant)}
            for node in ast.walk(tree)
            if isinstance(node, ast.Set)
        ]
        return fields_of(kind) - set().union(*literals)
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    } & fields_of(kind)


def test_fields_that_vllm_hashes_for_its_compiler_are_ignored_knowingly() -> None:
    skip_other_versions()
    found = {}
    for name, kind in config_classes().items():
        if name == "VllmConfig" or name not in CONFIG_FIELDS or "compute_hash" not in vars(kind):
            continue
        init_only = {
            field.name
            for field in getattr(kind, "__dataclass_fields__", {}).values()
            if "InitVar" in str(field.type)
        }
        if both := (hashed_by(kind) & ignored(CONFIG_FIELDS[name])) - init_only:
            found[name] = both
    assert found == {name: set(entry.split()) for name, entry in HASHED_BY_VLLM.items()}


@pytest.mark.parametrize("kind", [*CONFIG_FIELDS, "the environment"])
def test_every_reason_is_a_sentence_about_something(kind: str) -> None:
    fields = ENVIRONMENT if kind == "the environment" else CONFIG_FIELDS[kind]
    for reasons in (fields.paged, fields.ignored, fields.files, fields.refused, fields.partly):
        for reason, entry in reasons.items():
            assert len(reason.split()) >= 3, reason
            assert entry.split(), reason
