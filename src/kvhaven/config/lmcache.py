# SPDX-License-Identifier: Apache-2.0
"""Import of LMCache's settings: `LMCACHE_*` variables and its YAML file.

As in LMCache, a variable takes precedence over the file that `LMCACHE_CONFIG_FILE` names. The
meaning of each name was taken from LMCache's `v1/config.py` and from the code that uses it.
Settings that are enabled but have no counterpart are listed in one warning. Only settings that
are disabled are ignored silently.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvhaven.config.sources import RawValue, is_service_link, read_yaml

LMCACHE_FILE = "LMCACHE_CONFIG_FILE"
_PREFIX = "LMCACHE_"

NOT_SETTINGS = {LMCACHE_FILE, "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_TRACK_USAGE"}
"""Variables without meaning here: they choose the version of LMCache and its telemetry."""

_PER_RANK = (
    "LMCache allocates this for each rank; KVHaven's limit covers all ranks and engines of the "
    "service, so multiply it by the number of ranks of a node"
)


class Taken(msgspec.Struct, frozen=True):
    """A setting of LMCache with a counterpart; `change` describes the difference in meaning."""

    ours: str
    change: str = ""


TAKEN = {
    "chunk_size": Taken("chunk_size", "must be a multiple of 16"),
    "local_cpu": Taken("local_cpu", "`false` is not imported: all KV passes through host memory"),
    "max_local_cpu_size": Taken("max_local_cpu_size", f"{_PER_RANK}; 0 is not imported"),
    "local_disk": Taken(
        "local_disk",
        "enables a disk tier of the default size; LMCache also requires max_local_disk_size",
    ),
    "max_local_disk_size": Taken(
        "max_local_disk_size",
        f"{_PER_RANK}; 0 disables the disk tier, as in LMCache",
    ),
    "remote_url": Taken(
        "remote_url",
        "a directory (`fs://`), S3 or Redis; KVHaven does not read data that LMCache stored there "
        "and stores its own beside it",
    ),
    "s3_endpoint_url": Taken("s3_endpoint_url"),
    "cache_policy": Taken("cache_policy", "the disk tier always uses LRU"),
    "save_decode_cache": Taken("save_decode_cache"),
    "save_unfull_chunk": Taken(
        "pd_tail",
        "applies to the end of prompts only: kept in memory for 60 s, never written to tiers",
    ),
    "pd_role": Taken(
        "pd_role", "only with enable_pd, as in LMCache: a sender only saves, a receiver only loads"
    ),
    "transfer_channel": Taken(
        "transfer_channel",
        "`nixl` becomes `auto`: NIXL between nodes with RDMA, and elsewhere TCP, which is faster "
        "there; `py_socket` becomes `tcp`",
    ),
    "nixl_backends": Taken("nixl_backends", "for reads between nodes only, not for storage"),
    "priority_limit": Taken("priority_limit"),
    "enable_kv_events": Taken("kv_events", "enabled by default"),
    "force_skip_save": Taken(
        "force_skip_save", "0 and false disable it; in LMCache they enable it"
    ),
    "log_level": Taken("log_level"),
    "plugins": Taken("plugins", "run by the HTTP API, once for a node, as worker 0 of 1"),
    "runtime_plugin_locations": Taken(
        "runtime_plugin_locations", "run by the HTTP API, once for a node, as worker 0 of 1"
    ),
}
"""Settings with a counterpart, by their names in LMCache."""


class Left(msgspec.Struct, frozen=True):
    """Settings of LMCache without a counterpart, by name or pattern, with advice for users."""

    names: tuple[str, ...]
    advice: str


NOT_TAKEN = (
    Left(
        (
            *("remote_*", "s3_*", "external_*", "storage_plugins", "audit_actual_remote_url"),
            *("retrieve_locations", "store_location"),
        ),
        "this store or option is not supported; set remote_url for storage that nodes share: a "
        "directory, s3:// or redis://",
    ),
    Left(
        ("enable_pd", "enable_xpyd", "pd_*", "enable_nixl", "nixl_*"),
        "set peer_listen and peers on all nodes, and put `kvhaven route` in front of them; only "
        "pd_role is taken over",
    ),
    Left(
        (
            *("enable_p2p", "p2p_*", "distributed_url", "enable_controller", "controller_*"),
            *("lmcache_worker_*", "lmcache_instance_id", "mp_host", "mp_port"),
        ),
        "nodes read each other's memory with peer_listen and peers; engines of one node share a "
        "cache with service_address",
    ),
    Left(
        ("enable_blending", "blend_*"),
        "only prefixes are reused; blending of chunks is not supported yet",
    ),
    Left(("use_layerwise",), "load_mode sets when loads run; layered_load_ms is experimental"),
    Left(
        ("gds_*", "use_gds", "weka_path", "maru_*"),
        "this tier is not supported; local_disk uses direct I/O if available (disk_direct_io)",
    ),
    Left(
        ("internal_api_server_*", "enable_chunk_statistics", "chunk_statistics_*"),
        "the HTTP API has its own settings, api_listen and others",
    ),
    Left(
        ("plugin_locations", "script_allowed_imports", "extra_config"),
        "settings of plugins are not supported; see runtime_plugin_locations",
    ),
    Left(
        ("lookup_timeout_ms", "blocking_timeout_secs"),
        "use lookup_deadline_ms, promote_deadline_ms and save_deadline_ms",
    ),
    Left(
        ("min_retrieve_tokens",),
        "load_or_recompute compares measured times instead of a fixed number of tokens",
    ),
    Left(
        ("hit_miss_ratio", "lookup_*", "enable_scheduler_bypass_lookup"),
        "every lookup goes to the node service",
    ),
    Left(
        (
            *("pre_caching_hash_algorithm", "enable_async_loading", "use_gpu_connector_v3"),
            *("enable_lazy_memory_allocator", "lazy_memory_*", "reserve_local_cpu_size"),
            *("local_cpu_use_hugepages", "local_disk_path_sharding", "py_enable_gc"),
            *("numa_mode", "pin_timeout_sec", "pin_check_interval_sec", "cost_aware_*"),
        ),
        "they configure LMCache's internals; no action is needed",
    ),
    Left(("*",), "unknown setting; see docs/settings.md"),
)
"""Settings without a counterpart; the first entry that matches applies."""

_NAIVE = {"remote_serde": "naive", "use_gds": "true", "py_enable_gc": "true"}
"""Values that are LMCache's defaults and enable nothing; they cause no warning."""


_ROLES = ("sender", "receiver")
_CHANNELS = {"nixl": "auto", "py_socket": "tcp"}
"""Values of LMCache's transfer_channel."""


class Skipped(msgspec.Struct, frozen=True):
    """A setting of LMCache without effect: its name, its origin, and advice."""

    name: str
    origin: str
    advice: str


class Translation(msgspec.Struct, frozen=True):
    """LMCache's settings translated to KVHaven's names, and those without a counterpart."""

    taken: dict[str, RawValue]
    skipped: tuple[Skipped, ...] = ()

    @property
    def by_advice(self) -> dict[str, list[Skipped]]:
        """The settings without a counterpart, grouped by advice."""
        found: dict[str, list[Skipped]] = {}
        for skipped in self.skipped:
            found.setdefault(skipped.advice, []).append(skipped)
        return found

    @property
    def note(self) -> str | None:
        """All settings without a counterpart in one sentence, without their values."""
        parts = [
            f"{', '.join(f'{s.name} ({s.origin})' for s in found)}: {advice}"
            for advice, found in self.by_advice.items()
        ]
        return f"settings of LMCache without effect: {'; '.join(parts)}" if parts else None


def read_lmcache(environ: Mapping[str, str]) -> Translation:
    """Read and translate LMCache's variables and the file that they name.

    Raises `ConfigError` if the file cannot be read.
    """
    given: dict[str, RawValue] = {}
    if file := environ.get(LMCACHE_FILE, "").strip():
        given = read_lmcache_file(Path(file).expanduser(), LMCACHE_FILE)
    for variable, value in environ.items():
        if not variable.startswith(_PREFIX) or not value.strip() or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(_PREFIX)
        if not is_service_link(name, value):
            given[name.lower()] = RawValue(_unquoted(value.strip()), variable)
    return translate(given)


def read_lmcache_file(path: Path, named_by: str) -> dict[str, RawValue]:
    """Return the values of LMCache's YAML file by LMCache's names.

    Raises `ConfigError` if the file cannot be read or is malformed.
    """
    return {
        name: RawValue(raw.value, f"LMCache's {raw.origin}")
        for name, raw in read_yaml(path, named_by).items()
    }


def translate(given: Mapping[str, RawValue]) -> Translation:
    """Translate settings by their LMCache names into KVHaven's; values are not checked."""
    taken: dict[str, RawValue] = {}
    skipped: list[Skipped] = []
    for name, raw in given.items():
        advice = _not_taken(name, raw) or _role_without_effect(name, raw, given)
        if advice is not None:
            skipped.append(Skipped(name, raw.origin, advice))
        elif name in TAKEN:
            taken[TAKEN[name].ours] = _ours(name, raw)
    if _is_zero(taken.get("max_local_disk_size")):
        del taken["max_local_disk_size"]
        disk = taken.pop("local_disk", None)
        if disk is not None and not _is_off(disk):
            advice = "max_local_disk_size is 0, which disables the disk tier, as in LMCache"
            skipped.append(Skipped("local_disk", disk.origin, advice))
    return Translation(taken, tuple(skipped))


def _not_taken(name: str, raw: RawValue) -> str | None:
    """Return advice on a setting that is not imported; None if it is imported or off."""
    if name == "local_cpu" and _is_off(raw):
        return "host memory is always used; max_local_cpu_size sets its size"
    if name == "max_local_cpu_size" and _is_zero(raw):
        return "host memory is always used; its size is KVHaven's own setting or default"
    if name == "transfer_channel" and not _is_off(raw):
        known = str(raw.value).lower() in _CHANNELS
        return None if known else "this channel is not supported; auto chooses between NIXL and TCP"
    if name == "remote_url" and _is_foreign(raw):
        return _advice(name)
    if name in TAKEN or _is_off(raw) or str(raw.value).lower() == _NAIVE.get(name):
        return None
    return _advice(name)


def _role_without_effect(name: str, raw: RawValue, given: Mapping[str, RawValue]) -> str | None:
    """Return why `pd_role` is not imported; None if it is, for other settings, and if it is off."""
    if name != "pd_role" or _is_off(raw):
        return None
    if str(raw.value).lower() not in _ROLES:
        return "this role is not known; expected sender or receiver"
    enabled = "enable_pd" in given and not _is_off(given["enable_pd"])
    return None if enabled else "without enable_pd it has no effect, as in LMCache"


def _advice(name: str) -> str:
    return next(
        left.advice
        for left in NOT_TAKEN
        if any(fnmatchcase(name, pattern) for pattern in left.names)
    )


def _is_foreign(raw: RawValue) -> bool:
    """Whether a remote_url names a store that LMCache supports and KVHaven does not."""
    schemes = ("fs://", "file://", "s3://", "redis://", "rediss://", "valkey://", "unix://")
    return not _is_off(raw) and not str(raw.value).lower().startswith(schemes)


def _ours(name: str, raw: RawValue) -> RawValue:
    """Return a value in KVHaven's notation; the host in LMCache's `fs://` URLs is dropped."""
    if name == "transfer_channel":
        return RawValue(_CHANNELS.get(str(raw.value).lower(), raw.value), raw.origin)
    if name == "pd_role":
        return RawValue("both" if _is_off(raw) else str(raw.value).lower(), raw.origin)
    if name in {"nixl_backends", "runtime_plugin_locations"}:
        return RawValue(_words(raw.value), raw.origin)
    if name != "remote_url" or not str(raw.value).lower().startswith("fs://"):
        return raw
    return RawValue(f"fs://{urlsplit(str(raw.value)).path}", raw.origin)


def _words(value: object) -> str:
    """Return the words of a list, or of its text, separated by spaces."""
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.translate(str.maketrans("[],'\"", "     ")).split())


def _is_off(raw: RawValue) -> bool:
    """Whether a value disables something or is empty."""
    words = {"", "false", "0", "0.0", "no", "off", "none", "null"}
    return raw.value is None or raw.value in ([], {}) or str(raw.value).strip().lower() in words


def _is_zero(raw: RawValue | None) -> bool:
    try:
        return raw is not None and float(str(raw.value)) == 0
    except ValueError:
        return False


def _unquoted(value: str) -> str:
    """Return a value without surrounding quotes, as LMCache does."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
