# SPDX-License-Identifier: Apache-2.0
"""Which rank of an engine holds which shards, and whether that makes whole chunks."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvhaven.errors import KVHavenError
from kvhaven.types import Shard, ShardId, ShardTable

_MOST: Final = 1 << 12
"""Shards of a chunk: each is a file, and a bit wherever it is counted."""


class Holdings(NamedTuple):
    """The shards of a complete session; the two last are by rank."""

    table: ShardTable
    bitmaps: tuple[int, ...]
    """The shards that a rank holds, as bits of the table."""
    offsets: tuple[int, ...]
    """Where the first of them starts in an extent, in bytes."""


def require_shards(rank: int, shards: Sequence[Shard]) -> None:
    """Raise `KVHavenError` unless these can be one rank's shards."""
    if not shards:
        raise KVHavenError(f"rank {rank} holds no shards; it must hold one at least")
    for shard in shards:
        if shard.payload_bytes <= 0:
            raise KVHavenError(
                f"rank {rank} holds {shard.payload_bytes} bytes of shard {shard.id}; "
                "that must be more than none"
            )
        if not all(0 <= first < end for first, end in (shard.id.layers, shard.id.heads)):
            raise KVHavenError(
                f"rank {rank} holds {shard.id}; its layers and heads must be ranges that begin "
                "at 0 or later and are not empty"
            )
    ids = [shard.id for shard in shards]
    if ids != sorted(set(ids)):
        raise KVHavenError(
            f"rank {rank} holds {', '.join(map(str, ids))}; they must be in ascending order, "
            "each once"
        )


def united(held: Mapping[int, Sequence[Shard]], *, shared: bool) -> ShardTable:
    """Return the table of all shards of these ranks, in the order of their ids.

    `held` are valid (`require_shards`) shards by rank, perhaps not of all ranks yet; `shared`
    says whether ranks may hold the same ones. Raises `KVHavenError` when there are too many, when
    sizes of a shard disagree, when shards overlap without being equal, when two ranks hold some
    shards together and others not, or when a rank's shards do not follow each other in the table.
    """
    holders: dict[ShardId, tuple[int, Shard]] = {}
    for rank, shards in held.items():
        for shard in shards:
            other, same = holders.setdefault(shard.id, (rank, shard))
            if other != rank:
                _require_same(shard, rank, shards, same, other, held[other], shared=shared)
    if len(holders) > _MOST:
        raise KVHavenError(f"the ranks hold {len(holders)} shards; a chunk has {_MOST} at most")
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
                "them and is another rank's; a rank's shards must follow each other"
            )
    return ShardTable(tuple(holders[id_][1] for id_ in ids))


def holdings(held: Mapping[int, Sequence[Shard]], table: ShardTable) -> Holdings:
    """Return what ranks 0, 1, ... hold of the table that `united` made of all of them."""
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
    """Refuse that two ranks hold a shard unless they may, and hold all of theirs together."""
    if not shared:
        raise KVHavenError(
            f"ranks {other} and {rank} both hold {shard.id}, and do not say that their bytes are "
            "equal; give replicas their replica number, or attach all ranks with `shared`"
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
    """Refuse ranges that overlap and are not equal; `ids` are sorted, so neighbours tell."""
    for one, two in pairwise(ids):
        if one.group != two.group:
            continue
        if one.layers != two.layers:
            apart = one.layers[1] <= two.layers[0]
        else:
            apart = one.heads == two.heads or one.heads[1] <= two.heads[0]
        if not apart:
            raise KVHavenError(
                f"shards {one} and {two} overlap in part; layers and heads must be the same "
                "ranges or ranges apart, on all ranks"
            )
