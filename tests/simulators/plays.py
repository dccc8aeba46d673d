# SPDX-License-Identifier: Apache-2.0
"""Small programs for a device that are right with a wait and wrong without it, for some seeds."""

from collections.abc import Callable

import torch

from tests.simulators import POISON, Simulation, simulated
from tests.simulators.simulation import Kind, Mode

SEEDS = range(24)
SIZE = 64

Play = Callable[[Simulation, bool], bool]
"""What it plays with, whether it waits; returns whether all values were right."""


def outcomes(play: Play, kind: Kind, *, waits: bool, mode: Mode = "eager") -> list[bool]:
    """Return whether a play went right, for each seed."""
    found = []
    for seed in SEEDS:
        with simulated(kind, seed=seed, mode=mode) as sim:
            found.append(play(sim, waits))
    return found


def host(sim: Simulation, value: float = 0.0) -> torch.Tensor:
    """Host memory whose copies are asynchronous: pinned but for HPU, which takes any."""
    return torch.full((SIZE,), float(value), pin_memory=sim.kind != "hpu")


def on(sim: Simulation, value: float) -> torch.Tensor:
    """Device memory that has a value already."""
    tensor = torch.full((SIZE,), float(value), device=sim.kind)
    sim.drain()
    return tensor


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.view(torch.uint8) == POISON).all())


def store_after_compute(sim: Simulation, waits: bool) -> bool:
    """A copy on another stream reads what the current stream computed."""
    side, target, block = sim.module.Stream(), host(sim), on(sim, 1)
    block.fill_(7)
    if waits:
        side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    side.synchronize()
    return is_all(target, 7)


def load_after_last_use(sim: Simulation, waits: bool) -> bool:
    """A copy on another stream overwrites what the current stream still reads."""
    side, source, block = sim.module.Stream(), host(sim, 7), on(sim, 1)
    result = block + 1
    if waits:
        side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        block.copy_(source, non_blocking=True)
    sim.module.synchronize()
    return is_all(result.cpu(), 2)


def compute_after_load(sim: Simulation, waits: bool) -> bool:
    """The current stream reads what a copy on another brings."""
    side, source, block = sim.module.Stream(), host(sim, 7), on(sim, 1)
    ended = sim.module.Event()
    with sim.module.stream(side):
        block.copy_(source, non_blocking=True)
        ended.record()
    if waits:
        ended.wait()
    result = block + 1
    sim.module.synchronize()
    return is_all(result.cpu(), 8)


def compute_after_store(sim: Simulation, waits: bool) -> bool:
    """The current stream overwrites what a copy on another still reads."""
    side, target, block = sim.module.Stream(), host(sim), on(sim, 1)
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    if waits:
        sim.module.current_stream().wait_stream(side)
    block.fill_(7)
    sim.module.synchronize()
    return is_all(target, 1)


def two_hops(sim: Simulation, waits: bool) -> bool:
    """Order passes on from stream to stream."""
    first, second = sim.module.Stream(), sim.module.Stream()
    block, target = on(sim, 1), host(sim)
    block.fill_(2)
    first.wait_stream(sim.module.current_stream())
    if waits:
        second.wait_event(first.record_event())
    with sim.module.stream(second):
        target.copy_(block, non_blocking=True)
    sim.module.synchronize()
    return is_all(target, 2)


def event_after_its_work(sim: Simulation, waits: bool) -> bool:
    """An event stands for what was put on the stream before it was recorded, and no more."""
    side, source, block = sim.module.Stream(), host(sim, 7), on(sim, 1)
    ended = sim.module.Event()
    with sim.module.stream(side):
        if not waits:
            ended.record()
        block.copy_(source, non_blocking=True)
        if waits:
            ended.record()
    ended.wait()
    result = block + 1
    sim.module.synchronize()
    return is_all(result.cpu(), 8)


def event_recorded_again(sim: Simulation, waits: bool) -> bool:
    """Who waited for an event waits for what it stood for then, not for what it stands for later.

    Without waiting for the second, the first is all that is waited for.
    """
    side, block, target = sim.module.Stream(), on(sim, 1), host(sim)
    event = sim.module.Event()
    block.fill_(2)
    event.record()
    if not waits:
        side.wait_event(event)
    block.fill_(3)
    event.record()
    if waits:
        side.wait_event(event)
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    sim.module.synchronize()
    return is_all(target, 3)


def host_read_after_its_copy(sim: Simulation, waits: bool) -> bool:
    """The host sees what was copied to it once the copy's event has passed."""
    target, block, ended = host(sim), on(sim, 7), sim.module.Event()
    target.copy_(block, non_blocking=True)
    ended.record()
    if waits:
        ended.synchronize()
    assert is_all(target, 7) or is_poison(target)
    return is_all(target, 7)


def host_written_after_its_copy(sim: Simulation, waits: bool) -> bool:
    """The host's memory is read when the copy runs."""
    source, block, ended = host(sim, 7), on(sim, 1), sim.module.Event()
    block.copy_(source, non_blocking=True)
    ended.record()
    if waits:
        ended.synchronize()
    source.fill_(9)
    return is_all(block.cpu(), 7)


def memory_of_another_stream(sim: Simulation, waits: bool) -> bool:
    """What is freed belongs to the stream that it was allocated on, unless record_stream says."""
    side, target, block = sim.module.Stream(), host(sim), on(sim, 1)
    side.wait_stream(sim.module.current_stream())
    with sim.module.stream(side):
        target.copy_(block, non_blocking=True)
    if waits:
        block.record_stream(side)
    del block
    sim.module.synchronize()
    assert is_all(target, 1) or is_poison(target)
    return is_all(target, 1)


def new_memory_of_another_stream(sim: Simulation, waits: bool) -> bool:
    """A new tensor has nothing in it until its stream has written it."""
    side = sim.module.Stream()
    with sim.module.stream(side):
        block = torch.ones(SIZE, device=sim.kind)
    if waits:
        sim.module.current_stream().wait_stream(side)
    result = block.clone()
    sim.module.synchronize()
    now = result.cpu()
    assert is_all(now, 1) or is_poison(now)
    return is_all(now, 1)


def index_read_when_it_runs(sim: Simulation, waits: bool) -> bool:
    """The values of index tensors are memory like any other."""
    side = sim.module.Stream()
    block = torch.arange(SIZE, device=sim.kind)
    picked = torch.zeros(2, dtype=torch.int64, device=sim.kind)
    sim.drain()
    with sim.module.stream(side):
        picked.fill_(5)
    if waits:
        sim.module.current_stream().wait_stream(side)
    result = torch.index_select(block, 0, picked)
    sim.module.synchronize()
    return result.cpu().tolist() == [5, 5]


PLAYS: tuple[Play, ...] = (
    store_after_compute,
    load_after_last_use,
    compute_after_load,
    compute_after_store,
    two_hops,
    event_after_its_work,
    event_recorded_again,
    host_read_after_its_copy,
    host_written_after_its_copy,
    memory_of_another_stream,
    new_memory_of_another_stream,
    index_read_when_it_runs,
)
