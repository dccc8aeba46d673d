# SPDX-License-Identifier: Apache-2.0
"""Entry points by which other packages add tiers, eviction policies, devices and plugins.

A package declares an entry point in its `pyproject.toml`. Settings refer to it by its name, in
lower case:

    [project.entry-points."kvhaven.tiers"]
    sqlite = "my_package:open_sqlite"

An entry point is imported only when a setting names it.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple

from kvhaven.errors import ConfigError

TIERS: Final = "kvhaven.tiers"
"""URL schemes of shared tiers; each refers to a function `(url, options) -> Tier`."""
EVICTION_POLICIES: Final = "kvhaven.eviction_policies"
"""Values of `cache_policy`; each refers to a function `() -> EvictionPolicy`."""
DEVICES: Final = "kvhaven.devices"
"""Values of `device`; each refers to a `kvhaven.devices.detect.Kind`."""
PLUGINS: Final = "kvhaven.plugins"
"""Values of `plugins`; each refers to a class like `PluginBase`."""


class PluginBase:
    """Base class of plugins, which the HTTP API runs in a process of their own, once for a node.

    `config` has the settings of the service as attributes, secrets masked; `role` is `worker`,
    `worker_count` 1 and `worker_id` 0. `engine` asks the service (`kvhaven.gateway.plugin_host`).
    Hooks run one after the other, in the main thread. All of them are optional, and each has a
    second; a plugin that takes longer is killed and started again.
    """

    engine: Any

    def __init__(self, config: Any, role: str, worker_count: int, worker_id: int) -> None:
        self.config = config
        self.role = role
        self.worker_count = worker_count
        self.worker_id = worker_id

    def on_startup(self) -> None:
        """Begin; at most 30 s."""

    def on_request_complete(self, request_id: str, stats: Any) -> None:
        """Take note of a request that was looked up (see `RequestStats`)."""

    def on_config_changed(self, changes: Any) -> None:
        """Take note of changed settings: a mapping of their names and new values."""

    def on_tier_state(self, tier: str, state: str) -> None:
        """Take note of a tier's new state: on, read_only, off, offline or `writes off`."""

    def on_shutdown(self) -> None:
        """End."""


class RequestStats(NamedTuple):
    """Figures of a request: its tokens by where they were found, and the wait for them."""

    cache_hit: bool
    """Whether KVHaven had any of its tokens, apart from those in the engine's own cache."""
    prompt_tokens: int
    cached_tokens: int
    """Of `prompt_tokens`, those that KVHaven had."""
    by_source: dict[str, int]
    load_ms: float
    """From the lookup to its answer."""
    reason: str | None
    """Why the first missing token was missing; None if none was."""
    tenant: str
    engine: str


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
