# SPDX-License-Identifier: Apache-2.0
"""Namespaces of real configurations of vLLM: who shares KV with whom, and who must not."""

import copy
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.setting_tables import MOST_FIELDS
from kvhaven.integrations.vllm.namespace import (
    RULES_VERSION,
    Description,
    KvFormat,
    describe_engine,
)
from kvhaven.keys import differing_fields, namespace_digest
from tests.unit.test_docs import section, table
from tests.unit.vllm_configs import engine_config, write_model

pytestmark = pytest.mark.slow

FORMATS: tuple[KvFormat, ...] = ("paged", "portable")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def configured(model: Path) -> Any:
    """An engine's configuration, made once; tests change copies of it."""
    return engine_config(model)


@pytest.fixture
def config(configured: Any) -> Any:
    return copy.deepcopy(configured)


def fields(config: Any, kv_format: KvFormat) -> dict[str, str]:
    return describe_engine(config, kv_format).fields


def differing(one: Any, other: Any, kv_format: KvFormat) -> list[str]:
    return differing_fields(fields(one, kv_format), fields(other, kv_format))


# --- who shares -------------------------------------------------------------------------------

TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

SHARING: dict[str, dict[str, Any]] = {
    "max_model_len": {"max_model_len": 512},
    "max_num_seqs": {"max_num_seqs": 7},
    "max_num_batched_tokens": {"max_num_batched_tokens": 4096},
    "memory": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77},
    "prefix caching off": {"enable_prefix_caching": False},
    "hash of the prefix cache": {"prefix_caching_hash_algo": "sha256_cbor"},
    "seed": {"seed": 7},
    "served name": {"served_model_name": ["a", "b"]},
    "tokenizer": {"tokenizer_mode": "slow", "tokenizer": "/"},
    "sampling": {"override_generation_config": {"temperature": 0.5}, "max_logprobs": 3},
    "another engine": {"kv_transfer_config": TRANSFER | {"engine_id": "e2", "kv_port": 1}},
    "KV events": {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:1"}},
    "chunked prefill off": {"enable_chunked_prefill": False},
    "scheduling": {"scheduling_policy": "priority", "stream_interval": 5},
    "metrics": {"collect_detailed_traces": None, "kv_cache_metrics": True},
    "load threads": {
        "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3}
    },
    "speculation by n-grams": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        }
    },
    "grammars": {"structured_outputs_config": {"backend": "guidance"}},
    "weights by a trainer": {"weight_transfer_config": {"backend": "nccl"}},
    "replicas": {"data_parallel_size": 2, "data_parallel_backend": "mp"},
}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("arguments", SHARING.values(), ids=SHARING.keys())
def test_engines_that_compute_the_same_share(
    model: Path, config: Any, arguments: dict[str, Any], kv_format: KvFormat
) -> None:
    assert differing(config, _made(model, **arguments), kv_format) == []


@functools.cache
def _known(model: Path, arguments: str) -> Any:
    return engine_config(model, **json.loads(arguments))


def _made(model: Path, **arguments: Any) -> Any:
    """Return a configuration for these arguments, made once for all formats."""
    return _known(model, json.dumps(arguments))


def of_another_rank(config: Any) -> None:
    config.parallel_config.rank = 3
    config.device_config.device = torch.device("cuda:3")
    config.compilation_config.local_cache_dir = "/cache/rank_3"
    config.compilation_config.traced_files.add("/one/file.py")
    config.compilation_config.static_forward_context["layer"] = object()
    config.cache_config.num_gpu_blocks = 123
    config.model_config._supports_multimodal_inputs_cache = {1: object()}


def of_another_replica(config: Any) -> None:
    config.parallel_config.data_parallel_rank = 1
    config.parallel_config.data_parallel_index = 1
    config.parallel_config._data_parallel_master_port_list = [1, 2, 3]


def of_another_run(config: Any) -> None:
    config.instance_id = "1795324345144131263"
    config.parallel_config.master_port = 12345


def with_properties_that_were_asked_for(config: Any) -> None:
    """Properties that vLLM keeps (`cached_property`) lie among the attributes then."""
    for settings in (config.model_config, config.observability_config):
        for name, member in vars(type(settings)).items():
            if isinstance(member, functools.cached_property):
                getattr(settings, name)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    "change",
    [of_another_rank, of_another_replica, of_another_run, with_properties_that_were_asked_for],
)
def test_ranks_replicas_and_runs_agree(
    config: Any, configured: Any, change: Callable[[Any], None], kv_format: KvFormat
) -> None:
    change(config)
    assert differing(config, configured, kv_format) == []


UNLIKE: dict[str, dict[str, Any]] = {
    "cache.block_size": {"block_size": 64},
    "parallel.tensor_parallel_size": {"tensor_parallel_size": 2},
    "compilation.mode": {"enforce_eager": True},
    "attention.flash_attn_version": {"attention_config": {"flash_attn_version": 2}},
    "kernel.moe_backend": {"kernel_config": {"moe_backend": "triton"}},
    "lora.fully_sharded_loras": {"enable_lora": True, "fully_sharded_loras": True},
}


@pytest.mark.parametrize(("name", "arguments"), UNLIKE.items(), ids=UNLIKE.keys())
def test_unlike_engines_share_portable_kv_alone(
    model: Path, config: Any, name: str, arguments: dict[str, Any]
) -> None:
    other = _made(model, **arguments)
    assert name in differing(config, other, "paged")
    assert differing(config, other, "portable") == []


@pytest.mark.parametrize("kv_format", FORMATS)
def test_room_for_adapters_does_not_count(model: Path, config: Any, kv_format: KvFormat) -> None:
    one = _made(model, enable_lora=True)
    assert differing(one, _made(model, enable_lora=True, max_loras=4), kv_format) == []
    if kv_format == "portable":  # in the other one it is compiled otherwise
        assert differing(one, config, kv_format) == []


def test_the_api_knows_what_the_fields_of_device_and_block_are_named(config: Any) -> None:
    """`service.snapshot` shows them."""
    paged = fields(config, "paged")
    assert paged["device.device_type"] == "cpu"
    assert int(paged["cache.block_size"]) == config.cache_config.block_size


def test_the_engines_version_counts_in_the_paged_format_alone(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {kv_format: fields(config, kv_format) for kv_format in FORMATS}
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert differing_fields(before["paged"], fields(config, "paged")) == ["engine"]
    assert before["portable"] == fields(config, "portable")


# --- who must not share -----------------------------------------------------------------------

LORA = {"enable_lora": True}

OTHER: dict[str, dict[str, Any]] = {
    "model.dtype": {"dtype": "bfloat16"},
    "cache.cache_dtype": {"kv_cache_dtype": "fp8"},
    "model.hf_config.rope_parameters.rope_theta": {
        "hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    },
    "model.model_impl": {"model_impl": "transformers"},
    "model.model_class_overrides": {
        "model_class_overrides": {
            "LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"
        }
    },
    "model.runner_type": {"runner": "pooling"},
    "load.load_format": {"load_format": "pt"},
    "additional_config": {"additional_config": {"precision": "low"}},
    "parallel.worker_extension_cls": {"worker_extension_cls": "a.b.Extension"},
    "model.override_generation_config": {
        "override_generation_config": {"attn_temperature_tuning": True, "temperature": 1.0}
    },
    "lora.target_modules": LORA | {"lora_target_modules": ["o_proj"]},
    "lora.lora_dtype": LORA | {"lora_dtype": "bfloat16"},
    "lora.enable_tower_connector_lora": LORA | {"enable_tower_connector_lora": True},
}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(("name", "arguments"), OTHER.items(), ids=OTHER.keys())
def test_engines_that_compute_something_else_do_not_share(
    model: Path, config: Any, name: str, arguments: dict[str, Any], kv_format: KvFormat
) -> None:
    assert name in differing(config, _made(model, **arguments), kv_format)


def media(**settings: Any) -> Any:
    from vllm.config import MultiModalConfig

    return MultiModalConfig(**settings)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_kwargs", {"max_pixels": 1000}),
        ("media_io_kwargs", {"video": {"num_frames": 8}}),
        ("video_pruning_rate", 0.5),
        ("video_pruning_method", "vidcom2"),
        ("language_model_only", True),
    ],
)
def test_how_media_are_processed_counts(
    config: Any, name: str, value: Any, kv_format: KvFormat
) -> None:
    other = copy.deepcopy(config)
    config.model_config.multimodal_config = media()
    other.model_config.multimodal_config = media(**{name: value})
    assert differing(config, other, kv_format) == [f"model.multimodal_config.{name}"]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_argument_that_only_the_constructor_takes_counts(
    config: Any, kv_format: KvFormat
) -> None:
    """In 0.32 `model_config.video_pruning_rate` is an InitVar: None wherever it is read."""
    other = copy.deepcopy(config)
    config.model_config.multimodal_config = media()
    other.model_config.multimodal_config = media(video_pruning_rate=0.3)
    assert other.model_config.video_pruning_rate is None
    assert differing(config, other, kv_format) == ["model.multimodal_config.video_pruning_rate"]


def test_a_preprocessors_configuration_counts(config: Any, configured: Any) -> None:
    config.model_config.hf_image_processor_config = {"size": {"height": 336}}
    assert differing(config, configured, "portable") == ["model.hf_image_processor_config"]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_setting_of_a_later_version_counts(
    config: Any, configured: Any, kv_format: KvFormat
) -> None:
    config.cache_config.brand_new = True
    config.model_config.multimodal_config = SimpleNamespace(mm_encoder_attn_dtype=None)
    config.model_config.multimodal_config.__class__.__name__  # noqa: B018 - of no known class
    found = differing(config, configured, kv_format)
    assert "cache.brand_new" in found
    assert "model.multimodal_config" in found


def test_the_value_of_a_setting_that_is_not_known_is_not_shown(config: Any) -> None:
    config.model_config.new_token = "a secret"
    config.additional_config = {"password": "a secret"}
    for value in fields(config, "paged").values():
        assert "secret" not in value


def test_a_setting_that_cannot_be_named_is_of_this_run_alone(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config.kernel_config.brand_new = lambda layer: layer
    first = fields(config, "portable")
    assert fields(copy.deepcopy(config), "portable") == first  # its ranks agree
    assert "kernel.brand_new cannot be named (it holds a builtins.function)" in caplog.text
    config.instance_id = "1795324345144131263"
    assert differing_fields(first, fields(config, "portable")) == ["kernel.brand_new"]


# --- environment variables --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "paged", "portable"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", True, True),
        ("VLLM_ROCM_USE_AITER", True, False),
        ("VLLM_LOGGING_LEVEL", False, False),
        ("VLLM_HOST_IP", False, False),
        ("VLLM_OF_A_SERVICE_IN_KUBERNETES", False, False),
        ("VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB", True, True),
        ("VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB", True, True),
        ("NVIDIA_TF32_OVERRIDE", True, True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True, True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", True, True),
        ("ONEDNN_MAX_CPU_ISA", True, False),
    ],
)
def test_environment_variables_that_change_what_is_computed_count(
    config: Any, monkeypatch: pytest.MonkeyPatch, variable: str, paged: bool, portable: bool
) -> None:
    monkeypatch.delenv(variable, raising=False)
    for kv_format, counts in zip(FORMATS, (paged, portable), strict=True):
        before = fields(config, kv_format)
        monkeypatch.setenv(variable, "5")
        found = differing_fields(before, fields(config, kv_format))
        assert found == ([f"env.{variable}"] if counts else [])
        monkeypatch.delenv(variable)


def test_a_variable_of_a_later_version_counts_and_is_not_shown(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.envs

    monkeypatch.setitem(vllm.envs.environment_variables, "VLLM_BRAND_NEW", lambda: None)
    before = fields(config, "portable")
    monkeypatch.setenv("VLLM_BRAND_NEW", "a secret")
    after = fields(config, "portable")
    assert differing_fields(before, after) == ["env.VLLM_BRAND_NEW"]
    assert "secret" not in after["env.VLLM_BRAND_NEW"]


class Plugin:
    """An entry point of an installed distribution."""

    def __init__(self, name: str, distribution: str, version: str) -> None:
        self.name = name
        self.module = distribution
        self.dist = SimpleNamespace(name=distribution, version=version)


def test_plugins_that_vllm_loads_count_and_a_platforms_only_in_paged(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`VLLM_PLUGINS` says which of them it loads; one may compute another KV for any model."""
    installed = {
        "vllm.platform_plugins": [Plugin("hpu", "vllm_gaudi", "1.0")],
        "vllm.general_plugins": [
            Plugin("hpu_custom_ops", "vllm_gaudi", "1.0"),
            Plugin("other_llama", "evil", "2.0"),
            Plugin("kvhaven", "kvhaven", "1.0"),
        ],
    }
    monkeypatch.setattr(
        "kvhaven.integrations.vllm.namespace.importlib.metadata.entry_points",
        lambda group: installed[group],
    )
    monkeypatch.setenv("VLLM_PLUGINS", "none")
    none = {kv_format: fields(config, kv_format) for kv_format in FORMATS}
    assert "plugins" not in none["paged"]
    monkeypatch.setenv("VLLM_PLUGINS", "hpu,hpu_custom_ops")
    assert differing_fields(none["paged"], fields(config, "paged")) == ["engine"]
    assert differing_fields(none["portable"], fields(config, "portable")) == []
    monkeypatch.delenv("VLLM_PLUGINS")
    loaded = fields(config, "paged")
    assert loaded["engine"].endswith(", evil 2.0, vllm_gaudi 1.0")
    assert loaded["plugins"] == fields(config, "portable")["plugins"] == "evil:other_llama"


def test_a_custom_all_reduce_counts_in_paged(config: Any) -> None:
    """Its kernels may quantize what ranks send each other."""
    without = copy.deepcopy(config)
    config.parallel_config.disable_custom_all_reduce = False
    without.parallel_config.disable_custom_all_reduce = True
    assert differing(config, without, "paged") == ["parallel.disable_custom_all_reduce"]
    assert differing(config, without, "portable") == []


# --- code that is not vLLM's --------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "vLLM has no such model"])
def test_with_the_transformers_backend_its_version_counts(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, chosen: bool
) -> None:
    for kv_format in FORMATS:
        assert "transformers" not in fields(config, kv_format)
    if chosen:
        config = engine_config(write_model(tmp_path / "model"), model_impl="transformers")
    else:
        architecture = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
        config = engine_config(write_model(tmp_path / "model", **architecture))
    for kv_format in FORMATS:
        assert fields(config, kv_format)["transformers"] == importlib.metadata.version(
            "transformers"
        )


def test_pytorchs_version_counts_in_paged(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {kv_format: fields(config, kv_format) for kv_format in FORMATS}
    monkeypatch.setattr("torch.__version__", "99.0")
    assert differing_fields(before["paged"], fields(config, "paged")) == ["engine"]
    assert differing_fields(before["portable"], fields(config, "portable")) == []


# --- files that settings name -----------------------------------------------------------------


def test_files_that_settings_name_are_told(config: Any, tmp_path: Path) -> None:
    for name in ("scales.json", "quant.json", "generation_config.json", "weights.tensors"):
        (tmp_path / name).write_text("{}")
    config.model_config.multimodal_config = media(
        mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / "scales.json")
    )
    config.model_config.generation_config = str(tmp_path)
    config.model_config.hf_overrides = {"quantization_config_file": str(tmp_path / "quant.json")}
    config.load_config.model_loader_extra_config = {
        "concurrency": 4,
        "nested": {"path": str(tmp_path / "weights.tensors")},
    }
    described = describe_engine(config, "portable")
    assert described.files == {
        "load.model_loader_extra_config.nested.path": tmp_path / "weights.tensors",
        "model.generation_config": tmp_path / "generation_config.json",
        "model.hf_overrides.quantization_config_file": tmp_path / "quant.json",
        "model.multimodal_config.mm_encoder_fp8_scale_path": tmp_path / "scales.json",
    }
    assert str(tmp_path) not in str(described.fields)


@pytest.mark.parametrize("value", ["auto", "vllm"])
def test_a_setting_that_is_no_file_is_not_taken_for_one(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Started beside vLLM's sources, where there is a folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).mkdir()
    config.model_config.generation_config = value
    described = describe_engine(config, "portable")
    assert described.files == {}
    assert described.fields["model.generation_config"] == value


# --- what is refused --------------------------------------------------------------------------


def scales_by_the_first_request(config: Any) -> None:
    config.cache_config.calculate_kv_scales = True


def scales_by_earlier_images(config: Any) -> None:
    config.model_config.multimodal_config = media(mm_encoder_attn_dtype="fp8")


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scales_by_the_first_request, "calculate_kv_scales is set: scales come from"),
        (scales_by_earlier_images, "mm_encoder_attn_dtype is 'fp8' without mm_encoder_fp8_scale"),
    ],
)
def test_scales_that_follow_an_engines_own_traffic_are_refused(
    config: Any, change: Callable[[Any], None], message: str, kv_format: KvFormat
) -> None:
    change(config)
    with pytest.raises(IncompatibleEngineError, match=message):
        describe_engine(config, kv_format)


def test_settings_of_that_kind_that_are_off_are_not_refused(config: Any, configured: Any) -> None:
    config.cache_config.calculate_kv_scales = False
    assert differing(config, configured, "paged") == []


# --- what depends on more than one setting ----------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({}, False),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, True),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1.0}}, True),
        ({"attn_temperature_tuning": 4}, True),
    ],
)
def test_the_length_counts_where_a_models_kv_depends_on_it(
    config: Any, changed: dict[str, Any], counts: bool
) -> None:
    other = copy.deepcopy(config)
    other.model_config.max_model_len = 512
    for one in (config, other):
        for name, value in changed.items():
            setattr(one.model_config.hf_config, name, value)
    assert differing(config, other, "portable") == (["max_model_len"] if counts else [])


def test_a_drafting_models_settings_count(config: Any, configured: Any) -> None:
    config.speculative_config = SimpleNamespace(method="suffix")
    assert differing(config, configured, "paged") == []
    draft = copy.deepcopy(configured.model_config)
    speculation = _speculation(configured, draft)
    config.speculative_config = speculation
    found = differing(config, configured, "portable")
    assert "speculative.method" in found
    assert "speculative.draft_model_config.hf_config.num_hidden_layers" in found
    other = copy.deepcopy(config)
    other.speculative_config.draft_model_config.hf_config.num_hidden_layers = 7
    assert differing(config, other, "portable") == [
        "speculative.draft_model_config.hf_config.num_hidden_layers"
    ]


def _speculation(configured: Any, draft: Any) -> Any:
    """Return vLLM's configuration of a drafting model, without what its constructor does."""
    from vllm.config import SpeculativeConfig

    speculation = object.__new__(SpeculativeConfig)
    defaults = dict.fromkeys(SpeculativeConfig.__dataclass_fields__)
    vars(speculation).update(
        defaults
        | {
            "method": "eagle",
            "num_speculative_tokens": 2,
            "draft_model_config": draft,
            "target_model_config": configured.model_config,
        }
    )
    return speculation


# --- pipeline stages --------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", FORMATS)
def test_ranks_of_unequal_pipeline_stages_agree(tmp_path: Path, kv_format: KvFormat) -> None:
    """61 layers on two stages."""
    config = engine_config(
        write_model(tmp_path / "deep", num_hidden_layers=61), pipeline_parallel_size=2
    )
    first = fields(config, kv_format)
    config.parallel_config.rank = 1
    assert fields(config, kv_format) == first
    stages = [tuple(map(int, stage.split("-"))) for stage in first["stages"].split(",")]
    assert stages[0][1] - stages[0][0] != stages[1][1] - stages[1][0]
    assert [stages[0][0], stages[1][1]] == [0, 61]
    assert stages[0][1] == stages[1][0]


def test_engines_that_divide_the_layers_elsewhere_do_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = write_model(tmp_path / "deep", num_hidden_layers=61)
    one = fields(engine_config(deep, pipeline_parallel_size=2), "portable")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,41")
    other = fields(engine_config(deep, pipeline_parallel_size=2), "portable")
    assert differing_fields(one, other) == ["stages"]
    assert other["stages"] == "0-20,20-61"


# --- all of it --------------------------------------------------------------------------------


def test_another_process_finds_the_same_fields(model: Path, config: Any) -> None:
    """Whatever the order of its sets, and wherever its objects lie."""
    code = (
        "import json, sys\nfrom pathlib import Path\n"
        "from kvhaven.integrations.vllm.namespace import describe_engine\n"
        "from tests.unit.vllm_configs import engine_config\n"
        "config = engine_config(Path(sys.argv[1]))\n"
        "print(json.dumps([describe_engine(config, f).fields for f in ('paged', 'portable')]))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        env=os.environ | {"PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(found.stdout.splitlines()[-1]) == [
        fields(config, kv_format) for kv_format in FORMATS
    ]


def test_a_moved_model_has_the_same_fields(model: Path, config: Any, tmp_path: Path) -> None:
    moved = engine_config(write_model(tmp_path / "elsewhere" / "tiny"))
    for kv_format in FORMATS:
        assert differing(config, moved, kv_format) == []


def test_fields_are_text_of_bounded_size(config: Any) -> None:
    config.model_config.hf_config.many = {str(i): {str(j): j for j in range(60)} for i in range(60)}
    config.model_config.hf_config.long = "x" * 100_000
    described = fields(config, "paged")
    assert len(described) <= MOST_FIELDS + 1
    assert sum(len(name) + len(value) for name, value in described.items()) < 200_000
    other = copy.deepcopy(config)
    other.model_config.hf_config.many["59"]["59"] = -1
    assert differing(config, other, "paged") != []
    assert namespace_digest(described) == namespace_digest(dict(reversed(described.items())))


def test_a_description_names_its_rules_and_its_format(config: Any) -> None:
    described = describe_engine(config, "portable")
    assert isinstance(described, Description)
    assert {name: described.fields[name] for name in ("rules", "model", "format")} == {
        "rules": "2",
        "model": "tiny",
        "format": "portable",
    }


def test_the_page_on_formats_has_every_field(config: Any) -> None:
    page = section("formats.md", "Namespaces")
    assert f"*rules*, version {RULES_VERSION}." in page
    rows = [name.strip("` ") for row in table(page) for name in row.split(",")]
    parts = {f"{name.removesuffix('_config')}.*" for name in vars(config)}
    assert parts & set(rows)  # some of them are named, for all
    for kv_format in FORMATS:
        for name in fields(config, kv_format):
            known = {*rows, *parts, *(vars(config) if name in vars(config) else ())}
            assert any(fnmatchcase(name, pattern) for pattern in known), name
