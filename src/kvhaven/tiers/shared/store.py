# SPDX-License-Identifier: Apache-2.0
"""What a shared tier needs of its store, the names in it, and what can go wrong there."""

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
"""A folder: the first 16 hex digits of a namespace's digest, and the tenant's if there is one."""

_BLOB: Final = re.compile(rf"{FOLDER.pattern}/([0-9a-f]{{2}})/([0-9a-f]{{64}})\.(g[^/]*)\.kv")


class StoreFailedError(TierError):
    """The store itself failed, or did not answer in time: counted by the tier's breakers."""


class Blob(NamedTuple):
    """What a store lists: a name from its root, a size in bytes, and when it was used last.

    That is in seconds by the store's own clock; where it does not know (S3), when it was
    written; None where it knows neither (Redis).
    """

    name: str
    size: int
    used_at: float | None


class SharedStore(Protocol):
    """Blobs under names that others read and write too. Used by `SharedTier` alone.

    Called on the service's event loop, which no call blocks. All raise `StoreFailedError` when
    the store fails, and `TierError` when nobody can say that (a full queue). Buffers, deadlines
    and cancellation are as `Tier` says.
    """

    name: str
    """As `Tier.name`."""
    title: str
    """What people call this store in messages; no secret is in it."""

    async def open(self) -> None:
        """Find out whether the store can be used, also again after it could not.

        Raises `TierError` with what is wrong (a path, a bucket, credentials) and what to do.
        """

    async def still_open(self) -> bool:
        """Return whether it is the store that was opened (a mount may have vanished)."""

    async def close(self, deadline_s: float) -> None:
        """Finish what goes on within `deadline_s` seconds, and give all up, for good."""

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify. Raises `TierMissError` when absent, `DamagedShardError` when wrong."""

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write; what is there with a right size already stays. Returns the bytes written."""

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return whether each is there with a size that it may have."""

    async def remove(self, names: Sequence[str]) -> None:
        """Remove blobs by their names; absent ones are no error."""

    async def load_manifest(self, folder: str) -> bytes | None:
        """Return the content of a folder's manifest; None when there is none."""

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Write a folder's manifest, in one step, over an older one."""

    async def folders(self) -> Sequence[str]:
        """Return the names of namespaces' and tenants' folders (see `FOLDER`)."""

    def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """Yield what is in a folder, its manifest aside."""

    async def now(self) -> float:
        """Return the store's own time, by which `Blob.used_at` counts."""

    async def probe(self, lane: Lane) -> None:
        """Show that reads, or writes, work."""

    def queued(self, lane: Lane) -> int:
        """Return how many operations wait for their turn."""

    def longest_running_s(self) -> float:
        """Return for how long the oldest operation has been going on that nothing can end."""


def blob_name(shard: StoredShard) -> str:
    """Return a shard's name in any shared store.

    256 folders a namespace and tenant: a million chunks of one shard each are 4000 files in each.
    """
    key = shard.key.hex()
    return f"{folder_of(shard.namespace, shard.tenant)}/{key[:2]}/{key}.{shard.shard}.kv"


def folder_of(namespace: NamespaceDigest, tenant: TenantId) -> str:
    """Return the name of the folder of a tenant's part of a namespace."""
    return namespace.hex()[:16] + (f".t{tenant.hex()}" if tenant else "")


def tenant_of(folder: str) -> TenantId:
    """Return whose a folder is (see `FOLDER`)."""
    return TenantId(bytes.fromhex(folder[len("0123456789abcdef.t") :]))


def manifest_name(folder: str) -> str:
    """Return the name of a folder's manifest."""
    return f"{folder}/{MANIFEST_NAME}"


def is_shard_name(name: str) -> bool:
    """Return whether a blob is named as shards are."""
    return _BLOB.fullmatch(name) is not None


class Names:
    """Tells which shard of one namespace a name is of."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._shards = {str(shard.id): shard for shard in namespace.table.shards}

    def shard(self, name: str) -> StoredShard | None:
        """Return the shard that should be under this name; None when none should."""
        parts = _BLOB.fullmatch(name)
        shard = self._shards.get(parts[5]) if parts else None
        if parts is None or shard is None or parts[3] != parts[4][:2]:
            return None
        key, tenant = bytes.fromhex(parts[4]), bytes.fromhex(parts[2] or "")
        digest, size = self._namespace.digest, shard.payload_bytes
        return StoredShard(digest, ChunkKey(key), shard.id, size, TenantId(tenant))


async def read_manifest(store: SharedStore, folder: str) -> Namespace:
    """Return a folder's namespace. Raises `TierMissError` when its manifest tells of none.

    Each folder has one, a tenant's too: so it can be read, copied and removed by itself.
    """
    raw = await store.load_manifest(folder)
    if raw is None:
        raise TierMissError(f"{manifest_name(folder)} is not there")
    return unpack_manifest(raw, folder.partition(".")[0])


def require_size(size: int, shard: StoredShard, where: str) -> None:
    """Raise `DamagedShardError` if a stored object of this size in bytes cannot be the shard."""
    if not may_hold(size, shard.payload_bytes):
        most = stored_bytes(shard.payload_bytes)
        message = f"{where} has {size} bytes instead of {most} (or whole pages, compressed)"
        raise DamagedShardError(message, str(size).encode())


def unpack(
    codec: ShardCodec,
    head: bytes | memoryview,
    into: memoryview,
    size: int,
    shard: StoredShard,
    where: str,
) -> Checksum:
    """Call `codec.unpack`. Raises `DamagedShardError`, naming `where` the bytes are from."""
    try:
        return codec.unpack(head, into, size, shard)
    except DamagedShardError as error:
        raise DamagedShardError(f"{where}: {error}", error.evidence) from error
