# SPDX-License-Identifier: Apache-2.0
"""Shared store in memory, for tests: several tiers over one store simulate several nodes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold
from kvhaven.tiers.shared.store import (
    FOLDER,
    Blob,
    StoreFailedError,
    blob_name,
    manifest_name,
    require_size,
    unpack,
)
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum


def memory_tier(store: "MemoryStore", retry_s: float = 1.0) -> SharedTier:
    """Return a tier over `store`."""
    return SharedTier(store, retry_s=retry_s)


class MemoryStore:
    """`SharedStore` that keeps its content in `blobs`, by name, like a bucket.

    While `broken` is a non-empty text, every call raises `StoreFailedError` with that text.
    `SharedStore` documents the methods.
    """

    name = "memory"
    title = "memory tier"

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.broken = ""
        self._packing = ShardCodec(self.title)

    async def open(self) -> None:
        """Do nothing; fail while broken."""
        await self._pass()

    async def still_open(self) -> bool:
        """Return True: memory cannot vanish."""
        return True

    async def close(self, deadline_s: float) -> None:
        """Do nothing: another tier may use the store."""

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify a shard."""
        await self._pass()
        name = blob_name(shard)
        blob = self.blobs.get(name)
        if blob is None:
            raise TierMissError(f"{name} is not stored")
        require_size(len(blob), shard, name)
        into[: len(blob) - HEADER_BYTES] = memoryview(blob)[HEADER_BYTES:]
        return unpack(self._packing, blob[:HEADER_BYTES], into, len(blob), shard, name)

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write a shard unless it is present."""
        await self._pass()
        if self._has(shard):
            return 0
        blob = b"".join(self._packing.pack(shard, payload, checksum))
        self.blobs[blob_name(shard)] = blob
        return len(blob)

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return whether each shard is present."""
        await self._pass()
        return [self._has(shard) for shard in shards]

    async def remove(self, names: Sequence[str]) -> None:
        """Remove blobs."""
        await self._pass()
        for name in names:
            self.blobs.pop(name, None)

    async def load_manifest(self, folder: str) -> bytes | None:
        """Return a manifest."""
        await self._pass()
        return self.blobs.get(manifest_name(folder))

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Store a manifest."""
        await self._pass()
        self.blobs[manifest_name(folder)] = content

    async def folders(self) -> Sequence[str]:
        """Return the namespaces' folders."""
        await self._pass()
        folders = {name.partition("/")[0] for name in self.blobs}
        return sorted(folder for folder in folders if FOLDER.fullmatch(folder))

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """Yield all blobs of a folder in one page."""
        await self._pass()
        manifest = manifest_name(folder)
        yield [
            Blob(name, len(blob), None)
            for name, blob in self.blobs.items()
            if name.startswith(f"{folder}/") and name != manifest
        ]

    async def now(self) -> float:
        """Return this machine's time."""
        await self._pass()
        return time.time()

    async def probe(self, lane: Lane) -> None:
        """Fail while broken."""
        del lane  # the same for both
        await self._pass()

    def queued(self, lane: Lane) -> int:
        """Return 0: there is no queue."""
        del lane
        return 0

    def longest_running_s(self) -> float:
        """Return 0: calls do not hang."""
        return 0.0

    def _has(self, shard: StoredShard) -> bool:
        blob = self.blobs.get(blob_name(shard))
        return blob is not None and may_hold(len(blob), shard.payload_bytes)

    async def _pass(self) -> None:
        """Yield to other tasks, as a real store does; fail while broken."""
        await asyncio.sleep(0)
        if self.broken:
            raise StoreFailedError(self.broken)
