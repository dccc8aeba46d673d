# SPDX-License-Identifier: Apache-2.0
"""The memory of another node, as its listener sees it: shards that tests put there."""

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Final

import xxhash

from kvhaven.catalog.announcer import Batch, Cursor
from kvhaven.catalog.loans import Loan
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.types import (
    Checksum,
    ChunkKey,
    Extent,
    NamespaceDigest,
    Shard,
    ShardTable,
    TenantId,
)

_EXTENT: Final = Extent(0, 0, 1, 1)


def as_chunk(shard: StoredShard) -> StoredShard:
    """Return a shard's name as that of a chunk of one shard, so that each shard has its fate."""
    text = f"{shard.namespace.hex()} {shard.shard} {shard.payload_bytes}".encode()
    namespace = NamespaceDigest(hashlib.sha256(text).digest())
    return StoredShard(namespace, shard.key, shard.shard, shard.payload_bytes, shard.tenant)


class Unannounced:
    """A part of a `Lender`: nothing is announced, so peers ask."""

    def announced(self, cursor: Cursor, wait_s: float) -> Batch:
        """Return an empty beginning of a snapshot, again and again."""
        del cursor
        time.sleep(wait_s)
        return Batch(Cursor(0, 0), False, True, (), ())


class Shelf(Unannounced):
    """A `Lender` of the chunks that were put there, each of one shard."""

    def __init__(self) -> None:
        self.open: dict[int, memoryview] = {}
        """What is lent now, by the loan's number."""
        self.lent = 0
        self._lock = threading.Lock()
        self._stored: dict[
            tuple[NamespaceDigest, TenantId, ChunkKey], tuple[Namespace, memoryview, Checksum]
        ] = {}

    def put(
        self, shard: StoredShard, payload: memoryview, checksum: Checksum | None = None
    ) -> None:
        """Store a shard; by default with the checksum of its bytes."""
        namespace = Namespace(
            shard.namespace, {}, ShardTable((Shard(shard.shard, shard.payload_bytes),))
        )
        part = payload[: shard.payload_bytes]
        known = Checksum(xxhash.xxh3_128_digest(part)) if checksum is None else checksum
        self._stored[shard.namespace, shard.tenant, shard.key] = namespace, part, known

    def remove(self, shard: StoredShard) -> None:
        """Evict a shard."""
        self._stored.pop((shard.namespace, shard.tenant, shard.key), None)

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        return [(namespace, tenant, key) in self._stored for key in keys]

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        stored = self._stored.get((namespace, tenant, key))
        if stored is None:
            return None
        space, payload, checksum = stored
        with self._lock:
            self.lent += 1
            self.open[self.lent] = payload
            return Loan(self.lent, space, _EXTENT, (checksum,))

    def memory(self, loan: Loan) -> memoryview:
        return self.open[loan.number][:]  # the listener releases it

    def returned(self, loan: Loan) -> None:
        with self._lock:
            del self.open[loan.number]

    def namespaces(self) -> Sequence[Namespace]:
        return ()
