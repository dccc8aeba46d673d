# SPDX-License-Identifier: Apache-2.0
"""Which tiers a service has, in which order, and what the catalog is told of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvhaven.catalog import StoreOn, TierSpec, WriteMode
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.catalog import MEMORY
from kvhaven.config import Settings
from kvhaven.config_urls import redacted
from kvhaven.errors import ConfigError
from kvhaven.tiers.base import Tier
from kvhaven.tiers.disk import DiskTier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem import filesystem_tier


def make_tiers(settings: Settings) -> dict[TierName, Tier]:
    """Return the tiers of the settings, the fastest first; none of them is started.

    Raises `ConfigError` for a URL whose kind is unknown.
    """
    tiers: dict[TierName, Tier] = {}
    if settings.local_disk is not None:
        disk = DiskTier(
            Path(settings.local_disk),
            settings.max_local_disk_size,
            executor=TierExecutor(),
            direct_io=settings.disk_direct_io,
            retry_s=settings.breaker_pause_s,
        )
        tiers[TierName(disk.name)] = disk
    for url in (settings.remote_url or "").split():
        tier = _open(url, settings)
        tiers[_free_name(tier.name, tiers)] = tier
    return tiers


def specs_of(settings: Settings, tiers: dict[TierName, Tier]) -> list[TierSpec]:
    """Return what the catalog has to know of these tiers."""
    return [
        TierSpec(
            name,
            tier.health().capacity_bytes or 0,
            shared=tier.shared,
            believe_s=settings.remote_believe_s,
            write=WriteMode(settings.remote_write if tier.shared else settings.disk_write),
            store_on=StoreOn(settings.remote_store_on if tier.shared else settings.disk_store_on),
        )
        for name, tier in tiers.items()
    ]


def _open(url: str, settings: Settings) -> Tier:
    scheme = urlsplit(url).scheme.lower()
    opener = OPENERS.get(scheme)
    if opener is None:
        raise ConfigError(
            f"setting remote_url = {redacted(url)!r} is refused: there is no tier for {scheme}; "
            f"there are: {', '.join(f'{known}://' for known in OPENERS)}"
        )
    return opener(url, settings)


def _open_filesystem(url: str, settings: Settings) -> Tier:
    return filesystem_tier(
        Path(unquote(urlsplit(url).path)),
        executor=TierExecutor(),
        direct_io=settings.disk_direct_io,
        retry_s=settings.breaker_pause_s,
    )


def _free_name(name: str, taken: dict[TierName, Tier]) -> TierName:
    """Return a tier's name, with a number if there are several of its kind."""
    free, number = TierName(name), 1
    while free in taken or free == MEMORY:
        number += 1
        free = TierName(f"{name}-{number}")
    return free


OPENERS: Final[dict[str, Callable[[str, Settings], Tier]]] = {
    "file": _open_filesystem,
    "fs": _open_filesystem,
}
"""How a tier is made of a URL, by the URL's scheme. A new kind of tier is a line here."""
