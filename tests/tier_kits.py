# SPDX-License-Identifier: Apache-2.0
"""Every tier there is, over a store of its own: how to open it, and how to damage what it holds."""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvhaven.testing.memory_store import MemoryStore, memory_tier
from kvhaven.testing.tiers import Change, Kit, online
from kvhaven.tiers.base import StoredShard, Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.format import compression_policy as worth
from kvhaven.tiers.shared.store import blob_name
from tests.tiers import disk_tier, file_of


def change_file(file: Path, change: Change) -> None:
    file.write_bytes(change(file.read_bytes()))


def disk(_: pytest.FixtureRequest, path: Path, **settings: Any) -> Kit:
    folder = path / "tier"
    return Kit(
        lambda: disk_tier(folder, **settings),
        lambda shard, change: change_file(file_of(folder, shard), change),
    )


def disk_buffered(request: pytest.FixtureRequest, path: Path) -> Kit:
    return disk(request, path, direct_io="off")


def disk_zstd(request: pytest.FixtureRequest, path: Path) -> Kit:
    _always_compress(request)
    return disk(request, path, compress=True)


def memory(_: pytest.FixtureRequest, __: Path) -> Kit:
    store = MemoryStore()

    def change(shard: StoredShard, change: Change) -> None:
        name = blob_name(shard)
        store.blobs[name] = change(store.blobs[name])

    return Kit(lambda: online(memory_tier(store, retry_s=0.05)), change)


def filesystem(_: pytest.FixtureRequest, path: Path, **settings: Any) -> Kit:
    folder = path / "shared"
    folder.mkdir(exist_ok=True)

    def open_it() -> AbstractAsyncContextManager[Tier]:
        executor = TierExecutor()
        return online(filesystem_tier(folder, executor=executor, retry_s=0.05, **settings))

    return Kit(open_it, lambda shard, change: change_file(folder / blob_name(shard), change))


def filesystem_buffered(request: pytest.FixtureRequest, path: Path) -> Kit:
    return filesystem(request, path, direct_io="off")


def filesystem_zstd(request: pytest.FixtureRequest, path: Path) -> Kit:
    _always_compress(request)
    return filesystem(request, path, compress=True)


def s3(request: pytest.FixtureRequest, _: Path, **settings: Any) -> Kit:
    pytest.importorskip("obstore", reason="pip install 'kvhaven[s3]'")
    from tests.servers import Bucket

    bucket = Bucket(request.getfixturevalue("s3_server"))
    patch = request.getfixturevalue("monkeypatch")
    for name, value in bucket.environment.items():
        patch.setenv(name, value)

    def change(shard: StoredShard, change: Change) -> None:
        name = f"some/prefix/{blob_name(shard)}"
        bucket.put(name, change(bucket.get(name)))

    settings |= {"absent_s": 0, "retry_s": 0.05}
    return Kit(lambda: online(bucket.tier("some/prefix", **settings)), change)


def s3_zstd(request: pytest.FixtureRequest, path: Path) -> Kit:
    _always_compress(request)
    return s3(request, path, compress=True)


def redis(request: pytest.FixtureRequest, _: Path) -> Kit:
    return _redis(request, "redis_server")


def redis_zstd(request: pytest.FixtureRequest, _: Path) -> Kit:
    _always_compress(request)
    return _redis(request, "redis_server", compress=True)


def redis_cluster(request: pytest.FixtureRequest, _: Path) -> Kit:
    return _redis(request, "redis_cluster_server")


def _redis(request: pytest.FixtureRequest, server: str, **settings: Any) -> Kit:
    pytest.importorskip("redis", reason="pip install 'kvhaven[redis]'")
    from redis import Redis

    from kvhaven.tiers.redis.tier import PREFIX, redis_tier

    url = request.getfixturevalue(server)

    def change(shard: StoredShard, change: Change) -> None:
        with Redis.from_url(url.replace("+cluster", "")) as client:
            key = PREFIX + blob_name(shard)
            value = client.get(key)
            if value is not None:
                client.set(key, change(value))

    return Kit(lambda: online(redis_tier(url, retry_s=0.05, **settings)), change)


def _always_compress(request: pytest.FixtureRequest) -> None:
    """Have no tier find out that memory is faster than zstd."""
    pytest.importorskip("zstandard", reason="pip install 'kvhaven[zstd]'")
    pytest.importorskip("numpy", reason="pip install 'kvhaven[zstd]'")
    request.getfixturevalue("monkeypatch").setattr(worth, "MOST_SLOWER", math.inf)


KITS: dict[str, Callable[[pytest.FixtureRequest, Path], Kit]] = {
    "disk": disk,
    "disk-buffered": disk_buffered,
    "disk-zstd": disk_zstd,
    "memory": memory,
    "fs": filesystem,
    "fs-buffered": filesystem_buffered,
    "fs-zstd": filesystem_zstd,
    "s3": s3,
    "s3-zstd": s3_zstd,
    "redis": redis,
    "redis-zstd": redis_zstd,
    "redis-cluster": redis_cluster,
}
