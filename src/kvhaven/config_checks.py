# SPDX-License-Identifier: Apache-2.0
"""Settings against each other: contradictions, what comes later, what has no effect."""

from collections.abc import Mapping

from kvhaven.config_model import Settings
from kvhaven.config_sizes import format_size
from kvhaven.config_sources import DEFAULT, RawValue
from kvhaven.config_urls import has_directory
from kvhaven.config_values import SettingInfo, refuse


def refuse_what_comes_later(info: SettingInfo, value: object, raw: RawValue) -> None:
    """Refuse what is a legal value elsewhere but not yet here, and say what to do instead."""
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
            f"waiting writes hold memory of the arena, and max_local_cpu_size is "
            f"{format_size(arena)} ({where}); make the one smaller or the other larger",
        )


def notes(settings: Settings, raws: Mapping[str, RawValue]) -> tuple[str, ...]:
    """Name the settings that are given but have no effect beside the others."""
    found = []
    if settings.service_address is not None:
        own = [name for name in _SERVICE_ONLY if name in raws]
        if own:
            found.append(
                f"service_address is set, so the service's own settings count and not "
                f"{', '.join(own)} of this engine"
            )
    if settings.local_disk is None:
        disk = [name for name in _DISK_ONLY if name in raws]
        if disk:
            found.append(f"{', '.join(disk)} without effect: local_disk is not set")
    if settings.remote_url is None:
        remote = [name for name in _REMOTE_ONLY if name in raws]
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


_DISK_ONLY = (
    "max_local_disk_size",
    "tenant_disk",
    "disk_direct_io",
    "disk_write",
    "disk_compression",
    "disk_store_on",
)
_REMOTE_ONLY = (
    "s3_endpoint_url",
    "max_remote_size",
    "max_remote_namespace_size",
    "tenant_remote",
    "remote_ttl_s",
    "remote_write",
    "remote_store_on",
    "remote_compression",
    "remote_believe_s",
    "fill_faster_tiers",
)
_TIERS_ONLY = ("write_queue_size",)
_SERVICE_ONLY = (
    "max_local_cpu_size",
    "arena_strict",
    "cache_policy",
    "verify_memory",
    "tenant_memory",
    "local_disk",
    *_DISK_ONLY,
    "remote_url",
    *_REMOTE_ONLY,
    *_TIERS_ONLY,
    "breaker_pause_s",
    "embedded_linger_s",
    "stop_deadline_s",
)
_NOT_YET: dict[tuple[str, object], str] = {
    ("discard_partial_chunks", False): (
        "incomplete chunks cannot be kept yet; leave it out, and take a smaller chunk_size to "
        "lose fewer tokens at a prompt's end"
    ),
    ("local_cpu", False): (
        "every chunk passes through host memory, so it cannot be off; to use little of it set "
        "max_local_cpu_size (for example 512MiB), to save nothing set force_skip_save"
    ),
}
