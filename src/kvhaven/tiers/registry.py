# SPDX-License-Identifier: Apache-2.0
"""Registry of shared tiers by URL scheme; what each needs is imported only where it is used."""

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
"""Threads that wait for a file server take no core."""


@dataclass(frozen=True)
class TierOptions:
    """Settings of shared tiers; each kind takes those that concern it.

    `retry_s` is the pause before a failing store is tried again; `compress` stores with zstd;
    `direct_io` and `limits` (None: no limits are kept) are for directories, `ttl_s` for Redis
    (None: its default), `endpoints` for S3. `known` is set by tools: the store must exist.
    """

    retry_s: float = 1.0
    compress: bool = False
    direct_io: str = "auto"
    limits: Limits | None = None
    ttl_s: int | None = None
    endpoints: Sequence[str] = ()
    known: bool = False


class TierKind(NamedTuple):
    """A kind of shared tier: its URL schemes, an example of a URL, and the function that opens it.

    `open` returns a tier that is not started. It raises `ConfigError` for a bad URL, and when a
    package that it needs is not installed.
    """

    schemes: tuple[str, ...]
    example: str
    open: Callable[[str, TierOptions], SharedTier]


def open_tier(url: str, options: TierOptions | None = None) -> SharedTier:
    """Return the tier at `url`, not started yet; a path is a directory's.

    Raises `ConfigError` for a scheme that neither KVHaven nor an installed package has (entry
    points of `kvhaven.tiers`), and as `TierKind.open` does. Secrets in the URL are not repeated.
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
        f"a path, or one of {allowed}. Correct it, or install the package that adds the scheme."
    )


def _open_directory(url: str, options: TierOptions) -> SharedTier:
    _, separator, rest = url.partition("://")
    path = unquote(rest) if separator else url
    if not path.startswith("/"):
        raise ConfigError(
            f"remote_url: not an absolute path (got {path!r}); expected /mnt/kv or fs:///mnt/kv"
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
"""Kinds of tiers that come with KVHaven; packages add others (see `plugins`)."""
_BY_SCHEME: Final = {scheme: kind for kind in KINDS for scheme in kind.schemes}
