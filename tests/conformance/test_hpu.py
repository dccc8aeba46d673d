# SPDX-License-Identifier: Apache-2.0
"""What Gaudi makes dear: new shapes, which are compiled, and waiting for the device."""

import ctypes
import random

import pytest
import torch

from kvhaven.devices.base import SKIP, Device
from kvhaven.layouts import PagedLayout, describe_kv_caches
from tests.devices import opened

STEPS = {"lazy": 10_000, "eager": 1_000}
MOST_SHAPES = 16
BLOCKS = 160
LONGEST = 70
"""Chunks of a copy; of two blocks each, as 256 tokens in Gaudi's blocks of 128."""


def gaudi_layout(device: Device) -> PagedLayout:
    """K and V of a layer apart, `[block, token, head, head_dim]`."""
    caches = {
        f"l{layer}": tuple(
            torch.zeros(BLOCKS, 4, 2, 8, dtype=torch.bfloat16, device="hpu") for _ in "KV"
        )
        for layer in range(2)
    }
    return describe_kv_caches(
        caches,
        layer_specs=dict.fromkeys(caches, (256, 4)),
        num_blocks=BLOCKS,
        kernel_tag=device.kernel_tag,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", STEPS)
def test_a_long_random_run_has_few_shapes(mode: str) -> None:
    dice = random.Random(4)
    with opened(f"hpu-{mode}") as found:
        device, layout = found.device, gaudi_layout(found.device)
        chunk_bytes = layout.payload_bytes(2)
        memory = ctypes.create_string_buffer(LONGEST * chunk_bytes)
        places = [ctypes.addressof(memory) + chunk_bytes * chunk for chunk in range(LONGEST)]
        found.simulation.forget_shapes()
        for _ in range(STEPS[mode]):
            chunks = dice.choice((1, 2, 3, dice.randint(1, 12), dice.randint(1, LONGEST)))
            ids = dice.sample(range(BLOCKS), 2 * chunks)
            blocks = [ids[at : at + 2] for at in range(0, len(ids), 2)]
            if dice.random() < 0.5:
                job = device.store(layout, blocks, places[:chunks])
            else:
                if dice.random() < 0.3:
                    blocks[0][0] = SKIP
                job = device.load(layout, blocks, places[:chunks])
                device.forward_waits(job)
            assert job.wait(120)
            assert job.error == ""
        shapes = found.simulation.graph_shapes
    assert sum(shapes.values()) > STEPS[mode]
    assert len(shapes) <= MOST_SHAPES, "\n".join(shapes)


def test_loads_and_stores_wait_for_the_device_only_where_they_say_so() -> None:
    """A load waits for nothing; a store ends in its call, in the thread that finishes it."""
    with opened("hpu-lazy") as found:
        device, layout = found.device, gaudi_layout(found.device)
        memory = ctypes.create_string_buffer(layout.payload_bytes(2))
        place = ctypes.addressof(memory)
        waits = found.simulation.synchronizations
        waits.clear()
        job = device.load(layout, [[4, 5]], [place])
        device.forward_waits(job)
        device.fence([job])
        assert [wait for wait in waits if wait.thread == "MainThread"] == []
        assert job.wait(120)
        waits.clear()
        assert device.store(layout, [[4, 5]], [place]).done()
        assert {wait.thread.rsplit("_", 1)[0] for wait in waits} == {"kvhaven-hpu-store"}
