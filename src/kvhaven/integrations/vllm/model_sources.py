# SPDX-License-Identifier: Apache-2.0
"""Files that vLLM loads a model from, according to its configuration."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.files import ADVICE, Source, process_began_ns
from kvhaven.integrations.vllm.namespace_fields import NO_DRAFT_KV

_LOCAL_FORMATS: Final = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "gguf", "bitsandbytes", "sharded_state", "runai_streamer"),
        *("runai_streamer_sharded", "tensorizer"),
    }
)
"""Load formats that read the weights from the model's folder, or from files in the settings."""
_PARTS_OF: Final[Mapping[str, Sequence[str]]] = {"ultravox": ("text_model_id", "audio_model_id")}
"""Entries in the configuration of a model type that name models whose weights vLLM also loads."""


def model_sources(config: Any) -> list[Source]:
    """Return the sources of weights, code and processors for vLLM's `VllmConfig`.

    Raises `IncompatibleEngineError` if they cannot be determined: random or remote weights, or a
    model that is not found. Such models require `model_fingerprint`. Raises `OSError` if storage
    fails.
    """
    model, load = config.model_config, config.load_config
    sources = [*_model_sources("weights", model, load)]
    sources += [
        Source(f"weights.{key}", _local_place(str(name), None, load))
        for key in _PARTS_OF.get(str(getattr(model.hf_config, "model_type", "")), ())
        if (name := getattr(model.hf_config, key, None))
    ]
    sources += _foreign_code(model)
    if _reads_tokenizer(config) and str(model.tokenizer) != str(model.model):
        place = _local_place(str(model.tokenizer), _commit(model.tokenizer_revision), None)
        sources.append(Source("tokenizer", place, ("*token*", "*vocab*", "merges.txt", "*.model")))
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    method = getattr(speculative, "method", None)
    if draft is not None and method not in NO_DRAFT_KV and str(draft.model) != str(model.model):
        draft_load = getattr(speculative, "draft_load_config", None) or load
        sources += _model_sources("draft.weights", draft, draft_load)
    return sources + _gaudi_scales(config)


def _local_place(model: str, revision: str | None, load_config: Any) -> Path:
    """Return the folder or file of a model, which may be a name in the hub's cache.

    Raises `IncompatibleEngineError` if it is not there, `OSError` if storage fails.
    """
    if Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where needed

        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=getattr(load_config, "download_dir", None),
            local_files_only=True,
            allow_patterns=[],  # vLLM downloads a part, so no file is missing
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in {None, errno.ENOENT}:
            raise  # a storage error does not mean that it is not there
        raise IncompatibleEngineError(
            f"{model}: no local path, and not in the hub's cache ({error}); {_where()}{ADVICE}"
        ) from error
    return Path(found)


def _where() -> str:
    """Return advice for a model that may be in another hub's cache."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() not in {"1", "true"}:
        return ""
    return (
        "models of ModelScope (VLLM_USE_MODELSCOPE) are not found by name: serve the folder that "
        "`modelscope download` prints, or "
    )


def loading_began_ns(config: Any) -> int:
    """Return a time (ns since the epoch) before which the engine had loaded nothing.

    vLLM uses the time at which its configuration was created as the engine's id. If the id is not
    a time, the result is this process's start.
    """
    instance = str(getattr(config, "instance_id", ""))
    if re.fullmatch(r"\d{19}", instance):
        return int(instance)
    return process_began_ns()


def _model_sources(field: str, model: Any, load: Any) -> Iterator[Source]:
    """Yield the sources of one model. Raises as `model_sources` does."""
    name = str(getattr(model, "model_weights", "") or model.model)
    load_format = str(getattr(load, "load_format", "auto")).lower()
    if load_format == "dummy":
        raise IncompatibleEngineError(
            f"load_format is 'dummy': {name} has random weights, which have no identity; {ADVICE}"
        )
    if load_format not in _LOCAL_FORMATS:
        raise IncompatibleEngineError(
            f"load_format is {load_format!r}: the source of the weights of {name} is not known; "
            f"{ADVICE}"
        )
    revision = _commit(getattr(model, "revision", None))
    weights = _local_place(_local(name), revision, load)
    yield Source(field, weights)
    # vLLM loads only weights from a `download_dir`; all other files are in the default cache.
    with contextlib.suppress(IncompatibleEngineError):
        if (place := _local_place(name, revision, None)) != weights:
            yield Source(f"{field}.repository", place)
    if load_format == "tensorizer":
        yield Source(f"{field}.tensors", _tensorizer_folder(load.model_loader_extra_config))


def _local(name: str) -> str:
    if "://" in name:
        raise IncompatibleEngineError(f"the weights {name} are remote: {ADVICE}")
    return name


def _tensorizer_folder(extra: Any) -> Path:
    """Return the folder of the files that tensorizer loads; `extra` is its loader config."""
    settings = extra if isinstance(extra, Mapping) else vars(extra)
    settings = settings.get("tensorizer_config", settings)
    if folder := settings.get("tensorizer_dir"):
        return Path(_local(str(folder)))
    return Path(_local(str(settings.get("tensorizer_uri", "")))).parent


def _commit(revision: Any) -> str | None:
    """Return the commit that vLLM resolved a revision to, as a branch may have moved since."""
    commit: str | None = getattr(revision, "resolved", None) or revision
    return commit


def _foreign_code(model: Any) -> Iterator[Source]:
    """Yield the other repositories that a model loads code from.

    A repository that is not in the hub's cache was not used: vLLM has its own implementation.
    """
    code = getattr(model.hf_config, "auto_map", None) or {}
    names = [name for entry in code.values() for name in (entry if _is_list(entry) else [entry])]
    for repository in sorted({str(name).split("--")[0] for name in names if "--" in str(name)}):
        with contextlib.suppress(IncompatibleEngineError):
            place = _local_place(repository, getattr(model, "code_revision", None), None)
            yield Source(f"code.{repository}", place, ("*.py",))


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _reads_tokenizer(config: Any) -> bool:
    """Return whether a model may read the tokenizer itself, in addition to its tokens."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    return multimodal is not None or getattr(config, "engram_config", None) is not None


def _gaudi_scales(config: Any) -> list[Source]:
    """Return the files with measured scales for Gaudi's quantization.

    `QUANT_CONFIG` names a JSON file, which has the common prefix of their paths. Raises
    `IncompatibleEngineError` if the file cannot be read.
    """
    named = os.environ.get("QUANT_CONFIG")
    if not named or str(config.device_config.device_type) != "hpu":
        return []
    try:
        scales = json.loads(Path(named).read_text())
        beginning = Path(scales.get("dump_stats_path", "stats"))
    except (OSError, ValueError, AttributeError) as error:
        raise IncompatibleEngineError(
            f"QUANT_CONFIG={named}: the file cannot be read ({error}); expected Intel Neural "
            "Compressor's JSON"
        ) from error
    sources = [Source("scales.config", Path(named))]
    if beginning.parent.is_dir():
        sources.append(Source("scales", beginning.parent, (f"{beginning.name}*",)))
    return sources
