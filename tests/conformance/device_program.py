# SPDX-License-Identifier: Apache-2.0
"""Random programs for a device that keep the contract to the letter, and wait for nothing else.

Compute, stores and loads are put on the device at random; blocks are fenced, loads waited for,
and host memory left alone exactly as `Device` asks, so any order that it allows may happen.
Every value read on the way, all KV and all host memory must be right in the end.
"""

import ctypes
import itertools
import random
from dataclasses import dataclass, field

import torch

from kvhaven.devices.base import SKIP, CopyJob
from kvhaven.devices.plan import bytes_at, checksum_at
from kvhaven.devices.streams import StreamDevice
from kvhaven.layouts import PagedLayout, describe_kv_caches
from tests.devices import Opened

LAYERS = 2
BLOCKS = 12
SLOTS = 6
LONGEST = 4
MOST_CHUNKS = 3
WAIT_S = 30.0


@dataclass
class Slot:
    """A place for a chunk in host memory: what it must hold, and who uses it."""

    address: int
    values: list[int] = field(default_factory=list)
    jobs: list[CopyJob] = field(default_factory=list)
    index: int = 0
    """Which chunk of its store, the first of `jobs`, it holds."""


class Program:
    """A random program on one device. A block's value is a byte that fills all its pages."""

    def __init__(self, opened: Opened, seed: int) -> None:
        self.device = opened.device
        self._simulation = opened.simulation
        self._dice = random.Random(seed)
        self.layout = kv_layout(opened)
        self._memory = ctypes.create_string_buffer(SLOTS * self.layout.payload_bytes(LONGEST))
        base = ctypes.addressof(self._memory)
        self._slots = [
            Slot(base + index * self.layout.payload_bytes(LONGEST)) for index in range(SLOTS)
        ]
        self._values = [0] * BLOCKS
        self._reading: list[list[CopyJob]] = [[] for _ in range(BLOCKS)]
        self._loading: list[CopyJob | None] = [None] * BLOCKS
        self._seen: list[tuple[list[torch.Tensor], int]] = []
        self.device.register_host(base, len(self._memory))

    def run(self, steps: int) -> None:
        """Do random things, then compare everything."""
        try:
            for _ in range(steps):
                action = self._dice.choice((self._write, self._write, self._read, self._store,
                                            self._store, self._load))  # fmt: skip
                action()
                if self._simulation is None:
                    self._delay()
                else:
                    for _ in range(self._dice.choice((0, 0, 1, 2, 5))):
                        self._simulation.tick()
            self._check()
        finally:
            self.device.synchronize()
            for slot in self._slots:
                for job in slot.jobs:
                    job.wait(WAIT_S)
            self.device.unregister_host(ctypes.addressof(self._memory), len(self._memory))

    def _delay(self) -> None:
        """Occupy a stream of a GPU for up to 2 ms, so that its work is late for the others."""
        if not isinstance(self.device, StreamDevice):
            return
        streams = [torch.cuda.current_stream(), *self.device._streams.values()]
        with torch.cuda.stream(self._dice.choice(streams)):
            cycles = self._dice.choice((0, 0, 100_000, 1_000_000, 4_000_000))
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    # --- what may happen ----------------------------------------------------------------------

    def _write(self) -> None:
        """Compute: two kernels, so that a store between them would see half."""
        blocks = self._dice.sample(range(BLOCKS), self._dice.randint(1, 3))
        self._settle(blocks, to_write=True)
        value = self._dice.randrange(1, 251)
        for tensor in self.layout.tensors:
            tensor[blocks] = value
        for block in blocks:
            self._values[block] = value

    def _read(self) -> None:
        (block,) = self._dice.sample(range(BLOCKS), 1)
        self._settle([block], to_write=False)
        copies = [tensor[block].clone() for tensor in self.layout.tensors]
        self._seen.append((copies, self._values[block]))

    def _store(self) -> None:
        slots = self._dice.sample(self._slots, self._dice.randint(1, MOST_CHUNKS))
        chunks = [self._dice.sample(range(BLOCKS), self._dice.randint(1, LONGEST)) for _ in slots]
        self._await_free(slots)
        blocks = sorted(set(itertools.chain(*chunks)))
        self._settle(blocks, to_write=False)
        job = self.device.store(self.layout, chunks, [slot.address for slot in slots])
        for index, (slot, chunk) in enumerate(zip(slots, chunks, strict=True)):
            slot.jobs, slot.index = [job], index
            slot.values = [self._values[block] for block in chunk]
        for block in blocks:
            self._reading[block].append(job)

    def _load(self) -> None:
        filled = [slot for slot in self._slots if slot.values]
        if not filled:
            return
        slots = self._dice.sample(filled, self._dice.randint(1, min(MOST_CHUNKS, len(filled))))
        left = self._dice.sample(range(BLOCKS), BLOCKS)
        chunks: list[list[int]] = []
        for slot in slots:
            assert slot.jobs[0].wait(WAIT_S), "its store"
            blocks, left = left[: len(slot.values)], left[len(slot.values) :]
            if len(blocks) > 1 and self._dice.random() < 0.3:
                blocks[self._dice.randrange(len(blocks))] = SKIP
            chunks.append(blocks)
        given = [block for block in itertools.chain(*chunks) if block != SKIP]
        self._settle(given, to_write=True)
        job = self.device.load(self.layout, chunks, [slot.address for slot in slots])
        for slot, chunk in zip(slots, chunks, strict=True):
            slot.jobs.append(job)
            for block, value in zip(chunk, slot.values, strict=True):
                if block != SKIP:
                    self._values[block] = value
                    self._loading[block] = job

    def _settle(self, blocks: list[int], *, to_write: bool) -> None:
        """Do what the contract asks before blocks are used."""
        for block in blocks:
            load = self._loading[block]
            if load is not None:
                self.device.forward_waits(load)
                self._loading[block] = None
        if to_write:
            readers = [job for block in blocks for job in self._reading[block]]
            if readers:
                self.device.fence(readers)
            for block in blocks:
                self._reading[block].clear()

    def _await_free(self, slots: list[Slot]) -> None:
        for job in itertools.chain(*(slot.jobs for slot in slots)):
            assert job.wait(WAIT_S), "what used the slot before"
            assert job.error == ""

    # --- the end ------------------------------------------------------------------------------

    def _check(self) -> None:
        for load in self._loading:
            if load is not None:
                self.device.forward_waits(load)
        for copies, value in self._seen:
            for copy in copies:
                assert bool((copy.cpu() == value).all()), "a kernel saw another value"
        for tensor in self.layout.tensors:
            pages = tensor.cpu()
            for block, value in enumerate(self._values):
                assert bool((pages[block] == value).all()), f"block {block} holds another value"
        for slot in self._slots:
            self._check_slot(slot)

    def _check_slot(self, slot: Slot) -> None:
        for job in slot.jobs:
            assert job.wait(WAIT_S)
            assert job.error == ""
        if not slot.values:
            return
        size = self.layout.payload_bytes(len(slot.values))
        payload = bytes_at(slot.address, size).reshape(LAYERS, len(slot.values), -1)
        for position, value in enumerate(slot.values):
            assert (payload[:, position] == value).all(), "host memory is wrong"
        checksums = list(slot.jobs[0].checksums)
        assert checksums[slot.index : slot.index + 1] == [checksum_at(slot.address, size)]


def kv_layout(opened: Opened) -> PagedLayout:
    """KV of small pages of bytes, all 0, an allocation a layer as Gaudi has it."""
    tensors = {
        f"l{index}": opened.tensor(torch.zeros(BLOCKS, 1, 4, 24, dtype=torch.uint8))
        for index in range(LAYERS)
    }
    return describe_kv_caches(
        tensors,
        layer_specs=dict.fromkeys(tensors, (96, 4)),
        num_blocks=BLOCKS,
        kernel_tag=opened.device.kernel_tag,
    )
