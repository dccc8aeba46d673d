# SPDX-License-Identifier: Apache-2.0
"""Loading of settings: sources are merged and every value is checked.

`load_settings` merges its sources; the first one that has a value wins: vLLM's
`kv_connector_extra_config`, environment variables `KVHAVEN_<NAME>`, a YAML file
(`KVHAVEN_CONFIG_FILE`), LMCache's variables and file, the defaults. Unknown, malformed and
contradictory settings are refused at start; none is ignored silently. `config.values` parses
values (sizes, switches, paths), `config.sources` reads the sources, `config.lmcache` those of
LMCache.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvhaven.config.lmcache import read_lmcache
from kvhaven.config.settings import Settings
from kvhaven.config.sizes import format_size
from kvhaven.config.sources import DEFAULT, RawValue, read_sources, settings_file
from kvhaven.config.urls import has_directory
from kvhaven.config.values import (
    SettingInfo,
    Value,
    parse_value,
    refuse,
    settings_of,
    shown_value,
)


class SettingRow(msgspec.Struct, frozen=True):
    """One setting as it is displayed. `value` is masked if it is a secret."""

    name: str
    value: str | int | float | bool | None
    text: str
    origin: str
    doc: str
    allowed: str
    changes: str
    """When a change takes effect: `now` or at the `next_request`, by the HTTP API; with a `restart`
    of the service; or at the `next_attach` of an engine."""


class Resolved(msgspec.Struct, frozen=True):
    """Settings, and the origin of each.

    An origin is an environment variable's name, `kv_connector_extra_config`, `<file>:<line>`
    (`LMCache's <file>:<line>`) or `default`. `notes` are sentences for the log at start, about
    settings that are set but have no effect. `file` is the YAML file, if one was read.
    """

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    file: Path | None = None

    def rows(self) -> list[SettingRow]:
        """Every setting in the model's order, with secrets masked."""
        return [setting_row(info, self.settings, self.origins) for info in setting_infos()]


def setting_row(info: SettingInfo, settings: Settings, origins: Mapping[str, str]) -> SettingRow:
    """Return a setting as it is displayed; its origin is empty if `origins` does not have it."""
    value, text = shown_value(info, getattr(settings, info.name))
    changes = changes_of(info.name)
    origin = origins.get(info.name, "")
    return SettingRow(info.name, value, text, origin, info.doc, info.allowed, changes)


def changes_of(name: str) -> str:
    """Return when a change of a setting takes effect; see `SettingRow.changes`."""
    if name in NOW:
        return "now"
    if name in NEXT_REQUEST:
        return "next_request"
    return "restart" if name in _SERVICE_ONLY else "next_attach"


def reader_of(name: str) -> str:
    """Return whether the `engine`, the `service` or `both` read a setting."""
    if name in _BOTH:
        return "both"
    return "service" if changes_of(name) in {"now", "restart"} else "engine"


def setting_infos() -> tuple[SettingInfo, ...]:
    """Return name, kind, default and documentation of every setting."""
    return _INFOS


def load_settings(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    yaml_file: Path | None = None,
) -> Resolved:
    """Merge all sources into checked settings.

    `extra` is vLLM's `kv_connector_extra_config`; its keys are plain or start with `kvhaven.`.
    `environ` defaults to the process's environment. `yaml_file` takes precedence over
    `KVHAVEN_CONFIG_FILE`.

    Raises `ConfigError` if a setting is unknown, malformed, out of range or contradictory, even
    if a source with precedence overrides it. The message names the key, its origin, its value and
    the allowed values. Of LMCache's settings only those that take effect are checked: a value
    that is valid in LMCache may be invalid here, and users can then set KVHaven's setting.
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
    said = tuple(note for note in found if note is not None)
    return Resolved(settings, origins, said, settings_file(environ, yaml_file))


def check_value(name: str, raw: RawValue) -> Value:
    """Return the parsed value of one setting, regardless of all others.

    Raises `ConfigError` if the value is not allowed, or not supported yet.
    """
    info = _BY_NAME[name]
    value = parse_value(info, raw)
    refuse_what_comes_later(info, value, raw)
    return value


_INFOS = settings_of(Settings)
_BY_NAME = {info.name: info for info in _INFOS}


def refuse_what_comes_later(info: SettingInfo, value: object, raw: RawValue) -> None:
    """Refuse a value that is not supported yet, with advice on alternatives."""
    advice = _NOT_YET.get((info.name, value))
    if advice is not None:
        refuse(info, raw, advice)


def cross_check(
    settings: Settings, raws: Mapping[str, RawValue], infos: Mapping[str, SettingInfo]
) -> None:
    """Refuse settings that contradict each other."""
    queue, arena = settings.write_queue_size, settings.max_local_cpu_size
    if queue is not None and 2 * queue > arena:
        where = raws["max_local_cpu_size"].origin if "max_local_cpu_size" in raws else DEFAULT
        refuse(
            infos["write_queue_size"],
            raws["write_queue_size"],
            f"queued writes occupy the arena, and max_local_cpu_size is "
            f"{format_size(arena)} ({where}); decrease write_queue_size or increase "
            f"max_local_cpu_size",
        )


def notes(settings: Settings, raws: Mapping[str, RawValue]) -> tuple[str, ...]:
    """Return sentences about settings that are set but have no effect with the others."""
    found = []
    if settings.service_address is not None:
        own = [name for name in _SERVICE_ONLY if name in raws]
        if own:
            found.append(
                f"service_address is set, so the service's own settings apply instead of this "
                f"engine's {', '.join(own)}"
            )
    plugins = [name for name in _PLUGINS_ONLY if name in raws]
    if settings.api_listen == "off" and plugins:
        found.append(f"{', '.join(plugins)} without effect: api_listen is off")
    if settings.local_disk is None:
        directory = settings.remote_url is not None and has_directory(settings.remote_url)
        disk_only = _DISK_ONLY if directory else (*_DISK_ONLY, *_DIRECTORY_ONLY)
        disk = [name for name in disk_only if name in raws]
        if disk:
            found.append(f"{', '.join(disk)} without effect: local_disk is not set")
    if settings.remote_url is None:
        wanted = _REMOTE_ONLY if settings.peers else (*_REMOTE_ONLY, *_SHARED_ONLY)
        remote = [name for name in wanted if name in raws]
        if remote:
            found.append(f"{', '.join(remote)} without effect: remote_url is not set")
        if settings.local_disk is None:
            found += [
                f"{name} without effect: neither local_disk nor remote_url is set"
                for name in _TIERS_ONLY
                if name in raws
            ]
    elif "tenant_remote" in raws and not has_directory(settings.remote_url):
        found.append("tenant_remote without effect: remote_url names no shared directory")
    return tuple(found)


NOW: Final = frozenset(
    {
        "disk_store_on",
        "disk_write",
        "fill_faster_tiers",
        "log_level",
        "max_local_disk_size",
        "pin_share",
        "remote_lookup_ttl_s",
        "remote_store_on",
        "remote_write",
        "tenant_disk",
        "tenant_memory",
        "verify_memory",
        "write_queue_size",
    }
)
"""Settings that a running service can change."""
NEXT_REQUEST: Final = frozenset(
    {
        "force_skip_save",
        "load_or_recompute",
        "lookup_deadline_ms",
        "pd_wait_ms",
        "priority_limit",
        "promote_deadline_ms",
        "save_decode_cache",
        "step_budget_ms",
    }
)
"""Settings of the scheduler side that a running service can change for its engines."""
_BOTH: Final = frozenset({"log_level", "promote_deadline_ms", "runtime_dir"})
_DISK_ONLY = (
    "max_local_disk_size",
    "tenant_disk",
    "disk_write",
    "disk_compression",
    "disk_store_on",
)
_DIRECTORY_ONLY = ("disk_direct_io",)
"""Settings of the disk tier and of shared directories."""
_REMOTE_ONLY = (
    "s3_endpoint_url",
    "max_remote_size",
    "max_remote_namespace_size",
    "tenant_remote",
    "remote_ttl_s",
    "remote_write",
    "remote_store_on",
    "remote_compression",
)
_SHARED_ONLY = ("remote_lookup_ttl_s", "fill_faster_tiers")
"""Settings of all shared tiers, peers included."""
_PLUGINS_ONLY = (
    "plugins",
    "runtime_plugin_locations",
    "plugin_engine_url",
    "plugin_may_change",
    "plugin_memory",
)
_TIERS_ONLY = ("write_queue_size",)
_SERVICE_ONLY = (
    "max_local_cpu_size",
    "arena_strict",
    "cache_policy",
    "verify_memory",
    "pin_share",
    "tenant_memory",
    "local_disk",
    *_DISK_ONLY,
    *_DIRECTORY_ONLY,
    "remote_url",
    *_REMOTE_ONLY,
    *_SHARED_ONLY,
    *_TIERS_ONLY,
    "peer_listen",
    "peers",
    "peer_address",
    "peer_token_file",
    "peer_cert",
    "peer_key",
    "peer_ca",
    "peer_encrypt_data",
    "peer_tenants",
    "peer_streams",
    "peer_deadline_ms",
    "transfer_channel",
    "nixl_backends",
    "pd_stall_ms",
    "breaker_pause_s",
    "embedded_linger_s",
    "stop_deadline_s",
    "api_listen",
    "api_token_file",
    "api_read_token_file",
    "api_metrics_token_file",
    "api_tls_certificate",
    "api_tls_key",
    "api_hosts",
    *_PLUGINS_ONLY,
)
_NOT_YET: dict[tuple[str, object], str] = {
    ("discard_partial_chunks", False): (
        "incomplete chunks are not stored in tiers; omit the setting, and set pd_tail to keep them "
        "in memory, or a smaller chunk_size to lose fewer tokens at a prompt's end"
    ),
    ("local_cpu", False): (
        "every chunk passes through host memory, so it cannot be disabled; to use little memory "
        "set max_local_cpu_size (for example 512MiB), to save nothing set force_skip_save"
    ),
}
