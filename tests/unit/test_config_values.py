# SPDX-License-Identifier: Apache-2.0
"""How values are written and shown."""

import contextlib
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.config import setting_infos
from kvhaven.config.sizes import format_size, parse_size
from kvhaven.config.sources import RawValue
from kvhaven.config.values import (
    parse_value,
    setting,
    settings_of,
    shown_value,
)
from kvhaven.errors import ConfigError
from kvhaven.tenants import parse_quotas


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("20GiB", 20 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1 tib", 1 << 40),
        ("4096B", 4096),
        ("64Ki", 64 << 10),
        ("7kb", 7000),
        (".5GiB", 1 << 29),
        ("5", 5 << 30),
        (5, 5 << 30),
        (0.25, 1 << 28),
        ("0.25", 1 << 28),
    ],
)
def test_sizes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize(
    "written", ["", "GiB", "-1", "1e3", "nan", "1,5GB", True, [], float("inf")]
)
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(written)


@given(st.integers(0, 1 << 60))
def test_a_shown_size_reads_back_within_its_decimals(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("size", "shown"), [(4 << 30, "4GiB"), (3 << 19, "1.5MiB"), (1000, "1000B"), (0, "0B")]
)
def test_sizes_are_shown_in_the_largest_fitting_unit(size: int, shown: str) -> None:
    assert format_size(size) == shown


class Example(msgspec.Struct, frozen=True):
    """A model with a secret, as later settings will be."""

    password: Annotated[str | None, setting("A secret.", "any text", secret=True, most=8)] = None
    on: Annotated[bool, setting("A switch.", "true or false")] = False


def test_a_secret_is_shown_nowhere() -> None:
    password = settings_of(Example)[0]
    assert shown_value(password, "hunter2") == ("********", "********")
    assert shown_value(password, None) == (None, "none")
    with pytest.raises(ConfigError) as error:
        parse_value(password, RawValue("hunter2-is-too-long", "KVHAVEN_PASSWORD"))
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("written", ["true", "TRUE", "1", " yes ", "On", True, 1])
def test_switches_that_are_on(written: object) -> None:
    assert parse_value(settings_of(Example)[1], RawValue(written, "x")) is True


@pytest.mark.parametrize("written", ["false", "0", "No", "off", False, 0])
def test_switches_that_are_off(written: object) -> None:
    assert parse_value(settings_of(Example)[1], RawValue(written, "x")) is False


@pytest.mark.parametrize("written", ["none", "null", "", None])
def test_none_can_be_written(written: object) -> None:
    assert parse_value(settings_of(Example)[0], RawValue(written, "x")) is None


long_numbers = st.sampled_from((300, 320, 400, 4000, 5000)).flatmap(
    lambda digits: st.sampled_from(
        (10**digits, -(10**digits), "9" * digits, f"{'9' * digits}.5", f"{'9' * digits}GiB")
    )
)


@given(
    st.one_of(
        *(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.text())),
        *(long_numbers, st.lists(long_numbers), st.dictionaries(st.text(), long_numbers)),
    )
)
def test_any_rubbish_is_either_understood_or_a_config_error(value: object) -> None:
    for info in setting_infos():
        with contextlib.suppress(ConfigError):
            # Settings travel between processes.
            msgspec.json.encode(parse_value(info, RawValue(value, "x")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_budget_ms", 10**400),
        ("step_budget_ms", 10**5000),
        ("priority_limit", 10**400),
        ("priority_limit", -(1 << 63) - 1),
        ("chunk_size", 10**400),
        ("max_local_cpu_size", 10**400),
        ("max_local_cpu_size", "9" * 320 + ".5"),
        ("max_local_disk_size", "9" * 5000),
    ],
    ids=range(8),  # the values are too long for names
)
def test_an_enormous_number_is_refused_with_all_that_is_needed(name: str, value: object) -> None:
    (info,) = (info for info in setting_infos() if info.name == name)
    with pytest.raises(ConfigError, match=rf"^setting {name} = .*, from file:1, is") as error:
        parse_value(info, RawValue(value, "file:1"))
    assert str(error.value).endswith(f"allowed: {info.allowed}")
    assert len(str(error.value)) < 600


def test_a_quota_of_enormous_size_is_refused() -> None:
    with pytest.raises(ValueError, match="pair 1: no valid size"):
        parse_quotas(f"ann={'9' * 320}.5")
