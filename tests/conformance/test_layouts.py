# SPDX-License-Identifier: Apache-2.0
"""One suite for every layout, in both formats: bytes, neighbours, fingerprints, round trips."""

import ctypes
import random
from collections.abc import Sequence

import pytest
import torch
import xxhash

from kvhaven.devices import cpu_copies, native
from kvhaven.devices.base import SKIP, CopyJob
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.plan import Chunks, Moves, bytes_at, plan_chunks, plan_moves
from kvhaven.devices.selftest import self_test
from kvhaven.errors import LayoutError
from kvhaven.layouts import Layout, PagedLayout, PortableLayout, head_geometry
from tests.layouts import KINDS, Engine, Sizes, all_bytes, contents, engine, reference_shards

FORMATS = ("paged", "portable")
SIZES = {
    "bfloat16": Sizes(layers=3, blocks=9, tokens=16, heads=4, head_dim=8),
    "float32": Sizes(layers=2, blocks=7, tokens=32, heads=3, head_dim=16, dtype=torch.float32),
    "one head": Sizes(layers=2, blocks=5, tokens=16, heads=1, head_dim=8, dtype=torch.float16),
}
BLOCKS = [3, 1, 2, 4]
GAP = 0xAA


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=list(SIZES))
def rank(request: pytest.FixtureRequest, kind: str) -> Engine:
    return engine(kind, SIZES[request.param])


@pytest.fixture(params=FORMATS)
def layout(request: pytest.FixtureRequest, rank: Engine) -> Layout:
    return rank.paged if request.param == "paged" else rank.portable


@pytest.fixture(params=["hashed at once", "hashed in pieces", "without native code"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    if request.param == "hashed in pieces":
        monkeypatch.setattr(cpu_copies, "HASH_BYTES", 300)
    if request.param == "without native code":
        monkeypatch.setattr(native, "function", None)
    return CpuDevice()


class Host:
    """Host memory of a chunk, with some bytes around it."""

    def __init__(self, layout: Layout, blocks: int) -> None:
        self.size = layout.payload_bytes(blocks) + 4096
        self.buffer = ctypes.create_string_buffer(self.size + 128)
        self.address = -(-ctypes.addressof(self.buffer) // 64) * 64 + 64
        self.tensor = torch.from_numpy(bytes_at(self.address, self.size))
        self.tensor.fill_(GAP)


def reference_payload(rank: Engine, layout: Layout, blocks: list[int]) -> torch.Tensor:
    """What a store must leave in host memory, gaps between shards included, by torch alone."""
    expected = torch.full((layout.payload_bytes(len(blocks)),), GAP, dtype=torch.uint8)
    if isinstance(layout, PagedLayout):
        shards = [torch.cat([_page(view, b) for view in _runs(rank) for b in blocks])]
    else:
        shards = reference_shards(rank.caches, blocks)
    for index, shard in enumerate(shards):
        start = index * layout.shard_stride(len(blocks))
        expected[start : start + len(shard)] = shard
    return expected


def _runs(rank: Engine) -> list[torch.Tensor]:
    """The parts of the registered tensors whose pages are dense, the blocks first."""
    runs: list[torch.Tensor] = []
    for registered in rank.caches.registered:
        if not isinstance(registered, torch.Tensor) or rank.kind.form in {"2BNHD", "2BHND"}:
            runs.extend(registered)
        elif rank.kind.runs == 0 and rank.sizes.heads > 1:
            runs.extend(registered.unbind(1))
        else:
            runs.append(registered)
    return [blocks_of(run, rank) for run in runs]


def blocks_of(tensor: torch.Tensor, rank: Engine) -> torch.Tensor:
    """View kernel blocks as the engine's blocks."""
    parts = tensor.shape[0] // rank.sizes.blocks
    strides = tensor.stride()
    return tensor.as_strided(
        (rank.sizes.blocks, parts, *tensor.shape[1:]), (strides[0] * parts, *strides)
    )


def _page(run: torch.Tensor, block: int) -> torch.Tensor:
    """The bytes of a page in the order of memory."""
    start = run[block].data_ptr()
    size = run[block].numel() * run.element_size()
    return torch.from_numpy(bytes_at(start, size).copy())


def test_a_store_writes_the_reference_and_nothing_between(
    rank: Engine, layout: Layout, device: CpuDevice
) -> None:
    host = Host(layout, len(BLOCKS))
    before = all_bytes(rank.caches)
    expected = reference_payload(rank, layout, BLOCKS)
    job = device.store(layout, [BLOCKS], [host.address])
    assert torch.equal(host.tensor[: len(expected)], expected)
    assert bool((host.tensor[len(expected) :] == GAP).all())
    size, stride = layout.shard_bytes(len(BLOCKS)), layout.shard_stride(len(BLOCKS))
    assert list(job.checksums) == [
        xxhash.xxh3_128_digest(expected[at * stride : at * stride + size].numpy().tobytes())
        for at in range(layout.shards)
    ]
    for was, now in zip(before, all_bytes(rank.caches), strict=True):
        assert torch.equal(was, now), "a store changes no KV"


def test_a_load_is_the_inverse_and_writes_no_other_byte(
    rank: Engine, layout: Layout, device: CpuDevice
) -> None:
    host = Host(layout, len(BLOCKS))
    device.store(layout, [BLOCKS], [host.address])
    held = host.tensor.clone()
    wanted = all_bytes(rank.caches)
    for registered in rank.caches.registered:
        for tensor in [registered] if isinstance(registered, torch.Tensor) else registered:
            cleared = [b for b in BLOCKS if b != BLOCKS[2]]
            at = (rank.kind.form or "B").index("B")
            blocks_of(tensor.movedim(at, 0), rank)[cleared] = 0
    target = [SKIP if block == BLOCKS[2] else block for block in BLOCKS]
    job = device.load(layout, [target], [host.address])
    for was, now in zip(wanted, all_bytes(rank.caches), strict=True):
        assert torch.equal(was, now)
    assert list(job.checksums) == []
    assert torch.equal(host.tensor, held), "a load changes no host memory"


def test_moves_are_the_same_copy(rank: Engine, layout: Layout, device: CpuDevice) -> None:
    """What accelerators do, move by move."""
    if rank.kind.backend == "CPUAttentionBackend" and layout is rank.portable:
        with pytest.raises(LayoutError, match=r"K of layers.0 has its elements .* bytes apart"):
            plan_moves(layout, BLOCKS, 0)
        return
    host = Host(layout, len(BLOCKS))
    for at, source, size in zip(
        *(part.tolist() for part in plan_moves(layout, BLOCKS, host.address)), strict=True
    ):
        ctypes.memmove(at, source, size)
    expected = reference_payload(rank, layout, BLOCKS)
    assert torch.equal(host.tensor[: len(expected)], expected)
    assert bool((host.tensor[len(expected) :] == GAP).all())
    kept = [BLOCKS[0], SKIP, *BLOCKS[2:]]
    moves = plan_moves(layout, kept, host.address)
    assert int(moves.size.sum()) == layout.shards * layout.shard_bytes(len(kept) - 1)


def test_many_chunks_are_planned_as_each_alone(rank: Engine, layout: Layout) -> None:
    """Chunks of unlike lengths, with blocks to skip where two chunks could be taken for one."""
    if rank.kind.backend == "CPUAttentionBackend" and layout is rank.portable:
        return
    blocks = [[3, 1], [0], [SKIP, 2], [2, SKIP], [SKIP, 3], [1, 2, 3], [SKIP], [4]]
    places = [8192 * layout.payload_bytes(4) * at for at in range(1, len(blocks) + 1)]

    def moved(moves: Moves) -> list[tuple[int, ...]]:
        return list(zip(*(part.tolist() for part in moves), strict=True))

    together = moved(plan_chunks(layout, Chunks.of(blocks, places)))
    alone = [
        move
        for ids, place in zip(blocks, places, strict=True)
        for move in moved(plan_moves(layout, ids, place))
    ]
    assert sorted(together) == sorted(alone)


def test_the_self_test_passes_and_leaves_all_as_it_was(
    rank: Engine, layout: Layout, device: CpuDevice
) -> None:
    before = all_bytes(rank.caches)
    self_test(device, layout, memoryview(bytearray(layout.payload_bytes(2))))
    for was, now in zip(before, all_bytes(rank.caches), strict=True):
        assert torch.equal(was, now)


class Muddled(CpuDevice):
    """A device whose stores or loads take one layout for another."""

    def __init__(self, wrong: Layout, *, stores: bool) -> None:
        super().__init__()
        self._wrong, self._stores = wrong, stores

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        return super().store(self._wrong if self._stores else layout, blocks, targets)

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        return super().load(layout if self._stores else self._wrong, blocks, sources)


@pytest.mark.parametrize("stores", [True, False])
def test_the_self_test_names_a_head_that_is_copied_wrong(stores: bool) -> None:
    """Here as if the kernel's K were in rows."""
    rank = engine("CPU", SIZES["bfloat16"])
    rows = head_geometry(
        rank.paged,
        backend="FlashAttentionBackend",
        kernel_tag="",
        heads=rank.sizes.heads,
        head_dims=(rank.sizes.head_dim, rank.sizes.head_dim),
    )
    device = Muddled(PortableLayout(rank.paged, rows), stores=stores)
    before = all_bytes(rank.caches)
    message = (
        r"block 4, head 0 of K of layers.0 was not stored as the engine sees it: byte \d+ of"
        if stores
        else "K of layers.0 differs after a store and a load of blocks"
    )
    with pytest.raises(LayoutError, match=message):
        self_test(device, rank.portable, memoryview(bytearray(rank.portable.payload_bytes(2))))
    for was, now in zip(before, all_bytes(rank.caches), strict=True):
        assert torch.equal(was, now)


def test_chunks_on_several_threads_are_the_same(kind: str) -> None:
    rank = engine(kind, Sizes(blocks=32))
    device = CpuDevice(copy_threads=3)
    order = list(range(32))
    random.Random(1).shuffle(order)
    chunks = [order[at : at + 4] for at in range(0, 32, 4)]
    for layout in (rank.paged, rank.portable):
        size = layout.payload_bytes(4)
        host = ctypes.create_string_buffer(size * len(chunks))
        places = [ctypes.addressof(host) + size * at for at in range(len(chunks))]
        before = contents(rank.caches, range(32))
        job = device.store(layout, chunks, places)
        assert len(job.checksums) == len(chunks) * layout.shards
        shuffled = [chunks[at - 1] for at in range(len(chunks))]
        device.load(layout, shuffled, places)
        for chunk, target in zip(chunks, shuffled, strict=True):
            tokens = rank.sizes.tokens
            was = [t for block in chunk for t in range(block * tokens, (block + 1) * tokens)]
            for planes, now in zip(before, contents(rank.caches, target), strict=True):
                for plane, found in zip(planes, now, strict=True):
                    assert torch.equal(plane[was], found)
    device.close()


def test_the_paged_format_has_as_few_runs_as_can_be(rank: Engine) -> None:
    runs = rank.kind.runs or rank.sizes.heads
    assert len(rank.paged.layers) == runs * rank.sizes.layers
    assert all(tensor.shape[0] % rank.sizes.blocks == 0 for tensor in rank.paged.tensors)
    assert rank.paged.shards == 1


def test_fingerprints_differ_where_payloads_do() -> None:
    """`LBHNC` and `BLHNC` place the same pages differently, and so do some others."""
    by_print: dict[str, set[str]] = {}
    for name in KINDS:
        by_print.setdefault(engine(name).paged.fingerprint, set()).add(name)
    alike = sorted(sorted(names) for names in by_print.values() if len(names) > 1)
    assert alike == [["BHLNC", "LHBNC"], ["BLHNC", "LBHNC"], ["BLNHC", "LBNHC"]]


def test_a_portable_layout_says_what_it_is(rank: Engine) -> None:
    layout, sizes = rank.portable, rank.sizes
    dims = [plane.shape[-1] for plane in rank.caches.planes[0]]
    assert layout.shard_bytes(3) == sizes.layers * 3 * sizes.tokens * sum(dims) * (
        sizes.dtype.itemsize
    )
    assert layout.shard_stride(3) % 4096 == 0
    assert layout.shard_stride(3) - layout.shard_bytes(3) in range(4096)
    assert layout.payload_bytes(3) == (
        (sizes.heads - 1) * layout.shard_stride(3) + layout.shard_bytes(3)
    )
    assert layout.shards == layout.heads == sizes.heads
    assert layout.geometry_fields(layers="28", heads=8) == {
        "kv_planes": "latent" if rank.kind.latent else "K,V",
        "kv_layers": "28",
        "kv_heads": "8",
        "kv_head_dims": ",".join(map(str, dims)),
        "kv_dtype": str(sizes.dtype).removeprefix("torch."),
    }
    assert rank.paged.description in layout.description
