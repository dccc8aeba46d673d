# SPDX-License-Identifier: Apache-2.0
"""The device suite for every device that is present or simulated, and what only the CPU has."""

import os
import threading
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvhaven.devices import cpu
from kvhaven.devices.base import SKIP, Device
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.cuda import split_at
from kvhaven.devices.detect import KINDS
from kvhaven.devices.plan import Chunks, plan_moves
from kvhaven.testing.device_suite import *  # noqa: F403 - its tests are collected here
from kvhaven.testing.device_suite import LAYERS, layout_of
from tests.devices import WORDS, opened


@pytest.fixture(params=WORDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    seed = zlib.crc32(request.node.name.encode())
    with opened(request.param, seed) as found:
        yield found.device


@pytest.fixture
def torch_type(device: Device) -> str:
    return KINDS[device.name].torch_type


def test_the_device_is_one_that_we_know(device: Device) -> None:
    assert device.name in KINDS


def test_copy_threads_run_on_the_cores_they_are_given() -> None:
    """As in a CPU worker of vLLM, which is pinned to one core."""
    allowed = os.sched_getaffinity(0)
    own = {min(allowed)}
    seen: list[set[int]] = []
    both = threading.Barrier(2)

    def note(_: int) -> None:
        both.wait(10)  # a chunk each for two threads
        seen.append(os.sched_getaffinity(0))

    try:
        os.sched_setaffinity(0, own)
        device = CpuDevice(copy_threads=2, cores=allowed)
        device.threads.run(note, 2)
        device.close()
    finally:
        os.sched_setaffinity(0, allowed)
    assert sorted(seen, key=len) == [own, allowed]
    assert cpu.usable_cores() >= allowed


def test_chunks_are_taken_in_groups_of_so_many_blocks() -> None:
    chunks = Chunks.of([[1, 2], [3], [4, 5, 6, 7], [8], [9, SKIP], [10]], range(6))
    groups = list(chunks.groups(3))
    assert [group.lists() for group in groups] == [
        [[1, 2], [3]],
        [[4, 5, 6, 7]],
        [[8], [9, SKIP]],
        [[10]],
    ]
    assert [group.hosts.tolist() for group in groups] == [[0, 1], [2], [3, 4], [5]]
    assert [len(group) for group in chunks.groups(0)] == [1] * 6


def test_moves_are_merged_where_pages_touch_and_split_at_registrations() -> None:
    layout = layout_of("outside", CpuDevice(), "cpu")
    page = layout.layers[0].page_bytes
    moves = plan_moves(layout, [4, 5, SKIP, 7, 6], 10_000)
    assert moves.size.tolist() == [2 * page, page, page] * LAYERS
    assert [at - 10_000 for at in moves.host.tolist()[:3]] == [0, 3 * page, 4 * page]

    border = 10_000 + page // 2
    borders = [10_000, border, border + 1, 10_000 + 5 * page]
    split = split_at(moves, np.array(borders))
    reached = sorted(
        (host + byte, device + byte)
        for host, device, size in zip(*(part.tolist() for part in split), strict=True)
        for byte in range(size)
    )
    assert reached == sorted(
        (host + byte, device + byte)
        for host, device, size in zip(*(part.tolist() for part in moves), strict=True)
        for byte in range(size)
    )
    for host, size in zip(split.host.tolist(), split.size.tolist(), strict=True):
        assert not any(host < at < host + size for at in borders)
