# SPDX-License-Identifier: Apache-2.0
"""Basic types that several parts share: keys, shards, extents.

Structs that exist in large numbers are `gc=False`: they cannot be in a cycle, and the garbage
collector, whose runs stop the service's event loop, skips them.
"""

from typing import NewType

import msgspec

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name a chunk by everything that determines its content (see `keys`)."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes: SHA-256 of a namespace's canonical form (see `keys`)."""

TenantId = NewType("TenantId", bytes)
"""8 bytes that name a tenant by its cache salt (see `keys`); empty for requests without a salt."""

Checksum = NewType("Checksum", bytes)
"""16 bytes: xxh3-128 of a shard's payload, big-endian, as `xxhash.xxh3_128_digest` returns it."""

KEY_BYTES = 32
CHECKSUM_BYTES = 16
TENANT_BYTES = 8
NO_TENANT = TenantId(b"")
PAGE_BYTES = 4096
"""Shards start at multiples of this in the arena and in files, as direct I/O requires."""


def align_up(size: int, to: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `to` that is at least `size`."""
    return -(-size // to) * to


class ShardId(msgspec.Struct, frozen=True, order=True, gc=False):
    """Part of a chunk that one writer holds.

    `layers` and `heads` are half-open ranges `(first, end)`. `replica` numbers writers of the same
    part (KV heads that are replicated over tensor-parallel ranks).
    """

    group: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    replica: int = 0

    def __str__(self) -> str:
        """Return the form used in file names, for example `g0-l0.8-h0.2-r0`."""
        return (
            f"g{self.group}-l{self.layers[0]}.{self.layers[1]}"
            f"-h{self.heads[0]}.{self.heads[1]}-r{self.replica}"
        )


class Shard(msgspec.Struct, frozen=True, gc=False):
    """Entry of a namespace's shard table: the shard and the size of its payload in bytes."""

    id: ShardId
    payload_bytes: int


class ShardTable(msgspec.Struct, frozen=True):
    """All shards of a chunk of one namespace, in the order of their bits and offsets."""

    shards: tuple[Shard, ...]

    def __str__(self) -> str:
        """Return all shards with their sizes, for messages."""
        return ", ".join(f"{shard.id} ({shard.payload_bytes} bytes)" for shard in self.shards)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each shard in the chunk's extent; multiples of `PAGE_BYTES`."""
        offsets, end = [], 0
        for shard in self.shards:
            offsets.append(end)
            end += align_up(shard.payload_bytes)
        return tuple(offsets)

    @property
    def extent_bytes(self) -> int:
        """Size of a chunk's extent in the arena."""
        return sum(align_up(shard.payload_bytes) for shard in self.shards)

    @property
    def complete(self) -> int:
        """Bitmap with the bit of every shard set."""
        return (1 << len(self.shards)) - 1


class Extent(msgspec.Struct, frozen=True, gc=False):
    """Piece of the arena. `generation` differs each time the same piece is allocated."""

    segment: int
    offset: int
    length: int
    generation: int
