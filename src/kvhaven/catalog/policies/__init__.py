# SPDX-License-Identifier: Apache-2.0
"""Built-in eviction policies. docs/settings.md says which one suits which workload."""

from collections.abc import Callable

from kvhaven import plugins
from kvhaven.catalog.policies.fifo import FIFO
from kvhaven.catalog.policies.lfu import LFU
from kvhaven.catalog.policies.lru import LRU
from kvhaven.catalog.policies.mru import MRU
from kvhaven.catalog.policies.s3fifo import S3FIFO
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.errors import ConfigError

__all__ = ["FIFO", "LFU", "LRU", "MRU", "POLICIES", "S3FIFO", "make_policy"]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, MRU, S3FIFO)
}
"""Policies that come with KVHaven, by their names in the settings. Packages can add others."""


def make_policy(name: str) -> EvictionPolicy:
    """Return a new policy for a value of `cache_policy`, built in or from an installed package.

    Raises `ConfigError` if neither KVHaven nor an entry point has a policy of this name.
    """
    name = name.lower()
    if name in POLICIES:
        return POLICIES[name]()
    others = plugins.installed(plugins.EVICTION_POLICIES)
    if name in others:
        policy: EvictionPolicy = plugins.load(others[name])()
        return policy
    raise ConfigError(
        f"cache_policy: unknown (got {name!r}); expected one of {', '.join([*POLICIES, *others])}. "
        "Correct it, or install the package that adds the policy."
    )
