# SPDX-License-Identifier: Apache-2.0
"""A node's chunks, for benchmarks of the peer plane: equal shards, one after another."""

import os
import time
from collections.abc import Callable, Sequence

import xxhash

from kvhaven.catalog.announcer import Batch, Cursor
from kvhaven.catalog.loans import Loan
from kvhaven.tiers.base import Namespace
from kvhaven.types import Checksum, ChunkKey, Extent, NamespaceDigest, TenantId


class NumberedShards:
    """A `Lender` of random shards; a chunk's key is its number.

    `space` is a namespace with one shard a chunk. `memory_of` returns the bytes of an extent of
    `segment`.
    """

    def __init__(
        self,
        space: Namespace,
        count: int,
        memory_of: Callable[[Extent], memoryview],
        segment: int = 0,
    ) -> None:
        self._space = space
        self._memory_of = memory_of
        size = space.table.shards[0].payload_bytes
        self._extents = [Extent(segment, at * size, size, at) for at in range(count)]
        self._checksums = []
        for extent in self._extents:
            with memory_of(extent) as memory:
                memory[:] = os.urandom(1 << 20) * (size >> 20)
                self._checksums.append(Checksum(xxhash.xxh3_128_digest(memory)))

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        """Return True for every key."""
        del namespace, tenant
        return [True] * len(keys)

    def announced(self, cursor: Cursor, wait_s: float) -> Batch:
        """Announce nothing, so that peers ask."""
        del cursor
        time.sleep(wait_s)
        return Batch(Cursor(0, 0), False, True, (), ())

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        """Return the shard whose number the key is."""
        del namespace, tenant
        at = int.from_bytes(key, "big")
        return Loan(0, self._space, self._extents[at], (self._checksums[at],))

    def memory(self, loan: Loan) -> memoryview:
        """Return its bytes."""
        return self._memory_of(loan.extent)

    def returned(self, loan: Loan) -> None:
        """Do nothing."""

    def namespaces(self) -> Sequence[Namespace]:
        """Return none."""
        return ()
