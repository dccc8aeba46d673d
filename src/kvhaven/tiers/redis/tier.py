# SPDX-License-Identifier: Apache-2.0
"""Redis tier: shards as strings in Redis, Valkey or a cluster of them (`kvhaven[redis]`)."""

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - redis-py's own name for it
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004 - the same
)

from kvhaven.errors import ConfigError, TierError, TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold, stored_bytes
from kvhaven.tiers.redis.pipelines import Command, Pipelines, roomy
from kvhaven.tiers.shared.codec_threads import CodecThreads
from kvhaven.tiers.shared.remote_store import RemoteStore
from kvhaven.tiers.shared.retries import PassingError, Retries
from kvhaven.tiers.shared.store import (
    FOLDER,
    Blob,
    StoreFailedError,
    blob_name,
    manifest_name,
    require_size,
)
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum

_log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMES: Final = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
PREFIX: Final = "kvhaven/"
"""Prefix of all keys that KVHaven uses."""
MOST_BYTES: Final = 512 << 20
"""Longest string that Redis supports."""

READERS, WRITERS = 4, 2  # concurrent pipelines
_CONNECT_S: Final = 2.0
_SCAN_PAGE: Final = 1000


def redis_tier(
    url: str,
    *,
    ttl_s: int = 24 * 3600,
    most_shard_bytes: int = MOST_BYTES,
    compress: bool = False,
    deadline_s: float = 10.0,
    **watching: Any,  # settings of SharedTier, passed on
) -> SharedTier:
    """Return a tier over the server at `url`; see `RedisClient`, also for errors."""
    client = RedisClient(
        url,
        ttl_s=ttl_s,
        most_shard_bytes=most_shard_bytes,
        compress=compress,
        deadline_s=deadline_s,
    )
    return SharedTier(RemoteStore(client, deadline_s), codec=client.codec, **watching)


class RedisClient:
    """`SharedStore` over a Redis server or cluster, used in one thread.

    `url` is redis://[user:password@]host[:port][/db], rediss:// for TLS, redis+cluster:// or
    rediss+cluster:// with any node of a cluster, or unix://path; redis-py's options may follow
    (?ssl_ca_certs=FILE). User and password may be in REDIS_USERNAME and REDIS_PASSWORD instead.
    Redis expires a shard that is not read for `ttl_s` seconds (0: never; the server's maxmemory
    and its policy then decide). Shards larger than `most_shard_bytes` are refused.

    Raises `ConfigError` if the URL is invalid, or `compress` is set and its package is missing.
    `SharedStore` documents the methods.
    """

    name = "redis"

    def __init__(
        self, url: str, *, ttl_s: int, most_shard_bytes: int, compress: bool, deadline_s: float
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not (parts.hostname or parts.scheme == "unix"):
            raise ConfigError(
                f"remote_url: not a Redis URL (got one that begins with {parts.scheme}://); "
                f"expected redis://host:port/db, with one of the schemes {', '.join(SCHEMES)}"
            )
        place = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
        self.title = f"Redis tier {place}"
        self.codec = ShardCodec(self.title, zstd=compress)
        self._threads = CodecThreads(self.codec)
        self._cluster = parts.scheme.endswith("+cluster")
        self._url = url.replace("+cluster", "", 1) if self._cluster else url
        self._ttl_s = ttl_s
        self._most_bytes = min(most_shard_bytes, MOST_BYTES)
        self._deadline_s = deadline_s
        self._redis: Any = None  # Redis or RedisCluster, which share no type
        self._retries = Retries()
        self._reads = Pipelines(self._execute, READERS)
        self._writes = Pipelines(self._execute, WRITERS)
        self._warned = False
        self._has_getex = False
        try:
            client = self._connect()
            if not self._cluster:
                client.connection_pool.make_connection()  # which reads the options
        except (ValueError, TypeError, RedisClusterException) as error:
            raise ConfigError(
                f"remote_url: {self.title}: redis-py rejects the URL ({error}); expected "
                "options that its documentation lists"
            ) from error

    async def open(self) -> None:
        """Connect; log a warning if the server has no memory limit."""
        await self._disconnect()
        self._redis = self._connect()
        self._has_getex = not self._cluster  # redis-py sends GET to replicas, if told so
        await self.probe(Lane.READ)
        if self._warned or self._cluster:
            return
        self._warned = True
        facts = await self._ask(lambda: self._redis.info("memory"))
        if not facts.get("maxmemory"):
            _log.warning(
                "%s has no maxmemory: shards stay for %s and may fill the server's memory; set "
                "maxmemory and maxmemory-policy allkeys-lru",
                self.title,
                f"{self._ttl_s} s" if self._ttl_s else "ever",
            )

    async def still_open(self) -> bool:
        """Return True: redis-py reconnects by itself."""
        return True

    async def close(self, deadline_s: float) -> None:
        """Close all connections."""
        await self._threads.close(deadline_s)
        await self._reads.close()
        await self._writes.close()
        await self._disconnect()

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Get a string and verify it; the read extends its expiry by `ttl_s`."""
        name = blob_name(shard)
        most = stored_bytes(shard.payload_bytes)
        began = time.perf_counter()
        value = await self._ask(lambda: self._get(PREFIX + name, most))
        if value is None:
            raise TierMissError(f"{name} is not stored")
        size = len(value)
        self.codec.moved(Lane.READ, shard.namespace, size, time.perf_counter() - began)
        require_size(size, shard, name)
        whole = memoryview(value)
        into[: size - HEADER_BYTES] = whole[HEADER_BYTES:]
        return await self._threads.unpack(whole[:HEADER_BYTES], into, size, shard, name)

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Set a string unless one of a possible size is present."""
        most = stored_bytes(shard.payload_bytes)
        if most > self._most_bytes:
            raise TierError(
                f"{self.title}: a shard may have at most {self._most_bytes} bytes (got {most}): "
                f"use a smaller chunk_size, or another tier"
            )
        if (await self.contains([shard]))[0]:
            return 0
        value = await self._threads.pack(shard, payload, checksum)  # a copy: stays unchanged
        command: Command = ("SET", PREFIX + blob_name(shard), value)
        if self._ttl_s:
            command = (*command, "EX", self._ttl_s)
        began = time.perf_counter()
        await self._ask(lambda: self._writes.ask([command], len(value)))
        self.codec.moved(Lane.WRITE, shard.namespace, len(value), time.perf_counter() - began)
        return len(value)

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Look up all lengths in one pipeline."""
        lengths = await self._lengths([PREFIX + blob_name(shard) for shard in shards])
        return [
            may_hold(length, shard.payload_bytes)
            for shard, length in zip(shards, lengths, strict=True)
        ]

    async def remove(self, names: Sequence[str]) -> None:
        """Unlink the strings in one pipeline."""
        commands = [("UNLINK", PREFIX + name) for name in names]
        await self._ask(lambda: self._writes.ask(commands, 0))

    async def load_manifest(self, folder: str) -> bytes | None:
        """Get a manifest."""
        command = ("GET", PREFIX + manifest_name(folder))
        found: bytes | None = (await self._ask(lambda: self._reads.ask([command], 0)))[0]
        return found

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Set a manifest without expiry, since it is small."""
        command = ("SET", PREFIX + manifest_name(folder), content)
        await self._ask(lambda: self._writes.ask([command], len(content)))

    async def folders(self) -> Sequence[str]:
        """Scan all keys for manifests."""
        found = {
            name.partition("/")[0] async for page in self._scan(manifest_name("*")) for name in page
        }
        return sorted(name for name in found if FOLDER.fullmatch(name))

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """Scan all keys for those of a folder."""
        async for page in self._scan(f"{folder}/*"):
            names = [name for name in page if name != manifest_name(folder)]
            lengths = await self._lengths([PREFIX + name for name in names])
            yield [Blob(name, size, None) for name, size in zip(names, lengths, strict=True)]

    async def now(self) -> float:
        """Return the server's time in seconds."""
        seconds, microseconds = (await self._ask(lambda: self._writes.ask([("TIME",)], 0)))[0]
        return int(seconds) + int(microseconds) / 1e6

    async def probe(self, lane: Lane) -> None:
        """Get, or set, a short string."""
        command: Command = ("STRLEN", f"{PREFIX}probe")
        if lane is Lane.WRITE:
            command = ("SET", f"{PREFIX}probe", b"1", "EX", 60)
        await self._ask(lambda: self._writes.ask([command], 0))

    def queued(self, lane: Lane) -> int:
        """Return 0: `RemoteStore` has the queue."""
        del lane
        return 0

    def longest_running_s(self) -> float:
        """Return 0: every call ends by its deadline."""
        return 0.0

    async def _get(self, key: str, most: int) -> Any:
        """Get a string of at most `most` bytes, or None, and extend its expiry by `ttl_s`.

        GETEX does both in one command (Redis 6.2 and later); GET with EXPIRE reads at 0.9 of its
        rate. If GETEX fails and the two commands succeed, they are used until the next `open`.
        """
        if not self._ttl_s:
            return (await self._reads.ask([("GET", key)], most))[0]
        if self._has_getex:
            with contextlib.suppress(ResponseError):  # unknown, not permitted or refused now
                return (await self._reads.ask([("GETEX", key, "EX", self._ttl_s)], most))[0]
        commands = [("GET", key), ("EXPIRE", key, self._ttl_s)]
        value = (await self._reads.ask(commands, most))[0]
        self._has_getex = False
        return value

    async def _lengths(self, keys: Sequence[str]) -> list[int]:
        if not keys:
            return []
        commands = [("STRLEN", key) for key in keys]
        return await self._ask(lambda: self._reads.ask(commands, 0))

    async def _scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """Yield matching names, without the prefix, each once."""
        seen: set[str] = set()
        page: list[str] = []
        keys = self._redis.scan_iter(match=PREFIX + pattern, count=_SCAN_PAGE)

        async def following() -> Any:
            return await anext(keys, None)

        # No retry: after a failure the iterator would end as if the listing were complete.
        while (key := await self._ask_once(following)) is not None:
            name = key.decode(errors="replace").removeprefix(PREFIX)
            if name not in seen:
                seen.add(name)
                page.append(name)
            if len(page) == _SCAN_PAGE:
                yield page
                page = []
        yield page

    async def _execute(self, commands: Sequence[Command]) -> Sequence[Any]:
        """Send a pipeline; exceptions among the replies are returned, not raised."""
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: Sequence[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def _ask(self, work: Callable[[], Awaitable[T]]) -> T:
        """Send a request, with retries. Raises the error that `_explain` returns."""
        return await self._retries.run(lambda: self._ask_once(work))

    async def _ask_once(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except (RedisError, OSError) as error:
            raise self._explain(error) from None

    def _explain(self, error: Exception) -> StoreFailedError:
        """Return the error to raise, which states the remedy and contains no secret."""
        if isinstance(error, AuthenticationError | NoPermissionError) or "NOAUTH" in str(error):
            return StoreFailedError(
                "user or password is not accepted or lacks permission: check the URL, "
                "REDIS_USERNAME and REDIS_PASSWORD"
            )
        if isinstance(error, OutOfMemoryError):
            return StoreFailedError(
                "its memory is full and it does not evict: set maxmemory-policy allkeys-lru"
            )
        if isinstance(error, ReadOnlyError):
            return StoreFailedError("it is a replica, which refuses writes: specify the primary")
        passing = (ConnectionError, TimeoutError, BusyLoadingError, OSError)
        if isinstance(error, (*passing, RedisClusterException)):
            return PassingError(f"it cannot be reached: {error}")
        return StoreFailedError(str(error))

    def _connect(self) -> Any:
        options: dict[str, Any] = {
            "socket_timeout": self._deadline_s,
            "socket_connect_timeout": min(_CONNECT_S, self._deadline_s),
            "retry": Retry(NoBackoff(), 0),  # `Retries` retries, within its budget
        }
        parts = urlsplit(self._url)
        for option, given in (("username", parts.username), ("password", parts.password)):
            from_environment = os.environ.get(f"REDIS_{option.upper()}")
            if not given and from_environment:
                options[option] = from_environment
        if not self._cluster:
            client: Any = Redis.from_url(self._url, **options)
            pool = client.connection_pool
            pool.connection_class = roomy(pool.connection_class)
            return client
        cluster: Any = RedisCluster.from_url(self._url, **options)
        of_nodes = cluster.get_connection_kwargs()
        of_nodes["connection_class"] = roomy(of_nodes["connection_class"])
        return cluster

    async def _disconnect(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()
            self._redis = None
