# SPDX-License-Identifier: Apache-2.0
"""Texts of settings that are equal in every process: no addresses, no order of sets."""

import dataclasses
import enum
import json
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Final

LONGEST: Final = 96
"""Longer texts are replaced by their digest."""

_DEEPEST: Final = 32
_LITERAL: Final = re.compile(r"None|True|False|[-+]?(\d.*|inf|nan)|[\[{\"].*|sha256:.*", re.DOTALL)
_OWN_FORMS: Final = ("to_dict", "model_dump", "uuid", "compute_hash")
"""Methods with which objects (configurations, compiler passes) return their content."""


class UnnamedError(Exception):
    """A value has no text that is equal in every process."""


def plain(value: Any, depth: int = 0) -> Any:
    """Return the JSON form of a value; equal results mean equal values.

    Raises `UnnamedError` for values without such a form, such as functions and most objects.
    """
    if depth > _DEEPEST:
        raise UnnamedError("it is nested too deeply")
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _plain_container(value, depth + 1)
    return _plain_object(value, depth + 1)


def text(value: Any, *, digested: bool = False) -> str:
    """Return the text of a result of `plain`; a digest if it is long or `digested` is set."""
    whole = _json(value)
    if digested or len(whole) > LONGEST:
        return f"sha256:{sha256(whole.encode()).hexdigest()[:32]}"
    if value is None or isinstance(value, bool):
        return str(value)
    bare = isinstance(value, str) and value.isprintable() and not _LITERAL.fullmatch(value)
    return value if bare else whole


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        named = {str(plain(key, depth)): plain(item, depth) for key, item in value.items()}
        if len(named) < len(value):
            raise UnnamedError("two of its keys have the same text")
        return named
    items = [plain(item, depth) for item in value]
    return sorted(items, key=_json) if isinstance(value, set | frozenset) else items


def _plain_object(value: Any, depth: int) -> Any:
    kind = type(value)
    if isinstance(value, PurePath) or (
        kind.__module__ == "torch" and kind.__name__ in {"dtype", "device"}
    ):
        return str(value).removeprefix("torch.")
    if isinstance(value, bytes):
        return value.hex()
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return {"": kind.__name__} | plain(fields, depth)
        for method in _OWN_FORMS:
            if callable(getattr(value, method, None)):
                return {"": kind.__name__, method: plain(_own_form(value, method), depth)}
    raise UnnamedError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def _own_form(value: Any, method: str) -> Any:
    try:
        return getattr(value, method)()
    except Exception as error:  # third-party code may raise anything
        raise UnnamedError(f"{method} of a {type(value).__qualname__} failed: {error}") from error


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
