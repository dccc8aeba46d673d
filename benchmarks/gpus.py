# SPDX-License-Identifier: Apache-2.0
"""`gpu.*`: copies between a GPU and the arena, and the compute time that they cost.

`python -m benchmarks gpu` needs an NVIDIA or AMD GPU. The limit of a copy is a plain copy of the
same size between device memory and pinned host memory, in one piece. The target is 0.90 of it for
pages of 2 MiB and more. Smaller pages, and blocks of 16 tokens scattered over 32 layers, have no
target. `gpu.overlap` is the time of a loop of matrix multiplications while saves run, as a multiple
of the same loop alone; the limit is 1.03.
"""

import ctypes
import mmap
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.results import Result, at_least, at_most
from kvhaven.devices.base import Device
from kvhaven.devices.detect import KINDS, open_device
from kvhaven.layouts import PagedLayout, describe_kv_caches

_TOTAL = 512 * 2**20
_REPETITIONS = 15
_WAIT_S = 60.0
_PIECES = {"0.5MiB": 2**19, "2MiB": 2**21, "8MiB": 2**23}
_WANTED = {"2MiB": 0.90, "8MiB": 0.90}
_MULTIPLICATIONS, _SIZE = 60, 8192


def usable_gpu(say: Callable[[str], None]) -> str:
    """Return the first kind of GPU that is available; if none is, say why and return ""."""
    reasons = {name: KINDS[name].unavailable() for name in ("cuda", "rocm")}
    for name, reason in reasons.items():
        if not reason:
            return name
    say("no usable GPU: " + "; ".join(reasons.values()))
    return ""


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure the first kind of GPU that is available, if any."""
    kind = usable_gpu(say)
    if not kind:
        return []
    device = open_device(kind, copy_threads=4)
    arena = mmap.mmap(-1, _TOTAL)
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    device.register_host(base, _TOTAL)
    try:
        results = []
        for name, page in _PIECES.items():
            results += _copies(device, name, _pages(device, page), 1, base, _WANTED.get(name, 0.0))
        scattered = _pages(device, 2**16, layers=32)
        results += _copies(device, "scattered", scattered, 16, base, 0.0)
        results.append(_overlap(device, _pages(device, 2**21), base))
    finally:
        device.unregister_host(base, _TOTAL)
        device.close()
    return results


def _pages(device: Device, page: int, layers: int = 1) -> PagedLayout:
    """Return KV of `_TOTAL` bytes in twice as much memory, so that blocks can lie apart."""
    blocks = 2 * _TOTAL // (page * layers)
    heads, tokens = 8, page // (8 * 256 * 2)
    shape = (layers, blocks, heads, tokens, 256)
    raw = torch.zeros(shape, dtype=torch.bfloat16, device=KINDS[device.name].torch_type)
    caches = {f"layer{index}": raw[index] for index in range(layers)}
    return describe_kv_caches(
        caches,
        layer_specs=dict.fromkeys(caches, (page, tokens)),
        num_blocks=blocks,
        kernel_tag=device.kernel_tag,
    )


def _copies(
    device: Device, name: str, layout: PagedLayout, blocks: int, base: int, wanted: float
) -> list[Result]:
    """Copy `_TOTAL` bytes in both directions, alternating with plain copies."""
    size = layout.payload_bytes(blocks)
    count = _TOTAL // size
    ids = [list(range(2 * at * blocks, 2 * (at + 1) * blocks, 2)) for at in range(count)]
    places = [base + at * size for at in range(count)]
    pinned = torch.empty(_TOTAL, dtype=torch.uint8, pin_memory=True)
    plain = layout.tensors[0].reshape(-1).view(torch.uint8)
    plain = plain[:_TOTAL] if plain.numel() >= _TOTAL else plain.repeat(_TOTAL // plain.numel())

    def store() -> None:
        assert device.store(layout, ids, places).wait(_WAIT_S)

    def load() -> None:
        assert device.load(layout, ids, places).wait(_WAIT_S)

    rates: dict[str, list[float]] = {}
    for repetition in range(-2, _REPETITIONS):
        for what, copy in (
            ("store", store),
            ("to host", lambda: pinned.copy_(plain, non_blocking=True)),
            ("load", load),
            ("from host", lambda: plain.copy_(pinned, non_blocking=True)),
        ):
            seconds = _timed(device, copy)
            if repetition >= 0:
                rates.setdefault(what, []).append(_TOTAL / seconds / 1e9)
    limit = "a plain copy of the same size between the device and pinned memory"
    return [
        at_least(f"gpu.store.{name}", rates["store"], "GB/s", rates["to host"], wanted, limit),
        at_least(f"gpu.load.{name}", rates["load"], "GB/s", rates["from host"], wanted, limit),
    ]


def _overlap(device: Device, layout: PagedLayout, base: int) -> Result:
    """Multiply matrices alone, and while `_TOTAL` bytes are saved."""
    where = layout.tensors[0].device
    factor = torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device=where)
    count = _TOTAL // layout.payload_bytes(1)
    ids = [[2 * at] for at in range(count)]
    places = [base + at * layout.payload_bytes(1) for at in range(count)]

    def multiply() -> None:
        product = factor
        for _ in range(_MULTIPLICATIONS):
            product = factor @ product

    def beside_saves() -> None:
        device.store(layout, ids, places)
        multiply()

    alone: list[float] = []
    beside: list[float] = []
    for repetition in range(-2, _REPETITIONS):
        for times, work in ((alone, multiply), (beside, beside_saves)):
            seconds = _timed_on_stream(device, work)
            if repetition >= 0:
                times.append(seconds)
    ratio = statistics.median(beside) / statistics.median(alone)
    return at_most("gpu.overlap", ratio, "x", 1.03, len(alone), "1.03 times the time alone")


def _timed(device: Device, work: Callable[[], object]) -> float:
    """Return the seconds until all device work that `work` submits has ended."""
    device.synchronize()
    began = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - began


def _timed_on_stream(device: Device, work: Callable[[], object]) -> float:
    """Return the seconds until the work on the current stream has ended."""
    device.synchronize()
    began = time.perf_counter()
    work()
    torch.accelerator.current_stream().synchronize()
    return time.perf_counter() - began
