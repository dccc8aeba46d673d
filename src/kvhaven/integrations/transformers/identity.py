# SPDX-License-Identifier: Apache-2.0
"""Identity of a model in this process: all properties that determine the KV of its tokens."""

import inspect
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

from kvhaven.errors import IncompatibleEngineError

_SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_LIBRARIES = ("torch", "transformers")
_NO_STATE = ("name_or_path", "_is_hf_initialized", "warnings_issued", "training")
"""Attributes of modules that are locations, or are checked at each call."""
_PLACES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Entries of a configuration that are locations or versions, or are visible in the tensors."""


def namespace_of(model: Any, fingerprint: str | None = None) -> dict[str, str]:
    """Return the fields of the model's namespace.

    Reads every byte of its weights once, unless a `fingerprint` identifies them. Raises
    `IncompatibleEngineError` if the model's source code cannot be read.
    """
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "model": Path(name).name,
        "weights": fingerprint or _weights(model),
        "config": _digest(_config_text(model)),
        "modules": _digest(json.dumps(_modules(model))),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "code": _code(model),
        "device": model.device.type,
        "numerics": repr(numerics()),
    }


class Signature:
    """Detects changes of a model: other tensors, written tensors, other modules or settings.

    Torch counts writes to a tensor, except those through `.data` and by native code.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = [tensor for _, tensor in _tensors(model)]  # held, as addresses are reused
        self._versions = _versions(self._tensors)
        self._state = _state(model)

    def is_of(self, model: Any) -> bool:
        """Return whether the model is unchanged."""
        now = [tensor for _, tensor in _tensors(model)]
        return (
            len(now) == len(self._tensors)
            and all(one is other for one, other in zip(now, self._tensors, strict=True))
            and _versions(now) == self._versions
            and _state(model) == self._state
        )


def numerics() -> tuple[object, ...]:
    """Return the settings of torch that change how a forward rounds."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
        *(bool(getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()) for kernel in _SDP_KERNELS),
        torch.are_deterministic_algorithms_enabled(),
    )


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(one.data_ptr(), one._version) for one in tensors]  # noqa: SLF001 - no public name


def _state(model: Any) -> tuple[object, ...]:
    """Return the properties besides tensors that determine KV and may change at run time."""
    return numerics(), _config_text(model), _modules(model)


def _config_text(model: Any) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _PLACES}
    attention = getattr(model.config, "_attn_implementation", "")
    experts = getattr(model.config, "_experts_implementation", "")
    return json.dumps([config, str(attention), str(experts)], sort_keys=True, default=_named)


def _modules(model: Any) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return every module's name, class, and attributes, except tensors and modules."""
    return [
        (
            name,
            _named(type(module)),
            sorted((key, _named(v)) for key, v in vars(module).items() if key not in _NO_STATE),
        )
        for name, module in model.named_modules()
    ]


def _named(value: object) -> str:
    """Return a text of a value that is equal in every process."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_named, value))}]"
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


def _weights(model: Any) -> str:
    records = []
    for name, tensor in _tensors(model):
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        content = plain.view(torch.uint8).numpy().data if plain.numel() else b""
        records.append(
            (name, str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128_hexdigest(content))
        )
    return _digest(json.dumps(sorted(records)))


def _code(model: Any) -> str:
    """Return the digest of the model's source code outside of torch and transformers."""
    sources = {}
    for kind in {type(module) for module in model.modules()}:
        library = kind.__module__.split(".")[0] in _LIBRARIES
        dynamic = kind.__module__.startswith("transformers_modules")
        if library and not dynamic:
            continue
        name = f"{kind.__module__}.{kind.__qualname__}"
        try:
            sources[name] = inspect.getsource(inspect.getmodule(kind) or kind)
        except (OSError, TypeError) as error:
            raise IncompatibleEngineError(
                f"{name}: its source code cannot be read (got {error!r}); expected a class in a "
                "file, as code is part of the model's identity. Use model.generate for it."
            ) from error
    return _digest(json.dumps([type(model).__qualname__, sorted(sources.items())]))


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
