# SPDX-License-Identifier: Apache-2.0
"""Where the settings of `config_model` come from, and every check.

`load_settings` merges, first match wins: vLLM's `kv_connector_extra_config`, environment
variables `KVHAVEN_<NAME>`, a YAML file (`KVHAVEN_CONFIG_FILE`), LMCache's variables and file, the
defaults. What is unknown, malformed or contradictory is refused at start; nothing is ignored
in silence. How a value is written (sizes, switches, paths) is `config_values`; where it is found is
`config_sources`, and for LMCache's settings `config_lmcache`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvhaven.config_checks import cross_check, notes, refuse_what_comes_later
from kvhaven.config_lmcache import read_lmcache
from kvhaven.config_model import Settings
from kvhaven.config_sources import DEFAULT, RawValue, read_sources
from kvhaven.config_values import (
    SettingInfo,
    Value,
    parse_value,
    settings_of,
    shown_value,
)

__all__ = ["Resolved", "SettingRow", "Settings", "check_value", "load_settings", "setting_infos"]


class SettingRow(msgspec.Struct, frozen=True):
    """One setting as it is shown. `value` is masked if it is a secret."""

    name: str
    value: str | int | float | bool | None
    text: str
    origin: str
    doc: str
    allowed: str


class Resolved(msgspec.Struct, frozen=True):
    """Settings and where each came from.

    An origin is an environment variable's name, `kv_connector_extra_config`, `<file>:<line>`
    (`LMCache's <file>:<line>`) or `default`. `notes` are sentences about settings that are given
    but have no effect, for the log at start.
    """

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...] = ()

    def rows(self) -> list[SettingRow]:
        """Every setting in the model's order, with secrets masked."""
        rows = []
        for info in setting_infos():
            value, text = shown_value(info, getattr(self.settings, info.name))
            origin = self.origins[info.name]
            rows.append(SettingRow(info.name, value, text, origin, info.doc, info.allowed))
        return rows


def setting_infos() -> tuple[SettingInfo, ...]:
    """Name, kind, default and documentation of every setting."""
    return _INFOS


def load_settings(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    yaml_file: Path | None = None,
) -> Resolved:
    """Merge all sources into checked settings.

    `extra` is vLLM's `kv_connector_extra_config`; its keys are plain or start with `kvhaven.`.
    `environ` defaults to the process's environment; `yaml_file` goes before
    `KVHAVEN_CONFIG_FILE`.

    Raises `ConfigError`, which names the key, where it came from, its value and what is
    allowed, for anything unknown, malformed, out of range or contradictory, also where a
    source with precedence hides it. Of LMCache's settings only those that count are checked:
    what is right there may be wrong here, and setting ours is the way out.
    """
    names = [info.name for info in _INFOS]
    environ = os.environ if environ is None else environ
    sources = read_sources(names, extra, environ, yaml_file)
    values: dict[str, object] = {}
    raws: dict[str, RawValue] = {}
    for source in sources:
        for name, raw in source.items():
            value = check_value(name, raw)
            if name not in raws:
                values[name], raws[name] = value, raw
    lmcache = read_lmcache(environ)
    for name, raw in lmcache.taken.items():
        if name not in raws:
            values[name], raws[name] = check_value(name, raw), raw
    settings = msgspec.convert(values, Settings)
    cross_check(settings, raws, _BY_NAME)
    origins = {name: raws[name].origin if name in raws else DEFAULT for name in names}
    found = [*notes(settings, raws), lmcache.note]
    return Resolved(settings, origins, tuple(note for note in found if note is not None))


def check_value(name: str, raw: RawValue) -> Value:
    """Return a setting's value by itself. Raises `ConfigError` if it is not allowed.

    That is also a legal value elsewhere that cannot be had here yet; it says what to do instead.
    """
    info = _BY_NAME[name]
    value = parse_value(info, raw)
    refuse_what_comes_later(info, value, raw)
    return value


_INFOS = settings_of(Settings)
_BY_NAME = {info.name: info for info in _INFOS}
