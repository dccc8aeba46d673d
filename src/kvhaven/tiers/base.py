# SPDX-License-Identifier: Apache-2.0
"""Contract of a tier: storage below the arena that keeps shards."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvhaven.types import (
    NO_TENANT,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    ShardId,
    ShardTable,
    TenantId,
)


class StoredShard(msgspec.Struct, frozen=True, gc=False):
    """Name of a shard in a tier, and the size of its payload in bytes.

    `tenant` is part of the name: a shard written by one tenant is absent for every other tenant.
    """

    namespace: NamespaceDigest
    key: ChunkKey
    shard: ShardId
    payload_bytes: int
    tenant: TenantId = NO_TENANT


class Namespace(msgspec.Struct, frozen=True):
    """Record of a namespace that a tier stores to offer the namespace's shards after a restart.

    `digest` identifies the namespace. `fields` (model, dtype, layout, ...) are informational.
    """

    digest: NamespaceDigest
    fields: dict[str, str]
    table: ShardTable

    def shard_bytes(self, payload_bytes: int, tail: int = 0) -> int | None:
        """Return the payload size of a shard of a tail of which `tail` tokens are stored.

        `payload_bytes` is that of a full chunk's shard, which is also the answer for a `tail` of 0.
        None if the fields do not tell the tokens of a chunk, or if there is no such tail.
        """
        if not tail:
            return payload_bytes
        size = self.fields.get("chunk_size", "")
        tokens_of_chunk = int(size) if size.isascii() and size.isdigit() else 0
        if not 0 < tail <= tokens_of_chunk or payload_bytes * tail % tokens_of_chunk:
            return None
        return payload_bytes * tail // tokens_of_chunk

    def has_tails_of(self, tokens: int) -> bool:
        """Return whether there are tails of which so many tokens are stored."""
        sizes = (self.shard_bytes(shard.payload_bytes, tokens) for shard in self.table.shards)
        return tokens > 0 and all(size is not None for size in sizes)


class CompressionStatus(msgspec.Struct, frozen=True):
    """Compression decision for a namespace (digest in hex), and bytes written since the start.

    `stored_bytes` were stored for `payload_bytes`; both include headers and padding.
    """

    namespace: str
    on: bool
    why: str
    payload_bytes: int
    stored_bytes: int


class TierHealth(msgspec.Struct, frozen=True):
    """Health of a tier: state, `used_bytes` of `capacity_bytes`, counters, last error."""

    online: bool
    """Reads are served. Offline, every operation raises `TierError` immediately."""
    capacity_bytes: int | None
    """Bytes that the tier can hold now: the configured capacity, or less if the store is smaller.

    None: unbounded, or not managed by this service (a shared tier): the catalog evicts nothing.
    """
    used_bytes: int
    """Bytes of the indexed shards, headers and padding included; 0 for a shared tier."""
    writable: bool = False
    """Writes are accepted as well. A full or read-only store still serves reads."""
    epoch: int = 0
    """Incremented each time the store is opened; results of an earlier `scan` are then outdated."""
    queued_reads: int = 0
    queued_writes: int = 0
    reads: int = 0
    writes: int = 0
    misses: int = 0
    errors: int = 0
    rejected: int = 0
    """Shards that failed a check (header, length or checksum) and were set aside."""
    last_error: str = ""
    holder: str = ""
    """Owner of the tier's directory if it is another service; otherwise empty."""
    compression: list[CompressionStatus] | None = None
    """One entry for each namespace that was written; None if compression is off."""


class TierAudit(msgspec.Struct, frozen=True):
    """Result of `check`: valid shards, their bytes, and one line for each problem."""

    shards: int
    used_bytes: int
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether the audit found no problem."""
        return not self.problems


class Tier(Protocol):
    """Store of shards by name. All methods run on the service's event loop and never block it.

    **Guaranteed**: `read` returns bytes that match the checksum they were written with, or
    raises. A shard that is being written is not visible before it is complete.

    **Not guaranteed**: durability (a tier may lose any shard; a lost shard is a miss), and any
    order between operations on different shards. On a **shared** tier other services write and
    delete as well, without notification. Two services may write the same shard concurrently
    (the bytes are equal), and of a concurrent write and delete either may win.

    **Deadlines**: a shared tier ends every operation within its own `deadline_s`, if necessary
    with `TierError`. Callers set shorter deadlines with `asyncio.timeout`. An operation that is
    still queued at its deadline is withdrawn and does not count as a failure of the store.

    **Buffers** start on a 4096-byte boundary, and their length is `payload_bytes` rounded up to
    4096; another length raises `ValueError`. A tier accesses a buffer only until the call that
    received it ends. This includes cancelled calls (`asyncio.timeout`): a call that has not
    begun is withdrawn and ends immediately; a call that has begun **ends only when its thread
    has finished with the buffer**, regardless of cancellations and deadlines. On a stuck disk or
    mount that may be never; over a network (S3, Redis) it is immediate. A buffer therefore stays
    reserved until the call has ended, and a caller with a deadline must reply without waiting
    for it. The one exception: calls that outlive the deadline of `close` end with `TierError`
    while a thread may still hold their buffer. The process must then exit without using these
    buffers again.
    """

    name: str
    """Name in status, metrics and settings: `disk`, `fs`, `s3`, `redis`."""

    shared: bool
    """Whether other services use the store: each lookup calls `contains`; only tools call `scan`.

    The content of a tier that is not shared follows from `scan`, `write` and `delete` alone.
    """

    async def start(self) -> None:
        """Open the tier. Never raises for a store that is broken or held by another service.

        In that case the tier is offline, reports the reason once in the log and in `health`, and
        retries periodically.
        """

    async def close(self, deadline_s: float) -> None:
        """Finish queued operations within `deadline_s` seconds, then release all resources."""

    async def add_namespace(self, namespace: Namespace) -> None:
        """Register a namespace before its first `write`. Repeated registration is not an error.

        The namespace stays registered until `close`, also while the tier is offline. Raises
        `TierError` if the store fails, or if the digest is registered with another table.
        """

    def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield the tier's shards in batches, concurrently with other operations.

        Each shard is mapped to its stored size in bytes, header and padding included. `tenant`
        restricts the scan to that tenant's shards; a shared tier then lists no other folders.
        The scan removes debris (in a shared tier only files that are certainly abandoned). A
        namespace without shards yields one empty batch. A namespace that was yielded needs no
        `add_namespace`. A shard that is written or deleted during the scan may be missing or
        present. Raises `TierError` if the store fails or the tier goes offline during the scan.

        For a shared tier a scan takes minutes and, in an object store, costs money; its result
        is outdated immediately. It has no deadline except the caller's.
        """

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return, in the order of `shards`, whether each is present. One batch.

        A shard is present if its stored size is possible for it; compressed shards are shorter.
        The result is a hint: no content is read. A shard reported as present may be deleted, or
        fail its checks, by the time it is read. A shard reported as absent may have been written
        within the lifetime of the tier's cache of absences (S3: seconds), or may not have been
        scanned yet. Shards of unknown namespaces are looked up as well. Raises `TierError` if
        the store did not answer for all shards.
        """

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read a payload into `into` (writable; `payload_bytes` rounded up to 4096 long).

        Returns the payload's checksum, verified against the bytes read. Raises `TierMissError`
        if the shard is absent or was set aside because a check failed, and `TierError` if the
        store failed. The content of `into` is then undefined.
        """

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Store a payload under its name with the given checksum, which is not recomputed.

        Returns the stored size in bytes, header and padding included: `stored_bytes` of the
        payload, or less if it was compressed. A shared tier returns the bytes that it wrote: 0
        if the shard was present. Writing a shard that is present is not an error.

        `payload` is `payload_bytes` rounded up to 4096 long and must not change until the call
        returns. Raises `TierError` if the store failed, is offline, has no room (the catalog
        enforces the capacity; this check is a safety net) or does not accept shards of that
        size, or if the namespace, or a shard of that size in it, is not registered.
        """

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Remove shards in one batch; absent shards are not an error.

        Raises `TierError` if the store failed; while the store stays open, the tier retries.
        """

    def health(self) -> TierHealth:
        """Return the current state and counters."""

    async def check(self) -> TierAudit:
        """Audit the store: compare the index with the files, and verify every stored byte.

        Meant for an idle tier: concurrent changes may be reported as problems. Raises `TierError`
        if the store failed.
        """
