# SPDX-License-Identifier: Apache-2.0
"""Portable KV of KV groups that share memory: the same, however an engine groups the layers."""

import ctypes
import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from kvhaven.devices.base import SKIP
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.selftest import scratch_bytes, self_test
from kvhaven.errors import LayoutError
from kvhaven.integrations.vllm.portable import total_heads
from kvhaven.layouts import PortableLayout
from kvhaven.layouts.groups import layer_number
from tests.layouts import KINDS, Engine, Sizes, all_bytes, contents, engine, grouped

LAYERS, CHUNK, HEADS = 5, 128, 2
GROUPINGS = {
    "interleaved": ((0, 3), (1, 4), (2,)),
    "in order": ((0, 1), (2, 3), (4,)),
    "mixed": ((4, 1), (3,), (2, 0)),
    "one": ((0, 1, 2, 3, 4),),
    "apart": ((3,), (1,), (0,), (4,), (2,)),
}
DEVICE = CpuDevice()
SHORT = ("CPU", "LBHNC", "BLNHC", "kernel blocks", "unlike K and V", "MLA", "Gaudi")

Groups = Sequence[Sequence[int]]


class Writer:
    """One rank with all heads, whose groups have the given layers."""

    def __init__(self, kind: str, tokens: int, groups: Groups, seed: int) -> None:
        self.groups = groups
        self.per_group = CHUNK // tokens
        self.blocks = len(groups) * self.per_group + 3
        slots = max(map(len, groups))
        self.rank: Engine = engine(kind, Sizes(slots, self.blocks, tokens, HEADS, 8))
        self.layout: PortableLayout = grouped(self.rank.portable, groups)
        ids = list(range(self.blocks))
        random.Random(seed).shuffle(ids)
        self.ids = ids[: len(groups) * self.per_group]

    def of_layers(self) -> list[list[torch.Tensor]]:
        """Return each layer's KV of the chunk by torch alone, `[token, head, head_dim]` a plane."""
        found: dict[int, list[torch.Tensor]] = {}
        for group, numbers in enumerate(self.groups):
            own = self.ids[group * self.per_group :][: self.per_group]
            found |= zip(numbers, contents(self.rank.caches, own), strict=False)
        return [found[number] for number in range(LAYERS)]

    def reference(self) -> list[bytes]:
        """Return the payload of each head."""
        layers = self.of_layers()
        heads = range(layers[0][0].shape[1])
        return [
            b"".join(
                plane[:, head].contiguous().view(torch.uint8).numpy().tobytes()
                for planes in layers
                for plane in planes
            )
            for head in heads
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_does_not_depend_on_the_groups(kind: str) -> None:
    for (name, groups), tokens in itertools.product(GROUPINGS.items(), (16, 64)):
        writer = Writer(kind, tokens, groups, tokens)
        layout, expected = writer.layout, writer.reference()
        assert layout.shards == len(expected)
        size = layout.payload_bytes(len(writer.ids))
        memory = ctypes.create_string_buffer(size)
        job = DEVICE.store(layout, [writer.ids], [ctypes.addressof(memory)])
        stride = layout.shard_stride(len(writer.ids))
        for head, payload in enumerate(expected):
            assert memory.raw[head * stride :][: len(payload)] == payload, (name, tokens, head)
        assert layout.shard_bytes(len(writer.ids)) == len(expected[0])
        assert list(job.checksums) == [xxhash.xxh3_128_digest(one) for one in expected]


@pytest.mark.parametrize("read", GROUPINGS)
@pytest.mark.parametrize("written", GROUPINGS)
def test_what_one_engine_writes_another_with_other_groups_reads(written: str, read: str) -> None:
    for kind, (one, other) in itertools.product(SHORT, ((16, 64), (32, 32), (64, 16))):
        writer = Writer(kind, one, GROUPINGS[written], 1)
        reader = Writer(kind, other, GROUPINGS[read], 2)
        memory = ctypes.create_string_buffer(writer.layout.payload_bytes(len(writer.ids)))
        place = ctypes.addressof(memory)
        DEVICE.store(writer.layout, [writer.ids], [place])
        before = contents(reader.rank.caches, range(reader.blocks))
        # The first block of a group is not written, as if the engine had it.
        kept = [SKIP if at % reader.per_group == 0 else id_ for at, id_ in enumerate(reader.ids)]
        DEVICE.load(reader.layout, [kept], [place])
        for number, (wanted_p, now_p) in enumerate(
            zip(writer.of_layers(), reader.of_layers(), strict=True)
        ):
            for wanted, now in zip(wanted_p, now_p, strict=True):
                assert torch.equal(wanted[other:], now[other:]), (kind, number)
        after = contents(reader.rank.caches, range(reader.blocks))
        rest = [
            block * other + at
            for block in set(range(reader.blocks)) - set(kept)
            for at in range(other)
        ]
        for was, now in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
            assert torch.equal(was[rest], now[rest])


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_test_covers_all_groups(kind: str) -> None:
    for groups in GROUPINGS.values():
        writer = Writer(kind, 32, groups, 0)
        before = all_bytes(writer.rank.caches)
        self_test(DEVICE, writer.layout, memoryview(bytearray(scratch_bytes(writer.layout))))
        for was, now in zip(before, all_bytes(writer.rank.caches), strict=True):
            assert torch.equal(was, now)


def test_unequal_numbers_of_blocks_are_refused() -> None:
    layout = Writer("LBHNC", 32, GROUPINGS["mixed"], 0).layout
    memory = ctypes.create_string_buffer(layout.payload_bytes(6))
    with pytest.raises(LayoutError, match=r"4.* blocks, for 3 KV groups; expected equally many"):
        DEVICE.store(layout, [[1, 2, 3, 4]], [ctypes.addressof(memory)])
    with pytest.raises(LayoutError, match="3 KV groups are not copied in equal pieces"):
        _ = layout.pieces


def test_the_number_of_a_layer_is_in_its_name() -> None:
    assert layer_number("model.layers.12.self_attn.attn") == 12
    for name in ("attn", "model.layers.1.experts.2"):
        with pytest.raises(LayoutError, match=r"needs the order of the layers.*format: paged"):
            layer_number(name)
    with pytest.raises(LayoutError, match="several have the same number"):
        grouped(engine("LBHNC").portable, ((1, 2), (2, 3)))


def config_of(ranks: int, heads: int, **entries: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads} | entries)
    model = SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: heads, hf_text_config=text
    )
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    return SimpleNamespace(model_config=model, parallel_config=parallel)


def test_heads_that_several_ranks_share_must_be_those_of_all_layers() -> None:
    """A rank with one head does not show whether its layer has more heads than others."""
    assert total_heads(config_of(8, 4)) == 4
    assert total_heads(config_of(4, 4, swa_num_key_value_heads=8)) == 4
    per_layer = ({"kv_heads": [4, 8]}, {"block_configs": [{"attention": {"n_heads_in_group": 8}}]})
    others = ({"swa_num_key_value_heads": 8}, {"other": {"num_attention_groups": 8}})
    for entries in (*others, *per_layer):
        with pytest.raises(LayoutError, match=r"8 ranks share 4 KV heads .*have 8.*format: paged"):
            total_heads(config_of(8, 4, **entries))
