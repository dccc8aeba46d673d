# SPDX-License-Identifier: Apache-2.0
"""Values of settings: annotations, parsing of sizes, switches and paths, and display."""

import math
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from kvhaven import plugins
from kvhaven.config.sizes import GIB, MIB, format_size, parse_size
from kvhaven.config.sources import MASK, RawValue, represented, shortened
from kvhaven.config.urls import parse_urls, redacted
from kvhaven.errors import ConfigError
from kvhaven.tenants import parse_quotas

_PLUGIN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|[\w.-]+", re.ASCII)
_MAX_SOCKET_BYTES = 107  # sun_path of unix(7) without its terminating null
_INT_LIMIT = 1 << 63
"""Messages between processes have integers of 64 bits."""
_SWITCH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}

Kind = Literal[
    "bool",
    "int",
    "float",
    "text",
    "choice",
    "size",
    "path",
    "paths",
    "socket",
    "urls",
    "quotas",
    "plugins",
]
Value = str | int | float | bool | None


class SettingInfo(msgspec.Struct, frozen=True):
    """Description of a setting.

    `allowed` completes the sentence "allowed: ..."; for the limits see `setting`.
    """

    name: str
    kind: Kind
    doc: str
    allowed: str
    default: Value
    optional: bool
    choices: tuple[str, ...]
    secret: bool
    least: float | None
    most: float | None
    step: int
    plugins: str = ""


def setting(
    doc: str,
    allowed: str,
    *,
    kind: Kind | None = None,
    secret: bool = False,
    least: float | None = None,
    most: float | None = None,
    step: int = 1,
    choices: tuple[str, ...] = (),
    plugins: str = "",
) -> msgspec.Meta:
    """Annotate a field of the settings; `kind` defaults to the field's type.

    `least` and `most` bound a number or a string's length; a number must be a multiple of `step`.
    `choices` are the allowed strings unless the type lists them. Packages may add choices by
    entry points of the group `plugins`.
    """
    extra: dict[str, object] = {"allowed": allowed, "kind": kind, "secret": secret}
    extra |= {"choices": choices, "plugins": plugins}
    limits = {"least": least, "most": most, "step": step}
    return msgspec.Meta(description=doc, extra={**extra, **limits})


def switch(doc: str) -> msgspec.Meta:
    """Annotate a boolean field."""
    return setting(doc, "true or false")


def size(doc: str, most: str = "1PiB") -> msgspec.Meta:
    """Annotate a field in bytes, at least 1 MiB; `most` describes its upper limit."""
    allowed = (
        f"a size from 1MiB to {most}, such as 20GiB, 512MiB or 1.5GB, or a plain number of GiB"
    )
    return setting(doc, allowed, kind="size", least=MIB, most=GIB << 20)


def quotas(doc: str) -> msgspec.Meta:
    """Annotate a field of bytes per tenant; its value is the string form of `Quotas`."""
    allowed = (
        "pairs SALT=SIZE separated by spaces or commas, or a mapping; tenant:0123456789abcdef "
        "stands for a salt, * for all others; a size is 20GiB, 512MiB or none; or none"
    )
    return setting(doc, allowed, kind="quotas")


def duration(doc: str, unit: str, most: float, least: float = 0) -> msgspec.Meta:
    """Annotate a field that is a duration in `unit`."""
    return setting(doc, f"{unit} from {least:g} to {most:g}", least=least, most=most)


def settings_of(model: type[msgspec.Struct]) -> tuple[SettingInfo, ...]:
    """Return the annotations of a settings model, whose fields all have defaults."""
    hints = get_type_hints(model, include_extras=True)
    return tuple(
        _info(field.name, hints[field.name], field.default)
        for field in msgspec.structs.fields(model)
    )


def _info(name: str, annotated: object, default: Value) -> SettingInfo:
    typ, meta = get_args(annotated)
    extra = dict(meta.extra)
    optional = isinstance(typ, types.UnionType)
    inner = get_args(typ)[0] if optional else typ
    by_type: dict[object, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}
    choices = get_args(inner) if get_origin(inner) is Literal else extra["choices"]
    extra["kind"] = extra["kind"] or ("choice" if choices else by_type[inner])
    return SettingInfo(
        name=name,
        doc=meta.description,
        default=default,
        optional=optional,
        **extra | {"choices": choices},
    )


def parse_value(info: SettingInfo, raw: RawValue) -> Value:
    """Convert a raw value to the setting's type and check its range.

    Raises `ConfigError` if the setting does not allow it.
    """
    value = raw.value.strip() if isinstance(raw.value, str) else raw.value
    if value is None or (isinstance(value, str) and value.lower() in {"", "none", "null"}):
        if info.optional:
            return None
        refuse(info, raw, "a value is required; omit the key to use the default")
    try:
        parsed = _PARSERS[info.kind](info, value)
        _check_limits(info, parsed)
    except ValueError as error:
        refuse(info, raw, str(error))
    return parsed


def _check_limits(info: SettingInfo, value: Value) -> None:
    number = len(value) if isinstance(value, str) else value
    if number is None or isinstance(number, bool):
        return
    if info.least is not None and number < info.least:
        raise ValueError("too small")
    if info.most is not None and number > info.most:
        raise ValueError("too large")
    if number % info.step and info.step > 1:
        raise ValueError(f"not a multiple of {info.step}")


def refuse(info: SettingInfo, raw: RawValue, reason: str = "") -> NoReturn:
    """Raise a `ConfigError` with the key, its origin, its value and the allowed values."""
    masked = info.secret or info.kind == "quotas"
    shown = MASK if masked else shortened(redacted(represented(raw.value)))
    because = f" ({reason})" if reason else ""
    raise ConfigError(
        f"setting {info.name} = {shown}, from {raw.origin}, is refused{because}; "
        f"allowed: {info.allowed}"
    )


def shown_value(info: SettingInfo, value: Value) -> tuple[Value, str]:
    """Return a value for JSON and as text for display, both masked if it is a secret."""
    if info.secret and value is not None:
        return MASK, MASK
    if value is None:
        return None, "none"
    if isinstance(value, str):
        return redacted(value), redacted(value)
    if isinstance(value, bool):
        return value, str(value).lower()
    if info.kind == "size" and isinstance(value, int):
        return value, format_size(value)
    return value, f"{value:g}" if isinstance(value, float) else str(value)


def _parse_bool(_info: SettingInfo, value: object) -> bool:
    return _SWITCH[_known(str(value), _SWITCH)]


def _parse_int(_info: SettingInfo, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("not a whole number")
    number = int(value)
    if not -_INT_LIMIT <= number < _INT_LIMIT:
        raise ValueError("too large" if number > 0 else "too small")
    return number


def _parse_float(_info: SettingInfo, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer, not a text
        raise ValueError("too large") from None
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _parse_text(_info: SettingInfo, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _parse_choice(info: SettingInfo, value: object) -> str:
    if isinstance(value, bool):  # JSON's true for "on"
        value = "on" if value else "off"
    by_lower = {choice.lower(): choice for choice in info.choices}
    lower = str(value).strip().lower()
    if lower not in by_lower and info.plugins and lower in plugins.installed(info.plugins):
        return lower
    return by_lower[_known(lower, by_lower)]


def _known(text: str, among: Mapping[str, object]) -> str:
    lower = text.strip().lower()
    if lower not in among:
        raise ValueError("")
    return lower


def _parse_path(_info: SettingInfo, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not a path")
    if "\0" in value:
        raise ValueError("a path must not contain a null byte")
    path = value.removeprefix("file://")  # LMCache's recipes use this form
    if "://" in path:
        raise ValueError("expected a path, not a URL")
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111  it is sent as JSON


def _parse_socket(info: SettingInfo, value: object) -> str:
    if isinstance(value, str):
        value = value.removeprefix("unix://").removeprefix("unix:")
    path = _parse_path(info, value)
    if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
        raise ValueError(f"{len(os.fsencode(path))} bytes")
    return path


def _parse_quotas(_info: SettingInfo, value: object) -> str:
    """Return quotas as a string with tenants' names, so that salts are not passed on."""
    quotas = parse_quotas(value)
    if not str(quotas):
        raise ValueError("no pairs")
    return str(quotas)


def _parse_paths(info: SettingInfo, value: object) -> str:
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, list) or not words:
        raise ValueError("no paths")
    paths = [_parse_path(info, word) for word in words]
    if any(len(path.split()) != 1 or "," in path for path in paths):
        raise ValueError("a path must not contain spaces or commas")
    return " ".join(paths)


def _parse_plugins(_info: SettingInfo, value: object) -> str:
    """Return plugins as words, `module:Class` or the name of an entry point."""
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ValueError("no plugins")
    words = [_plugin(item) for item in items]
    if len(set(words)) < len(words):
        raise ValueError("a plugin is named twice")
    return " ".join(words)


def _plugin(item: object) -> str:
    if isinstance(item, dict):
        if item.keys() != {"module", "class"}:
            raise ValueError("a mapping must have the keys module and class, and no others")
        item = f"{item['module']}:{item['class']}"
    if not isinstance(item, str) or not _PLUGIN.fullmatch(item):
        raise ValueError(f"{item!r} is neither module:Class nor a name")
    if ":" not in item and item.lower() not in plugins.installed(plugins.PLUGINS):
        raise ValueError(f"no installed package has a plugin {item!r}")
    return item if ":" in item else item.lower()


_PARSERS: dict[Kind, Callable[[SettingInfo, object], Value]] = {
    "bool": _parse_bool,
    "int": _parse_int,
    "float": _parse_float,
    "text": _parse_text,
    "choice": _parse_choice,
    "size": lambda _info, value: parse_size(value),
    "path": _parse_path,
    "socket": _parse_socket,
    "urls": lambda _info, value: parse_urls(value),
    "quotas": _parse_quotas,
    "paths": _parse_paths,
    "plugins": _parse_plugins,
}
