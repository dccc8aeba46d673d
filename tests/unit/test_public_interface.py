# SPDX-License-Identifier: Apache-2.0
"""The public interface stays as it is: `public_interface.txt` has its names and signatures.

A change there is a decision: it needs a line in CHANGELOG.md. To take it over:

    .venv/bin/python -m tests.unit.test_public_interface > tests/unit/public_interface.txt
"""

import dataclasses
import difflib
import enum
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import pytest

FROZEN = Path(__file__).with_name("public_interface.txt")
MODULES = ("kvhaven", "kvhaven.engine", "kvhaven.integrations.transformers")


def described() -> str:
    """Return every public name with its signature, a line each."""
    text = "".join(f"{line}\n" for module in MODULES for line in _module(module))
    return text.replace("pathlib._local.", "pathlib.")  # Python 3.13 says where it is defined


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for exported in sorted(module.__all__):
        value = getattr(module, exported)
        if inspect.isclass(value):
            yield f"{name}.{exported}{_bases(value)}"
            yield from (f"    {line}" for line in _members(value))
        elif callable(value):
            yield f"{name}.{exported}{inspect.signature(value)}"
        else:
            yield f"{name}.{exported}"


def _bases(cls: type) -> str:
    names = [base.__name__ for base in cls.__bases__ if base is not object]
    return f"({', '.join(names)})" if names else ""


def _members(cls: type) -> Iterator[str]:
    """Yield what a class itself defines: fields, properties, and methods with signatures."""
    if dataclasses.is_dataclass(cls):
        yield from (f"{field.name}: {_text(field.type)}" for field in dataclasses.fields(cls))
    elif hasattr(cls, "__struct_fields__"):
        yield from sorted(cls.__struct_fields__)
    elif issubclass(cls, tuple):
        yield from getattr(cls, "_fields", ())
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, property) and not name.startswith("_"):
            yield f"{name} (property)"
        elif inspect.isfunction(member) and (not name.startswith("_") or name == "__init__"):
            protocol = getattr(cls, "_is_protocol", False)
            if name == "__init__" and (dataclasses.is_dataclass(cls) or protocol):
                continue
            yield f"{name}{inspect.signature(member)}"
        elif isinstance(member, enum.Enum):
            yield name


def _text(kind: Any) -> str:
    if get_origin(kind) in {Union, UnionType}:  # one type since Python 3.14, two before
        return " | ".join(map(_text, get_args(kind)))
    if kind is NoneType:
        return "None"
    return kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))


def test_public_names_and_signatures_are_as_they_were() -> None:
    pytest.importorskip("transformers", reason="its integration is a part of the interface")
    frozen, now = FROZEN.read_text(), described()
    changed = difflib.unified_diff(frozen.splitlines(), now.splitlines(), "frozen", "now")
    assert now == frozen, "\n".join(changed)


def test_every_public_name_is_documented() -> None:
    pytest.importorskip("transformers", reason="its integration is a part of the interface")
    for name in MODULES:
        module = importlib.import_module(name)
        for exported in module.__all__:
            value = getattr(module, exported)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert inspect.getdoc(value), f"{name}.{exported}"


if __name__ == "__main__":
    sys.stdout.write(described())
