# SPDX-License-Identifier: Apache-2.0
"""Validation of the shards that ranks hold, and their union, the shard table."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvhaven.errors import KVHavenError
from kvhaven.types import Shard, ShardId, ShardTable

_MOST: Final = 1 << 12
"""Most shards of a chunk: each is a file in a tier, and a bit in every bitmap."""


class Holdings(NamedTuple):
    """The shards of a complete session; `bitmaps` and `offsets` are by rank."""

    table: ShardTable
    bitmaps: tuple[int, ...]
    """The shards of a rank, as bits of the table."""
    offsets: tuple[int, ...]
    """Byte offset of the rank's first shard in an extent."""


def require_shards(rank: int, shards: Sequence[Shard]) -> None:
    """Raise `KVHavenError` unless these shards are valid for one rank."""
    if not shards:
        raise KVHavenError(f"rank {rank} holds no shards; it must hold at least one")
    for shard in shards:
        if shard.payload_bytes <= 0:
            raise KVHavenError(
                f"rank {rank} holds {shard.payload_bytes} bytes of shard {shard.id}; "
                "expected more than 0"
            )
        if not all(0 <= first < end for first, end in (shard.id.layers, shard.id.heads)):
            raise KVHavenError(
                f"rank {rank} holds {shard.id}; its layers and heads must be non-empty ranges "
                "that begin at 0 or later"
            )
    ids = [shard.id for shard in shards]
    if ids != sorted(set(ids)):
        raise KVHavenError(
            f"rank {rank} holds {', '.join(map(str, ids))}; they must be in ascending order, "
            "without repetition"
        )


def united(held: Mapping[int, Sequence[Shard]], *, shared: bool) -> ShardTable:
    """Return the table of all shards of these ranks, in the order of their ids.

    `held` has valid shards (`require_shards`) by rank, possibly not of all ranks yet. `shared` is
    whether ranks may hold the same shards. Raises `KVHavenError` if there are too many shards, if
    ranks disagree about the size of a shard, if shards overlap without being equal, if two ranks
    have some but not all shards in common, or if a rank's shards are not consecutive in the table.
    """
    holders: dict[ShardId, tuple[int, Shard]] = {}
    for rank, shards in held.items():
        for shard in shards:
            other, same = holders.setdefault(shard.id, (rank, shard))
            if other != rank:
                _require_same(shard, rank, shards, same, other, held[other], shared=shared)
    if len(holders) > _MOST:
        raise KVHavenError(f"the ranks hold {len(holders)} shards; a chunk has at most {_MOST}")
    ids = sorted(holders)
    _refuse_overlaps(ids)
    bits = {id_: bit for bit, id_ in enumerate(ids)}
    for rank, shards in held.items():
        first, last = bits[shards[0].id], bits[shards[-1].id]
        if last - first >= len(shards):
            own = {shard.id for shard in shards}
            between = next(id_ for id_ in ids[first:last] if id_ not in own)
            raise KVHavenError(
                f"rank {rank} holds {shards[0].id} to {shards[-1].id}, but {between} lies between "
                "them and belongs to another rank; a rank's shards must be consecutive"
            )
    return ShardTable(tuple(holders[id_][1] for id_ in ids))


def holdings(held: Mapping[int, Sequence[Shard]], table: ShardTable) -> Holdings:
    """Return the shards of ranks 0, 1, ... in the `table` that `united` returned for all ranks."""
    bits = {shard.id: bit for bit, shard in enumerate(table.shards)}
    by_rank = [held[rank] for rank in range(len(held))]
    bitmaps = tuple(sum(1 << bits[shard.id] for shard in shards) for shards in by_rank)
    offsets = table.offsets
    return Holdings(table, bitmaps, tuple(offsets[bits[shards[0].id]] for shards in by_rank))


def _require_same(
    shard: Shard,
    rank: int,
    held: Sequence[Shard],
    same: Shard,
    other: int,
    others: Sequence[Shard],
    *,
    shared: bool,
) -> None:
    """Raise `KVHavenError` unless two ranks may share a shard, and share all their shards."""
    if not shared:
        raise KVHavenError(
            f"ranks {other} and {rank} both hold {shard.id}, but do not declare that their bytes "
            "are equal; give replicas their replica number, or attach all ranks with `shared`"
        )
    if shard != same:
        raise KVHavenError(
            f"shard {shard.id} has {shard.payload_bytes} bytes on rank {rank}, "
            f"{same.payload_bytes} on rank {other}"
        )
    if [each.id for each in held] != [each.id for each in others]:
        raise KVHavenError(
            f"ranks {other} and {rank} both hold {shard.id}, but not all of their shards "
            "together; two ranks hold the same shards or none in common"
        )


def _refuse_overlaps(ids: Sequence[ShardId]) -> None:
    """Raise `KVHavenError` if unequal ranges overlap. `ids` are sorted: neighbours suffice."""
    for one, two in pairwise(ids):
        if one.group != two.group:
            continue
        if one.layers != two.layers:
            apart = one.layers[1] <= two.layers[0]
        else:
            apart = one.heads == two.heads or one.heads[1] <= two.heads[0]
        if not apart:
            raise KVHavenError(
                f"shards {one} and {two} overlap in part; layers and heads must be equal or "
                "disjoint ranges on all ranks"
            )
