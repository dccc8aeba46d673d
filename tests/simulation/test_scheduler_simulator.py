# SPDX-License-Identifier: Apache-2.0
"""vLLM's real schedulers with our connector, over devices whose copies really are late.

`KVHAVEN_SEED` replays the seed of a failure, `KVHAVEN_EVENTS` sets how many steps are run
altogether (short form: 7,000). A long form: `KVHAVEN_EVENTS=1000000 pytest -o timeout=0
tests/simulation/test_scheduler_simulator.py`. Threads and a real service take part, so a seed
repeats the random choices, not every instant.
"""

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from tests.simulation.engine_simulation import Simulation, random_setup
from tests.simulation.node import Node, running_node

pytestmark = pytest.mark.slow

STEPS = 300
EVENTS = int(os.environ.get("KVHAVEN_EVENTS", "7000"))
RUNS = max(1, EVENTS // STEPS)
SEED = int(os.environ.get("KVHAVEN_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


@pytest.fixture
def second(short_dir: Path) -> Iterator[Node]:
    folder = short_dir / "second"
    folder.mkdir()
    with running_node(folder) as started:
        yield started


def simulate(
    seed: int,
    folder: Path,
    node: Node,
    second: Node | None = None,
    *,
    faults: bool = False,
    failing: bool = False,
) -> Counter[str]:
    """Run one engine from a seed, which is printed when something is wrong."""
    choice = random.Random(seed)
    setup = random_setup(choice, node, second, patient=not faults)
    # A second connector would load again what failed, and vLLM can wait for itself then.
    failing = failing and setup.load_mode == "async" and not setup.second_address
    try:
        with pytest.MonkeyPatch.context() as patch:
            run = Simulation(
                seed,
                folder,
                [node, second] if second is not None else [node],
                setup,
                patch,
                faults=faults,
                failing_loads=failing,
            )
            return Counter(run.run(STEPS))
    except BaseException:
        print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
        raise


def test_no_schedule_shows_wrong_kv_or_leaks(short_dir: Path, node: Node, second: Node) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        counts += simulate(seed, short_dir, node, second, failing=seed % 2 == 0)
    if RUNS >= 20:
        wanted = (
            *("hit_tokens", "tail_hits", "saved_chunks", "fences", "preemptions"),
            *("aborted WAITING", "aborted RUNNING", "aborted WAITING_FOR_REMOTE_KVS"),
        )
        assert not [what for what in wanted if not counts[what]], f"seed {SEED}: {counts}"


def test_an_arena_that_is_far_too_small_and_a_disk_below_it(short_dir: Path) -> None:
    with running_node(short_dir, arena_bytes=200_000, disk=True) as node:
        counts: Counter[str] = Counter()
        for seed in range(SEED, SEED + max(1, RUNS // 5)):
            counts += simulate(seed, short_dir, node)
    assert RUNS < 20 or counts["hit_tokens"], f"seed {SEED}: {counts}"


def test_a_service_that_is_killed_stopped_and_started_again(short_dir: Path, node: Node) -> None:
    for seed in range(SEED, SEED + max(1, RUNS // 5)):
        simulate(seed, short_dir, node, faults=True)
