# SPDX-License-Identifier: Apache-2.0
"""Entry points by which other packages add tiers, eviction policies and devices.

A package declares an entry point in its `pyproject.toml`. Settings refer to it by its name, in
lower case:

    [project.entry-points."kvhaven.tiers"]
    sqlite = "my_package:open_sqlite"

An entry point is imported only when a setting names it.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kvhaven.errors import ConfigError

TIERS: Final = "kvhaven.tiers"
"""URL schemes of shared tiers; each refers to a function `(url, options) -> Tier`."""
EVICTION_POLICIES: Final = "kvhaven.eviction_policies"
"""Values of `cache_policy`; each refers to a function `() -> EvictionPolicy`."""
DEVICES: Final = "kvhaven.devices"
"""Values of `device`; each refers to a `kvhaven.devices.detect.Kind`."""


def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by their names in lower case."""
    return {entry.name.lower(): entry for entry in entry_points(group=group)}


def load(entry: EntryPoint) -> Any:
    """Return the object that an entry point refers to.

    Raises `ConfigError` if it cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist is not None else "a package"
        raise ConfigError(
            f"{entry.group}: {entry.name!r} of {package} cannot be imported (got {error!r}); "
            f"expected {entry.value}. Repair or remove the package."
        ) from error
