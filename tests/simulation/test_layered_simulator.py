# SPDX-License-Identifier: Apache-2.0
"""Layered loads in vLLM's real schedulers, on simulated GPUs whose layers call the hooks or not."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from kvhaven.engine import layered
from kvhaven.engine.loader import Loader
from tests.simulation.engine_simulation import Simulation
from tests.simulation.engine_world import PATIENT, Setup
from tests.simulation.layer_breakages import layers_without_hooks_are_not_noticed, no_waits
from tests.simulation.node import Node, running_node
from tests.simulation.test_scheduler_simulator import EVENTS, SEED
from tests.simulators import simulated

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch

STEPS = 60
WORLDS: dict[str, dict[str, Any]] = {
    "cuda-13.0": {"kind": "cuda", "driver": 13000},
    "cuda-unregistered": {"kind": "cuda", "registered_bytes": 0},
    "rocm": {"kind": "rocm"},
}
RUNS = max(1, EVENTS // STEPS // 30 // len(WORLDS))
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


@pytest.mark.parametrize("world", list(WORLDS))
def test_no_schedule_shows_wrong_kv_or_leaks(world: str, short_dir: Path, node: Node) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        choice = random.Random(seed)
        setup = setup_of(choice, node)
        try:
            counts += run_of(seed, short_dir, node, setup, world, order=choice.choice((1, -1)))
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
            raise
    wanted = ("layered", "whole", "preemptions", "aborted RUNNING")
    assert RUNS < 8 or all(counts[what] for what in wanted), f"seed {SEED}: {counts}"
    print(counts)  # noqa: T201 - the figures


def run_of(
    seed: int,
    folder: Path,
    node: Node,
    setup: Setup,
    world: str = "cuda-13.0",
    *,
    breakage: Callable[[Patch], None] = lambda _: None,
    order: int = 1,
    silent: bool = False,
    faults: bool = False,
) -> Counter[str]:
    """Run random steps; `silent`: after the first third of them, the first layer has no hook."""
    with simulated(seed=seed, devices=2, **WORLDS[world]) as device, Patch.context() as patch:
        breakage(patch)
        counts = counted(patch)
        run = Simulation(seed, folder, [node], setup, patch, simulated=device, faults=faults)
        for one in run.engine.devices:
            one.order = order
        if silent:
            step, left = run._step, [STEPS // 3]

            def silencing_step() -> None:
                step()
                left[0] -= 1
                if not left[0]:
                    run.engine.devices[0].silent = {0}

            patch.setattr(run, "_step", silencing_step)
        return Counter(run.run(STEPS)) + counts


# --- breakages ------------------------------------------------------------------------------------


def full_graphs_are_layered(patch: Patch) -> None:
    """A FULL graph is taken for one that calls hooks, and its layers for known ones."""
    patch.setattr("kvhaven.integrations.vllm.connector.calls_layer_hooks", lambda _: True)
    layers_without_hooks_are_not_noticed(patch)


BREAKAGES: dict[Callable[[Patch], None], dict[str, Any]] = {
    no_waits: {},
    layers_without_hooks_are_not_noticed: {"silent": True},
    full_graphs_are_layered: {},
}
SEEDS = 40


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_breakage_is_seen(breakage: Callable[[Patch], None], short_dir: Path, node: Node) -> None:
    for seed in range(SEEDS):
        setup = setup_of(
            random.Random(seed),
            node,
            asynchronous_scheduling=False,
            prefix_caching=False,
            world=1,
            tails=False,
            settings=(*PATIENT, ("layered_load_ms", ALL_MS)),
        )
        try:
            run_of(seed, short_dir, node, setup, breakage=breakage, **BREAKAGES[breakage])
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} runs did not show it")


@pytest.mark.parametrize(
    ("policy", "prefix_caching"), [("recompute", False), ("fail", False), ("fail", True)]
)
def test_a_layer_without_a_hook_fails_the_load_and_nothing_is_wrong(
    policy: str, short_dir: Path, node: Node, *, prefix_caching: bool
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + SEEDS):
        setup = setup_of(
            random.Random(seed),
            node,
            asynchronous_scheduling=False,
            on_failed_load=policy,
            world=1,
            prefix_caching=prefix_caching,
            settings=(*PATIENT, ("layered_load_ms", ALL_MS)),
        )
        counts += run_of(seed, short_dir, node, setup, silent=True)
        if counts["failed_loads"] and seed > SEED:  # a random run may load nothing after its middle
            break
    assert counts["failed_loads"], counts
    assert counts["failed_loads"] <= counts["layered"]


def test_a_service_that_is_killed_stopped_and_started_again(short_dir: Path, node: Node) -> None:
    for seed in range(SEED, SEED + max(1, RUNS // 5)):
        run_of(seed, short_dir, node, setup_of(random.Random(seed), node), faults=True)
