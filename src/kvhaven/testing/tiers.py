# SPDX-License-Identifier: Apache-2.0
"""Test data for tiers: namespaces, shards with payloads, buffers."""

import asyncio
import contextlib
import hashlib
import mmap
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import xxhash

from kvhaven.tiers.base import Namespace, StoredShard, Tier
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

Change = Callable[[bytes], bytes]


class Kit(NamedTuple):
    """Private store of a test: a function that opens a tier over it, and one that changes bytes."""

    open: Callable[[], AbstractAsyncContextManager[Tier]]
    """Opens a tier of `CAPACITY` bytes over the store; repeatable, concurrently if it is shared."""
    change: Callable[[StoredShard, Change], None]
    """Changes the stored bytes of a shard without the tier's knowledge."""


CAPACITY = 1 << 26
PAYLOAD = 10_000
"""Not a multiple of 4096, so that shards have padding."""


_EXPONENTS = bytes(0x3E + number % 4 for number in range(256))


class Piece(NamedTuple):
    """Shard with its payload and checksum."""

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

    The bytes resemble bf16 values of similar magnitude, of which zstd saves about a third.
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
    """Scan a tier (for a tenant); return the namespaces and shards that it yields."""
    namespaces: set[NamespaceDigest] = set()
    shards: set[StoredShard] = set()
    async for namespace, batch in tier.scan(tenant):
        namespaces.add(namespace.digest)
        shards.update(batch)
    return namespaces, shards


async def until(condition: Callable[[], bool], within_s: float = 120) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def opened(tier: Tier) -> AsyncIterator[Tier]:
    """Start a tier, and close it at the end."""
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(5)


@contextlib.asynccontextmanager
async def online(tier: Tier) -> AsyncIterator[Tier]:
    """Start a tier, wait until it is online, and close it at the end."""
    async with opened(tier):
        await until(lambda: bool(tier.health().online))
        yield tier
