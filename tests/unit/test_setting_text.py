# SPDX-License-Identifier: Apache-2.0
"""Settings as text: other values have other texts, and one value has one in every process."""

import enum
import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.identity.setting_text import LONGEST, UnnamedError, plain, text


class Backend(enum.Enum):
    FLASH = 1


@dataclass
class Scales:
    weight: str
    activation: float


class Overlong:
    """A configuration of transformers, as far as it matters here."""

    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def to_dict(self) -> dict[str, Any]:
        return self._entries


class Failing:
    """A compiler's pass that only knows its name while it compiles."""

    def uuid(self) -> str:
        raise RuntimeError("no context")


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of equal types all the way down (1 is not True)."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (one != 0 or math.copysign(1, one) == math.copysign(1, other))


@given(VALUES, VALUES)
def test_equal_texts_mean_equal_values(one: Any, other: Any) -> None:
    assert (text(plain(one)) == text(plain(other))) == same(one, other)


@pytest.mark.parametrize("value", ["None", "True", "5", "-1.5", "[1]", '{"a":1}', '"x"', "sha256:"])
def test_a_text_is_not_taken_for_what_it_looks_like(value: str) -> None:
    assert text(plain(value)) == json.dumps(value) != value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", "auto"),
        (None, "None"),
        (False, "False"),
        (32, "32"),
        (1e-06, "1e-06"),
        (float("inf"), '"inf"'),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cpu"), "cpu"),
        (Path("/a/b"), "/a/b"),
        (Backend.FLASH, "FLASH"),
        ({"b", "a", "c"}, '["a","b","c"]'),
        ((1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (Counter("aab"), '{"a":2,"b":1}'),
        (b"\xab\xff", "abff"),
        ("a\udcffb", '"a\\udcffb"'),
        ("two\nlines", '"two\\nlines"'),
        (Scales("fp8", 0.5), '{"":"Scales","activation":0.5,"weight":"fp8"}'),
        (Overlong(layers=2), '{"":"Overlong","to_dict":{"layers":2}}'),
    ],
)
def test_values_that_vllms_settings_have(value: Any, expected: str) -> None:
    assert text(plain(value)) == expected


def test_long_texts_are_digests_that_differ() -> None:
    one, other = (text(plain("x" * LONGEST + end)) for end in ("a", "b"))
    assert one != other
    assert one.startswith("sha256:")
    assert len(one) < LONGEST
    assert text("secret", digested=True) == text(plain("secret"), digested=True) != "secret"


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda config: config,
        Overlong,
        [object()],
        {"a": {"b": print}},
        {1: "a", "1": "b"},
        Overlong(function=print),
        Failing(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_lasting_form_has_no_text(value: Any) -> None:
    with pytest.raises(UnnamedError):
        plain(value)


def test_what_contains_itself_has_no_text() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnnamedError, match="nested too deeply"):
        plain(endless)
