# SPDX-License-Identifier: Apache-2.0
"""Every layout on every device, and portable KV from any of them to any other.

A chunk is written by the ranks of one engine and read by those of another, of any device, layout,
block size and tensor-parallel degree. `KVHAVEN_SEED` replays a pair.
"""

import ctypes
import itertools
import os
import random
from typing import Final

import pytest
import torch

from kvhaven.devices.base import SKIP
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.plan import bytes_at
from kvhaven.devices.selftest import scratch_bytes, self_test
from kvhaven.layouts import Layout, PortableLayout, head_shards
from tests.devices import SIMULATED, WORDS, Opened, opened
from tests.layouts import (
    KINDS,
    Engine,
    Registered,
    Sizes,
    contents,
    described,
    engine,
    grouped,
    reference_shards,
)

BLOCKS: Final = [3, 1, 2]
HEADS: Final = 4
CHUNK: Final = 256
GROUPS: Final = ((4, 1), (0, 3), (2,))
"""The layers of KV groups by their numbers in the model."""
PAIRS: Final = 3
"""Random pairs of engines for each pair of devices."""


class OnDevice:
    """The KV tensors of an engine on a device, and their twins on the host."""

    def __init__(self, host: Engine, found: Opened) -> None:
        self.host = host
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        registered = [self._moved(layer, found) for layer in host.caches.registered]
        paged, portable = described(host.kind, host.sizes, host.caches, registered)
        self.layouts: dict[str, Layout] = {"paged": paged, "portable": portable}

    def pull(self) -> None:
        """Copy everything on the device to the twins on the host."""
        for host, device in self._twins.values():
            host.copy_(device.cpu())

    def _moved(self, registered: Registered, found: Opened) -> Registered:
        if not isinstance(registered, torch.Tensor):
            first, second = (self._moved_tensor(tensor, found) for tensor in registered)
            return first, second
        return self._moved_tensor(registered, found)

    def _moved_tensor(self, tensor: torch.Tensor, found: Opened) -> torch.Tensor:
        """Return the same view of the same bytes on the device."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._twins:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._twins[storage.data_ptr()] = flat, found.tensor(flat)
        _, device = self._twins[storage.data_ptr()]
        return device.view(tensor.dtype).as_strided(
            tensor.shape, tensor.stride(), tensor.storage_offset()
        )


@pytest.mark.parametrize("kv_format", ["paged", "portable"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("word", [word for word in WORDS if not word.startswith("cpu")])
def test_a_device_copies_as_the_cpu_does(word: str, kind: str, kv_format: str) -> None:
    rank = engine(kind, Sizes(layers=2, blocks=7, tokens=16, heads=2, head_dim=8))
    reference = rank.paged if kv_format == "paged" else rank.portable
    size = reference.payload_bytes(len(BLOCKS))
    wanted, got = (ctypes.create_string_buffer(size) for _ in range(2))
    sums = CpuDevice().store(reference, [BLOCKS], [ctypes.addressof(wanted)]).checksums
    with opened(word, seed=len(kind)) as found:
        there = OnDevice(rank, found)
        layout = there.layouts[kv_format]
        job = found.device.store(layout, [BLOCKS], [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        assert list(job.checksums) == list(sums)
        assert got.raw == wanted.raw
        before = contents(rank.caches, range(7))
        job = found.device.load(layout, [[5, 0, 6]], [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        there.pull()
    moved = {5: 3, 0: 1, 6: 2}
    tokens = rank.sizes.tokens
    for was, now in zip(
        itertools.chain(*before), itertools.chain(*contents(rank.caches, range(7))), strict=True
    ):
        for block in range(7):
            origin = moved.get(block, block)
            expected = was[origin * tokens : (origin + 1) * tokens]
            assert torch.equal(now[block * tokens : (block + 1) * tokens], expected)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("word", [word for word in WORDS if not word.startswith("cpu")])
def test_a_device_copies_groups_that_share_memory_as_the_cpu_does(word: str, kind: str) -> None:
    """Three groups of 5 layers; the last one has no layer in the second tensor."""
    rank = engine(kind, Sizes(layers=2, blocks=9, tokens=16, heads=2, head_dim=8))
    reference = grouped(rank.portable, GROUPS)
    chunks, targets = [[3, 1, 7, 2, 0, 5]], [[8, SKIP, 4, 6, 1, 3]]
    size = reference.payload_bytes(6)
    wanted, got = (ctypes.create_string_buffer(size) for _ in range(2))
    sums = CpuDevice().store(reference, chunks, [ctypes.addressof(wanted)]).checksums
    with opened(word, seed=len(kind)) as found:
        there = OnDevice(rank, found)
        portable = there.layouts["portable"]
        assert isinstance(portable, PortableLayout)
        layout = grouped(portable, GROUPS)
        job = found.device.store(layout, chunks, [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        assert list(job.checksums) == list(sums)
        assert got.raw == wanted.raw
        before = contents(rank.caches, range(9))
        job = found.device.load(layout, targets, [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        there.pull()
        self_test(found.device, layout, memoryview(bytearray(scratch_bytes(layout))))
    after = contents(rank.caches, range(9))
    for slot, (was_p, now_p) in enumerate(zip(before, after, strict=True)):
        moved = {8: 3, 4: 7, 6: 2, 1: 0, 3: 5}
        written_nowhere = {1, 3} if slot else set()  # the last group's, in the second tensor
        for was, now in zip(was_p, now_p, strict=True):
            for block in set(range(9)) - written_nowhere:
                origin = moved.get(block, block)
                expected = was[origin * 16 : (origin + 1) * 16]
                assert torch.equal(now[block * 16 : (block + 1) * 16], expected), block


@pytest.mark.parametrize("kv_format", ["paged", "portable"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("word", WORDS)
def test_a_device_copies_tails_as_the_cpu_does(word: str, kind: str, kv_format: str) -> None:
    """A tail of 37 tokens in 3 blocks of 16; its last block may get anything behind the tail."""
    tail, chunk = 37, 64
    rank = engine(kind, Sizes(layers=2, blocks=7, tokens=16, heads=2, head_dim=8))
    whole = rank.paged if kv_format == "paged" else rank.portable
    reference = whole.of_tail(tail, chunk)
    wanted, got = (ctypes.create_string_buffer(whole.payload_bytes(chunk // 16)) for _ in range(2))
    sums = CpuDevice().store(reference, [BLOCKS], [ctypes.addressof(wanted)]).checksums
    with opened(word, seed=len(kind)) as found:
        there = OnDevice(rank, found)
        layout = there.layouts[kv_format].of_tail(tail, chunk)
        job = found.device.store(layout, [BLOCKS], [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        assert list(job.checksums) == list(sums)
        assert got.raw == wanted.raw, "bytes outside of the tail were written"
        before = contents(rank.caches, range(7))
        job = found.device.load(layout, [[SKIP, 0, 6]], [ctypes.addressof(got)])
        assert job.wait(120)
        assert job.error == ""
        there.pull()
    after = contents(rank.caches, range(7))
    for was, now in zip(itertools.chain(*before), itertools.chain(*after), strict=True):
        moved = was.clone()
        moved[:16] = was[16:32]  # block 0 is the tail's second, which came from block 1
        moved[6 * 16 : 6 * 16 + 5] = was[2 * 16 : 2 * 16 + 5]
        moved[6 * 16 + 5 :], now[6 * 16 + 5 :] = 0, 0
        assert torch.equal(now, moved)


class Split:
    """An engine of some ranks on one device, with a chunk or a tail in each rank's KV."""

    def __init__(
        self, word: str, kind: str, tokens: int, ranks: int, tail: int, dice: random.Random
    ) -> None:
        self.tail = tail
        self.word, self.kind, self.tokens, self.ranks = word, kind, tokens, ranks
        self.heads = [
            [shard.heads[0] for shard in head_shards(HEADS, ranks, rank, group=0, layers=(0, 2))]
            for rank in range(ranks)
        ]
        blocks = CHUNK // tokens + 2
        self.engines = [
            engine(kind, Sizes(2, blocks, tokens, len(heads), 8)) for heads in self.heads
        ]
        self.blocks = dice.sample(range(blocks), -(-(tail or CHUNK) // tokens))

    def copy(self, memory: int, seed: int, *, store: bool) -> None:
        """Let every rank store its heads to the chunk's memory, or load them from there."""
        with opened(self.word, seed) as found:
            ranks = [OnDevice(rank, found) for rank in self.engines]
            for heads, rank in zip(self.heads, ranks, strict=True):
                layout = rank.layouts["portable"]
                if self.tail:
                    layout = layout.of_tail(self.tail, CHUNK)
                place = memory + heads[0] * layout.shard_stride(len(self.blocks))
                copy = found.device.store if store else found.device.load
                job = copy(layout, [self.blocks], [place])
                assert job.wait(120)
                assert job.error == ""
            for rank in ranks:
                rank.pull()

    def shards(self) -> dict[int, torch.Tensor]:
        """Return each head's canonical shard, by torch alone; the last rank that holds it says."""
        return {
            head: shard
            for heads, rank in zip(self.heads, self.engines, strict=True)
            for head, shard in zip(heads, self.shards_of(rank), strict=True)
        }

    def shards_of(self, rank: Engine) -> list[torch.Tensor]:
        """Return the canonical shards of a rank, by torch alone."""
        return reference_shards(rank.caches, self.blocks, self.tail or CHUNK)

    def __repr__(self) -> str:
        what = f"a tail of {self.tail}" if self.tail else "a chunk"
        return f"{self.ranks} ranks on {self.word}, {self.kind}, blocks of {self.tokens}, {what}"


def random_split(word: str, tail: int, dice: random.Random) -> Split:
    """Return an engine of any layout with K and V alike, block size and degree."""
    alike = [name for name, kind in KINDS.items() if not kind.latent and name != "unlike K and V"]
    return Split(
        word,
        dice.choice(alike),
        dice.choice((16, 32, 64, 128, 256)),
        dice.choice((1, 2, 4, 8)),
        tail,
        dice,
    )


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product(["cpu", *SIMULATED], repeat=2))
)
def test_any_engine_reads_what_any_other_wrote(source: str, target: str) -> None:
    replay = os.environ.get("KVHAVEN_SEED")
    for seed in [int(replay)] if replay else range(PAIRS):
        dice = random.Random(f"{source} {target} {seed}")
        tail = dice.choice((0, dice.randrange(1, CHUNK)))
        writer, reader = random_split(source, tail, dice), random_split(target, tail, dice)
        one = writer.engines[0].portable.shard_stride(CHUNK // writer.tokens)
        memory = ctypes.create_string_buffer(HEADS * one + 4096)
        base = -(-ctypes.addressof(memory) // 4096) * 4096
        writer.copy(base, seed, store=True)
        wanted = writer.shards()
        for head, shard in wanted.items():
            stored = torch.from_numpy(bytes_at(base + head * one, len(shard)))
            assert torch.equal(stored, shard), f"KVHAVEN_SEED={seed}: head {head} by {writer}"
        reader.copy(base, seed, store=False)
        for rank_heads, rank in zip(reader.heads, reader.engines, strict=True):
            found = reader.shards_of(rank)
            for head, shard in zip(rank_heads, found, strict=True):
                assert torch.equal(shard, wanted[head]), (
                    f"KVHAVEN_SEED={seed}: head {head}, written by {writer}, read by {reader}"
                )
