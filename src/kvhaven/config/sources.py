# SPDX-License-Identifier: Apache-2.0
"""Sources of settings: `kv_connector_extra_config`, `KVHAVEN_*` variables, a YAML file.

Each source is read into raw values with their origins. Unknown keys are refused, with the most
similar known key.
"""

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import yaml

from kvhaven.errors import ConfigError

DEFAULT = "default"
EXTRA_CONFIG = "kv_connector_extra_config"
EXTRA_PREFIX = "kvhaven."
ENV_PREFIX = "KVHAVEN_"
CONFIG_FILE = "KVHAVEN_CONFIG_FILE"
MASK = "********"

NOT_SETTINGS = {
    CONFIG_FILE: "path of the YAML file",
    "KVHAVEN_SEED": "seed of the simulator and of random tests",
    "KVHAVEN_EVENTS": "number of events that the simulator runs",
}
"""Variables that start with `KVHAVEN_` but are not settings, with their purpose."""

RENAMED = {"remote_believe_s": "remote_lookup_ttl_s"}
"""Former names of settings; sources may still use them."""

NOT_SETTINGS_PREFIXES = ("KVHAVEN_TEST_", "KVHAVEN_BENCH_", "KVHAVEN_DEMO_")
"""Prefixes of variables for this project's tests, benchmarks and demo."""

_MOST_SHOWN = 300
_SECRET_LIKE = re.compile(r"password|secret|token|credential|tenant|salt|key$", re.IGNORECASE)
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?)")
_SERVICE_LINK_URL = re.compile(r"(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)(://.*)?|\d+|[\d.]+|[\da-fA-F:]+")


class RawValue(msgspec.Struct, frozen=True):
    """An unparsed value and its origin."""

    value: object
    origin: str


def read_sources(
    names: Collection[str],
    extra: Mapping[str, object] | None,
    environ: Mapping[str, str],
    yaml_file: Path | None,
) -> list[dict[str, RawValue]]:
    """Return the raw values of each source, the one with precedence first.

    Raises `ConfigError` for unknown and duplicate keys, and if the YAML file cannot be read.
    """
    sources = [_read_extra(names, extra or {}), _read_environ(names, environ)]
    file = settings_file(environ, yaml_file)
    if file is not None:
        named_by = CONFIG_FILE if yaml_file is None else "the command line"
        sources.append(_read_yaml(names, file, named_by))
    return sources


def settings_file(environ: Mapping[str, str], yaml_file: Path | None) -> Path | None:
    """Return the YAML file of settings, if there is one: `yaml_file` has precedence."""
    if yaml_file is None and environ.get(CONFIG_FILE):
        return Path(environ[CONFIG_FILE]).expanduser()
    return yaml_file


def _read_extra(names: Collection[str], extra: Mapping[str, object]) -> dict[str, RawValue]:
    found: dict[str, RawValue] = {}
    for key, value in extra.items():
        name = _current(key.removeprefix(EXTRA_PREFIX))
        _check_known(names, name, key, value, EXTRA_CONFIG)
        if name in found and found[name].value != value:
            one, two = _shown(name, found[name].value), _shown(name, value)
            raise ConfigError(
                f"setting {name} is given twice in {EXTRA_CONFIG} (with and without the prefix "
                f"{EXTRA_PREFIX!r}, or by an earlier name): {one} and {two}; keep one"
            )
        found[name] = RawValue(value, EXTRA_CONFIG)
    return found


def _read_environ(names: Collection[str], environ: Mapping[str, str]) -> dict[str, RawValue]:
    found: dict[str, RawValue] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or not value.strip():
            continue  # container manifests leave variables empty to unset them
        name = _current(variable.removeprefix(ENV_PREFIX).lower())
        if name not in names and _is_no_setting(variable, value):
            continue
        _check_known(names, name, variable, value, "the environment")
        _refuse_second(found, name, variable)
        found[name] = RawValue(value, variable)
    return found


def _is_no_setting(variable: str, value: str) -> bool:
    """Whether the variable is known not to be a setting."""
    if variable in NOT_SETTINGS or variable.startswith(NOT_SETTINGS_PREFIXES):
        return True
    return is_service_link(variable.removeprefix(ENV_PREFIX), value)


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set a variable; `name` excludes the prefix.

    Kubernetes sets variables for each service in a pod's namespace, and a service may be called
    `kvhaven`:
    https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    """
    if _SERVICE_LINK.fullmatch(name):
        return True
    return bool(_SERVICE_LINK_URL.fullmatch(name) and _SERVICE_LINK_VALUE.fullmatch(value))


def _read_yaml(names: Collection[str], path: Path, named_by: str) -> dict[str, RawValue]:
    found: dict[str, RawValue] = {}
    for key, raw in read_yaml(path, named_by).items():
        name = _current(key)
        _check_known(names, name, key, raw.value, raw.origin)
        _refuse_second(found, name, raw.origin)
        found[name] = raw
    return found


def _current(name: str) -> str:
    """Return the current name of a setting."""
    return RENAMED.get(name, name)


def _refuse_second(found: Mapping[str, RawValue], name: str, origin: str) -> None:
    if name in found:
        raise ConfigError(
            f"setting {name} is given twice, at {found[name].origin} and {origin}; keep one"
        )


def read_yaml(path: Path, named_by: str) -> dict[str, RawValue]:
    """Return the flat mapping of a YAML file; see `parse_yaml`.

    Raises `ConfigError` if the file cannot be read, is not a mapping, or has a duplicate key.
    """
    return parse_yaml(read_text(path, named_by), path, named_by)


def read_text(path: Path, named_by: str) -> str:
    """Return the text of a file, with its line ends. Raises `ConfigError`."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(
            f"settings file {path} (named by {named_by}) cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise _not_yaml(path, named_by, error) from error


def parse_yaml(text: str, path: Path, named_by: str) -> dict[str, RawValue]:
    """Return the flat mapping of the YAML text of a file, with scalars as strings.

    YAML would read `off` as a boolean and `1e3` as a string. `named_by` is the source of the
    path, for messages. Raises `ConfigError` if it is not a mapping, or has a duplicate key.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(path, named_by, error) from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"settings file {path} (named by {named_by}) must contain lines such as chunk_size: 256"
        )
    found: dict[str, RawValue] = {}
    for key_node, value_node in root.value:
        origin = f"{path}:{key_node.start_mark.line + 1}"
        name, value = str(key_node.value), _yaml_value(value_node, path)
        if name in found:
            raise ConfigError(
                f"setting {name} is given twice, at {found[name].origin} and {origin}; keep one"
            )
        found[name] = RawValue(value, origin)
    return found


def _not_yaml(path: Path, named_by: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"settings file {path} (named by {named_by}) is not valid YAML: {_without_text(error)}"
    )


def _without_text(error: Exception) -> str:
    """Return the position and problem of a YAML error, without the text, which may be secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error)


def _yaml_value(node: yaml.Node, path: Path) -> object:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.MappingNode):
        return _yaml_mapping(node, path)
    return yaml.safe_load(yaml.serialize(node))  # refused and shown by the setting


def _yaml_mapping(node: yaml.MappingNode, path: Path) -> dict[str, object]:
    """Return a setting's mapping. Keys may be secret (salts), so errors do not repeat them."""
    found: dict[str, object] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value in found:
            raise ConfigError(
                f"{path}:{key_node.start_mark.line + 1}: the key is a duplicate or not a string; "
                "give each key once"
            )
        found[key_node.value] = _yaml_value(value_node, path)
    return found


def _check_known(names: Collection[str], name: str, key: str, value: object, where: str) -> None:
    """Refuse an unknown key and name the most similar setting, spelled as in this source."""
    if name in names:
        return
    nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    spelt = [ENV_PREFIX + n.upper() if key.startswith(ENV_PREFIX) else n for n in nearest]
    hint = f"did you mean {spelt[0]}?" if spelt else "no known setting is similar;"
    raise ConfigError(
        f"unknown setting {key} = {_shown(key, value)} in {where}: {hint} "
        f"`kvhaven config show` lists all settings"
    )


def _shown(key: str, value: object) -> str:
    """Return a value for a message, masked if it may be secret."""
    return MASK if _SECRET_LIKE.search(key) else shortened(represented(value))


def represented(value: object) -> str:
    """Return the text of a raw value for a message."""
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number with too many digits"


def shortened(text: str) -> str:
    """Return the beginning of a text for a message, behind which the advice is still read."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
