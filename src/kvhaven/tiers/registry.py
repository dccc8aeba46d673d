# SPDX-License-Identifier: Apache-2.0
"""Registry of shared tiers by URL scheme; each kind imports its packages when it is opened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from kvhaven import plugins
from kvhaven.config.urls import DIRECTORIES, redacted
from kvhaven.errors import ConfigError
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.optional import import_optional
from kvhaven.tiers.shared.tier import SharedTier

THREADS: Final = 16
PER_CORE: Final = 8
"""Threads that wait for a file server use no CPU time."""


@dataclass(frozen=True)
class TierOptions:
    """Settings of shared tiers; each kind uses those that apply to it.

    `retry_s` is the pause in seconds before a failing store is retried; `compress` enables zstd;
    `direct_io` and `limits` (None: unlimited) apply to directories, `ttl_s` (in seconds; None:
    the default) to Redis, `endpoints` to S3. Tools set `known`: the store must already exist.
    """

    retry_s: float = 1.0
    compress: bool = False
    direct_io: str = "auto"
    limits: Limits | None = None
    ttl_s: int | None = None
    endpoints: Sequence[str] = ()
    known: bool = False


class TierKind(NamedTuple):
    """Kind of shared tier: its URL schemes, an example URL, and a function that opens it.

    `open` returns a tier that is not started. It raises `ConfigError` if the URL is invalid or a
    required package is not installed.
    """

    schemes: tuple[str, ...]
    example: str
    open: Callable[[str, TierOptions], SharedTier]


def open_tier(url: str, options: TierOptions | None = None) -> SharedTier:
    """Return the tier at `url`, not started; a `url` without a scheme is a directory's path.

    Raises `ConfigError` if neither KVHaven nor an installed package (entry points of
    `kvhaven.tiers`) provides the scheme, and as `TierKind.open` does. Messages show no secret of
    the URL.
    """
    options = options or TierOptions()
    scheme, separator, _ = url.partition("://")
    scheme = scheme.lower() if separator else DIRECTORIES[0]
    kind = _BY_SCHEME.get(scheme)
    if kind is not None:
        return kind.open(url, options)
    others = plugins.installed(plugins.TIERS)
    if scheme in others:
        tier: SharedTier = plugins.load(others[scheme])(url, options)
        return tier
    allowed = ", ".join([*(kind.example for kind in KINDS), *(f"{name}://" for name in others)])
    raise ConfigError(
        f"remote_url: no tier has the scheme {scheme}:// (got {redacted(url)!r}); expected "
        f"a path, or one of {allowed}. Correct the URL, or install the package for its scheme."
    )


def _open_directory(url: str, options: TierOptions) -> SharedTier:
    _, separator, rest = url.partition("://")
    path = unquote(rest) if separator else url
    if not path.startswith("/"):
        raise ConfigError(
            f"remote_url: the path is not absolute (got {path!r}); expected /mnt/kv or "
            "fs:///mnt/kv. Correct the URL."
        )
    return filesystem_tier(
        Path(path),
        executor=TierExecutor(THREADS, per_core=PER_CORE),
        retry_s=options.retry_s,
        compress=options.compress,
        direct_io=options.direct_io,  # type: ignore[arg-type]  # checked with the settings
        limits=options.limits,
        known=options.known,
    )


def _open_s3(url: str, options: TierOptions) -> SharedTier:
    s3: Any = import_optional("s3.tier", "s3", "a tier at s3://")
    tier: SharedTier = s3.s3_tier(
        url, endpoints=options.endpoints, retry_s=options.retry_s, compress=options.compress
    )
    return tier


def _open_redis(url: str, options: TierOptions) -> SharedTier:
    redis: Any = import_optional("redis.tier", "redis", "a tier at redis://")
    scheme, _, rest = url.partition("://")
    ttl = {} if options.ttl_s is None else {"ttl_s": options.ttl_s}
    tier: SharedTier = redis.redis_tier(
        f"{scheme.lower().replace('valkey', 'redis')}://{rest}",
        retry_s=options.retry_s,
        compress=options.compress,
        **ttl,
    )
    return tier


KINDS: Final = (
    TierKind(DIRECTORIES, "fs:///path", _open_directory),
    TierKind(("s3",), "s3://bucket/prefix", _open_s3),
    TierKind(
        (
            *("redis", "rediss", "redis+cluster", "rediss+cluster", "unix"),
            *("valkey", "valkeys", "valkey+cluster", "valkeys+cluster"),
        ),
        "redis://host:6379",
        _open_redis,
    ),
)
"""Built-in kinds of tiers; packages add others (see `plugins`)."""
_BY_SCHEME: Final = {scheme: kind for kind in KINDS for scheme in kind.schemes}
