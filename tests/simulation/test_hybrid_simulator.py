# SPDX-License-Identifier: Apache-2.0
"""vLLM's real schedulers with KV groups that have a sliding window, over late devices.

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

from kvhaven.engine import part_lookups, request_state
from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.save_planner import SavePlanner
from kvhaven.engine.worker import WorkerSide
from kvhaven.integrations.vllm import parts
from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS
from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_hybrid import ALTERNATING, MIXED, WIDE
from tests.simulation.engine_simulation import Simulation
from tests.simulation.engine_world import PATIENT, Setup
from tests.simulation.node import Node, running_node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30"),
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


def hybrid_setup(choice: random.Random, node: Node, **more: Any) -> Setup:
    """Return an engine with windows within a chunk of 16 tokens, or over several."""
    chosen: dict[str, Any] = {
        "asynchronous_scheduling": choice.random() < 0.7,
        "world": choice.choice((1, 1, 2)),
        "blocks": choice.choice((130, 170, 250)),  # vLLM waits for ever below 3 x 40
        "prefix_caching": choice.random() < 0.7,
        "save_decode": choice.random() < 0.5,
        "policy": choice.choice(("fcfs", "priority")),
        "budget": choice.choice((16, 48, 100)),
        "long_prefill": choice.choice((0, 8, 16)),
        "window": choice.choice((5, 9, 16, 17, 30, 50)),
        "local": False,
        "grouping": choice.choice((ALTERNATING, ALTERNATING, MIXED, WIDE)),
        "format": choice.choice(("paged", "portable")),
        "service_address": node.address,
        "settings": (*PATIENT, ("window_every", choice.choice((0, 32, 64)))),
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
    setup = hybrid_setup(random.Random(seed), node, **more)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "PORTABLE_GRAIN", random.Random(seed).choice((4, 8, 128)))
            run = Simulation(
                seed, folder, [node], setup, patch, faults=faults, failing_loads=failing
            )
            return Counter(run.run(STEPS))
    except BaseException:
        print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={STEPS}: {setup}")  # noqa: T201
        raise


def test_no_schedule_of_windows_shows_wrong_kv_or_leaks(short_dir: Path, node: Node) -> None:
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


def test_no_schedule_of_local_attention_shows_wrong_kv_or_leaks(
    short_dir: Path, node: Node
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        window = random.Random(seed).choice((16, 32, 64))
        failing = seed % 2 == 0
        counts += simulate(seed, short_dir, node, failing=failing, window=window, local=True)
    assert counts["hit_tokens"], f"seed {SEED}: {counts}"


def windows_come_from_the_other_end(patch: Patch) -> None:
    original = KvPart.first_token
    patch.setattr(
        KvPart,
        "chunks",
        lambda part, end, computed, size: (
            range(computed // size, end)
            if part.reach is None
            else range(
                computed // size,
                computed // size + end - max(computed, original(part, end * size)) // size,
            )
        ),
    )


def only_the_full_part_is_loaded(patch: Patch) -> None:
    original = WorkerSide.begin

    def begin(worker: WorkerSide, plan: Any) -> None:
        for job in plan.loads:
            if job.part:
                object.__setattr__(
                    job,
                    "blocks",
                    tuple(tuple((-1,) * len(ids) for ids in group) for group in job.blocks),
                )
        original(worker, plan)

    patch.setattr(WorkerSide, "begin", begin)


def a_missing_chunk_of_a_window_is_not_noticed(patch: Patch) -> None:
    original = KvPart.chunks

    def chunks(part: KvPart, end: int, computed: int, size: int) -> range:
        found = original(part, end, computed, size)
        return found if part.reach is None else found[-1:]

    patch.setattr(KvPart, "chunks", chunks)


def half_of_a_local_chunk_is_thought_enough(patch: Patch) -> None:
    original = KvPart.chunks

    def chunks(part: KvPart, end: int, computed: int, size: int) -> range:
        found = original(part, end, computed, size)
        return found[len(found) // 2 :] if part.local else found

    patch.setattr(KvPart, "chunks", chunks)


def blocks_of_other_groups_are_not_fenced(patch: Patch) -> None:
    original = SavePlanner.note_new

    def note(saves: SavePlanner, blocks: Sequence[Sequence[int]], tokens: int = 0) -> None:
        original(saves, [blocks[0]], tokens)

    patch.setattr(SavePlanner, "note_new", note)


def hits_end_at_the_last_token(patch: Patch) -> None:
    original = part_lookups.PartLookups.lease

    class Longer:
        def __init__(self, request: Any) -> None:
            self._request = request

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._request, name)
            return value + 1 if name == "num_tokens" else value

    def lease(lookups: Any, state: RequestState) -> Any:
        request, state.request = state.request, Longer(state.request)
        try:
            return original(lookups, state)
        finally:
            state.request = request

    patch.setattr(part_lookups.PartLookups, "lease", lease)


def freed_blocks_are_saved(patch: Patch) -> None:
    original = RequestState.part_blocks

    def blocks(state: RequestState, part: KvPart, chunk: int) -> Any:
        state.step_begin = 0
        return original(state, part, chunk)

    patch.setattr(RequestState, "part_blocks", blocks)
    patch.setattr(request_state, "NULL_BLOCK", -1)


def parts_end_with_the_first(patch: Patch) -> None:
    original = WorkerSide.begin

    def begin(worker: WorkerSide, plan: Any) -> None:
        original(worker, plan)
        worker._parts_loading.clear()

    patch.setattr(WorkerSide, "begin", begin)


def no_fence(patch: Patch) -> None:
    patch.setattr(LateDevice, "fence", lambda *_: None)


SLOW: dict[str, Any] = {"stores": (0.02,), "loads": (0.02,), "blocks": 130}
MUTATIONS: dict[Callable[[Patch], None], dict[str, Any]] = {
    windows_come_from_the_other_end: {"window": 17},
    only_the_full_part_is_loaded: {},
    a_missing_chunk_of_a_window_is_not_noticed: {"window": 50},
    half_of_a_local_chunk_is_thought_enough: {"window": 64, "local": True},
    blocks_of_other_groups_are_not_fenced: SLOW,
    hits_end_at_the_last_token: {"window": 17},
    freed_blocks_are_saved: {
        "window": 17,
        "prefix_caching": True,
        "settings": (*PATIENT, ("window_every", 16)),
    },
    parts_end_with_the_first: {"loads": (0.01,)},
    no_fence: SLOW,
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_breakage_is_seen(
    mutation: Callable[[Patch], None], short_dir: Path, small_node: Node
) -> None:
    for seed in range(SEEDS):
        setup = hybrid_setup(random.Random(seed), small_node, **MUTATIONS[mutation])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "PORTABLE_GRAIN", 4)
            mutation(patch)
            run = Simulation(seed, short_dir, [small_node], setup, patch)
            try:
                run.run(STEPS)
            except AssertionError:
                return
    pytest.fail(f"{SEEDS} runs did not show it")
