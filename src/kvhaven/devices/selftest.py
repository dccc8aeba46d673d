# SPDX-License-Identifier: Apache-2.0
"""The write-read test at start: the engine's own view of its KV against what copies move."""

import ctypes
from collections.abc import Sequence

import torch

from kvhaven.devices.base import CopyJob, Device
from kvhaven.devices.plan import bytes_at, checksum_at
from kvhaven.errors import LayoutError
from kvhaven.layouts import PagedLayout
from kvhaven.layouts.paged import page_order

TIMEOUT_S = 30.0
"""For each copy of a few blocks; one that takes longer counts as failed."""


def self_test(device: Device, layout: PagedLayout, scratch: memoryview) -> None:
    """Prove on the real device that stores and loads move exactly the bytes the engine sees.

    Random bytes are written to up to two blocks through the engine's own tensors, stored,
    compared with what the tensors' strides say the pages must be, cleared, loaded and compared
    again; blocks around them must not change. Everything is put back as it was, also after a
    failure. Nothing else may use the KV caches meanwhile: call it when they are registered,
    before the first request.

    `scratch` is writable host memory as copies will use it, such as a part of the arena, of at
    least `layout.payload_bytes(2)` bytes. Raises `LayoutError` that names the first mismatch.
    """
    blocks = sorted({layout.num_blocks // 2, layout.num_blocks - 1})
    needed = layout.payload_bytes(len(blocks))
    if scratch.nbytes < needed:
        raise LayoutError(f"the self-test needs {needed} bytes of scratch, got {scratch.nbytes}")
    around = sorted(
        {
            block + step
            for block in blocks
            for step in (-1, 0, 1)
            if 0 <= block + step < layout.num_blocks
        }
    )
    device.synchronize()
    original = _read_blocks(layout, around)
    exported = ctypes.c_char.from_buffer(scratch)
    address = ctypes.addressof(exported)
    device.register_host(address, needed)
    try:
        _round_trip(device, layout, blocks, address)
        device.synchronize()
        rest = [index for index, block in enumerate(around) if block not in blocks]
        for run, before, after in zip(
            layout.layers, original, _read_blocks(layout, around), strict=True
        ):
            if not torch.equal(before[rest], after[rest]):
                raise LayoutError(
                    f"self-test on {device.name}: a copy to blocks {blocks} of {run.layer} "
                    f"changed a block beside them ({layout.description})"
                )
    finally:
        device.synchronize()
        device.unregister_host(address, needed)
        del exported
        for tensor, saved in zip(layout.tensors, original, strict=True):
            _by_block(layout, tensor)[around] = saved
        device.synchronize()


def _round_trip(device: Device, layout: PagedLayout, blocks: list[int], address: int) -> None:
    size = layout.payload_bytes(len(blocks))
    written = []
    random = torch.Generator().manual_seed(0)
    for tensor in layout.tensors:
        view = _by_block(layout, tensor)
        shape = (len(blocks), *view.shape[1:])
        pattern = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        view[blocks] = pattern.to(tensor.device)
        written.append(pattern)
    job = device.store(layout, [blocks], [address])
    _wait(device, job, "store")
    _compare_payload(device, layout, blocks, written, address)
    if list(job.checksums) != [checksum_at(address, size)]:
        raise LayoutError(f"self-test on {device.name}: the store's checksum is not its payload's")
    for tensor in layout.tensors:
        _by_block(layout, tensor)[blocks] = 0
    _wait(device, device.load(layout, [blocks], [address]), "load")
    for run, expected, found in zip(
        layout.layers, written, _read_blocks(layout, blocks), strict=True
    ):
        if not torch.equal(expected, found.cpu()):
            raise LayoutError(
                f"self-test on {device.name}: {run.layer} differs after a store and a load of "
                f"blocks {blocks} ({layout.description})"
            )


def _compare_payload(
    device: Device,
    layout: PagedLayout,
    blocks: Sequence[int],
    written: Sequence[torch.Tensor],
    address: int,
) -> None:
    """Compare a payload with the pages that the tensors' own strides say were written."""
    payload = torch.from_numpy(bytes_at(address, layout.payload_bytes(len(blocks))))
    start = 0
    for run, tensor, pattern in zip(layout.layers, layout.tensors, written, strict=True):
        order = page_order(_by_block(layout, tensor)[:1])
        missing = [dim for dim in range(1, pattern.dim()) if dim not in order]
        for index, block in enumerate(blocks):
            expected = pattern[index : index + 1].permute(0, *missing, *order).reshape(-1)
            found = payload[start : start + run.page_bytes]
            if not torch.equal(expected, found):
                at = int(torch.nonzero(expected != found)[0]) if len(expected) == len(found) else 0
                raise LayoutError(
                    f"self-test on {device.name}: block {block} of {run.layer} was not stored as "
                    f"the engine sees it: byte {at} of the page's {run.page_bytes} is "
                    f"{int(found[at])}, expected {int(expected[at])} ({layout.description})"
                )
            start += run.page_bytes


def _by_block(layout: PagedLayout, tensor: torch.Tensor) -> torch.Tensor:
    """View a layer's tensor as bytes, `[blocks, kernel blocks, heads, tokens, content]`."""
    as_bytes = tensor.view(torch.uint8)
    parts = tensor.shape[0] // layout.num_blocks
    strides = as_bytes.stride()
    return as_bytes.as_strided(
        (layout.num_blocks, parts, *as_bytes.shape[1:]), (strides[0] * parts, *strides)
    )


def _read_blocks(layout: PagedLayout, blocks: Sequence[int]) -> list[torch.Tensor]:
    return [_by_block(layout, tensor)[list(blocks)] for tensor in layout.tensors]


def _wait(device: Device, job: CopyJob, what: str) -> None:
    if not job.wait(TIMEOUT_S):
        raise LayoutError(f"self-test on {device.name}: a {what} did not end in {TIMEOUT_S:.0f} s")
    if job.error:
        raise LayoutError(f"self-test on {device.name}: a {what} failed: {job.error}")
