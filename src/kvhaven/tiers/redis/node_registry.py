# SPDX-License-Identifier: Apache-2.0
"""Registry of a cluster's nodes in Redis: each node renews its address there."""

import contextlib
import os
import socket
from typing import Final
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvhaven.config.urls import split_url
from kvhaven.errors import ConfigError, TierError

KEY: Final = "kvhaven:peers"
"""Sorted set of addresses, by the second of the server's clock at which each expires."""
KEEP_S: Final = 15
"""Seconds for which a node stays after its last call of `members`, three times its interval."""
_MOST: Final = 1024
_DEADLINE_S: Final = 2.0
_PORT: Final = 6379
_ANYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104  nothing is bound


class RedisRegistry:
    """A `NodeRegistry` at `url`: redis://[user:password@]host[:port][/db], or rediss:// for TLS.

    User and password may be in REDIS_USERNAME and REDIS_PASSWORD instead. `host` and `port` are the
    address that this node registers; without `port` it registers none. A host that stands for all
    interfaces is replaced by the address of the interface towards Redis. Used in one thread at a
    time. Raises `ConfigError` if the URL is invalid.
    """

    def __init__(self, url: str, host: str = "", port: int = 0) -> None:
        try:
            parts = split_url(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in {"redis", "rediss"} or not parts.hostname:
            raise ConfigError(
                f"peers: invalid URL (one that begins with {url.partition(':')[0]}://); expected "
                "redis://host:port/db or rediss://host:port/db"
            )
        self.title = f"node registry in Redis {parts.netloc.rpartition('@')[2]}"
        self._server = parts.hostname, parts.port or _PORT
        self._host, self._port = host, port
        self._registered = ""
        credentials: dict[str, str] = {}
        for option, given in (("username", parts.username), ("password", parts.password)):
            from_environment = os.environ.get(f"REDIS_{option.upper()}")
            if not given and from_environment:
                credentials[option] = from_environment
        try:
            self._redis = Redis.from_url(
                url,
                socket_timeout=_DEADLINE_S,
                socket_connect_timeout=_DEADLINE_S,
                retry=Retry(NoBackoff(), 0),
                decode_responses=True,
                encoding_errors="surrogateescape",  # other members may be any bytes
                **credentials,
            )
            pool = self._redis.connection_pool
            pool.make_connection()  # which reads the options
            pool.reset()  # a pool counts it, and may be limited to one
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"peers: {self.title}: redis-py rejects the URL ({error}); expected "
                "options that its documentation lists"
            ) from error

    def members(self) -> list[str]:
        """Register this node for `KEEP_S` seconds more; return all nodes, this one included.

        Blocks for a few seconds at most. Raises `TierError` if Redis is away.
        """
        try:
            now = int(self._redis.time()[0])
            with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.zremrangebyscore(KEY, "-inf", now)
                if self._port:
                    self._registered = self._own_address()
                    pipeline.zadd(KEY, {self._registered: now + KEEP_S})
                pipeline.zrange(KEY, 0, _MOST - 1)
                found = pipeline.execute()[-1]
        except (RedisError, OSError) as error:
            raise TierError(f"{self.title}: {error}") from None
        return [str(address) for address in found]

    def leave(self) -> None:
        """Remove this node, and disconnect. Raises nothing: the entry expires in any case."""
        with contextlib.suppress(RedisError, OSError):
            if self._registered:
                self._redis.zrem(KEY, self._registered)
        self._redis.close()

    def _own_address(self) -> str:
        host = self._host
        if host in _ANYWHERE:
            family, _, _, _, there = socket.getaddrinfo(*self._server, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(there)  # sends nothing
                host = str(sock.getsockname()[0])
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
