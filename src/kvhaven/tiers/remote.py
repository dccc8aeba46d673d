# SPDX-License-Identifier: Apache-2.0
"""From a URL to a shared tier; what each needs is imported only where it is used."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from kvhaven.config_urls import redacted
from kvhaven.errors import ConfigError
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.extras import import_extra
from kvhaven.tiers.filesystem import filesystem_tier
from kvhaven.tiers.shared import SharedTier

THREADS: Final = 16
PER_CORE: Final = 8
"""Threads that wait for a file server take no core."""

_REDIS: Final = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")


def open_tier(url: str, *, endpoints: Sequence[str] = (), **settings: Any) -> SharedTier:
    """Return the tier at `url`, not started yet: a path or fs://, s3:// or redis:// and its kin.

    `endpoints` are those of an S3 store; `settings` (`compress`, ...) are those of
    `filesystem_tier`, `s3_tier` or `redis_tier`. Raises `ConfigError` when the URL is none of
    these, or when a package is not installed that is needed. No part of the URL that may be
    secret is repeated.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme in {"fs", "file"}:
        return _filesystem(unquote(rest) if separator else url, settings)
    if scheme == "s3":
        s3 = import_extra("s3", "a tier at s3://")
        return s3.s3_tier(url, endpoints=endpoints, **settings)  # type: ignore[no-any-return]
    scheme = re.sub("^valkey", "redis", scheme)
    if scheme in _REDIS:
        redis = import_extra("redis", "a tier at redis://")
        return redis.redis_tier(f"{scheme}://{rest}", **settings)  # type: ignore[no-any-return]
    raise ConfigError(
        f"remote_url = {redacted(url)!r} is refused: there is no tier for {scheme}://; allowed: a "
        f"path or fs:///path, s3://bucket/prefix, or {', '.join(f'{s}://' for s in _REDIS)}"
    )


def _filesystem(path: str, settings: dict[str, Any]) -> SharedTier:
    if not path.startswith("/"):
        raise ConfigError(
            f"{path!r} is no place for a shared tier: a path begins with /, as in /mnt/kv or "
            f"fs:///mnt/kv"
        )
    executor = TierExecutor(THREADS, per_core=PER_CORE)
    return filesystem_tier(Path(path), executor=executor, **settings)
