# SPDX-License-Identifier: Apache-2.0
"""Digests of values in memory: tensors, and containers of tensors and plain values."""

import struct
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from kvhaven.keys import KeyInputError

_NONE, _BOOL, _INT, _FLOAT, _TEXT, _BYTES, _TENSOR, _SEQUENCE, _MAPPING, _OBJECT = range(10)

_Buffer = bytes | memoryview


def content_digest(value: object, *, objects_of: str = "") -> bytes:
    """Return the SHA-256 of a value's content: equal in every process for equal content.

    Supports None, booleans, numbers, texts, bytes, tensors and arrays (by dtype, shape and
    elements), sequences and mappings. With `objects_of`, a prefix of module names, it also
    supports objects of these modules, by their attributes. Raises `KeyInputError` for any other
    value: a digest that omits a part could be equal for two contents.
    """
    digest = sha256()
    for part in _parts(value, objects_of):
        digest.update(part)
    return digest.digest()


def _parts(value: object, objects_of: str) -> Iterator[_Buffer]:
    """Yield an unambiguous encoding: a kind, a length, the content."""
    plain = _plain(value)
    if plain is not None:
        yield from plain
    elif isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield from _tensor(torch.from_numpy(np.ascontiguousarray(value)))
    elif isinstance(value, list | tuple):
        yield _head(_SEQUENCE, len(value))
        for item in value:
            yield from _parts(item, objects_of)
    elif isinstance(value, Mapping):
        yield from _mapping(_MAPPING, value, objects_of)
    elif objects_of and _is_of(value, objects_of) and hasattr(value, "__dict__"):
        yield from _leaf(_TEXT, type(value).__qualname__.encode())
        yield from _mapping(_OBJECT, vars(value), objects_of)
    else:
        raise KeyInputError(
            f"content digest: a value cannot be identified by its content (got {type(value)!r}); "
            "expected tensors, numbers, texts, and sequences or mappings of them"
        )


def _is_of(value: object, modules: str) -> bool:
    return type(value).__module__.startswith(modules)


def _plain(value: object) -> tuple[_Buffer, ...] | None:
    """Return the encoding of a value that is not a container; None for other values."""
    parts: tuple[_Buffer, ...] | None = None
    if value is None:
        parts = (_head(_NONE, 0),)
    elif isinstance(value, bool):
        parts = (_head(_BOOL, int(value)),)
    elif isinstance(value, int):
        parts = _leaf(_INT, str(value).encode())
    elif isinstance(value, float):
        parts = _leaf(_FLOAT, struct.pack("<d", value))
    elif isinstance(value, str):
        parts = _leaf(_TEXT, value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        parts = _leaf(_BYTES, memoryview(value).cast("B"))
    return parts


def _mapping(kind: int, value: Mapping[Any, object], objects_of: str) -> Iterator[_Buffer]:
    if not all(isinstance(name, str) for name in value):
        raise KeyInputError("content digest: a mapping has keys that are not texts")
    yield _head(kind, len(value))
    for name in sorted(value, key=str):
        yield from _parts(name, objects_of)
        yield from _parts(value[name], objects_of)


def _tensor(tensor: torch.Tensor) -> Iterator[_Buffer]:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise KeyInputError(
            f"content digest: a tensor cannot be read (got layout {tensor.layout}); expected "
            "strided and not quantized"
        )
    yield _head(_TENSOR, tensor.dim())
    yield from _parts(str(tensor.dtype), "")
    yield from _parts(list(tensor.shape), "")
    plain = tensor.detach().cpu().contiguous()
    elements = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, "u1")
    yield from _leaf(_BYTES, elements.data)


def _leaf(kind: int, content: _Buffer) -> tuple[_Buffer, ...]:
    return _head(kind, len(content)), content


def _head(kind: int, length: int) -> bytes:
    return struct.pack("<BQ", kind, length)
