# SPDX-License-Identifier: Apache-2.0
"""`plan.*`: time for which a load blocks the engine's thread, and time to plan its copies.

Blocks of 16 tokens are in random order, so that no two can be copied together: one copy for each
block and layer. 128K tokens of 32 layers are 262,144 copies, 1M tokens of 80 layers are 5,242,880.

`plan.load.*` is the time that `load` blocks its caller, on a simulated CUDA (whose copies are real,
but whose timing has no meaning). `plan.moves.*` is the time until all copies are planned, which
KVHaven does in its own thread, batch by batch, beside the copies in progress.
"""

import ctypes
import random
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.results import Result, at_most, plain
from kvhaven.devices import cuda
from kvhaven.devices.base import CopyJob
from kvhaven.devices.detect import open_device
from kvhaven.devices.plan import check_copy
from kvhaven.layouts import PagedLayout, describe_kv_caches
from tests.simulators import simulated
from tests.simulators.build import NoCompilerError, library

_BLOCK, _CHUNK = 16, 256
_SIZES = {"128k": (32, 2**17), "1m": (80, 2**20)}
"""Number of layers and of tokens."""
_LIMIT_MS = 10.0
_REPETITIONS = 7
_WAIT_S = 120.0


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure loads of both sizes."""
    results = []
    for name, (layers, tokens) in _SIZES.items():
        planned = _moves(layers, tokens)
        moves = f"plan.moves.{name}"
        if name == "128k":
            what = "10 ms in any thread"
            results.append(at_most(moves, planned, "ms", _LIMIT_MS, _REPETITIONS, what))
        else:
            results.append(plain(moves, planned, "ms", _REPETITIONS))
        try:
            library()
        except NoCompilerError as error:
            say(f"plan.load.{name} needs the simulated CUDA: {error}")
            continue
        held = _load(layers, tokens)
        what = "10 ms of the engine's thread"
        results.append(at_most(f"plan.load.{name}", held, "ms", _LIMIT_MS, _REPETITIONS, what))
    return results


def _layout(layers: int, blocks: int, where: str) -> PagedLayout:
    """Return KV with pages of 16 bytes, as the size does not affect a plan."""
    raw = torch.zeros(layers, blocks, 1, _BLOCK, 1, dtype=torch.int8, device=where)
    caches = {f"layer{index}": raw[index] for index in range(layers)}
    return describe_kv_caches(
        caches,
        layer_specs=dict.fromkeys(caches, (_BLOCK, _BLOCK)),
        num_blocks=blocks,
        kernel_tag="plan",
    )


def _chunks(tokens: int) -> list[list[int]]:
    """Return the blocks of each chunk, of which no two are adjacent."""
    ids = list(range(0, 2 * tokens // _BLOCK, 2))
    random.Random(1).shuffle(ids)
    step = _CHUNK // _BLOCK
    return [ids[at : at + step] for at in range(0, len(ids), step)]


def _moves(layers: int, tokens: int) -> float:
    """Return the milliseconds to plan all moves of a load with the code for GPUs."""
    layout, blocks = _layout(layers, 2 * tokens // _BLOCK, "cpu"), _chunks(tokens)
    size = layout.payload_bytes(_CHUNK // _BLOCK)
    places = [2**40 + at * size for at in range(len(blocks))]
    borders = cuda.Registered({2**40: len(blocks) * size}).borders

    def plan() -> None:
        chunks = check_copy(layout, blocks, places, may_skip=True)
        for _ in cuda.planned(layout, chunks, borders):
            pass

    return _median_ms(plan, lambda: None)


def _load(layers: int, tokens: int) -> float:
    """Return the milliseconds that `load` blocks its caller."""
    blocks = _chunks(tokens)
    with simulated("cuda"):
        device = open_device("cuda", copy_threads=2)
        layout = _layout(layers, 2 * tokens // _BLOCK, "cuda")
        size = layout.payload_bytes(_CHUNK // _BLOCK)
        memory = ctypes.create_string_buffer(len(blocks) * size)
        base = ctypes.addressof(memory)
        device.register_host(base, len(memory))
        places = [base + at * size for at in range(len(blocks))]

        jobs: list[CopyJob] = []

        def load() -> None:
            jobs.append(device.load(layout, blocks, places))

        def wait() -> None:
            job = jobs.pop()
            assert job.wait(_WAIT_S)
            assert not job.error

        load()  # a warm-up
        wait()
        try:
            return _median_ms(load, wait)
        finally:
            device.unregister_host(base, len(memory))
            device.close()


def _median_ms(work: Callable[[], None], after: Callable[[], None]) -> float:
    """Return the median milliseconds of `work`, without those of `after`."""
    times = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
        after()
    return statistics.median(times) * 1000
