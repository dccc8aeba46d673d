# SPDX-License-Identifier: Apache-2.0
"""Layered loads in vLLM's real schedulers, on simulated GPUs whose layers call the hooks or not."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from kvhaven.devices.streams import StreamDevice
from kvhaven.engine import layered
from kvhaven.engine.layered import LayerGroup, LayerGroups
from kvhaven.engine.load_planner import LoadPlanner
from kvhaven.engine.loader import Loader
from tests.simulation.engine_simulation import Simulation
from tests.simulation.engine_world import PATIENT, Setup
from tests.simulation.node import Node, running_node
from tests.simulation.test_scheduler_simulator import EVENTS, SEED
from tests.simulators import simulated

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch

STEPS = 100
WORLDS: dict[str, dict[str, Any]] = {
    "cuda-12.4": {"kind": "cuda", "driver": 12040},
    "cuda-13.0": {"kind": "cuda", "driver": 13000},
    "cuda-unregistered": {"kind": "cuda", "registered_bytes": 0},
    "rocm": {"kind": "rocm"},
}
RUNS = max(1, EVENTS // STEPS // 4 // len(WORLDS))
ALL_MS, SOME_MS = 4.0, 0.0001  # of hits: 25 GB/s are 1.5 million tokens, or 39


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


@pytest.fixture(autouse=True)
def groups_of_one_layer(monkeypatch: Patch) -> None:
    """The simulated model has two layers only."""
    monkeypatch.setattr(layered, "LAYERS", 1)


def setup_of(choice: random.Random, node: Node, **more: Any) -> Setup:
    asynchronous = choice.random() < 0.7
    found: dict[str, Any] = {
        "asynchronous_scheduling": asynchronous,
        "load_mode": choice.choice(("auto", "auto", "sync")),
        "world": choice.choice((1, 1, 2)),
        "blocks": choice.choice((48, 64, 100)),
        "prefix_caching": choice.random() < 0.7,
        "save_decode": choice.random() < 0.5,
        "tails": choice.random() < 0.3,
        "budget": choice.choice((16, 48, 100)),
        "policy": choice.choice(("fcfs", "priority")),
        "on_failed_load": "fail",
        "service_address": node.address,
        "settings": (*PATIENT, ("layered_load_ms", choice.choice((ALL_MS, ALL_MS, SOME_MS)))),
    }
    return Setup(**found | more)


def counted(patch: Patch) -> Counter[str]:
    """Count the layered loads that begin, and the layers that wait for some."""
    counts: Counter[str] = Counter()
    start, wait = Loader.start, Loader.wait_for_layer

    def counting_start(loads: Loader, job: Any, **more: Any) -> None:
        start(loads, job, **more)
        counts["layered"] += sum(load.job is job and bool(load.unread) for load in loads._running)
        counts["whole"] += not job.layered

    def counting_wait(loads: Loader, layer: str) -> None:
        counts["waits"] += any(load.unread for load in loads._running)
        wait(loads, layer)

    patch.setattr(Loader, "start", counting_start)
    patch.setattr(Loader, "wait_for_layer", counting_wait)
    return counts


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
@pytest.mark.parametrize("world", list(WORLDS))
def test_no_schedule_shows_wrong_kv_or_leaks(
    world: str, order: int, short_dir: Path, node: Node
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        setup = setup_of(random.Random(seed), node)
        try:
            with simulated(seed=seed, devices=2, **WORLDS[world]) as device, Patch.context() as patch:
                found = counted(patch)
                run = Simulation(seed, short_dir, [node], setup, patch, simulated=device)
                for one in run.engine.devices:
                    one.order = order
                counts += Counter(run.run(STEPS)) + found
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
            raise
    assert RUNS < 3 or (counts["layered"] and counts["whole"]), f"seed {SEED}: {counts}"
