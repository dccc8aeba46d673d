# SPDX-License-Identifier: Apache-2.0
"""Contract of a shared tier's store, the names of its blobs, and its errors."""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple, Protocol

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import DamagedShardError, ShardCodec
from kvhaven.tiers.format.header import may_hold, stored_bytes
from kvhaven.tiers.format.manifest import MANIFEST_NAME, unpack_manifest
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, TenantId

FOLDER: Final = re.compile(r"([0-9a-f]{16})(?:\.t([0-9a-f]{16}))?")
"""Folder name: first 16 hex digits of the namespace's digest, and the tenant id if there is one."""

_BLOB: Final = re.compile(rf"{FOLDER.pattern}/([0-9a-f]{{2}})/([0-9a-f]{{64}})\.(g[^/]*)\.kv")


class StoreFailedError(TierError):
    """The store failed or did not answer in time; the tier's breakers count this error."""


class Blob(NamedTuple):
    """Entry of a listing: name relative to the store's root, size in bytes, time of last use.

    `used_at` is in seconds by the store's clock. It is the time of writing if the store does not
    record uses (S3), and None if it records neither (Redis).
    """

    name: str
    size: int
    used_at: float | None


class SharedStore(Protocol):
    """Store of named blobs that other services read and write as well. Used by `SharedTier` only.

    The methods run on the service's event loop and never block it. All raise `StoreFailedError`
    if the store fails, and `TierError` if the call failed for another reason (a full queue).
    Buffers, deadlines and cancellation follow the contract of `Tier`.
    """

    name: str
    """Same as `Tier.name`."""
    title: str
    """Name of the store in messages; contains no secret."""

    async def open(self) -> None:
        """Connect to the store and verify that it is usable. May be called again after a failure.

        Raises `TierError` with the problem (a path, a bucket, credentials) and the remedy.
        """

    async def still_open(self) -> bool:
        """Return whether this is still the store that was opened (a mount may have vanished)."""

    async def close(self, deadline_s: float) -> None:
        """Finish running operations within `deadline_s` seconds, then release all resources."""

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify. Raises `TierMissError` if absent, `DamagedShardError` if damaged."""

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write unless a shard of a possible size is present. Returns the bytes written (or 0)."""

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return whether each shard is present with a possible size."""

    async def remove(self, names: Sequence[str]) -> None:
        """Remove blobs by name; absent blobs are not an error."""

    async def load_manifest(self, folder: str) -> bytes | None:
        """Return the content of a folder's manifest; None if it is absent."""

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Write a folder's manifest atomically; an existing one is replaced."""

    async def folders(self) -> Sequence[str]:
        """Return the names of the namespaces' and tenants' folders (see `FOLDER`)."""

    def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """Yield the blobs in a folder, except its manifest."""

    async def now(self) -> float:
        """Return the time in seconds of the store's clock, which `Blob.used_at` uses."""

    async def probe(self, lane: Lane) -> None:
        """Verify that reads or writes work. Raises `TierError` if not."""

    def queued(self, lane: Lane) -> int:
        """Return the number of queued operations."""

    def longest_running_s(self) -> float:
        """Return the seconds since the oldest operation began that cannot be cancelled."""


def blob_name(shard: StoredShard) -> str:
    """Return a shard's name in any shared store.

    Each namespace and tenant has 256 subfolders: a million chunks of one shard are 4000 files each.
    """
    key = shard.key.hex()
    return f"{folder_of(shard.namespace, shard.tenant)}/{key[:2]}/{key}.{shard.shard}.kv"


def folder_of(namespace: NamespaceDigest, tenant: TenantId) -> str:
    """Return the name of the folder of a tenant's part of a namespace."""
    return namespace.hex()[:16] + (f".t{tenant.hex()}" if tenant else "")


def tenant_of(folder: str) -> TenantId:
    """Return the tenant of a folder (see `FOLDER`)."""
    return TenantId(bytes.fromhex(folder[len("0123456789abcdef.t") :]))


def manifest_name(folder: str) -> str:
    """Return the name of a folder's manifest."""
    return f"{folder}/{MANIFEST_NAME}"


def is_shard_name(name: str) -> bool:
    """Return whether a blob's name is that of a shard."""
    return _BLOB.fullmatch(name) is not None


class Names:
    """Lookup of shards of one namespace by blob name."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._shards = {str(shard.id): shard for shard in namespace.table.shards}

    def shard(self, name: str) -> StoredShard | None:
        """Return the shard that `name` stands for; None if it is not a shard of the namespace."""
        parts = _BLOB.fullmatch(name)
        shard = self._shards.get(parts[5]) if parts else None
        if parts is None or shard is None or parts[3] != parts[4][:2]:
            return None
        key, tenant = bytes.fromhex(parts[4]), bytes.fromhex(parts[2] or "")
        digest, size = self._namespace.digest, shard.payload_bytes
        return StoredShard(digest, ChunkKey(key), shard.id, size, TenantId(tenant))


async def read_manifest(store: SharedStore, folder: str) -> Namespace:
    """Return a folder's namespace. Raises `TierMissError` if its manifest is absent or invalid.

    Each folder has a manifest, tenants' folders too, so it can be copied and removed on its own.
    """
    raw = await store.load_manifest(folder)
    if raw is None:
        raise TierMissError(f"{manifest_name(folder)} does not exist")
    return unpack_manifest(raw, folder.partition(".")[0])


def require_size(size: int, shard: StoredShard, where: str) -> None:
    """Raise `DamagedShardError` if `size` bytes is not a possible stored size of the shard."""
    if not may_hold(size, shard.payload_bytes):
        most = stored_bytes(shard.payload_bytes)
        message = f"{where} has {size} bytes instead of {most} (or fewer whole pages, compressed)"
        raise DamagedShardError(message, str(size).encode())


def unpack(
    codec: ShardCodec,
    head: bytes | memoryview,
    into: memoryview,
    size: int,
    shard: StoredShard,
    where: str,
) -> Checksum:
    """Call `codec.unpack`; `DamagedShardError` names `where` the bytes come from."""
    try:
        return codec.unpack(head, into, size, shard)
    except DamagedShardError as error:
        raise DamagedShardError(f"{where}: {error}", error.evidence) from error
