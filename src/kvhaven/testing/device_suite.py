# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of devices: bytes, order, neighbours, checksums, refusals.

A test module imports everything from here and defines the fixtures `device` (an open `Device`)
and `torch_type` (what torch calls it, such as `cuda`):

    from kvhaven.testing.device_suite import *
"""

import ctypes
import mmap
import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import xxhash

from kvhaven.devices.base import SKIP, CopyJob, Device
from kvhaven.devices.selftest import self_test
from kvhaven.errors import IncompatibleEngineError, LayoutError
from kvhaven.layouts import PagedLayout, PageRun, describe_kv_caches

WAIT_S = 30.0
# Blocks, heads, tokens, content; layers; how they lie: one allocation with the layers outside or
# inside, an allocation a layer, or pages of unlike sizes.
SHAPES = {
    "outside": (32, 2, 4, 16),
    "inside": (32, 2, 4, 16),
    "apart": (32, 1, 8, 24),
    "unlike": (32, 2, 4, 16),
    "large": (24, 2, 128, 128),
}
LAYERS = 3
ARENA_BYTES = 8 * 2**20


class Arena:
    """Host memory as the service provides it: a mapped memfd of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("test")
        os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._exported = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._exported)
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back."""
        del self._exported, self.tensor
        self.bytes.release()
        os.close(self._file)


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    arena = Arena(ARENA_BYTES)
    device.register_host(arena.address, ARENA_BYTES)
    yield arena
    device.unregister_host(arena.address, ARENA_BYTES)
    arena.close()


@pytest.fixture(params=list(SHAPES))
def layout(request: pytest.FixtureRequest, device: Device, torch_type: str) -> PagedLayout:
    return layout_of(request.param, device, torch_type)


def layout_of(kind: str, device: Device, where: str) -> PagedLayout:
    """Make KV tensors of random bytes on a torch device; return how they lie."""
    shape = SHAPES[kind]
    random_bytes = torch.Generator().manual_seed(1)

    def filled(*sizes: int) -> torch.Tensor:
        values = torch.randint(0, 2**15, sizes, dtype=torch.int16, generator=random_bytes)
        return values.to(where).view(torch.bfloat16)

    if kind == "inside":
        raw = filled(shape[0], LAYERS, *shape[1:])
        tensors = {f"l{index}": raw[:, index] for index in range(LAYERS)}
    elif kind == "apart":
        tensors = {f"l{index}": filled(*shape) for index in range(LAYERS)}
    elif kind == "unlike":
        tensors = {f"l{index}": filled(shape[0], 1 + index, *shape[2:]) for index in range(LAYERS)}
    else:
        raw = filled(LAYERS, *shape)
        tensors = {f"l{index}": raw[index] for index in range(LAYERS)}
    return describe_kv_caches(
        tensors,
        layer_specs={
            name: (tensor[0].numel() * tensor.element_size(), shape[2])
            for name, tensor in tensors.items()
        },
        num_blocks=shape[0],
        kernel_tag=device.kernel_tag,
    )


def contents(layout: PagedLayout) -> list[torch.Tensor]:
    """All KV as bytes, `[block, page]` a layer, by torch alone and on the host."""
    return [
        tensor.cpu().contiguous().view(torch.uint8).reshape(layout.num_blocks, -1)
        for tensor in layout.tensors
    ]


def reference_payload(kv: list[torch.Tensor], blocks: list[int]) -> torch.Tensor:
    """`[layer][block][page]`, by torch alone."""
    return torch.cat([pages[block] for pages in kv for block in blocks])


def ended(job: CopyJob) -> CopyJob:
    assert job.wait(WAIT_S)
    assert job.done()
    assert job.error == ""
    return job


def random_chunks(layout: PagedLayout, seed: int) -> list[list[int]]:
    """Chunks of 4 blocks at most, some blocks following each other, none used twice."""
    rng = random.Random(seed)
    ids = list(range(layout.num_blocks))
    pieces = [ids[start : start + 2] for start in range(0, len(ids), 2)]
    rng.shuffle(pieces)
    mixed = [block for piece in pieces for block in piece]
    return [mixed[start : start + rng.randint(1, 4)] for start in range(0, len(ids) - 4, 4)]


def places(layout: PagedLayout, chunks: list[list[int]], arena: Arena) -> list[int]:
    """An address for each chunk, with a gap of 100 bytes before it."""
    found, end = [], arena.address
    for chunk in chunks:
        found.append(end + 100)
        end += 100 + layout.payload_bytes(len(chunk))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_stores_bring_the_pages_in_order_and_their_checksums(
    device: Device, layout: PagedLayout, arena: Arena, seed: int
) -> None:
    chunks = random_chunks(layout, seed)
    targets = places(layout, chunks, arena)
    arena.tensor.fill_(0xAA)
    before = contents(layout)

    job = ended(device.store(layout, chunks, targets))

    expected = torch.full_like(arena.tensor, 0xAA)
    for chunk, target in zip(chunks, targets, strict=True):
        payload = reference_payload(before, chunk)
        start = target - arena.address
        expected[start : start + len(payload)] = payload
    assert torch.equal(arena.tensor, expected), "payloads, and the gaps between them"
    assert list(job.checksums) == [
        xxhash.xxh3_128_digest(reference_payload(before, chunk).numpy().tobytes())
        for chunk in chunks
    ]
    for pages, now in zip(before, contents(layout), strict=True):
        assert torch.equal(pages, now), "a store changes no KV"


@pytest.mark.parametrize("seed", range(3))
def test_loads_bring_the_pages_back_and_touch_no_other(
    device: Device, layout: PagedLayout, arena: Arena, seed: int
) -> None:
    chunks = random_chunks(layout, seed)
    sources = places(layout, chunks, arena)
    rng = random.Random(seed)
    skipped = [[SKIP if rng.random() < 0.3 else block for block in chunk] for chunk in chunks]
    arena.tensor.copy_(
        torch.randint(
            0, 256, arena.tensor.shape, dtype=torch.uint8, generator=torch.manual_seed(seed)
        )
    )
    held = arena.tensor.clone()
    expected = contents(layout)

    for chunk, source in zip(skipped, sources, strict=True):
        at = source - arena.address
        for pages in expected:
            for block in chunk:
                if block != SKIP:
                    pages[block] = held[at : at + pages.shape[1]]
                at += pages.shape[1]

    job = ended(device.load(layout, skipped, sources))

    for layer, (pages, now) in enumerate(zip(expected, contents(layout), strict=True)):
        assert torch.equal(pages, now), f"layer {layer}"
    assert list(job.checksums) == []
    assert torch.equal(arena.tensor, held), "a load changes no host memory"


def test_a_store_and_a_load_into_other_blocks_move_a_chunk(
    device: Device, layout: PagedLayout, arena: Arena
) -> None:
    origin, target = [3, 4, 5, 9], [20, 11, 12, 13]
    before = contents(layout)
    ended(device.store(layout, [origin], [arena.address]))
    ended(device.load(layout, [target], [arena.address]))
    after = contents(layout)
    for pages, now in zip(before, after, strict=True):
        assert torch.equal(pages[origin], now[target])


def test_any_blocks_of_a_chunk_may_be_skipped(
    device: Device, layout: PagedLayout, arena: Arena
) -> None:
    ended(device.store(layout, [[0, 1, 2, 3]], [arena.address]))
    before = contents(layout)
    blocks = [[SKIP, SKIP, 7, 6], [SKIP] * 4, [10, SKIP, 11, SKIP]]
    ended(device.load(layout, blocks, [arena.address] * 3))
    for pages, now in zip(before, contents(layout), strict=True):
        assert torch.equal(now[[7, 6, 10, 11]], pages[[2, 3, 0, 2]])
        others = [block for block in range(layout.num_blocks) if block not in {6, 7, 10, 11}]
        assert torch.equal(now[others], pages[others])


def test_no_chunks_are_a_copy_that_ends(device: Device, layout: PagedLayout) -> None:
    assert list(ended(device.store(layout, [], [])).checksums) == []
    ended(device.load(layout, [], []))


def test_compute_loads_and_stores_are_ordered_as_promised(
    device: Device, layout: PagedLayout, arena: Arena
) -> None:
    """Work on the current stream before and after the copies, without any waiting between."""
    size = layout.payload_bytes(2)
    for value in range(1, 20):
        for tensor in layout.tensors:
            tensor[[4, 5]] = value
        stored = device.store(layout, [[4, 5]], [arena.address])
        device.fence([stored])
        for tensor in layout.tensors:
            tensor[[4, 5]] = -value
        ended(stored)
        loaded = device.load(layout, [[4, 5]], [arena.address])
        device.forward_waits(loaded)
        copies = [tensor[[4, 5]].clone() for tensor in layout.tensors]
        ended(loaded)
        device.synchronize()
        for copy in copies:
            assert bool((copy == value).all())
        assert stored.checksums[0] == xxhash.xxh3_128_digest(arena.bytes[:size])


@pytest.mark.parametrize(
    ("blocks", "addresses", "message"),
    [
        ([[0, 10_000]], [0], "block 10000 is not one of the engine's"),
        ([[0, -2]], [0], "block -2 is not one of the engine's"),
        ([[0], [1]], [0], "2 chunks, but 1 host addresses"),
        ([[]], [0], "without blocks"),
    ],
)
def test_copies_that_cannot_be_are_refused_before_anything_is_copied(
    device: Device,
    layout: PagedLayout,
    blocks: list[list[int]],
    addresses: list[int],
    message: str,
) -> None:
    for copy in (device.store, device.load):
        with pytest.raises(LayoutError, match=message):
            copy(layout, blocks, addresses)
        with pytest.raises(LayoutError, match=f"block {layout.num_blocks} is not"):
            copy(layout, [[0], [layout.num_blocks]], [0, 0])


def test_a_store_skips_nothing(device: Device, layout: PagedLayout, arena: Arena) -> None:
    with pytest.raises(LayoutError, match="block -1"):
        device.store(layout, [[0, SKIP]], [arena.address])


def test_the_device_says_what_it_is(device: Device) -> None:
    assert device.count() >= 1
    assert 0 <= device.current() < device.count()
    device.set_current(device.current())
    free, total = device.memory()
    assert 0 < free <= total
    with pytest.raises(IncompatibleEngineError, match=r"no .* device 999"):
        device.set_current(999)


def test_the_self_test_passes_and_leaves_all_as_it_was(
    device: Device, layout: PagedLayout, arena: Arena
) -> None:
    before = contents(layout)
    self_test(device, layout, arena.bytes)
    for pages, now in zip(before, contents(layout), strict=True):
        assert torch.equal(pages, now)


def test_the_self_test_names_a_layout_that_is_wrong(
    device: Device, arena: Arena, torch_type: str
) -> None:
    right = layout_of("outside", device, torch_type)
    one, two, three = right.layers

    def shifted(run: PageRun) -> PageRun:
        return replace(run, pointer=run.pointer + 32 * run.page_bytes // 8)

    wrongs = [
        ("l0", (replace(one, pointer=one.pointer + 64), two, three)),
        ("l1", (one, shifted(two), three)),
        ("l1", (two, one, three)),
    ]
    before = contents(right)
    for layer, layers in wrongs:
        with pytest.raises(LayoutError, match=rf"block 16 of {layer} was not stored.*byte 0 of"):
            self_test(device, replace(right, layers=layers), arena.bytes)
        for pages, now in zip(before, contents(right), strict=True):
            assert torch.equal(pages, now)


def test_the_self_test_needs_room(device: Device, layout: PagedLayout) -> None:
    with pytest.raises(LayoutError, match="bytes of scratch, got 10"):
        self_test(device, layout, memoryview(bytearray(10)))
