# SPDX-License-Identifier: Apache-2.0
"""Changes of a settings file in place: its comments, its order and all other settings remain."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import yaml

from kvhaven.config.load import check_value, load_settings
from kvhaven.config.sources import RENAMED, RawValue, parse_yaml, read_text
from kvhaven.errors import ConfigError

_NAMED_BY: Final = "the service"
_MODE: Final = 0o7777
_ADVICE: Final = "make its directory writable for the service, or edit the file by hand"


def write_settings(
    path: Path,
    values: Mapping[str, object],
    *,
    dry_run: bool,
    wanted: Callable[[], bool] = lambda: True,
) -> dict[str, str]:
    """Set the values of settings in a YAML file, and return the origin of each setting in it.

    The file is replaced as a whole, with its owner and mode, or remains as it was. A link is
    followed. With `dry_run`, or if it is not `wanted` any more once all is ready, it remains.

    Raises `ConfigError` if the file cannot be read or written, if a service could not start with
    it, if it is written in a way that cannot be edited (aliases, for example), or if somebody else
    changes it meanwhile.
    """
    target = Path(os.path.realpath(path))
    try:
        before = read_text(target, _NAMED_BY)
        after = _edited(before, values, path)
        found = _verified(before, after, values, path)
        with _ready(target, after) as temporary:
            _require_loadable(temporary, path)
            if read_text(target, _NAMED_BY) != before:
                raise ConfigError(f"settings file {path} was changed meanwhile; try again")
            if not dry_run and wanted():
                temporary.replace(target)
                _sync(target.parent)
    except RecursionError as error:
        raise _unsuitable(path, values) from error
    except OSError as error:
        raise ConfigError(
            f"settings file {path} cannot be written: {error.strerror}; {_ADVICE}"
        ) from error
    return {name: raw.origin for name, raw in found.items()}


def _edited(text: str, values: Mapping[str, object], path: Path) -> str:
    """Return the text with the values in the places of the former ones, or at its end."""
    root = yaml.compose(text, Loader=yaml.SafeLoader) if parse_yaml(text, path, _NAMED_BY) else None
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    nodes = {_name(str(key.value)): value for key, value in pairs}
    missing = dict(values)
    for name, node in sorted(nodes.items(), key=lambda item: -item[1].start_mark.index):
        if name in missing:
            start, end = node.start_mark.index, _last(node).end_mark.index
            space = " " if text[start - 1] == ":" else ""
            line_end = "\n" if text[start:end].endswith("\n") else ""  # of a literal, for example
            text = f"{text[:start]}{space}{_json(missing.pop(name))}{line_end}{text[end:]}"
    if missing and text and not text.endswith("\n"):
        text += "\n"
    indent = " " * pairs[0][0].start_mark.column if pairs else ""
    return text + "".join(f"{indent}{name}: {_json(value)}\n" for name, value in missing.items())


def _last(node: yaml.Node) -> yaml.Node:
    """Return the node with which another ends: a block also counts the lines behind it as its."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()  # YAML reads it, and in one line


def _verified(
    before: str, after: str, values: Mapping[str, object], path: Path
) -> dict[str, RawValue]:
    """Return the settings of the text after an edit, if it changed what it should, and only that.

    Names are the current ones.
    """
    try:
        old, new = _current(before, path), _current(after, path)
        kept = {name: raw.value for name, raw in old.items() if name not in values}
        same = kept == {name: raw.value for name, raw in new.items() if name not in values}
        good = same and all(
            check_value(name, new[name]) == check_value(name, RawValue(value, ""))
            for name, value in values.items()
        )
    except (ConfigError, KeyError):
        good = False
    if not good:
        raise _unsuitable(path, values)
    return new


def _unsuitable(path: Path, values: Mapping[str, object]) -> ConfigError:
    return ConfigError(
        f"settings file {path}: {', '.join(values)} cannot be set in the way it is written; "
        "edit it by hand, as lines such as chunk_size: 256"
    )


def _current(text: str, path: Path) -> dict[str, RawValue]:
    return {_name(name): raw for name, raw in parse_yaml(text, path, _NAMED_BY).items()}


def _name(given: str) -> str:
    """Return the current name of a setting."""
    return RENAMED.get(given, given)


def _require_loadable(temporary: Path, path: Path) -> None:
    """Raise `ConfigError` if no service could start with the file and this environment."""
    try:
        load_settings(yaml_file=temporary)
    except ConfigError as error:
        said = str(error).replace(str(temporary), str(path))
        raise ConfigError(f"no service could start with it: {said}") from error


@contextmanager
def _ready(path: Path, text: str) -> Iterator[Path]:
    """Yield a file with the text beside another, with its owner and mode; remove it at the end."""
    state = path.stat()
    if path.is_mount():
        raise OSError(0, "it is a mount point of its own, which cannot be replaced")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            made = os.fstat(descriptor)
            if (made.st_uid, made.st_gid) != (state.st_uid, state.st_gid):
                os.fchown(descriptor, state.st_uid, state.st_gid)
            os.fchmod(descriptor, state.st_mode & _MODE)
            os.fsync(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # it has replaced the other
            temporary.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
