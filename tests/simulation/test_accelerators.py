# SPDX-License-Identifier: Apache-2.0
"""vLLM's real schedulers with our connector and our real devices, on simulated accelerators.

As `test_scheduler_simulator` does over a device of Python, with the same two variables.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from tests.simulation.engine_simulation import Simulation
from tests.simulation.engine_world import PATIENT, Setup
from tests.simulation.node import Node, running_node
from tests.simulation.test_scheduler_simulator import EVENTS, SEED
from tests.simulators import simulated

pytestmark = pytest.mark.slow

STEPS = 150
ACCELERATORS: dict[str, dict[str, Any]] = {
    "hpu-lazy": {"kind": "hpu", "mode": "lazy"},
    "hpu-eager": {"kind": "hpu", "mode": "eager"},
    "xpu": {"kind": "xpu"},
    "cuda-12.4": {"kind": "cuda", "driver": 12040},
    "cuda-13.0": {"kind": "cuda", "driver": 13000},
    "cuda-unregistered": {"kind": "cuda", "registered_bytes": 0},
    "rocm": {"kind": "rocm"},
}
RUNS = max(1, EVENTS // STEPS // 2 // len(ACCELERATORS))


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


def setup_of(accelerator: str, kv_format: str, choice: random.Random, node: Node) -> Setup:
    """Return an engine as it may be on this accelerator."""
    gaudi = accelerator.startswith("hpu")
    return Setup(
        asynchronous_scheduling=choice.random() < 0.7,
        load_mode="auto" if gaudi else choice.choice(("auto", "sync")),
        world=choice.choice((1, 1, 2)),
        blocks=choice.choice((48, 64, 100)),
        prefix_caching=gaudi or choice.random() < 0.7,
        save_decode=choice.random() < 0.5,
        tails=choice.random() < 0.6,
        budget=choice.choice((16, 48, 100)),
        policy=choice.choice(("fcfs", "priority")),
        service_address=node.address,
        settings=PATIENT,
        format=kv_format,
    )


@pytest.mark.parametrize("kv_format", ["paged", "portable"])
@pytest.mark.parametrize("accelerator", list(ACCELERATORS))
def test_no_schedule_shows_wrong_kv_or_leaks(
    accelerator: str, kv_format: str, short_dir: Path, node: Node
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        choice = random.Random(seed)
        setup = setup_of(accelerator, kv_format, choice, node)
        try:
            with (
                simulated(seed=seed, devices=2, **ACCELERATORS[accelerator]) as device,
                pytest.MonkeyPatch.context() as patch,
            ):
                run = Simulation(seed, short_dir, [node], setup, patch, simulated=device)
                counts += Counter(run.run(STEPS))
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
            raise
    assert RUNS < 3 or counts["hit_tokens"], f"seed {SEED}: {counts}"
