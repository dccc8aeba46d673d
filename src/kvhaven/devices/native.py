# SPDX-License-Identifier: Apache-2.0
"""Native copies of heads between an engine's pages and host memory, where a library was built.

Numpy copies items one by one if they lie in columns on one side. `native.c` transposes tiles of
them in registers; the installation of KVHaven compiles it if there is a C compiler. Without it, or
if it does not copy the same bytes as numpy, numpy copies: vLLM's CPU pages at 0.6 of the speed.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

_LIBRARY: Final = Path(__file__).with_name("_native.so")
_FUNCTION: Final = "kvhaven_copy_heads_1"

_Array = npt.NDArray[Any]
"""`[block or position, head, layer, plane, token, item]`."""
_Function = Callable[..., None]


class _Side(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 6))

    @classmethod
    def of(cls, array: _Array) -> "_Side":
        """Describe an array."""
        address = array.__array_interface__["data"][0]
        return cls(address, (ctypes.c_int64 * 6)(*array.strides))


class _Pair(ctypes.Structure):
    _fields_ = (
        ("source", _Side),
        ("target", _Side),
        *((name, ctypes.c_int64) for name in ("planes", "tokens", "items", "item")),
    )


def copies(source: _Array, target: _Array) -> bool:
    """Return whether native code is loaded and can copy the arrays.

    Both must have dense rows; or one has dense rows and the other dense columns, of 2 or 4 bytes an
    item.
    """
    item = source.itemsize
    *_, token, element = source.strides
    *_, to_token, to_element = target.strides
    rows = element == to_element == item
    turned = (token, to_element) == (item, item) or (element, to_token) == (item, item)
    return function is not None and (rows or (turned and item in {2, 4}))


def copy_heads(pairs: Sequence[tuple[_Array, _Array]], blocks: Sequence[tuple[int, int]]) -> None:
    """Copy some blocks, with all their heads, layers, planes and tokens, from sources to targets.

    `pairs` are pairs of a source and a target that `copies` accepts; `blocks` are pairs of a first
    index in the source and one in the target. All arrays have equally many heads and layers. A
    source and a target must not share memory. Raises `ValueError` if the shapes differ.
    """
    if not pairs or not blocks:
        return
    _, heads, layers, *_ = pairs[0][0].shape
    for source, target in pairs:
        same = source.shape[1:] == target.shape[1:] and source.itemsize == target.itemsize
        if not same or source.shape[1:3] != (heads, layers):
            raise ValueError(
                f"heads of {source.shape[1:]} items of {source.itemsize} bytes cannot be copied to "
                f"{target.shape[1:]} items of {target.itemsize} bytes; expected equal shapes and "
                f"item sizes, with {heads} heads and {layers} layers"
            )
    assert function is not None
    _call(function, pairs, blocks, heads, layers)


def _call(
    function: _Function,
    pairs: Sequence[tuple[_Array, _Array]],
    blocks: Sequence[tuple[int, int]],
    heads: int,
    layers: int,
) -> None:
    described = [
        _Pair(_Side.of(source), _Side.of(target), *source.shape[3:], source.itemsize)
        for source, target in pairs
    ]
    indices = ctypes.c_int64 * len(blocks)
    function(
        (_Pair * len(pairs))(*described),
        len(pairs),
        indices(*(one for one, _ in blocks)),
        indices(*(other for _, other in blocks)),
        *(len(blocks), heads, layers),
    )


def load(library: Path) -> _Function | None:
    """Return the native function, or None if it was not built or does not copy as numpy does."""
    try:
        found: Any = getattr(ctypes.CDLL(str(library)), _FUNCTION)
    except (OSError, AttributeError) as error:
        _log.debug("no native code to copy heads, numpy copies them: %s", error)
        return None
    found.restype = None
    some = ctypes.POINTER(ctypes.c_int64)
    found.argtypes = [ctypes.POINTER(_Pair), ctypes.c_int64, some, some, *[ctypes.c_int64] * 3]
    for items in ("<u2", "<u4"):
        for columns in (False, True):
            if not _works(found, items, columns=columns):
                _log.warning("%s copies other bytes than numpy does; numpy copies instead", library)
                return None
    return found  # type: ignore[no-any-return]


def _works(function: _Function, items: str, *, columns: bool) -> bool:
    """Return whether the function copies two blocks as numpy does.

    K is in columns and V in rows in the source, or, without `columns`, in the target.
    """
    shape = (2, 3, 2, 1, 19, 21)
    kv = np.arange(2 * np.prod(shape), dtype=items).reshape(2, *shape)
    key, value = kv[0].reshape(*shape[:4], 21, 19).swapaxes(4, 5), kv[1]
    host = np.zeros_like(kv)
    if columns:
        pairs = [(key, host[0]), (value, host[1])]
    else:
        pairs = [(kv[0], host[0].reshape(*shape[:4], 21, 19).swapaxes(4, 5)), (value, host[1])]
    _call(function, pairs, [(0, 1), (1, 0)], 3, 2)
    return all(np.array_equal(source[::-1], target) for source, target in pairs)


function: _Function | None = load(_LIBRARY)
"""The native function, or None."""
