# SPDX-License-Identifier: Apache-2.0
"""Portable KV: written by one engine, read by another with other blocks, ranks and layout."""

import ctypes
import itertools

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhaven.devices.cpu import CpuDevice
from kvhaven.errors import LayoutError
from kvhaven.layouts import head_shards
from kvhaven.types import ShardId
from tests.layouts import KINDS, Caches, Engine, Sizes, contents, engine, reference_shards

BLOCK_SIZES = (16, 32, 64, 128, 256)
RANKS = (1, 2, 4, 8)
HEADS, CHUNK, LAYERS = 4, 256, 2
PLAIN = sorted(name for name, kind in KINDS.items() if not kind.latent and "unlike" not in name)
DEVICE = CpuDevice()

Shards = dict[ShardId, bytes]


@pytest.mark.parametrize("name", KINDS)
def test_every_writer_writes_the_reference_and_every_reader_reads_it(name: str) -> None:
    """The full sweep: with the reference between them, all pairs of writer and reader."""
    heads = 1 if KINDS[name].latent else HEADS
    for tokens, ranks in itertools.product(BLOCK_SIZES, RANKS):
        for rank, one in enumerate(engines_of(name, tokens, ranks, heads)):
            ids = shards_of(rank, ranks, heads)
            blocks = some_blocks(one, rank)
            expected = reference_shards(one.caches, blocks)
            stored = store(one, ids, blocks)
            assert list(stored) == ids
            assert list(stored.values()) == [data.numpy().tobytes() for data in expected]
            target = some_blocks(one, rank + 3)
            load(one, ids, target, stored)
            for wanted, now in zip(expected, reference_shards(one.caches, target), strict=True):
                assert torch.equal(wanted, now)


@pytest.mark.parametrize("written", BLOCK_SIZES)
@pytest.mark.parametrize("read", BLOCK_SIZES)
def test_all_pairs_of_block_sizes_and_ranks(written: int, read: int) -> None:
    for writers, readers in itertools.product(RANKS, RANKS):
        exchange(("CPU", written, writers), ("LBNHC", read, readers), HEADS)


@pytest.mark.parametrize("written", PLAIN)
@pytest.mark.parametrize("read", PLAIN)
def test_all_pairs_of_layouts(written: str, read: str) -> None:
    exchange((written, 32, 2), (read, 128, 1), HEADS)


configs = st.tuples(st.sampled_from(PLAIN), st.sampled_from(BLOCK_SIZES), st.sampled_from(RANKS))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(configs, configs, st.sampled_from((1, 2, 4, 8)), st.sampled_from((2, 4)))
def test_what_one_engine_writes_any_other_reads(
    writer: tuple[str, int, int], reader: tuple[str, int, int], heads: int, item: int
) -> None:
    exchange(writer, reader, heads, torch.float32 if item == 4 else torch.bfloat16)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(configs, configs, st.integers(1, CHUNK - 1))
def test_a_tail_is_written_and_read_to_the_token(
    writer: tuple[str, int, int], reader: tuple[str, int, int], tail: int
) -> None:
    """No byte of another token is written, in memory or in the KV, whatever the blocks."""
    stride = engines_of(*writer, HEADS)[0].portable.shard_stride(CHUNK // writer[1])
    memory = ctypes.create_string_buffer(b"\xaa" * (HEADS * stride))
    wanted: dict[ShardId, torch.Tensor] = {}
    for rank, one in enumerate(engines_of(*writer, HEADS)):
        ids = shards_of(rank, writer[2], HEADS)
        blocks = some_blocks(one, rank)[: -(-tail // writer[1])]
        if ids[0] in wanted:
            continue
        layout = one.portable.of_tail(tail, CHUNK)
        place = ctypes.addressof(memory) + ids[0].heads[0] * stride
        job = DEVICE.store(layout, [blocks], [place])
        expected = reference_shards(one.caches, blocks, tail)
        wanted |= dict(zip(ids, expected, strict=True))
        assert list(job.checksums) == [
            xxhash.xxh3_128_digest(shard.numpy().tobytes()) for shard in expected
        ]
    for shard, content in wanted.items():
        stored = memory.raw[shard.heads[0] * stride : (shard.heads[0] + 1) * stride]
        assert stored == content.numpy().tobytes().ljust(stride, b"\xaa")
        assert len(content) * CHUNK == tail * engines_of(*writer, HEADS)[0].portable.shard_bytes(
            CHUNK // writer[1]
        )
    for rank, one in enumerate(engines_of(*reader, HEADS)):
        ids = shards_of(rank, reader[2], HEADS)
        blocks = some_blocks(one, rank + 1)[: -(-tail // reader[1])]
        before = contents(one.caches, range(one.sizes.blocks))
        place = ctypes.addressof(memory) + ids[0].heads[0] * stride
        DEVICE.load(one.portable.of_tail(tail, CHUNK), [blocks], [place])
        found = reference_shards(one.caches, blocks, tail)
        assert all(torch.equal(wanted[i], f) for i, f in zip(ids, found, strict=True))
        written = {
            block * reader[1] + at
            for position, block in enumerate(blocks)
            for at in range(min(reader[1], tail - position * reader[1]))
        }
        rest = [t for t in range(one.sizes.blocks * reader[1]) if t not in written]
        after = contents(one.caches, range(one.sizes.blocks))
        for was, now in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
            assert torch.equal(was[rest], now[rest])


def test_a_tail_in_the_wrong_number_of_blocks_is_refused() -> None:
    one = engines_of("CPU", 16, 1, HEADS)[0]
    layout = one.portable.of_tail(33, CHUNK)
    memory = ctypes.create_string_buffer(layout.payload_bytes(3))
    for blocks in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(LayoutError, match=r"tail of 33 tokens in .* blocks; expected 3"):
            DEVICE.store(layout, [blocks], [ctypes.addressof(memory)])
    with pytest.raises(LayoutError, match="not copied in pieces"):
        _ = layout.pieces


@given(st.sampled_from(RANKS), st.sampled_from((1, 2, 4, 8, 16)))
def test_the_ranks_together_hold_every_head(ranks: int, heads: int) -> None:
    held = [shards_of(rank, ranks, heads) for rank in range(ranks)]
    assert sorted({shard for part in held for shard in part}) == [
        ShardId(3, (4, 8), (head, head + 1)) for head in range(heads)
    ]
    assert {len(part) for part in held} == {max(1, heads // ranks)}
    assert held == sorted(held), "neighbours share a head"


def test_heads_that_do_not_divide_are_refused() -> None:
    for heads, ranks in ((6, 4), (3, 2), (4, 6)):
        with pytest.raises(LayoutError, match=f"{heads} KV heads cannot be split evenly over"):
            head_shards(heads, ranks, 0, group=0, layers=(0, 1))
    for rank in (-1, 2):
        with pytest.raises(LayoutError, match=f"rank {rank} of 2 with 4 KV heads is invalid"):
            head_shards(4, 2, rank, group=0, layers=(0, 1))


def exchange(
    writer: tuple[str, int, int],
    reader: tuple[str, int, int],
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a chunk with all ranks of one engine, read it with all of another, compare."""
    whole = torch.randint(0, 256, (LAYERS, 2, CHUNK, heads, 8 * dtype.itemsize), dtype=torch.uint8)
    written: Shards = {}
    for rank, one in enumerate(engines_of(*writer, heads, dtype)):
        ids = shards_of(rank, writer[2], heads)
        blocks = some_blocks(one, rank)
        fill(one.caches, blocks, whole[:, :, :, ids[0].heads[0] : ids[-1].heads[1]])
        for shard, data in store(one, ids, blocks).items():
            assert written.setdefault(shard, data) == data, "replicas write the same"
    assert len(written) == heads
    for rank, one in enumerate(engines_of(*reader, heads, dtype)):
        ids = shards_of(rank, reader[2], heads)
        blocks = some_blocks(one, rank + 1)
        load(one, ids, blocks, written)
        mine = whole[:, :, :, ids[0].heads[0] : ids[-1].heads[1]]
        for layer, planes in enumerate(contents(one.caches, blocks)):
            for plane, found in enumerate(planes):
                wanted = mine[layer, plane].contiguous()
                assert torch.equal(found.contiguous().view(torch.uint8), wanted)


def engines_of(
    name: str, tokens: int, ranks: int, heads: int, dtype: torch.dtype = torch.bfloat16
) -> list[Engine]:
    per_rank = max(1, heads // ranks)
    blocks = CHUNK // tokens + 2
    return [engine(name, Sizes(LAYERS, blocks, tokens, per_rank, 8, dtype)) for _ in range(ranks)]


def shards_of(rank: int, ranks: int, heads: int) -> list[ShardId]:
    return head_shards(heads, ranks, rank, group=3, layers=(4, 8))


def some_blocks(one: Engine, seed: int) -> list[int]:
    """The blocks of a chunk, not in order."""
    order = torch.randperm(one.sizes.blocks, generator=torch.Generator().manual_seed(seed))
    return [int(block) for block in order[: CHUNK // one.sizes.tokens]]


def fill(caches: Caches, blocks: list[int], whole: torch.Tensor) -> None:
    """Write `[layer, plane, token, head, bytes]` through the views of torch alone."""
    for layer, planes in enumerate(caches.planes):
        for plane, view in enumerate(planes):
            values = whole[layer, plane].contiguous().view(view.dtype)
            parts = values.reshape(len(blocks), *view.shape[1:])
            for block, part in zip(blocks, parts, strict=True):
                view[block].copy_(part)


def store(one: Engine, ids: list[ShardId], blocks: list[int]) -> Shards:
    layout = one.portable
    host = ctypes.create_string_buffer(layout.payload_bytes(len(blocks)))
    DEVICE.store(layout, [blocks], [ctypes.addressof(host)])
    stride, size = layout.shard_stride(len(blocks)), layout.shard_bytes(len(blocks))
    assert len(ids) == layout.shards
    return {shard: host.raw[at * stride : at * stride + size] for at, shard in enumerate(ids)}


def load(one: Engine, ids: list[ShardId], blocks: list[int], shards: Shards) -> None:
    layout = one.portable
    host = ctypes.create_string_buffer(layout.payload_bytes(len(blocks)))
    for at, shard in enumerate(ids):
        start = ctypes.addressof(host) + at * layout.shard_stride(len(blocks))
        ctypes.memmove(start, shards[shard], len(shards[shard]))
    DEVICE.load(layout, [blocks], [ctypes.addressof(host)])
