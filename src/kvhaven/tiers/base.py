# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier: a place below the arena that keeps shards."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, ShardId, ShardTable


class StoredShard(msgspec.Struct, frozen=True):
    """The name of a shard in a tier, and its payload's size in bytes."""

    namespace: NamespaceDigest
    key: ChunkKey
    shard: ShardId
    payload_bytes: int


class Namespace(msgspec.Struct, frozen=True):
    """What a tier must remember of a namespace to offer its shards after a restart.

    `fields` are the namespace's own (model, dtype, layout, ...) for people to read;
    `digest` is what counts.
    """

    digest: NamespaceDigest
    fields: dict[str, str]
    table: ShardTable


class TierHealth(msgspec.Struct, frozen=True):
    """How a tier is doing: `used_bytes` of `capacity_bytes`, counters, its last error."""

    online: bool
    capacity_bytes: int
    used_bytes: int
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


class Tier(Protocol):
    """Keeps shards by name. All methods run on the service's event loop and never block it.

    What is *not* promised: that a shard which was written is still there (a tier may lose
    anything, a loss is a miss), and any order between operations on different shards.
    What is promised: `read` returns bytes that carry the checksum they were written with,
    or raises; a shard that is being written is not seen before it is whole.
    """

    name: str
    """The word for it in status, metrics and settings: `disk`, `fs`, `s3`, `redis`."""

    async def start(self) -> None:
        """Open the tier. Never raises for a store that is broken: it is then offline."""

    async def close(self, deadline_s: float) -> None:
        """Finish what is queued within `deadline_s` seconds, then give everything up."""

    async def add_namespace(self, namespace: Namespace) -> None:
        """Remember a namespace, before its first `write`. Raises `TierError`."""

    def scan(self) -> AsyncIterator[tuple[Namespace, Sequence[StoredShard]]]:
        """Yield what the tier holds, in batches, while other operations go on."""

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read a payload into `into` (writable, `payload_bytes` rounded up to 4096 long).

        Returns the payload's checksum, which was verified against the bytes read. Raises
        `TierMissError` (absent, or set aside because a check failed) or `TierError` (the
        store failed); `into` then holds anything.
        """

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> None:
        """Store a payload under its name, with the checksum given (it is not recomputed).

        `payload` is `payload_bytes` rounded up to 4096 long and stays unchanged until this
        returns. Storing what is there already is not an error. Raises `TierError`.
        """

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Remove shards; absent ones are no error. Raises `TierError`."""

    def health(self) -> TierHealth:
        """Return the figures of this moment."""
