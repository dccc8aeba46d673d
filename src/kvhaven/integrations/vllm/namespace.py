# SPDX-License-Identifier: Apache-2.0
"""Namespace of an engine: named fields from vLLM's configuration, by the tables of fields."""

import copy
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.model_config import entries_of, rotary_kinds
from kvhaven.identity.setting_tables import SettingFields, bounded
from kvhaven.identity.setting_text import text
from kvhaven.integrations.vllm.namespace_environment import ENVIRONMENT, LIBRARIES
from kvhaven.integrations.vllm.namespace_fields import CONFIG_FIELDS, NO_DRAFT_KV

KvFormat = Literal["paged", "portable"]

RULES_VERSION: Final = "2"
"""Version of the rules for fields; version 1 listed the fields that count, and sampled weights."""

_LENGTH_MATTERS: Final = frozenset({"longrope", "su", "dynamic"})
"""Kinds of rotary embedding that depend on the engine's `max_model_len`."""
_PLATFORM_PLUGINS: Final = "vllm.platform_plugins"
_GENERAL_PLUGINS: Final = "vllm.general_plugins"


@dataclasses.dataclass(frozen=True)
class Description:
    """Namespace fields and files of an engine's configuration."""

    fields: dict[str, str]
    """The namespace's fields, except those for the content of files."""
    files: dict[str, Path]
    """Files and folders that settings refer to, by setting; their content counts."""


def describe_engine(config: Any, kv_format: KvFormat) -> Description:
    """Return the namespace fields of vLLM's `VllmConfig` for the format `paged` or `portable`.

    All settings count except those that `namespace_fields` and `namespace_environment` exclude.
    Raises `IncompatibleEngineError` for a setting with which KV cannot be identified.
    """
    model = config.model_config
    _refuse_dynamic_scales(model)
    rules = _VllmRules()
    run = f"{config.instance_id} {_engine_id(config)}"
    walk = SettingFields(rules, run=run, paged=kv_format == "paged")
    walk.add(config)
    fields = walk.fields
    if fields.get("lora.lora_dtype") == fields["model.dtype"]:
        del fields["lora.lora_dtype"]  # the default, as without adapters
    if rules.length_matters:
        fields["max_model_len"] = str(model.max_model_len)
    if stages := _stages(config):
        fields["stages"] = stages
    variables = {**ENVIRONMENT.treatments, **LIBRARIES.treatments}
    walk.add_environment(_variables() | LIBRARIES.treatments.keys(), variables)
    if plugins := _model_plugins():
        fields["plugins"] = plugins
    if model.using_transformers_backend():  # by choice, or if vLLM does not have the model
        fields["transformers"] = importlib.metadata.version("transformers")
    if kv_format == "paged":
        fields["engine"] = _engine_version()
    fields |= {"rules": RULES_VERSION, "model": _model_name(model), "format": kv_format}
    return Description(bounded(fields), walk.files)


def _model_name(model: Any) -> str:
    """Return the last part of the model's name or path, for display."""
    name = str(getattr(model, "model_weights", "") or model.model)
    return text(os.path.basename(name.rstrip("/")))  # noqa: PTH119 - may not be a path


class _VllmRules:
    """Rules for vLLM's configuration objects; `length_matters` is set by a model that says so."""

    engine = "vLLM"
    tables = CONFIG_FIELDS
    modules = "vllm.config."

    def __init__(self) -> None:
        self.length_matters = False

    def skips(self, name: str, value: Any) -> bool:
        """Return whether a setting is a method of speculation without its own KV."""
        return name == "speculative_config" and getattr(value, "method", None) in NO_DRAFT_KV

    def add_file(self, into: SettingFields, path: str, value: Any) -> None:
        """Add a setting that names a file, or in some of vLLM's options has other values."""
        if path.endswith("hf_overrides"):
            path += ".quantization_config_file"
            value = value.get("quantization_config_file") if isinstance(value, Mapping) else None
        elif path.endswith("generation_config"):
            if value in {None, "auto", "vllm"}:
                into.add_value(path, value)
                return
            value = Path(value) / "generation_config.json"
        into.add_file(path, value)

    def add_object(self, into: SettingFields, path: str, value: Any, owner: Any) -> None:
        """Add a model's own configuration, with a field for each entry.

        The text model's configuration is part of the whole model's, unless vLLM created a
        separate one.
        """
        if path.endswith("hf_text_config") and value is owner.hf_config:
            return
        entries = entries_of(value)
        if path.endswith("hf_text_config"):
            into.add_value(path, entries)
        else:
            self.length_matters |= _length_matters(entries)
            into.add_entries(path, entries)


def _refuse_dynamic_scales(model: Any) -> None:
    """Raise `IncompatibleEngineError` if an encoder's scales depend on earlier requests."""
    multimodal = getattr(model, "multimodal_config", None)
    dtype = getattr(multimodal, "mm_encoder_attn_dtype", None)
    if dtype is not None and not getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        raise IncompatibleEngineError(
            f"mm_encoder_attn_dtype is {dtype!r} without mm_encoder_fp8_scale_path: the scales "
            "then depend on earlier requests, and an image has different KV each time. Set a file "
            "of scales, or serve without KVHaven."
        )


# --- properties outside of configuration fields -------------------------------------------------


def _length_matters(entries: object) -> bool:
    """Return whether a model's KV depends on `max_model_len`, by its configuration.

    Some rotary embeddings depend on it, and Llama 4 tunes its attention temperature above 32K.
    """
    return bool(rotary_kinds(entries) & _LENGTH_MATTERS) or _has("attn_temperature_tuning", entries)


def _has(name: str, entries: object) -> bool:
    """Return whether entries, or nested ones, have this name."""
    if isinstance(entries, Mapping):
        return name in entries or any(_has(name, item) for item in entries.values())
    return isinstance(entries, list | tuple) and any(_has(name, item) for item in entries)


def _stages(config: Any) -> str:
    """Return the layers of each pipeline stage; empty if there is only one."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size == 1:
        return ""
    stages = []
    for stage in range(parallel.pipeline_parallel_size):
        of_stage = copy.copy(parallel)
        of_stage.rank = stage * parallel.tensor_parallel_size
        first, end = config.model_config.get_layers_start_end_indices(of_stage)
        stages.append(f"{first}-{end}")
    return ",".join(stages)


def _engine_id(config: Any) -> str:
    transfer = getattr(config, "kv_transfer_config", None)
    return str(getattr(transfer, "engine_id", ""))


def _engine_version() -> str:
    """Return the versions of vLLM, PyTorch and plugins, which determine a page's content."""
    import torch  # noqa: PLC0415 - the rest works without it
    import vllm  # noqa: PLC0415 - as above

    versions = {f"{plugin.distribution} {plugin.version}" for plugin in _plugins()}
    return ", ".join([f"vllm {vllm.__version__}", f"torch {torch.__version__}", *sorted(versions)])


def _model_plugins() -> str:
    """Return the names of plugins that may change any model; empty if there are none.

    Plugins of a platform's distribution are excluded, because the portable format is shared
    between platforms. Versions are excluded, like that of vLLM itself.
    """
    plugins = list(_plugins())
    platforms = {plugin.distribution for plugin in plugins if plugin.group == _PLATFORM_PLUGINS}
    others = (plugin for plugin in plugins if plugin.distribution not in platforms)
    return ", ".join(sorted({f"{plugin.distribution}:{plugin.name}" for plugin in others}))


class _Plugin(NamedTuple):
    """Installed plugin of vLLM."""

    group: str
    name: str
    distribution: str
    version: str
    package: str


def _plugins() -> Iterator[_Plugin]:
    """Yield each plugin that vLLM loads into engines, except those of KVHaven and vLLM."""
    admitted = os.environ.get("VLLM_PLUGINS")
    for group in (_PLATFORM_PLUGINS, _GENERAL_PLUGINS):
        for entry in importlib.metadata.entry_points(group=group):
            package = entry.module.partition(".")[0]
            if admitted is not None and entry.name not in admitted.split(","):
                continue
            if entry.dist is not None and package not in {"kvhaven", "vllm"}:
                yield _Plugin(group, entry.name, entry.dist.name, entry.dist.version, package)


def _variables() -> set[str]:
    """Return the names of the environment variables that vLLM and its plugins declare."""
    packages = {"vllm", *(plugin.package for plugin in _plugins())}
    known: set[str] = set()
    for package in packages:
        module = sys.modules.get(f"{package}.envs")
        known |= set(getattr(module, "environment_variables", {}))
    return known
