# SPDX-License-Identifier: Apache-2.0
"""`copy.*`, `portable.*`, `columns.*`: GB/s of copies between KV tensors and the arena, on CPU.

The limit is plain `memcpy` of the same bytes between the same memory (the KV tensors, and a
populated mapping of a segment of the arena), with the same number of threads, each of which takes
the next piece of a chunk's size. A store also computes the checksum of the copied bytes; its target
is 0.70 of the limit nevertheless. Chunks lie in random blocks, as in an engine that has run for a
while.

KV has the layout of vLLM's CPU backend (`vllm-facts`): a bf16 tensor `[blocks, heads, 128, 2 * 64]`
for each layer, all in one allocation; a chunk of 256 tokens has 2 MiB.

`copy.*` is the paged format. `portable.*` copies the same bytes between the same places as shards
of one head each, and its limit is the paged format in the same run. Its pages are those of all
backends except the CPU's: K next to V of each token. `columns.*` is portable as well, with the
pages of vLLM's CPU kernel, whose K has a row for each element and a column for each token.
"""

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.results import Result, at_least
from kvhaven.arena.segment import MappedSegment, Segment
from kvhaven.devices.cpu import CpuDevice, usable_cores
from kvhaven.layouts import PagedLayout, PortableLayout, describe_kv_caches, head_geometry

_LAYERS, _BLOCKS, _HEADS, _BLOCK_SIZE, _CONTENT = 8, 512, 4, 128, 128
_BLOCKS_PER_CHUNK = 2
_CHUNKS = 64
_REPETITIONS = 15
_MOST_THREADS = 4  # a worker's default


def measure(say: Callable[[str], None]) -> list[Result]:
    """Copy 128 MiB in both directions, alternating `memcpy` and KVHaven in both formats."""
    threads = min(_MOST_THREADS, len(usable_cores()))
    layout, memory = _kv_caches()
    portable = _by_heads(layout, "FlashAttentionBackend")
    columns = _by_heads(layout, "CPUAttentionBackend")
    assert portable.payload_bytes(_BLOCKS_PER_CHUNK) == layout.payload_bytes(_BLOCKS_PER_CHUNK)
    size = layout.payload_bytes(_BLOCKS_PER_CHUNK)
    total = size * _CHUNKS
    device = CpuDevice(threads)
    blocks = list(range(_BLOCKS))
    random.Random(1).shuffle(blocks)
    chunks = [blocks[at : at + _BLOCKS_PER_CHUNK] for at in range(0, _BLOCKS, _BLOCKS_PER_CHUNK)]
    segment = Segment.create(0, total)
    mapped = MappedSegment.map(0, os.dup(segment.fd), total, lock_byte=1)
    mapped.prefault(threading.Event())
    arena = [mapped.address + at * size for at in range(_CHUNKS)]
    tensors = [memory.data_ptr() + at * size for at in range(_CHUNKS)]
    rates: dict[str, list[float]] = {}
    try:
        with ThreadPoolExecutor(threads) as pool:
            plain = _Memcpy(pool, threads, size)
            for repetition in range(-1, _REPETITIONS):
                for name, copy in (
                    ("store", lambda: device.store(layout, chunks[:_CHUNKS], arena)),
                    ("portable store", lambda: device.store(portable, chunks[:_CHUNKS], arena)),
                    ("columns store", lambda: device.store(columns, chunks[:_CHUNKS], arena)),
                    ("to arena", lambda: plain.copy(arena, tensors)),
                    ("load", lambda: device.load(layout, chunks[:_CHUNKS], arena)),
                    ("portable load", lambda: device.load(portable, chunks[:_CHUNKS], arena)),
                    ("columns load", lambda: device.load(columns, chunks[:_CHUNKS], arena)),
                    ("from arena", lambda: plain.copy(tensors, arena)),
                ):
                    began = time.perf_counter()
                    copy()
                    rate = total / (time.perf_counter() - began) / 1e9
                    if repetition >= 0:  # the first repetition is a warm-up
                        rates.setdefault(name, []).append(rate)
    finally:
        device.close()
        mapped.close()
        segment.close()
    say(f"{threads} threads, {_CHUNKS} chunks of {size >> 10} KiB")
    what = f"memcpy of the same bytes with {threads} threads"
    paged = "a copy of the same bytes in the paged format"
    return [
        at_least("copy.store", rates["store"], "GB/s", rates["to arena"], 0.70, what),
        at_least("copy.load", rates["load"], "GB/s", rates["from arena"], 0.70, what),
        at_least("portable.store", rates["portable store"], "GB/s", rates["store"], 0.60, paged),
        at_least("portable.load", rates["portable load"], "GB/s", rates["load"], 0.60, paged),
        at_least("columns.store", rates["columns store"], "GB/s", rates["store"], 0.60, paged),
        at_least("columns.load", rates["columns load"], "GB/s", rates["load"], 0.60, paged),
    ]


class _Memcpy:
    """Plain copies of pieces of `size` bytes, by the threads of a pool."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int, size: int) -> None:
        self._pool, self._threads, self._size = pool, threads, size

    def copy(self, targets: list[int], sources: list[int]) -> None:
        """Copy every piece."""
        left: Iterator[tuple[int, int]] = iter(list(zip(targets, sources, strict=True)))

        def work() -> None:
            for target, source in left:
                ctypes.memmove(target, source, self._size)

        futures = [self._pool.submit(work) for _ in range(self._threads - 1)]
        work()
        for future in futures:
            future.result()


def _kv_caches() -> tuple[PagedLayout, torch.Tensor]:
    """Return KV tensors with random content, as vLLM 0.32 allocates them on CPU."""
    page = _HEADS * _BLOCK_SIZE * _CONTENT
    memory = torch.randint(-128, 128, (2 * _LAYERS * _BLOCKS * page,), dtype=torch.int8)
    layers = memory.view(torch.bfloat16).view(_LAYERS, _BLOCKS, _HEADS, _BLOCK_SIZE, _CONTENT)
    names = [f"layer.{index}" for index in range(_LAYERS)]
    layout = describe_kv_caches(
        dict(zip(names, layers, strict=True)),
        layer_specs=dict.fromkeys(names, (2 * page, _BLOCK_SIZE)),
        num_blocks=_BLOCKS,
        kernel_tag="benchmark",
    )
    return layout, memory


def _by_heads(layout: PagedLayout, backend: str) -> PortableLayout:
    """Return the same KV in the portable format."""
    geometry = head_geometry(
        layout,
        backend=backend,
        kernel_tag="cpu-x86_64",
        heads=_HEADS,
        head_dims=(_CONTENT // 2, _CONTENT // 2),
    )
    return PortableLayout(layout, geometry)
