# SPDX-License-Identifier: Apache-2.0
"""Namespace of an engine: named fields from vLLM's configuration, by the tables of fields."""

import copy
import dataclasses
import enum
import functools
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.setting_text import UnnamedError, plain, text
from kvhaven.integrations.vllm.namespace_environment import ENVIRONMENT, LIBRARIES
from kvhaven.integrations.vllm.namespace_fields import (
    CONFIG_FIELDS,
    MODEL_CONFIG_PLACES,
    NO_DRAFT_KV,
    ConfigFields,
)

logger = logging.getLogger(__name__)

KvFormat = Literal["paged", "portable"]

RULES_VERSION: Final = "2"
"""Version of the rules for fields; version 1 listed the fields that count, and sampled weights."""
MOST_FIELDS: Final = 1024

_FLAT_DEPTH: Final = 2
_FLAT_SIZE: Final = 64
_LENGTH_MATTERS: Final = frozenset({"longrope", "su", "dynamic"})
"""Kinds of rotary embedding that depend on the engine's `max_model_len`."""
_PLATFORM_PLUGINS: Final = "vllm.platform_plugins"
_GENERAL_PLUGINS: Final = "vllm.general_plugins"


class _Treatment(enum.Enum):
    """Treatment of a field in the namespace."""

    COUNTS = "counts"
    PAGED = "paged"
    IGNORED = "ignored"
    FILE = "file"
    REFUSED = "refused"
    UNKNOWN = "unknown"


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
    walk = _Walk(kv_format, f"{config.instance_id} {_engine_id(config)}")
    walk.add(config, "")
    fields = walk.fields
    if fields.get("lora.lora_dtype") == fields["model.dtype"]:
        del fields["lora.lora_dtype"]  # the default, as without adapters
    if walk.length_matters:
        fields["max_model_len"] = str(model.max_model_len)
    if stages := _stages(config):
        fields["stages"] = stages
    walk.add_environment()
    if plugins := _model_plugins():
        fields["plugins"] = plugins
    if model.using_transformers_backend():  # by choice, or if vLLM does not have the model
        fields["transformers"] = importlib.metadata.version("transformers")
    if kv_format == "paged":
        fields["engine"] = _engine_version()
    fields |= {"rules": RULES_VERSION, "model": _model_name(model), "format": kv_format}
    return Description(_bounded(fields), walk.files)


def _model_name(model: Any) -> str:
    """Return the last part of the model's name or path, for display."""
    name = str(getattr(model, "model_weights", "") or model.model)
    return text(os.path.basename(name.rstrip("/")))  # noqa: PTH119 - may not be a path


class _Walk:
    """Collects fields from configuration objects, including fields that no table has.

    `run` is a text that is unique to this run of the engine.
    """

    def __init__(self, kv_format: KvFormat, run: str) -> None:
        self.fields: dict[str, str] = {}
        self.files: dict[str, Path] = {}
        self.length_matters = False
        self._paged = kv_format == "paged"
        self._run = sha256(run.encode()).hexdigest()[:16]

    def add(self, settings: Any, prefix: str) -> None:
        """Add the fields of a configuration object and of nested ones."""
        kind = type(settings).__name__
        table, partly = _treatments(kind)
        defaults = _defaults(type(settings))
        for name in sorted(defaults.keys() | _attributes(settings, table)):
            value, path = getattr(settings, name), f"{prefix}{name}"
            treatment = table.get(name, _Treatment.UNKNOWN)
            if treatment is _Treatment.FILE:
                self._add_file(path, value)
            elif treatment is _Treatment.REFUSED:
                _refuse_if_set(kind, name, value)
            elif self._takes(treatment) and not _keeps_no_kv(name, value):
                if name in partly:
                    value = self._without(value, partly[name], path)
                if _is_configuration(value):
                    self.add(value, f"{path.removesuffix('_config') if not prefix else path}.")
                elif callable(getattr(value, "to_dict", None)):
                    self._add_model_config(path, value, settings)
                elif not _off(value, defaults.get(name, dataclasses.MISSING)):
                    self._add_value(path, value, known=treatment is not _Treatment.UNKNOWN)

    def add_environment(self) -> None:
        """Add the environment variables that are set and count."""
        libraries, _ = _table_of(LIBRARIES)
        table = _table_of(ENVIRONMENT)[0] | libraries
        for name in sorted((_variables() | libraries.keys()) & os.environ.keys()):
            treatment = table.get(name, _Treatment.UNKNOWN)
            if self._takes(treatment):
                known = treatment is not _Treatment.UNKNOWN
                self._add_value(f"env.{name}", os.environ[name], known=known)

    def _takes(self, treatment: _Treatment) -> bool:
        """Return whether a field with this treatment counts in the format."""
        return treatment in {_Treatment.COUNTS, _Treatment.UNKNOWN} or (
            treatment is _Treatment.PAGED and self._paged
        )

    def _add_value(self, path: str, value: Any, *, known: bool = True) -> None:
        try:
            form = plain(value)
        except UnnamedError as error:
            logger.warning(
                "vLLM's setting %s cannot be named (%s): other engines, and this one after a "
                "restart, will not find the KV that it caches",
                path,
                error,
            )
            self.fields[path] = f"of run {self._run} alone"
            return
        # An unknown or free-form setting may hold a secret, so only its digest is kept.
        self.fields[path] = text(form, digested=not known or isinstance(form, dict))

    def _add_model_config(self, path: str, model: Any, settings: Any) -> None:
        """Add a model's own configuration, with a field for each entry.

        The text model's configuration is part of the whole model's, unless vLLM created a
        separate one.
        """
        if path.endswith("hf_text_config") and model is settings.hf_config:
            return
        entries = _without_places(model)
        if path.endswith("hf_text_config"):
            self._add_value(path, entries)
        else:
            self.length_matters |= _length_matters(entries)
            self._add_entries(path, entries, 0)

    def _add_entries(self, path: str, part: Mapping[str, Any], depth: int) -> None:
        for key, value in part.items():
            if isinstance(value, Mapping) and depth < _FLAT_DEPTH and 0 < len(value) <= _FLAT_SIZE:
                self._add_entries(f"{path}.{key}", value, depth + 1)
            else:
                self._add_value(f"{path}.{key}", value)

    def _add_file(self, path: str, value: Any) -> None:
        """Record the file that a setting names; add its value as a field if there is no file."""
        if path.endswith("hf_overrides"):
            path += ".quantization_config_file"
            value = value.get("quantization_config_file") if isinstance(value, Mapping) else None
        elif path.endswith("generation_config"):
            if value in {None, "auto", "vllm"}:
                self._add_value(path, value)
                return
            value = Path(value) / "generation_config.json"
        if value and Path(value).exists():
            self.files[path] = Path(value)
        elif value:
            self._add_value(path, str(value))

    def _without(self, value: Any, keys: frozenset[str], path: str) -> Any:
        """Return a mapping without the ignored `keys`; files in it count by content."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = vars(value)
        if isinstance(value, Mapping):
            return {
                key: self._without(item, keys, f"{path}.{key}")
                for key, item in value.items()
                if key not in keys
            }
        if isinstance(value, str) and Path(value).is_file():
            self.files[path] = Path(value)
            return "a file"
        return value


def _attributes(settings: Any, table: Mapping[str, _Treatment]) -> set[str]:
    """Return the attributes of a configuration object that hold settings.

    Cached properties, and private attributes that the table does not list, are excluded: they
    hold values derived from settings on first use, which not every process has computed.
    """
    kept = {
        name
        for name, member in inspect.getmembers_static(type(settings))
        if isinstance(member, functools.cached_property)
    }
    return {
        name
        for name in vars(settings)
        if name not in kept and (name in table or not name.startswith("_"))
    }


def _is_configuration(value: Any) -> bool:
    """Return whether a value is one of vLLM's configuration objects, known or new."""
    kind = type(value)
    return kind.__name__ in CONFIG_FIELDS or (
        dataclasses.is_dataclass(value) and kind.__module__.startswith("vllm.config.")
    )


def _without_places(value: Any) -> Any:
    if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {
            name: _without_places(item)
            for name, item in value.items()
            if name not in MODEL_CONFIG_PLACES
        }
    return [_without_places(item) for item in value] if isinstance(value, list | tuple) else value


def _keeps_no_kv(name: str, value: Any) -> bool:
    """Return whether a setting is a method of speculation without its own KV."""
    return name == "speculative_config" and getattr(value, "method", None) in NO_DRAFT_KV


def _off(value: Any, default: Any) -> bool:
    """Return whether a setting is empty by default, which equals a version without it."""
    if value is None:
        return default is None or default is dataclasses.MISSING
    empty = value is False or (isinstance(value, str | tuple | list | dict | set) and not value)
    return empty and type(value) is type(default) and bool(value == default)


def _refuse_if_set(kind: str, name: str, value: Any) -> None:
    if value:
        reason = next(r for r, names in CONFIG_FIELDS[kind].refused.items() if name in names)
        raise IncompatibleEngineError(
            f"{name} is set: {reason}. Cached KV would be wrong in other runs. Unset it, or "
            "serve without KVHaven."
        )


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


def _bounded(fields: dict[str, str]) -> dict[str, str]:
    """Return at most `MOST_FIELDS` fields, plus one that digests the remaining ones, if any."""
    names = sorted(fields)
    kept = {name: fields[name] for name in names[:MOST_FIELDS]}
    if rest := {name: fields[name] for name in names[MOST_FIELDS:]}:
        kept["more"] = text(rest, digested=True)
    return kept


# --- the tables ---------------------------------------------------------------------------------


@functools.cache
def _treatments(kind: str) -> tuple[dict[str, _Treatment], dict[str, frozenset[str]]]:
    """Return how the fields of a class are treated, and which keys of mappings do not count."""
    return _table_of(CONFIG_FIELDS.get(kind, ConfigFields()))


def _table_of(
    fields: ConfigFields,
) -> tuple[dict[str, _Treatment], dict[str, frozenset[str]]]:
    table = dict.fromkeys(fields.counts.split(), _Treatment.COUNTS)
    for treatment, reasons in (
        (_Treatment.PAGED, fields.paged),
        (_Treatment.IGNORED, fields.ignored),
        (_Treatment.FILE, fields.files),
        (_Treatment.REFUSED, fields.refused),
    ):
        for names in reasons.values():
            table |= dict.fromkeys(names.split(), treatment)
    partly = {}
    for entry in fields.partly.values():
        name, _, keys = entry.partition(":")
        partly[name.strip()] = frozenset(keys.split())
        table[name.strip()] = _Treatment.COUNTS
    return table, partly


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a configuration class with their defaults, if these are simple."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        described: Any = field.default
        if not hasattr(described, "default_factory"):  # not pydantic's field
            described = field
        factory = described.default_factory
        simple = factory() if factory in (list, dict, set) else described.default
        defaults[field.name] = simple
    return defaults


# --- properties outside of configuration fields -------------------------------------------------


def _length_matters(value: object) -> bool:
    """Return whether a model's KV depends on `max_model_len`, by its configuration.

    Some rotary embeddings depend on it, and Llama 4 tunes its attention temperature above 32K.
    """
    if isinstance(value, Mapping):
        kinds = {str(value.get(name)) for name in ("rope_type", "type")}
        if kinds & _LENGTH_MATTERS or "attn_temperature_tuning" in value:
            return True
        return any(map(_length_matters, value.values()))
    return isinstance(value, list | tuple) and any(map(_length_matters, value))


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
