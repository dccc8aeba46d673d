# SPDX-License-Identifier: Apache-2.0
"""`kvhaven tier`, as a person uses it, on a directory, a bucket and Redis."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from kvhaven.keys import tenant_id
from kvhaven.testing.tiers import Piece, make_namespace, make_piece
from kvhaven.tiers.base import Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.shared.store import blob_name
from tests.commands import kvhaven

SPACES = [make_namespace("one"), make_namespace("two")]
PIECES = [make_piece(space, number) for space in SPACES for number in range(10)]
FILE_BYTES = 4096 + 12288


class Store(NamedTuple):
    """A store with ten shards of each of two namespaces."""

    url: str
    tier: Callable[[], Tier]


async def fill(tier: Tier, pieces: Sequence[Piece] = PIECES) -> None:
    await tier.start()
    try:
        for space in SPACES:
            await tier.add_namespace(space)
        for piece in pieces:
            await tier.write(*piece)
    finally:
        await tier.close(5)


def filled_directory(path: Path) -> Store:
    return Store(str(path), lambda: filesystem_tier(path, executor=TierExecutor(2)))


def filled_bucket(server: str, patch: pytest.MonkeyPatch) -> Store:
    pytest.importorskip("obstore")
    from tests.servers import Bucket

    bucket = Bucket(server)
    for name, value in (bucket.environment | {"KVHAVEN_S3_ENDPOINT_URL": server}).items():
        patch.setenv(name, value)
    return Store(f"s3://{bucket.name}/prefix", lambda: bucket.tier("prefix"))


def filled_redis(url: str) -> Store:
    pytest.importorskip("redis")
    from kvhaven.tiers.redis.tier import redis_tier

    return Store(url, lambda: redis_tier(url))


@pytest.fixture(params=["fs", "s3", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "fs":
        store = filled_directory(tmp_path)
    elif request.param == "s3":
        store = filled_bucket(request.getfixturevalue("s3_server"), monkeypatch)
    else:
        store = filled_redis(request.getfixturevalue("redis_server"))
    asyncio.run(fill(store.tier()))
    return store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    asyncio.run(fill(filled_directory(tmp_path).tier()))
    return tmp_path


def file_of(directory: Path, piece: Piece) -> Path:
    return directory / blob_name(piece.shard)


def test_usage_verify_and_rm_work_on_every_store(store: Store) -> None:
    table = kvhaven("tier", "usage", store.url)
    assert "20 shards, 320 KiB" in table
    rows = json.loads(kvhaven("tier", "usage", "--json", KVHAVEN_REMOTE_URL=store.url))
    assert [(row["shards"], row["bytes"]) for row in rows] == [(10, 10 * FILE_BYTES)] * 2
    assert sorted(row["fields"]["model"] for row in rows) == ["one", "two"]
    assert kvhaven("tier", "verify", store.url).startswith("20 shards verified, 320 KiB; 0 prob")
    first = SPACES[0].digest.hex()[:8]
    assert "removed 10 shards" in kvhaven("tier", "rm", store.url, "--namespace", first)
    (left,) = json.loads(kvhaven("tier", "usage", store.url, "--json"))
    assert left["fields"]["model"] == "two"
    assert "10 shards verified" in kvhaven("tier", "verify", store.url)
    assert "removed 10 shards" in kvhaven("tier", "rm", store.url, "--all")
    assert json.loads(kvhaven("tier", "usage", store.url, "--json")) == []


def test_verify_names_what_is_wrong_and_removes_it_if_told(directory: Path) -> None:
    flipped, cut = file_of(directory, PIECES[0]), file_of(directory, PIECES[1])
    content = bytearray(flipped.read_bytes())
    content[5000] ^= 1
    flipped.write_bytes(content)
    os.truncate(cut, 5000)
    foreign = flipped.with_name("notes.txt")
    foreign.write_text("not ours")
    told = kvhaven("tier", "verify", str(directory), status=1, KVHAVEN_LOG_LEVEL="ERROR")
    assert told == ""  # what is found goes to standard output
    kvhaven("tier", "verify", str(directory), "--remove", status=1)
    assert not flipped.exists()
    assert not cut.exists()
    assert foreign.exists()
    foreign.unlink()
    assert "18 shards verified" in kvhaven("tier", "verify", str(directory))


def test_gc_removes_the_least_recently_used_and_debris(directory: Path) -> None:
    for age, piece in enumerate(PIECES):
        then = time.time() - 1000 * (age + 1)
        os.utime(file_of(directory, piece), (then, then))
    os.truncate(file_of(directory, PIECES[0]), 100)
    debris = file_of(directory, PIECES[0]).with_name(".0123.4.tmp")
    debris.write_bytes(b"half a shard")
    os.utime(debris, (0, 0))
    would = kvhaven("tier", "gc", str(directory), "--ttl-s", "15500", "--dry-run")
    assert would.startswith("would remove 6 shards")
    assert len(list(directory.rglob("*.kv"))) == 20
    assert "removed 6 shards" in kvhaven("tier", "gc", str(directory), "--ttl-s", "15500")
    assert not debris.exists()
    assert "14 shards verified" in kvhaven("tier", "verify", str(directory))
    assert [file_of(directory, piece).exists() for piece in PIECES] == (
        [False] + [True] * 14 + [False] * 5
    )
    told = kvhaven("tier", "gc", str(directory))
    assert "no limit is set" in told
    assert "removed 0 shards" in told


def test_gc_keeps_a_bucket_within_limits(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = filled_bucket(s3_server, monkeypatch)
    asyncio.run(fill(bucket.tier()))
    size = f"{15 * FILE_BYTES / 2**30:.9f}"
    told = kvhaven("tier", "gc", bucket.url, "--max-size", size)
    assert told.startswith("removed 8 shards")  # down to four fifths of the limit
    assert "12 shards verified" in kvhaven("tier", "verify", bucket.url)


def test_what_is_no_store_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    told = kvhaven("tier", "usage", str(tmp_path), status=1)
    assert "is not a KVHaven store" in told
    assert list(tmp_path.iterdir()) == []
    assert "does not exist" in kvhaven("tier", "gc", str(tmp_path / "nowhere"), status=1)
    assert "remote_url has: none" in kvhaven("tier", "verify", status=2)
    two = f"{tmp_path}/a {tmp_path}/b"
    assert "specify one shared tier" in kvhaven("tier", "usage", status=2, KVHAVEN_REMOTE_URL=two)
    assert "allowed: a path" in kvhaven("tier", "usage", "kv/here", status=2)
    assert "a size such as" in kvhaven("tier", "gc", str(tmp_path), "--max-size", "big", status=2)
    assert "specify what to remove" in kvhaven("tier", "rm", str(tmp_path), status=1)


def test_a_namespace_must_be_named_clearly(directory: Path) -> None:
    told = kvhaven("tier", "rm", str(directory), "--namespace", "xyz", status=1)
    assert "0 namespaces start with 'xyz'" in told
    assert SPACES[0].digest.hex()[:16] in told


def test_a_tenants_part_is_removed_alone(directory: Path) -> None:
    ann = [make_piece(SPACES[0], number, tenant=tenant_id("ann")) for number in range(3)]
    asyncio.run(fill(filled_directory(directory).tier(), ann))
    assert "23 shards verified" in kvhaven("tier", "verify", str(directory))
    assert "removed 3 shards" in kvhaven("tier", "rm", str(directory), "--tenant", "ann")
    assert "20 shards verified" in kvhaven("tier", "verify", str(directory))
    told = kvhaven("tier", "rm", str(directory), "--tenant", "tenant:12", status=2)
    assert "16 hex digits" in told


def test_redis_removes_by_itself(redis_server: str) -> None:
    told = kvhaven("tier", "gc", redis_server, "--ttl-s", "10", status=2)
    assert "Redis expires and evicts by itself" in told
