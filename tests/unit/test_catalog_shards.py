# SPDX-License-Identifier: Apache-2.0
"""Which shards ranks may hold, and the table that comes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.catalog.shards import holdings, require_shards, united
from kvhaven.errors import KVHavenError
from kvhaven.types import Shard, ShardId

SIZE = 5000


def shard(
    heads: tuple[int, int], layers: tuple[int, int] = (0, 4), *, group: int = 0, replica: int = 0
) -> Shard:
    return Shard(ShardId(group, layers, heads, replica), SIZE)


def heads(first: int, end: int, group: int = 0) -> tuple[Shard, ...]:
    return tuple(shard((head, head + 1), group=group) for head in range(first, end))


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ((), "holds no shards"),
        ((Shard(ShardId(0, (0, 1), (0, 1)), 0),), "holds 0 bytes .* expected more than 0"),
        ((shard((1, 1)),), "holds .* non-empty ranges that begin at 0 or later"),
        ((shard((-1, 1)),), "ranges that begin at 0"),
        ((shard((0, 1), (3, 2)),), "ranges that begin at 0"),
        ((*heads(1, 2), *heads(0, 1)), "ascending order"),
        (heads(0, 1) * 2, "without repetition"),
    ],
)
def test_impossible_shards_are_refused(shards: tuple[Shard, ...], reason: str) -> None:
    with pytest.raises(KVHavenError, match=f"rank 7 .*{reason}"):
        require_shards(7, shards)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_the_table_does_not_depend_on_how_the_heads_are_divided(
    world_size: int, count: int, stages: int
) -> None:
    """Tensor parallel over the heads, pipeline parallel over the layers; more ranks than heads."""
    held = {}
    for stage in range(stages):
        layers = (stage * 4, stage * 4 + 4)
        for rank in range(world_size):
            first = rank * count // world_size
            end = max((rank + 1) * count // world_size, first + 1)
            own = tuple(shard((head, head + 1), layers) for head in range(first, end))
            held[stage * world_size + rank] = own
    table = united(held, shared=world_size > count)
    assert [str(s.id) for s in table.shards] == [
        f"g0-l{stage * 4}.{stage * 4 + 4}-h{head}.{head + 1}-r0"
        for stage in range(stages)
        for head in range(count)
    ]
    found = holdings(held, table)
    assert found.table == table
    for rank, shards in held.items():
        bits = [bit for bit, each in enumerate(table.shards) if found.bitmaps[rank] >> bit & 1]
        assert [table.shards[bit] for bit in bits] == list(shards)
        assert found.offsets[rank] == table.offsets[bits[0]] == bits[0] * 8192


def test_replicas_are_shards_of_their_own() -> None:
    held = {rank: (shard((0, 1), replica=rank),) for rank in range(3)}
    found = holdings(held, united(held, shared=False))
    assert (found.bitmaps, found.offsets) == ((1, 2, 4), (0, 8192, 16384))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ((shard((0, 2)),), (shard((1, 3)),), "overlap in part"),
        ((shard((0, 4)),), (shard((1, 2)),), "overlap in part"),
        ((shard((0, 2)),), (shard((0, 1)),), "overlap in part"),
        ((shard((0, 1), (0, 4)),), (shard((1, 2), (3, 8)),), "overlap in part"),
        ((shard((0, 2)),), (shard((1, 3), replica=1),), "overlap in part"),
        (heads(0, 2), heads(1, 3), "not all of their shards together"),
        (heads(0, 2), heads(0, 1), "not all of their shards together"),
        ((*heads(0, 1), *heads(2, 3)), heads(1, 2), "h1.2-r0 lies between them"),
        (heads(0, 1), (Shard(heads(0, 1)[0].id, 1),), "has 1 bytes on rank 1, 5000 on rank 0"),
    ],
)
def test_ranks_whose_shards_do_not_fit_together_are_refused(
    first: tuple[Shard, ...], second: tuple[Shard, ...], reason: str
) -> None:
    with pytest.raises(KVHavenError, match=reason):
        united({0: first, 1: second}, shared=True)


def test_equal_shards_are_refused_unless_they_are_said_to_be_equal() -> None:
    held = {0: heads(0, 2), 1: heads(0, 2)}
    with pytest.raises(KVHavenError, match=r"ranks 0 and 1 both hold g0-l0\.4-h0\.1-r0"):
        united(held, shared=False)
    assert len(united(held, shared=True).shards) == 2
    assert united({0: heads(0, 2), 1: heads(0, 2, 1)}, shared=False).extent_bytes == 4 * 8192


def test_a_chunk_of_more_shards_than_can_be_counted_is_refused() -> None:
    held = {rank: heads(1000 * rank, 1000 * (rank + 1)) for rank in range(5)}
    assert len(united({rank: held[rank] for rank in range(4)}, shared=False).shards) == 4000
    with pytest.raises(KVHavenError, match="hold 5000 shards; a chunk has at most 4096"):
        united(held, shared=False)
