# SPDX-License-Identifier: Apache-2.0
"""vLLM's real schedulers with KV groups that keep recurrent states, over late devices.

`KVHAVEN_SEED` and `KVHAVEN_EVENTS` are as in `test_scheduler_simulator`.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from kvhaven.engine.jobs import LoadJob, SaveJob
from kvhaven.engine.load_planner import LoadPlanner
from kvhaven.engine.loader import Loader
from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.requests import KeptState
from kvhaven.engine.save_planner import SavePlanner
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.errors import UnreportedLoadError
from kvhaven.integrations.vllm.state import HANDS_STATES_OFF
from tests.simulation.engine_simulation import Simulation
from tests.simulation.engine_world import BLOCK, CHUNK, PATIENT, Setup
from tests.simulation.node import Node, running_node
from tests.simulation.test_hybrid_simulator import (
    blocks_of_other_groups_are_not_fenced,
    hits_end_at_the_last_token,
    no_fence,
    only_the_full_part_is_loaded,
    parts_end_with_the_first,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HANDS_STATES_OFF, reason="vLLM 0.32 and newer hand states off"),
]

Patch = pytest.MonkeyPatch
STEPS = 250
RUNS = max(2, int(os.environ.get("KVHAVEN_EVENTS", "2500")) // STEPS)
SEED = int(os.environ.get("KVHAVEN_SEED") or random.SystemRandom().randrange(1 << 32))
SEEDS = 60


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


@pytest.fixture
def small_node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir, arena_bytes=150_000) as started:
        yield started


def state_setup(choice: random.Random, node: Node, **more: Any) -> Setup:
    """Return an engine with chunks of one block, as most models have them, or of four."""
    block = choice.choice((BLOCK, CHUNK, CHUNK))
    chosen: dict[str, Any] = {
        "states": True,
        "asynchronous_scheduling": choice.random() < 0.7,
        "world": choice.choice((1, 1, 2)),
        "block": block,
        "blocks": choice.choice((130, 170, 250)) * 2 * BLOCK // block,
        "prefix_caching": True,
        "save_decode": choice.random() < 0.5,
        "policy": choice.choice(("fcfs", "priority")),
        "budget": choice.choice((16, 48, 100)),
        "long_prefill": choice.choice((0, 8, 16)),
        "checkpoints": choice.random() < 0.5,
        "retention": choice.choice((0, 0, 2 * CHUNK, CHUNK, None)),
        "service_address": node.address,
        "settings": PATIENT,
    }
    return Setup(**(chosen | more))


def simulate(
    seed: int,
    folder: Path,
    node: Node,
    *,
    failing: bool = False,
    faults: bool = False,
    **more: Any,
) -> Counter[str]:
    """Run one engine from a seed, which is printed when something is wrong."""
    setup = state_setup(random.Random(seed), node, **more)
    try:
        with pytest.MonkeyPatch.context() as patch:
            run = Simulation(
                seed, folder, [node], setup, patch, faults=faults, failing_loads=failing
            )
            return Counter(run.run(STEPS))
    except BaseException:
        print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
        raise


def test_no_schedule_of_states_shows_a_wrong_one_or_leaks(short_dir: Path, node: Node) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        counts += simulate(seed, short_dir, node, failing=seed % 2 == 0)
    assert counts["hit_tokens"], f"seed {SEED}: {counts}"
    assert counts["saved_chunks"]


def test_a_service_that_is_killed_stopped_and_started_again(short_dir: Path, node: Node) -> None:
    for seed in range(SEED, SEED + max(2, RUNS // 5)):
        simulate(seed, short_dir, node, faults=True, settings=())


def test_an_arena_that_is_far_too_small_and_a_disk_below_it(short_dir: Path) -> None:
    with running_node(short_dir, arena_bytes=200_000, disk=True) as node:
        for seed in range(SEED, SEED + max(2, RUNS // 5)):
            simulate(seed, short_dir, node)


Plan = Callable[..., list[SaveJob]]


def mutated_states(patch: Patch, change: Callable[..., Sequence[KeptState]]) -> None:
    """Have saves planned for other states than those that vLLM hands off."""
    original: Plan = SavePlanner._plan_states

    def plan(
        saves: SavePlanner,
        state: RequestState,
        part: KvPart,
        number: int,
        end: int,
        states: Sequence[KeptState],
    ) -> list[SaveJob]:
        return original(saves, state, part, number, end, change(state, part, end, states))

    patch.setattr(SavePlanner, "_plan_states", plan)


def states_are_saved_by_their_position(patch: Patch) -> None:
    def by_position(
        state: RequestState, part: KvPart, end: int, _: Sequence[KeptState]
    ) -> list[KeptState]:
        state.step_begin = 0
        return [
            KeptState(group, state.blocks[group][tokens // part.block_size - 1], tokens)
            for tokens in range(CHUNK, end + 1, CHUNK)
            for group in part.groups
        ]

    mutated_states(patch, by_position)


def a_state_is_saved_for_the_chunk_before(patch: Patch) -> None:
    def before(
        state: RequestState, _: KvPart, __: int, states: Sequence[KeptState]
    ) -> list[KeptState]:
        state.step_begin = 0
        return [one._replace(tokens=one.tokens - CHUNK) for one in states if one.tokens > CHUNK]

    mutated_states(patch, before)


def a_state_is_saved_for_another_group(patch: Patch) -> None:
    def swapped(
        _: RequestState, part: KvPart, __: int, states: Sequence[KeptState]
    ) -> list[KeptState]:
        return [one._replace(group=sum(part.groups) - one.group) for one in states]

    mutated_states(patch, swapped)


def loads_are_synchronous(patch: Patch) -> None:
    matched, init = SchedulerSide.matched_tokens, LoadPlanner.__init__

    def found(side: SchedulerSide, *args: Any) -> tuple[int | None, bool]:
        return matched(side, *args)[0], False

    def begin(planner: LoadPlanner, *args: Any, **more: Any) -> None:
        init(planner, *args, **more | {"asynchronous": False})

    patch.setattr(SchedulerSide, "matched_tokens", found)
    patch.setattr(LoadPlanner, "__init__", begin)


def a_failed_load_of_a_state_is_not_reported(patch: Patch) -> None:
    original = Loader.fail

    def fail(loader: Loader, job: LoadJob, reason: str) -> None:
        if job.part:
            loader._finished.add(job.request_id)
        else:
            original(loader, job, reason)

    patch.setattr(Loader, "fail", fail)


SLOW: dict[str, Any] = {"stores": (0.02,), "loads": (0.02,), "block": CHUNK, "blocks": 70}
MUTATIONS: dict[Callable[[Patch], None], dict[str, Any]] = {
    states_are_saved_by_their_position: {},
    a_state_is_saved_for_the_chunk_before: {},
    a_state_is_saved_for_another_group: {},
    loads_are_synchronous: {},
    a_failed_load_of_a_state_is_not_reported: {},
    only_the_full_part_is_loaded: {},
    hits_end_at_the_last_token: {},
    parts_end_with_the_first: {"loads": (0.01,)},
    blocks_of_other_groups_are_not_fenced: SLOW,
    no_fence: SLOW,
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_breakage_is_seen(
    mutation: Callable[[Patch], None], short_dir: Path, small_node: Node
) -> None:
    failing = mutation is a_failed_load_of_a_state_is_not_reported
    for seed in range(SEEDS):
        setup = state_setup(random.Random(seed), small_node, **MUTATIONS[mutation])
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            run = Simulation(seed, short_dir, [small_node], setup, patch, failing_loads=failing)
            try:
                run.run(STEPS)
            except AssertionError:
                return
            except UnreportedLoadError:  # a load could not be planned: the engine stops, rightly
                assert mutation is loads_are_synchronous
    pytest.fail(f"{SEEDS} runs did not show it")
