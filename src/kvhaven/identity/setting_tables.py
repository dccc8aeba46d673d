# SPDX-License-Identifier: Apache-2.0
"""Tables that say which of an engine's settings determine KV, and the namespace fields by them.

An engine has a table for each of its configuration classes, and one for environment variables. A
setting that is in no table counts: one that a later version of the engine adds causes a miss, never
wrong output.
"""

import dataclasses
import enum
import functools
import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol

from kvhaven.errors import IncompatibleEngineError
from kvhaven.identity.setting_text import UnnamedError, plain, text

logger = logging.getLogger(__name__)

MOST_FIELDS: Final = 1024

_FLAT_DEPTH: Final = 2
_FLAT_SIZE: Final = 64

Reasons = Mapping[str, str]
"""Names separated by blanks, by their common reason."""


class Treatment(enum.Enum):
    """Treatment of a setting in the namespace."""

    COUNTS = "counts"
    PAGED = "paged"
    IGNORED = "ignored"
    FILE = "file"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ConfigFields:
    """Treatment of the fields of one configuration class, by field name.

    `counts` are part of the namespace in both formats. Those of `paged` count only in that format.
    `ignored` never count. `files` name a file or folder, whose content counts and not its path.
    `partly` are mappings, in which the keys after the colon do not count. `refused` must not be
    set.
    """

    counts: str = ""
    paged: Reasons = field(default_factory=dict)
    ignored: Reasons = field(default_factory=dict)
    files: Reasons = field(default_factory=dict)
    partly: Reasons = field(default_factory=dict)
    refused: Reasons = field(default_factory=dict)

    @functools.cached_property
    def treatments(self) -> Mapping[str, Treatment]:
        """The treatment of each field in the table."""
        table = dict.fromkeys(self.counts.split(), Treatment.COUNTS)
        for treatment, reasons in (
            (Treatment.PAGED, self.paged),
            (Treatment.IGNORED, self.ignored),
            (Treatment.FILE, self.files),
            (Treatment.REFUSED, self.refused),
        ):
            for names in reasons.values():
                table |= dict.fromkeys(names.split(), treatment)
        return table | dict.fromkeys(self.ignored_keys, Treatment.COUNTS)

    @functools.cached_property
    def ignored_keys(self) -> Mapping[str, frozenset[str]]:
        """The keys that do not count in the mappings of `partly`, by field."""
        entries = (entry.partition(":") for entry in self.partly.values())
        return {name.strip(): frozenset(keys.split()) for name, _, keys in entries}

    def require_unset(self, name: str, value: object) -> None:
        """Raise `IncompatibleEngineError` if a field of `refused` is set."""
        if value:
            reason = next(r for r, names in self.refused.items() if name in names.split())
            raise IncompatibleEngineError(
                f"{name} is set: {reason}. Cached KV would be wrong in other runs. Unset it, or "
                "serve without KVHaven."
            )


class SettingRules(Protocol):
    """Rules of one engine for its configuration objects."""

    @property
    def engine(self) -> str:
        """The engine's name, for log lines."""

    @property
    def tables(self) -> Mapping[str, ConfigFields]:
        """The table of each configuration class, by the class's name."""

    @property
    def modules(self) -> str:
        """Prefix of the modules whose other data classes are configurations, too."""

    def skips(self, name: str, value: Any) -> bool:
        """Return whether a value of a setting that counts leaves KV as it is."""

    def add_file(self, into: "SettingFields", path: str, value: Any) -> None:
        """Add a setting of `files` to `into`, usually by its `add_file`."""

    def add_object(self, into: "SettingFields", path: str, value: Any, owner: Any) -> None:
        """Add an object with a method `to_dict`, such as a model's configuration, to `into`.

        `owner` is the configuration object that has it.
        """


class SettingFields:
    """Collects namespace fields and files from configuration objects, by an engine's rules.

    `run` is a text that is unique to this run of the engine. `paged` says whether the fields that
    count in that format alone are collected.
    """

    def __init__(self, rules: SettingRules, *, run: str, paged: bool) -> None:
        self.fields: dict[str, str] = {}
        """The namespace's fields, except those for the content of files."""
        self.files: dict[str, Path] = {}
        """Files and folders that settings refer to, by setting; their content counts."""
        self._rules = rules
        self._run = sha256(run.encode()).hexdigest()[:16]
        self._paged = paged

    def add(self, settings: Any, prefix: str = "") -> None:
        """Add the fields of a configuration object and of nested ones.

        Raises `IncompatibleEngineError` for a setting of `refused`.
        """
        table = self._rules.tables.get(type(settings).__name__, ConfigFields())
        defaults = _defaults(type(settings))
        for name in sorted(defaults.keys() | _attributes(settings, table.treatments)):
            value, path = getattr(settings, name), f"{prefix}{name}"
            treatment = table.treatments.get(name, Treatment.UNKNOWN)
            if treatment is Treatment.FILE:
                self._rules.add_file(self, path, value)
            elif treatment is Treatment.REFUSED:
                table.require_unset(name, value)
            elif self._takes(treatment) and not self._rules.skips(name, value):
                if name in table.ignored_keys:
                    value = self._without(value, table.ignored_keys[name], path)
                if self._is_configuration(value):
                    self.add(value, f"{path.removesuffix('_config') if not prefix else path}.")
                elif callable(getattr(value, "to_dict", None)):
                    self._rules.add_object(self, path, value, settings)
                elif not _off(value, defaults.get(name, dataclasses.MISSING)):
                    self.add_value(path, value, known=treatment is not Treatment.UNKNOWN)

    def add_environment(self, names: Iterable[str], table: Mapping[str, Treatment]) -> None:
        """Add those of the environment variables `names` that are set and count."""
        for name in sorted(os.environ.keys() & names):
            treatment = table.get(name, Treatment.UNKNOWN)
            if self._takes(treatment):
                known = treatment is not Treatment.UNKNOWN
                self.add_value(f"env.{name}", os.environ[name], known=known)

    def add_value(self, path: str, value: Any, *, known: bool = True) -> None:
        """Add a field. Of a value that is not `known`, only the digest is kept."""
        try:
            form = plain(value)
        except UnnamedError as error:
            logger.warning(
                "%s's setting %s cannot be named (%s): other engines, and this one after a "
                "restart, will not find the KV that it caches",
                self._rules.engine,
                path,
                error,
            )
            self._put(path, f"of run {self._run} alone")
            return
        # An unknown or free-form setting may hold a secret, so only its digest is kept.
        self._put(path, text(form, digested=not known or isinstance(form, dict)))

    def add_entries(self, path: str, entries: Mapping[str, Any], depth: int = 0) -> None:
        """Add a field for each entry of a mapping, also for those of small nested ones."""
        for key, value in entries.items():
            if isinstance(value, Mapping) and depth < _FLAT_DEPTH and 0 < len(value) <= _FLAT_SIZE:
                self.add_entries(f"{path}.{key}", value, depth + 1)
            else:
                self.add_value(f"{path}.{key}", value)

    def add_file(self, path: str, value: Any) -> None:
        """Record the file that a setting names; add its value as a field if there is no file."""
        if value and Path(value).exists():
            self.files[path] = Path(value)
        elif value:
            self.add_value(path, str(value))

    def _put(self, path: str, value: str) -> None:
        if path in self.fields:  # such as the entries {"x": {"b": 1}, "x.b": 2}: both count
            value = text([self.fields[path], value], digested=True)
        self.fields[path] = value

    def _takes(self, treatment: Treatment) -> bool:
        """Return whether a field with this treatment counts in the format."""
        return treatment in {Treatment.COUNTS, Treatment.UNKNOWN} or (
            treatment is Treatment.PAGED and self._paged
        )

    def _is_configuration(self, value: Any) -> bool:
        """Return whether a value is one of the engine's configuration objects, known or new."""
        kind = type(value)
        return kind.__name__ in self._rules.tables or (
            dataclasses.is_dataclass(value) and kind.__module__.startswith(self._rules.modules)
        )

    def _without(self, value: Any, keys: frozenset[str], path: str) -> Any:
        """Return a mapping without the ignored `keys`; files in it count by content."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = vars(value)
        if isinstance(value, Mapping):
            return {
                key: self._without(item, keys, f"{path}.{key}")
                for key, item in value.items()
                if key not in keys
            }
        if isinstance(value, str) and Path(value).is_file():
            self.files[path] = Path(value)
            return "a file"
        return value


def bounded(fields: Mapping[str, str]) -> dict[str, str]:
    """Return at most `MOST_FIELDS` fields, plus one that digests the remaining ones, if any."""
    names = sorted(fields)
    kept = {name: fields[name] for name in names[:MOST_FIELDS]}
    if rest := {name: fields[name] for name in names[MOST_FIELDS:]}:
        kept["more"] = text(rest, digested=True)
    return kept


def _attributes(settings: Any, table: Mapping[str, Treatment]) -> set[str]:
    """Return the attributes of a configuration object that hold settings.

    Cached properties, and private attributes that the table does not list, are excluded: they
    hold values derived from settings on first use, which not every process has computed.
    """
    kept = {
        name
        for name, member in inspect.getmembers_static(type(settings))
        if isinstance(member, functools.cached_property)
    }
    return {
        name
        for name in vars(settings)
        if name not in kept and (name in table or not name.startswith("_"))
    }


def _off(value: Any, default: Any) -> bool:
    """Return whether a setting is empty by default, which equals a version without it."""
    if value is None:
        return default is None or default is dataclasses.MISSING
    empty = value is False or (isinstance(value, str | tuple | list | dict | set) and not value)
    return empty and type(value) is type(default) and bool(value == default)


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the fields of a configuration class with their defaults, if these are simple."""
    defaults: dict[str, Any] = {}
    for one in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        described: Any = one.default
        if not hasattr(described, "default_factory"):  # not pydantic's field
            described = one
        factory = described.default_factory
        simple = factory() if factory in (list, dict, set) else described.default
        defaults[one.name] = simple
    return defaults
