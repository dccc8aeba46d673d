# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier: a place below the arena that keeps shards."""

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
    """The name of a shard in a tier, and its payload's size in bytes.

    `tenant` is part of the name: what one tenant wrote is not there under another's.
    """

    namespace: NamespaceDigest
    key: ChunkKey
    shard: ShardId
    payload_bytes: int
    tenant: TenantId = NO_TENANT


class Namespace(msgspec.Struct, frozen=True):
    """What a tier must remember of a namespace to offer its shards after a restart.

    `fields` are the namespace's own (model, dtype, layout, ...) for people to read;
    `digest` is what counts.
    """

    digest: NamespaceDigest
    fields: dict[str, str]
    table: ShardTable


class CompressionStatus(msgspec.Struct, frozen=True):
    """What was chosen for a namespace (digest in hex), and bytes written since the start.

    `stored_bytes` is what was stored for `payload_bytes`, both with headers and padding.
    """

    namespace: str
    on: bool
    why: str
    payload_bytes: int
    stored_bytes: int


class TierHealth(msgspec.Struct, frozen=True):
    """How a tier is doing: `used_bytes` of `capacity_bytes`, counters, its last error."""

    online: bool
    """Reads are served. Offline, every operation fails at once with `TierError`."""
    capacity_bytes: int | None
    """What it can hold now: what was set, or less where the store itself is smaller.

    None: unbounded, or not ours to keep to (a shared tier): nothing is evicted from it by us.
    """
    used_bytes: int
    """Bytes of the shards it knows, headers and padding included; 0 for a shared tier."""
    writable: bool = False
    """Writes are accepted too: a full or read-only store still serves reads."""
    epoch: int = 0
    """Grows each time the store is opened (anew): then `scan` tells what it holds now."""
    queued_reads: int = 0
    queued_writes: int = 0
    reads: int = 0
    writes: int = 0
    misses: int = 0
    errors: int = 0
    rejected: int = 0
    """Shards that failed their checks (header, length or checksum) and were set aside."""
    last_error: str = ""
    holder: str = ""
    """Who owns the tier's directory, when it is not this service."""
    compression: list[CompressionStatus] | None = None
    """For each namespace that was written; None where nothing is to be compressed."""


class TierAudit(msgspec.Struct, frozen=True):
    """What `check` found: shards and bytes that are right, and a line for each that is not."""

    shards: int
    used_bytes: int
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


class Tier(Protocol):
    """Keeps shards by name. All methods run on the service's event loop and never block it.

    What is *not* promised: that a shard which was written is still there (a tier may lose
    anything, a loss is a miss), and any order between operations on different shards. On a
    **shared** tier other services write and delete too: nobody tells of it, two services may
    write the same shard at once (both are right), and of a write and a delete at once either
    may win.
    What is promised: `read` returns bytes that carry the checksum they were written with,
    or raises; a shard that is being written is not seen before it is whole.

    **Deadlines**: a shared tier ends every operation within its own `deadline_s`, with
    `TierError` if need be; shorter ones are the caller's (`asyncio.timeout`). What waited for
    its turn until then is taken back, and does not count as a failure of the store.

    **Buffers** start on a 4096-byte boundary and are `payload_bytes` rounded up to 4096
    long; another length is a `ValueError`. A tier touches a buffer only until the call that
    got it ends. This holds for cancelled calls (`asyncio.timeout`) too: one that has not
    begun is taken back and ends at once; one that has begun **ends only when its thread is
    done with the buffer**, however often it is cancelled and whatever the deadline is, which
    on a stuck disk or mount may be never (over a network, in S3 and Redis: at once). So a
    buffer stays reserved until the call really ends, and whoever must answer by a deadline
    answers without waiting for it. The one exception: calls that outlive the
    deadline of `close` end with `TierError` while a thread may still hold their buffer; the
    process is to exit then, without using these buffers again.
    """

    name: str
    """The word for it in status, metrics and settings: `disk`, `fs`, `s3`, `redis`."""

    shared: bool
    """Other services use the store too: ask `contains` for each lookup, `scan` only in tools.

    What a tier that is not shared holds is known from `scan`, `write` and `delete` alone.
    """

    async def start(self) -> None:
        """Open the tier. Never raises for a store that is broken or held by another.

        It is then offline, says why once in the log and in `health`, and tries again by
        itself now and then.
        """

    async def close(self, deadline_s: float) -> None:
        """Finish what is queued within `deadline_s` seconds, then give everything up."""

    async def add_namespace(self, namespace: Namespace) -> None:
        """Remember a namespace, before its first `write`; again and again is no error.

        It stays known until `close`, also while the tier is offline. Raises `TierError`: the
        store failed, or the digest is known with another table.
        """

    def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield what the tier holds, in batches, while other operations go on.

        With each shard comes what it takes there, in bytes, header and padding included. With
        `tenant`, only what that tenant has; a shared tier does not even look at the rest.
        Removes debris on its way (shared: what is surely nobody's any more, and nothing
        else). A namespace without shards yields one empty batch; its `add_namespace` is not
        needed any more. A shard written or deleted meanwhile may be missing or present. Raises
        `TierError`, also when the tier goes offline meanwhile.

        For a shared tier this takes minutes and, in an object store, money; what it tells is
        old at once. It has no deadline but the caller's.
        """

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return, in the order of `shards`, whether each is there. One batch.

        Its size must be one that such a shard may have; compressed ones are shorter. A hint: no
        byte is looked at. True may be gone, or fail its checks, when it is read. False may have
        been written since, within the tier's memory for absence (S3: seconds), or not have been
        found by a `scan` yet. Unknown namespaces are asked for too. Raises `TierError` when the
        store did not tell of all of them.
        """

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read a payload into `into` (writable, `payload_bytes` rounded up to 4096 long).

        Returns the payload's checksum, which was verified against the bytes read. Raises
        `TierMissError` (absent, or set aside because a check failed) or `TierError` (the
        store failed); `into` then holds anything.
        """

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Store a payload under its name, with the checksum given (it is not recomputed).

        Returns what it takes there, in bytes, header and padding included: `stored_bytes` of
        its payload, or less when it was compressed. A shared tier returns what it wrote: 0 when
        it was there.

        `payload` is `payload_bytes` rounded up to 4096 long and stays unchanged until this
        returns. Storing what is there already is not an error. Raises `TierError`: the
        store failed, has no room (capacity is the catalog's business, this is only its
        safety net) or takes no shards of that size, is offline, or does not know the namespace
        or a shard of that size.
        """

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Remove shards in one batch; absent ones are no error.

        Raises `TierError`; while the store stays open, the tier then tries again by itself.
        """

    def health(self) -> TierHealth:
        """Return the figures of this moment."""

    async def check(self) -> TierAudit:
        """Audit the store: what it believes against what is there, every byte of it.

        For a tier at rest: what moves meanwhile may be reported. Raises `TierError`.
        """
