# SPDX-License-Identifier: Apache-2.0
"""Tables of settings, for an engine that is not vLLM."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.setting_tables import ConfigFields, SettingFields


@dataclass
class Nested:
    size: int = 4


@dataclass
class Arguments:
    dtype: str = "bfloat16"
    kernel: str = "fast"
    port: int = 1
    scales: str = ""
    dynamic: bool = False
    options: dict[str, int] = field(default_factory=dict)
    nested_config: Nested = field(default_factory=Nested)
    unheard_of: str = "secret"


class Rules:
    engine = "toy"
    tables = {  # noqa: RUF012 - read by the class alone
        "Arguments": ConfigFields(
            counts="dtype nested_config",
            paged={"choice of a kernel": "kernel"},
            ignored={"an address": "port"},
            files={"its content counts": "scales"},
            partly={"ways of reading": "options: threads"},
            refused={"another reason": "dynamic_range", "scales come from traffic": "dynamic"},
        ),
    }
    modules = __name__

    def skips(self, name: str, value: Any) -> bool:
        return False

    def add_file(self, into: SettingFields, path: str, value: Any) -> None:
        into.add_file(path, value)

    def add_object(self, into: SettingFields, path: str, value: Any, owner: Any) -> None:
        into.add_value(path, value)


def collected(arguments: Arguments, *, paged: bool = True) -> SettingFields:
    found = SettingFields(Rules(), run="one", paged=paged)
    found.add(arguments)
    return found


def test_each_list_of_a_table_does_what_it_says(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.touch()
    given = Arguments(port=7, scales=str(scales), options={"threads": 3, "bits": 8})
    found = collected(given)
    assert found.files == {"scales": scales}
    assert found.fields.keys() == {"dtype", "kernel", "nested.size", "options", "unheard_of"}
    assert "kernel" not in collected(given, paged=False).fields
    given.options["threads"] = 4
    given.port = 8
    assert collected(given).fields == found.fields
    given.options["bits"] = 4
    assert collected(given).fields != found.fields


def test_a_setting_that_no_table_has_counts_and_is_not_shown() -> None:
    one, other = (collected(Arguments(unheard_of=text)).fields for text in ("secret", "other"))
    assert one["unheard_of"] != other["unheard_of"]
    assert one["unheard_of"].startswith("sha256:")


def test_a_setting_that_must_not_be_set_is_refused() -> None:
    with pytest.raises(IncompatibleEngineError, match="dynamic is set: scales come from traffic"):
        collected(Arguments(dynamic=True))


def test_environment_variables_count_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ConfigFields(counts="TOY_A TOY_B", ignored={"an address": "TOY_HOST"}).treatments
    for name in ("TOY_A", "TOY_B", "TOY_HOST", "TOY_NEW"):
        monkeypatch.setenv(name, "1")
    found = SettingFields(Rules(), run="one", paged=True)
    found.add_environment({"TOY_A", "TOY_HOST", "TOY_NEW", "TOY_UNSET"}, table)
    assert found.fields.keys() == {"env.TOY_A", "env.TOY_NEW"}


def test_two_settings_with_one_path_both_count() -> None:
    def fields(first: int, second: int) -> dict[str, str]:
        found = SettingFields(Rules(), run="one", paged=True)
        found.add_entries("model", {"x": {"b": first}, "x.b": second})
        return found.fields

    names = [fields(1, 2), fields(9, 2), fields(1, 3)]
    assert all(one.keys() == {"model.x.b"} for one in names)
    assert len({one["model.x.b"] for one in names}) == len(names)
