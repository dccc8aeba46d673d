# SPDX-License-Identifier: Apache-2.0
"""Identity of a model in this process: everything that determines the KV of its tokens."""

import inspect
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash

_LIBRARIES = ("torch", "transformers")
_PLACES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Entries of a configuration that name places and versions, or repeat what the tensors say."""

Signature = tuple[object, ...]


def namespace_of(model: Any, fingerprint: str | None = None) -> dict[str, str]:
    """Return the fields of the model's namespace.

    Reads every byte of its weights once, unless a `fingerprint` names them.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _PLACES}
    name = str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "model": Path(name).name,
        "weights": fingerprint or _weights(model),
        "config": _digest(json.dumps(config, sort_keys=True, default=repr)),
        "attention": str(getattr(model.config, "_attn_implementation", "")),
        "code": _code(model),
        "device": model.device.type,
        "numerics": repr(numerics()),
    }


def signature(model: Any) -> Signature:
    """Return a value that changes when tensors of the model are replaced or written in place.

    Torch counts writes to a tensor, but for those through `.data` and by foreign code.
    """
    return tuple((tensor.data_ptr(), tensor._version) for _, tensor in _tensors(model))  # noqa: SLF001 - torch has no public name for it


def numerics() -> Signature:
    """Return the settings of torch that change how a forward rounds."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
    )


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


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
        sources[f"{kind.__module__}.{kind.__qualname__}"] = inspect.getsource(
            inspect.getmodule(kind) or kind
        )
    return _digest(json.dumps([type(model).__qualname__, sorted(sources.items())]))


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
