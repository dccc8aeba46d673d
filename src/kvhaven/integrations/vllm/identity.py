# SPDX-License-Identifier: Apache-2.0
"""What determines the KV besides tokens: the weights, the model's configuration, adapters."""

import enum
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from kvhaven.errors import IncompatibleEngineError

SPOT_BYTES = 4096
"""A tensor is sampled by that many bytes at its start, its middle and its end."""
FILE_SPOTS = 32768
"""A file without an index of tensors is sampled every MiB, in at most this many spots."""

_READERS = 8
_MAX_HEADER_BYTES = 256 * 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CONFIGURATION = re.compile(r"(config|params|adapter_config|.*quant.*)\.json|.*\.py")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PLACES = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Fields of a model's configuration that say where it came from, not what it computes."""
_LENGTH_MATTERS = frozenset({"longrope", "su", "dynamic"})
"""Kinds of rotary embedding that depend on the engine's `max_model_len`."""
_ADVICE = (
    "set `model_fingerprint` to a text of your own that names these weights, and change it "
    "whenever they change"
)


class Record(msgspec.Struct, frozen=True, order=True):
    """One sampled thing of a checkpoint: a tensor or a file, and the digest of its sample."""

    name: str
    form: str
    digest: str


def weights_fingerprint(model_config: Any, load_config: Any) -> str:
    """Return a hex digest of the weights of vLLM's `ModelConfig`, loaded by its `LoadConfig`.

    Of safetensors files, every tensor counts with its name, dtype, shape and samples of its
    bytes, wherever it lies: neither the path nor the division into files matters. Of torch's
    zip files every member with its CRC-32 and samples, of other files (GGUF) evenly spaced
    samples. Files of a hub cache count by the names of their blobs, which are hashes of their
    content. Configuration and code files beside the weights count whole.

    Raises `IncompatibleEngineError` where there is nothing to sample (dummy or remote
    weights); `model_fingerprint` is then needed.
    """
    model = str(getattr(model_config, "model_weights", "") or model_config.model)
    load_format = str(getattr(load_config, "load_format", "auto")).lower()
    if load_format == "dummy":
        raise IncompatibleEngineError(
            f"load_format is 'dummy': {model} has random weights that nothing identifies; {_ADVICE}"
        )
    if "://" in model:
        raise IncompatibleEngineError(f"the weights {model} are remote: {_ADVICE}")
    place = _local_place(model, getattr(model_config, "revision", None), load_config)
    return _fingerprint(_files(place), f"the weights of {model} at {place}")


def lora_fingerprint(path: str) -> str:
    """Return a hex digest of a LoRA adapter by its files (a directory, or a repository's name).

    Kept by path, time and size of the files, so that asking for each request is cheap. Raises
    `IncompatibleEngineError` if there is nothing to sample.
    """
    place = _local_place(os.path.expanduser(path), None, None)  # noqa: PTH111 - may be no path
    seen = [(str(file), file.stat()) for file in _files(place)]
    stamp = tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in seen)
    return _lora_by_stamp(str(place), stamp)


def namespace_fields(
    vllm_config: Any,
    *,
    chunk_size: int,
    kv_format: str,
    layout_fingerprint: str = "",
    geometry: Mapping[str, str] | None = None,
    model_fingerprint: str = "",
) -> dict[str, str]:
    """Return the fields of the namespace of an engine, from vLLM's `VllmConfig`.

    `chunk_size` is in tokens; `kv_format` is `paged` or `portable`; `layout_fingerprint` is
    that of the paged layout, `geometry` the portable one's. With `model_fingerprint` the weights
    are not looked at. Raises `IncompatibleEngineError` as `weights_fingerprint` does.
    """
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    configuration = _configuration(model.hf_config)
    fields = {
        "chunk_size": str(chunk_size),
        "format": kv_format,
        "model": os.path.basename(str(model.model).rstrip("/")),  # noqa: PTH119 - may be no path
        "weights": model_fingerprint or weights_fingerprint(model, load),
        "config": _digest(configuration),
        "dtype": _plain(model.dtype),
        "kv_cache_dtype": _plain(cache.cache_dtype),
    }
    # Fields that not every version of vLLM has, and that only count where they are set.
    parts: list[tuple[str, object, tuple[str, ...]]] = [
        (
            "model",
            model,
            (
                "quantization",
                "quantization_config",
                "revision",
                "code_revision",
                "hf_overrides",
                "model_class_overrides",
                "model_impl",
                "runner_type",
                "convert_type",
                "disable_sliding_window",
                "video_pruning_rate",
            ),
        ),
        ("cache", cache, ("calculate_kv_scales", "kv_cache_dtype_skip_layers", "sliding_window")),
    ]
    if kv_format == "paged":
        parallel = ("tensor_parallel_size", "pipeline_parallel_size")
        context = ("decode_context_parallel_size", "prefill_context_parallel_size")
        parts.append(("parallel", vllm_config.parallel_config, parallel + context))
        fields["layout"] = layout_fingerprint
        fields["engine"] = _engine_version()
        attention = getattr(vllm_config, "attention_config", None)
        parts.append(("attention", attention, ("backend", "backend_per_kind")))
    else:
        # Shards are whole heads, of the layers of one pipeline stage.
        parts.append(("parallel", vllm_config.parallel_config, ("pipeline_parallel_size",)))
        fields |= geometry or {}
    for prefix, part, names in parts:
        for name in names:
            value = getattr(part, name, None)
            if value not in (None, "", False, {}, []):
                fields[f"{prefix}.{name}"] = _plain(value)
    if _length_matters(configuration):
        fields["max_model_len"] = str(model.max_model_len)
    fields |= _draft_fields(vllm_config, model_fingerprint)
    return fields


def _draft_fields(vllm_config: Any, model_fingerprint: str) -> dict[str, str]:
    """Return what a drafting model adds: its layers' KV is kept with the target's."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None:
        return {}
    fields = {
        "draft.method": _plain(speculative.method),
        "draft.config": _digest(_configuration(draft.hf_config)),
        "draft.quantization": _plain(draft.quantization),
    }
    if str(draft.model) == str(vllm_config.model_config.model):
        return fields
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    fields["draft.weights"] = model_fingerprint or weights_fingerprint(draft, load)
    return fields


def _engine_version() -> str:
    """Return vLLM's version: it decides about the inside of a page, which shapes do not show."""
    import vllm  # noqa: PLC0415 - so that the rest can be used without it

    return f"vllm {vllm.__version__}"


def _length_matters(value: object) -> bool:
    """Return whether a configuration has a rotary embedding of a kind in `_LENGTH_MATTERS`."""
    if isinstance(value, Mapping):
        kinds = {str(value.get(name)) for name in ("rope_type", "type")}
        return bool(kinds & _LENGTH_MATTERS) or any(map(_length_matters, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_length_matters, value))
    return False


def _configuration(hf_config: Any) -> object:
    """Return a model's configuration, overrides and defaults included, without its place."""
    return _without_places(hf_config.to_dict())


def _without_places(value: object) -> object:
    if isinstance(value, Mapping):
        return {
            str(name): _without_places(item)
            for name, item in value.items()
            if str(name) not in _PLACES
        }
    if isinstance(value, list | tuple):
        return [_without_places(item) for item in value]
    return value


def _plain(value: object) -> str:
    """Return a setting as text that is the same in every process."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str | int | float | bool) or value is None:
        return str(value)
    if isinstance(value, set | frozenset):
        value = sorted(map(_plain, value))
    elif hasattr(value, "__dict__") and not callable(value):
        value = vars(value)
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, sort_keys=True, default=_plain)
    if callable(value):  # hf_overrides may be a function; its effect shows in the configuration
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value).removeprefix("torch.")


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=1024)
def _lora_by_stamp(place: str, stamp: tuple[tuple[str, int, int], ...]) -> str:
    return _fingerprint([Path(name) for name, *_ in stamp], f"the adapter at {place}")


def _local_place(model: str, revision: str | None, load_config: Any) -> Path:
    """Return the directory or file of a model, which may be a name in the hub's cache."""
    if Path(model).exists():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only where needed

        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=getattr(load_config, "download_dir", None),
            local_files_only=True,
        )
    except Exception as error:
        raise IncompatibleEngineError(
            f"{model} is no local path and not in the hub's cache ({error}): {_ADVICE}"
        ) from error
    return Path(found)


def _files(place: Path) -> list[Path]:
    """Return the files of a model that count, in a fixed order."""
    if place.is_file():
        return [place]
    return sorted(
        file
        for file in place.iterdir()
        if (file.suffix in _WEIGHTS or _CONFIGURATION.fullmatch(file.name)) and file.is_file()
    )


def _fingerprint(files: list[Path], what: str) -> str:
    if not any(file.suffix in _WEIGHTS for file in files):
        raise IncompatibleEngineError(
            f"{what}: no file of {', '.join(_WEIGHTS)} to sample; {_ADVICE}"
        )
    try:
        with ThreadPoolExecutor(_READERS, "kvhaven-identity") as readers:
            records = sorted(record for found in readers.map(_sample, files) for record in found)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise IncompatibleEngineError(f"{what} cannot be sampled ({error}); {_ADVICE}") from error
    return sha256(msgspec.json.encode(records)).hexdigest()


def _sample(file: Path) -> list[Record]:
    """Return the records of one file."""
    target = file.resolve()
    if file.is_symlink() and target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
        return [Record(file.name, "blob", target.name)]
    with target.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if file.suffix not in _WEIGHTS:
            return [Record(file.name, "file", sha256(opened.read()).hexdigest())]
        if file.suffix == ".safetensors":
            return list(_sample_safetensors(opened.fileno(), size, file.name))
        if zipfile.is_zipfile(target):
            return list(_sample_zip(target, opened.fileno()))
        step = max(2**20, size // FILE_SPOTS)
        starts = [*range(0, size, step), max(0, size - SPOT_BYTES)]
        return [Record(file.name, f"file {size}", _digest_of(opened.fileno(), starts, size))]


def _sample_safetensors(file: int, size: int, name: str) -> Iterator[Record]:
    """Yield a record for each tensor: the header is 8 bytes little-endian length, then JSON."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"{name} has no safetensors header: it would be {length} bytes long")
    header = msgspec.json.decode(os.pread(file, length, 8), type=dict[str, Any])
    header.pop("__metadata__", None)
    begin = 8 + length
    for tensor, entry in header.items():
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= size - begin:
            raise ValueError(f"{name}: {tensor} lies outside of the file")
        form = f"{entry['dtype']} {entry['shape']}"
        yield Record(
            tensor, form, _digest_of(file, _spots(begin + first, begin + end), begin + end)
        )


def _sample_zip(path: Path, file: int) -> Iterator[Record]:
    """Yield a record for each member (torch keeps one for each tensor), with its CRC-32."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        # Its own header of a few dozen bytes comes first; the sample may as well hold that.
        begin, end = member.header_offset, member.header_offset + member.file_size
        form = f"{member.file_size} {member.CRC:08x}"
        yield Record(member.filename, form, _digest_of(file, _spots(begin, end), end))


def _spots(begin: int, end: int) -> Iterable[int]:
    """Return where to sample `[begin, end)`: start, middle and end, or all of it if short."""
    if end - begin <= 3 * SPOT_BYTES:
        return range(begin, end, SPOT_BYTES)
    return begin, (begin + end - SPOT_BYTES) // 2, end - SPOT_BYTES


def _digest_of(file: int, starts: Iterable[int], end: int) -> str:
    digest = sha256()
    for start in starts:
        digest.update(os.pread(file, min(SPOT_BYTES, end - start), start))
    return digest.hexdigest()
