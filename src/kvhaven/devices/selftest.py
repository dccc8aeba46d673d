# SPDX-License-Identifier: Apache-2.0
"""The write-read test at start: copies compared with the engine's own view of its KV."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kvhaven.devices.base import CopyJob, Device
from kvhaven.devices.plan import bytes_at, checksum_at, shard_places
from kvhaven.errors import LayoutError
from kvhaven.layouts import Layout, PagedLayout, Plane, PortableLayout
from kvhaven.layouts.paged import page_order

TIMEOUT_S = 30.0
"""Timeout in seconds for each copy of a few blocks; a slower one counts as failed."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their bytes: random bits are moved as integers, since a float may be a NaN."""


class _Window(NamedTuple):
    """A part of the engine's own tensors, as integers."""

    name: str
    view: torch.Tensor
    """The first dimension is the engine's blocks."""
    group: int = 0
    """The number of its KV group."""


class _Piece(NamedTuple):
    """Content that a store must write next into a shard."""

    what: str
    shard: int
    content: torch.Tensor


def self_test(device: Device, layout: Layout, scratch: memoryview) -> None:
    """Check on the real device that stores and loads move exactly the bytes that the engine sees.

    The test writes random bytes to up to two blocks through the engine's own tensors, stores them,
    compares the payloads with those that torch alone derives (the pages by the tensors' strides, or
    the heads' canonical shards), clears the blocks, loads them and compares again; adjacent blocks
    must not change. All content is restored, also after a failure. Nothing else may use the KV
    caches meanwhile: call it when they are registered, before the first request.

    `scratch` is writable host memory of the kind that copies will use, such as a part of the arena,
    of at least `scratch_bytes(layout)` bytes. Raises `LayoutError` that names the first mismatch.
    """
    blocks = _some_blocks(layout)
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
    windows = _windows(layout)
    device.synchronize()
    original = [window.view[around] for window in windows]
    exported = ctypes.c_char.from_buffer(scratch)
    address = ctypes.addressof(exported)
    device.register_host(address, needed)
    try:
        _round_trip(device, layout, windows, blocks, address)
        device.synchronize()
        rest = [index for index, block in enumerate(around) if block not in blocks]
        for window, before in zip(windows, original, strict=True):
            if not torch.equal(before[rest], window.view[around][rest]):
                raise LayoutError(
                    f"self-test on {device.name}: a copy to blocks {blocks} of {window.name} "
                    f"changed an adjacent block ({layout.description})"
                )
    finally:
        device.synchronize()
        device.unregister_host(address, needed)
        del exported
        for window, saved in zip(windows, original, strict=True):
            window.view[around] = saved
        device.synchronize()


def scratch_bytes(layout: Layout) -> int:
    """Return the bytes of host memory that `self_test` needs."""
    return layout.payload_bytes(len(_some_blocks(layout)))


def _some_blocks(layout: Layout) -> list[int]:
    """Return different blocks: up to two of each KV group, one group's after the other's.

    Raises `LayoutError` if there are fewer blocks than groups.
    """
    groups, blocks = _groups(layout), layout.num_blocks
    found = sorted({blocks * at // (2 * groups) for at in range(1, 2 * groups)} | {blocks - 1})
    if len(found) < groups:
        raise LayoutError(f"{blocks} blocks for {groups} KV groups; expected one each or more")
    return found[: len(found) // groups * groups]


def _groups(layout: Layout) -> int:
    return layout.groups if isinstance(layout, PortableLayout) else 1


def _round_trip(
    device: Device,
    layout: Layout,
    windows: Sequence[_Window],
    blocks: list[int],
    address: int,
) -> None:
    written = []
    random = torch.Generator().manual_seed(0)
    per_group = len(blocks) // _groups(layout)
    for _, view, group in windows:
        own = blocks[group * per_group :][:per_group]
        shape = (per_group, *view.shape[1:-1], view.shape[-1] * view.element_size())
        pattern = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        written.append(pattern.view(view.dtype))
        view[own] = written[-1].to(view.device)
    job = device.store(layout, [blocks], [address])
    _wait(device, job, "store")
    places = shard_places(layout, [blocks], [address])
    _compare(device, layout, _pieces(layout, windows, blocks, written), places)
    if list(job.checksums) != [checksum_at(*place) for place in places]:
        raise LayoutError(
            f"self-test on {device.name}: the store's checksums differ from those of its payloads"
        )
    for window in windows:
        window.view[blocks] = 0
    _wait(device, device.load(layout, [blocks], [address]), "load")
    for window, expected in zip(windows, written, strict=True):
        own = blocks[window.group * per_group :][:per_group]
        if not torch.equal(expected, window.view[own].cpu()):
            raise LayoutError(
                f"self-test on {device.name}: {window.name} differs after a store and a load of "
                f"blocks {own} ({layout.description})"
            )


def _compare(
    device: Device, layout: Layout, pieces: Iterator[_Piece], places: Sequence[tuple[int, int]]
) -> None:
    """Compare payloads with the expected content, piece by piece."""
    payloads = [torch.from_numpy(bytes_at(*place)) for place in places]
    ends = [0] * len(payloads)
    for what, shard, content in pieces:
        expected = content.contiguous().reshape(-1).view(torch.uint8)
        start = ends[shard]
        ends[shard] += len(expected)
        found = payloads[shard][start : ends[shard]]
        if not torch.equal(expected, found):
            at = int(torch.nonzero(expected != found)[0]) if len(expected) == len(found) else 0
            raise LayoutError(
                f"self-test on {device.name}: {what} was not stored as the engine sees it: byte "
                f"{at} of its {len(expected)} is {int(found[at])}, expected {int(expected[at])} "
                f"({layout.description})"
            )
    if ends != [size for _, size in places]:
        raise LayoutError(
            f"self-test on {device.name}: payloads of {[size for _, size in places]} bytes, but "
            f"the engine's tensors have {ends} ({layout.description})"
        )


def _windows(layout: Layout) -> list[_Window]:
    if isinstance(layout, PortableLayout):
        layers = layout.geometry.layers
        groups = layout.layer_groups or (0,) * len(layers)
        return [
            _Window(
                _name(plane), _by_block(layout, plane.view.view(_INTEGERS[plane.item_bytes])), group
            )
            for planes, group in zip(layers, groups, strict=True)
            for plane in planes
        ]
    assert isinstance(layout, PagedLayout)
    return [
        _Window(run.layer, _by_block(layout, tensor.view(torch.uint8)))
        for run, tensor in zip(layout.layers, layout.tensors, strict=True)
    ]


def _by_block(layout: Layout, view: torch.Tensor) -> torch.Tensor:
    """View `[kernel blocks, ...]` as `[blocks, kernel blocks of each, ...]`."""
    parts = view.shape[0] // layout.num_blocks
    strides = view.stride()
    return view.as_strided(
        (layout.num_blocks, parts, *view.shape[1:]), (strides[0] * parts, *strides)
    )


def _pieces(
    layout: Layout,
    windows: Sequence[_Window],
    blocks: Sequence[int],
    written: Sequence[torch.Tensor],
) -> Iterator[_Piece]:
    """Yield the expected content of a chunk's shards, each shard's pieces in order."""
    per_group = len(blocks) // _groups(layout)
    for (name, view, group), pattern in zip(windows, written, strict=True):
        # A portable pattern is [blocks, kernel blocks, heads, tokens, head_dim].
        order = page_order(view[:1])
        missing = [dim for dim in range(1, pattern.dim()) if dim not in order]
        for index, block in enumerate(blocks[group * per_group :][:per_group]):
            if isinstance(layout, PortableLayout):
                for head in range(layout.heads):
                    what = f"block {block}, head {head} of {name}"
                    yield _Piece(what, head, pattern[index, :, head])
            else:
                page = pattern[index : index + 1].permute(0, *missing, *order)
                yield _Piece(f"block {block} of {name}", 0, page)


def _name(plane: Plane) -> str:
    return f"{plane.name} of {plane.layer}"


def _wait(device: Device, job: CopyJob, what: str) -> None:
    if not job.wait(TIMEOUT_S):
        raise LayoutError(f"self-test on {device.name}: a {what} did not end in {TIMEOUT_S:.0f} s")
    if job.error:
        raise LayoutError(f"self-test on {device.name}: a {what} failed: {job.error}")
