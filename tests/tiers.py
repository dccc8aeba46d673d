# SPDX-License-Identifier: Apache-2.0
"""What the tests of tiers share: page-aligned buffers, namespaces, pieces to store, mounts."""

import asyncio
import contextlib
import hashlib
import mmap
import random
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from kvhaven.tiers.base import Namespace, StoredShard, Tier
from kvhaven.tiers.disk import DiskTier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
    TenantId,
    align_up,
)

CAPACITY = 1 << 26
PAYLOAD = 10_000
"""Not a multiple of 4096, so that there is padding."""


_EXPONENTS = bytes(0x3E + number % 4 for number in range(256))


class Piece(NamedTuple):
    """A shard with its payload."""

    shard: StoredShard
    payload: memoryview
    checksum: Checksum


def page_buffer(size: int) -> memoryview:
    """Return page-aligned memory for a payload of `size` bytes."""
    return memoryview(mmap.mmap(-1, align_up(size)))


def make_namespace(name: str = "model", sizes: tuple[int, ...] = (PAYLOAD,)) -> Namespace:
    """Return a namespace with a shard of each size, which its digest covers."""
    shards = tuple(
        Shard(ShardId(0, (0, 8), (head, head + 1)), size) for head, size in enumerate(sizes)
    )
    digest = NamespaceDigest(hashlib.sha256(f"{name} {sizes}".encode()).digest())
    return Namespace(digest, {"model": name}, ShardTable(shards))


def make_piece(
    namespace: Namespace, number: int = 0, at: int = 0, tenant: TenantId = NO_TENANT
) -> Piece:
    """Return chunk `number`'s shard `at`; the same arguments give the same bytes.

    They are like bf16 of about the same size, of which zstd saves about a third.
    """
    entry = namespace.table.shards[at]
    key = ChunkKey(hashlib.sha256(f"{namespace.digest.hex()} {number}".encode()).digest())
    payload = page_buffer(entry.payload_bytes)
    chosen = random.Random(f"{key.hex()} {at}")
    payload[::2] = chosen.randbytes(len(payload) // 2)
    payload[1::2] = chosen.randbytes(len(payload) // 2).translate(_EXPONENTS)
    checksum = Checksum(xxhash.xxh3_128_digest(payload[: entry.payload_bytes]))
    shard = StoredShard(namespace.digest, key, entry.id, entry.payload_bytes, tenant)
    return Piece(shard, payload, checksum)


async def store(tier: Tier, *pieces: Piece) -> None:
    """Write pieces one after the other."""
    for piece in pieces:
        await tier.write(*piece)


async def fetch(tier: Tier, shard: StoredShard) -> bytes:
    """Read a shard and return its payload without padding."""
    buffer = page_buffer(shard.payload_bytes)
    await tier.read(shard, buffer)
    return bytes(buffer[: shard.payload_bytes])


def content(piece: Piece) -> bytes:
    """Return a piece's payload without padding."""
    return bytes(piece.payload[: piece.shard.payload_bytes])


async def scanned(
    tier: Tier, tenant: TenantId | None = None
) -> tuple[set[NamespaceDigest], set[StoredShard]]:
    """Scan a tier (for a tenant); return the namespaces and shards it told of."""
    namespaces: set[NamespaceDigest] = set()
    shards: set[StoredShard] = set()
    async for namespace, batch in tier.scan(tenant):
        namespaces.add(namespace.digest)
        shards.update(batch)
    return namespaces, shards


@contextlib.asynccontextmanager
async def disk_tier(path: Path, **settings: Any) -> AsyncIterator[DiskTier]:
    """Open a disk tier that retries fast; `settings` are its constructor's."""
    defaults: dict[str, Any] = {"retry_s": 0.05, "lock_wait_s": 0.2}
    capacity = settings.pop("capacity_bytes", CAPACITY)
    settings.setdefault("executor", TierExecutor())
    tier = DiskTier(path, capacity, **defaults | settings)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(5)


def file_of(path: Path, shard: StoredShard) -> Path:
    """Return the file in which a disk tier at `path` keeps a shard."""
    (file,) = path.glob(f"{shard.namespace.hex()[:16]}/*/{shard.key.hex()}.{shard.shard}.kv")
    return file


def run_or_skip(*command: object) -> None:
    """Run a command that needs rights which not every machine gives."""
    try:
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"{command[0]} is not possible here: {reason.decode().strip()}")


@contextlib.contextmanager
def tmpfs(path: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes in memory at `path`."""
    path.mkdir(exist_ok=True)
    run_or_skip("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def ext4(path: Path, size: int) -> Iterator[Path]:
    """Mount a real file system of `size` bytes, in a file beside it, at `path`."""
    path.mkdir(exist_ok=True)
    image = path.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    run_or_skip("mkfs.ext4", "-q", image)
    run_or_skip("mount", "-o", "loop", image, path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


async def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)
