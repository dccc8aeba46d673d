# SPDX-License-Identifier: Apache-2.0
"""LMCache's settings as a source of ours: `LMCACHE_*` variables, and its YAML file.

As in LMCache, a variable goes before the file that `LMCACHE_CONFIG_FILE` names. What a name
means there was read in its `v1/config.py` and where it is used. What is switched on and has no
counterpart is collected, for one warning; nothing is ignored in silence but what is off.
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
"""Variables that are for something that has no place here: which LMCache runs, its telemetry."""

_PER_RANK = (
    "each rank has so much there; here it is for all ranks and engines of the service together, "
    "so multiply by the number of ranks of a node"
)


class Taken(msgspec.Struct, frozen=True):
    """A setting of LMCache that is one of ours; `change` is what it means differently."""

    ours: str
    change: str = ""


TAKEN = {
    "chunk_size": Taken("chunk_size", "a multiple of 16 here"),
    "local_cpu": Taken(
        "local_cpu", "`false` is not taken over: everything passes through host memory here"
    ),
    "max_local_cpu_size": Taken("max_local_cpu_size", f"{_PER_RANK}; 0 is not taken over"),
    "local_disk": Taken(
        "local_disk",
        "enough for a disk tier here, of the default size; there it has no effect without "
        "max_local_disk_size",
    ),
    "max_local_disk_size": Taken(
        "max_local_disk_size",
        f"{_PER_RANK}; 0 is no disk tier, as there",
    ),
    "remote_url": Taken(
        "remote_url",
        "a directory (`fs://`), S3 or Redis; what LMCache stored there is not read, ours lies "
        "beside it",
    ),
    "s3_endpoint_url": Taken("s3_endpoint_url"),
    "cache_policy": Taken("cache_policy", "the disk tier is LRU here in any case"),
    "save_decode_cache": Taken("save_decode_cache"),
    "priority_limit": Taken("priority_limit"),
    "enable_kv_events": Taken("kv_events", "on by default here"),
    "force_skip_save": Taken("force_skip_save", "0 and false are off here, but on there"),
    "log_level": Taken("log_level"),
}
"""What is understood, by LMCache's names."""


class Left(msgspec.Struct, frozen=True):
    """Settings of LMCache without a counterpart, by name or pattern, and what to do instead."""

    names: tuple[str, ...]
    advice: str


NOT_TAKEN = (
    Left(
        (
            *("remote_*", "s3_*", "external_*", "storage_plugins", "audit_actual_remote_url"),
            *("retrieve_locations", "store_location"),
        ),
        "there is no such store or option; stores that nodes share are set by remote_url: a "
        "directory, s3:// or redis://",
    ),
    Left(
        ("enable_pd", "enable_xpyd", "pd_*", "transfer_channel", "enable_nixl", "nixl_*"),
        "prefill and decode on different machines are not supported yet: run engines that do both",
    ),
    Left(
        (
            *("enable_p2p", "p2p_*", "distributed_url", "enable_controller", "controller_*"),
            *("lmcache_worker_*", "lmcache_instance_id", "mp_host", "mp_port"),
        ),
        "nodes do not fetch from each other yet; engines of one node share a cache by "
        "service_address",
    ),
    Left(("enable_blending", "blend_*"), "only prefixes are reused: chunks are not blended yet"),
    Left(("use_layerwise",), "layers are not loaded one by one; load_mode says when loads run"),
    Left(
        ("save_unfull_chunk",),
        "incomplete chunks are not kept; a smaller chunk_size loses fewer tokens",
    ),
    Left(
        ("gds_*", "use_gds", "weka_path", "maru_*"),
        "there is no such tier; local_disk uses direct I/O where it can (disk_direct_io)",
    ),
    Left(
        ("internal_api_server_*", "enable_chunk_statistics", "chunk_statistics_*"),
        "there is no HTTP interface yet; see `kvhaven status`",
    ),
    Left(
        ("plugin_locations", "runtime_plugin_locations", "script_allowed_imports", "extra_config"),
        "plugins and their settings are not supported",
    ),
    Left(
        ("lookup_timeout_ms", "blocking_timeout_secs"),
        "see lookup_deadline_ms, promote_deadline_ms and save_deadline_ms",
    ),
    Left(
        ("min_retrieve_tokens", "hit_miss_ratio", "lookup_*", "enable_scheduler_bypass_lookup"),
        "every look-up goes to the node service, and every hit is loaded",
    ),
    Left(
        (
            *("pre_caching_hash_algorithm", "enable_async_loading", "use_gpu_connector_v3"),
            *("enable_lazy_memory_allocator", "lazy_memory_*", "reserve_local_cpu_size"),
            *("local_cpu_use_hugepages", "local_disk_path_sharding", "py_enable_gc"),
            *("numa_mode", "pin_timeout_sec", "pin_check_interval_sec", "cost_aware_*"),
        ),
        "they steer LMCache's insides, nothing to do",
    ),
    Left(("*",), "not known here; see docs/settings.md"),
)
"""What is not understood; the first that fits counts."""

_NAIVE = {"remote_serde": "naive", "use_gds": "true", "py_enable_gc": "true"}
"""Values that are LMCache's defaults and ask for nothing."""


class Skipped(msgspec.Struct, frozen=True):
    """A setting of LMCache that has no effect here: where it stands, and what to do."""

    name: str
    origin: str
    advice: str


class Translation(msgspec.Struct, frozen=True):
    """What LMCache's settings are in ours, by our names, and what has no counterpart."""

    taken: dict[str, RawValue]
    skipped: tuple[Skipped, ...] = ()

    @property
    def by_advice(self) -> dict[str, list[Skipped]]:
        """What has no counterpart, by what to do about it."""
        found: dict[str, list[Skipped]] = {}
        for skipped in self.skipped:
            found.setdefault(skipped.advice, []).append(skipped)
        return found

    @property
    def note(self) -> str | None:
        """All that has no counterpart, in one sentence; values are not shown."""
        parts = [
            f"{', '.join(f'{s.name} ({s.origin})' for s in found)}: {advice}"
            for advice, found in self.by_advice.items()
        ]
        return f"settings of LMCache without effect here: {'; '.join(parts)}" if parts else None


def read_lmcache(environ: Mapping[str, str]) -> Translation:
    """Read LMCache's variables and the file that they name, and translate them.

    Raises `ConfigError` for a file that cannot be read.
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
    """Return what LMCache's YAML file says, by its names. Raises `ConfigError`."""
    return {
        name: RawValue(raw.value, f"LMCache's {raw.origin}")
        for name, raw in read_yaml(path, named_by).items()
    }


def translate(given: Mapping[str, RawValue]) -> Translation:
    """Turn settings of LMCache, by their names there, into ours. Values are not checked here."""
    taken: dict[str, RawValue] = {}
    skipped: list[Skipped] = []
    for name, raw in given.items():
        advice = _not_taken(name, raw)
        if advice is not None:
            skipped.append(Skipped(name, raw.origin, advice))
        elif name in TAKEN:
            taken[TAKEN[name].ours] = _ours(name, raw)
    if _is_zero(taken.get("max_local_disk_size")):
        del taken["max_local_disk_size"]
        disk = taken.pop("local_disk", None)
        if disk is not None and not _is_off(disk):
            advice = "max_local_disk_size is 0, which is no disk tier, as there"
            skipped.append(Skipped("local_disk", disk.origin, advice))
    return Translation(taken, tuple(skipped))


def _not_taken(name: str, raw: RawValue) -> str | None:
    """Return what to do about a setting that is not taken over; None if it is, or is off."""
    if name == "local_cpu" and _is_off(raw):
        return "host memory is always used; max_local_cpu_size says how much of it"
    if name == "max_local_cpu_size" and _is_zero(raw):
        return "host memory is always used; the size is KVHaven's own setting or default"
    if name == "remote_url" and _is_foreign(raw):
        return _advice(name)
    if name in TAKEN or _is_off(raw) or str(raw.value).lower() == _NAIVE.get(name):
        return None
    return _advice(name)


def _advice(name: str) -> str:
    return next(
        left.advice
        for left in NOT_TAKEN
        if any(fnmatchcase(name, pattern) for pattern in left.names)
    )


def _is_foreign(raw: RawValue) -> bool:
    """Whether a remote_url leads to a store that LMCache knows and we do not."""
    schemes = ("fs://", "file://", "s3://", "redis://", "rediss://", "valkey://", "unix://")
    return not _is_off(raw) and not str(raw.value).lower().startswith(schemes)


def _ours(name: str, raw: RawValue) -> RawValue:
    """Write a value as it is written here: LMCache's fs:// has a host, which means nothing."""
    if name != "remote_url" or not str(raw.value).lower().startswith("fs://"):
        return raw
    return RawValue(f"fs://{urlsplit(str(raw.value)).path}", raw.origin)


def _is_off(raw: RawValue) -> bool:
    """Whether a value switches something off, or is none."""
    words = {"", "false", "0", "0.0", "no", "off", "none", "null"}
    return raw.value is None or raw.value in ([], {}) or str(raw.value).strip().lower() in words


def _is_zero(raw: RawValue | None) -> bool:
    try:
        return raw is not None and float(str(raw.value)) == 0
    except ValueError:
        return False


def _unquoted(value: str) -> str:
    """Return a value without quotes around it, which LMCache takes off too."""
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value
