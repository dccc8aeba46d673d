# SPDX-License-Identifier: Apache-2.0
"""Two engines of one model with windows, unlike in blocks, ranks and KV groups, on one service.

Both are vLLM's real schedulers, and write and read portable KV. A document is always new to the
engine that reads it, so its hits are on KV that the other engine wrote. `KVHAVEN_SEED` and
`KVHAVEN_EVENTS` are as in `test_scheduler_simulator`.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import RequestState
from kvhaven.integrations.vllm import parts, start
from kvhaven.layouts import groups, head_shards
from kvhaven.types import ShardId
from tests.simulation.engine_hybrid import ALTERNATING, MIXED, WIDE
from tests.simulation.engine_model import VOCABULARY, Model
from tests.simulation.engine_simulation import check_no_leaks
from tests.simulation.engine_world import PATIENT, Engine, Setup
from tests.simulation.node import Node, running_node
from tests.simulation.test_scheduler_simulator import EVENTS, SEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not parts.REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30"),
]

Patch = pytest.MonkeyPatch
DOCUMENTS = 10
RUNS = max(2, EVENTS // 700)
SEEDS = 12
GRAIN = 8
"""As little of a window is stored as blocks of 8 tokens allow, in place of 128 tokens."""
_END_S = 120.0


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


class Unlike:
    """Two engines, which are stepped at random."""

    def __init__(self, seed: int, folder: Path, node: Node, patch: Patch, **more: Any) -> None:
        self._choice = choice = random.Random(seed)
        self._node = node
        self._model = Model()
        local = choice.random() < 0.25
        window = choice.choice((16, 32, 64) if local else (5, 9, 16, 17, 30, 50))
        # An engine with blocks of 16 tokens stores 16 of a smaller window, which the others do not.
        blocks = [(4, 8), (8, 4)] + [(4, 16), (16, 8)] * (window > GRAIN + 1)
        common: dict[str, Any] = {
            "format": "portable",
            "fingerprint": f"unlike {seed}",
            "window": window,
            "local": local,
            "heads": choice.choice((1, 2, 2)),
            "blocks": choice.choice((130, 200)),
            "service_address": node.address,
            "settings": (*PATIENT, ("window_every", choice.choice((0, 16, 32)))),
        }
        self.setups = [
            Setup(
                block=block,
                grouping=grouping,
                world=world,
                asynchronous_scheduling=choice.random() < 0.7,
                budget=choice.choice((16, 48, 100)),
                prefix_caching=choice.random() < 0.7,
                save_decode=choice.random() < 0.5,
                **(common | more),
            )
            for block, grouping, world in zip(
                choice.choice(blocks),
                choice.choice(((ALTERNATING, MIXED), (WIDE, ALTERNATING), (MIXED, WIDE))),
                choice.choice(((1, 2), (2, 1))),
                strict=True,
            )
        ]
        self.engines = [Engine(folder, one, self._model, choice, patch) for one in self.setups]
        self._documents = [
            [choice.randrange(VOCABULARY) for _ in range(choice.randint(20, 150))]
            for _ in range(DOCUMENTS)
        ]
        self._expected: list[tuple[Engine, str, list[int]]] = []
        self._written: list[tuple[Engine, str, int]] = []

    def run(self) -> Counter[str]:
        """Serve each document by one engine, then by the other; compare every answer."""
        devices = [device for engine in self.engines for device in engine.devices]
        try:
            self._serve()
            for device in devices:
                device.synchronize()
            for engine, name, expected in self._expected:
                assert engine.outputs[name] == expected, name
            check_no_leaks(self._node)
        except BaseException:
            for device in devices:
                device.abandon()
            raise
        finally:
            for engine in self.engines:
                engine.close()
        return sum((Counter(engine.counters) for engine in self.engines), Counter())

    def _serve(self) -> None:
        end = time.monotonic() + _END_S
        for engine in self.engines:
            engine.wait_ready()
        while self._documents or self._written or any(one.busy for one in self.engines):
            assert time.monotonic() < end, "stuck"
            self._act()
            engine = self._choice.choice(self.engines)
            if self._choice.random() < 0.5:
                engine.tick()
            engine.step()

    def _act(self) -> None:
        """Let a document come to one engine, and those that one has served to the other."""
        choice = self._choice
        if self._documents and choice.random() < 0.05:
            document = self._documents.pop()
            first = choice.randrange(2)
            name = self._ask(self.engines[first], document)
            self._written.append((self.engines[first], name, 1 - first))
        for at, (engine, name, other) in enumerate(self._written):
            if engine.requests[name].is_finished():
                del self._written[at]
                document = list(engine.requests[name].prompt_token_ids)
                more = [choice.randrange(VOCABULARY) for _ in range(choice.choice((0, 1, 20)))]
                self._ask(self.engines[other], document + more)
                return

    def _ask(self, engine: Engine, prompt: Sequence[int]) -> str:
        name, length = f"r{len(self._expected)}", self._choice.randint(1, 12)
        expected = self._model.continuation(None, list(prompt), length)
        self._expected.append((engine, name, expected))
        engine.add(name, list(prompt), length)
        return name


def simulate(
    seed: int, folder: Path, node: Node, change: Callable[[Patch], None] | None = None
) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PORTABLE_GRAIN", GRAIN)
        if change is not None:
            change(patch)
        run = Unlike(seed, folder, node, patch)
        try:
            return run.run()
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={EVENTS}: {run.setups}")  # noqa: T201
            raise


def test_what_one_engine_writes_an_unlike_one_reads(short_dir: Path, node: Node) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        counts += simulate(seed, short_dir, node)
    assert counts["hit_tokens"] > 100 * RUNS, f"seed {SEED}: {counts}"
    assert not counts["failed_loads"]


def windows_are_a_block_off(patch: Patch) -> None:
    original = RequestState.part_blocks

    def blocks(state: RequestState, part: KvPart, chunk: int) -> Any:
        tables = state.blocks
        state.blocks = [[ids[0], *ids[:-1]] for ids in tables]
        try:
            return original(state, part, chunk)
        finally:
            state.blocks = tables

    patch.setattr(RequestState, "part_blocks", blocks)


def heads_are_swapped(patch: Patch) -> None:
    original = head_shards

    def shards(heads: int, ranks: int, rank: int, **more: Any) -> list[ShardId]:
        return original(heads, ranks, ranks - 1 - rank, **more)

    patch.setattr(start, "head_shards", shards)


def layers_are_in_the_order_of_their_groups(patch: Patch) -> None:
    calls = iter(range(1 << 30))
    patch.setattr(groups, "layer_number", lambda _: next(calls))
    # The namespaces would tell the order of the layers.
    patch.setattr(start, "layers_field", lambda *_, **__: "all")


def groups_are_in_the_other_order(patch: Patch) -> None:
    original = groups.portable_layout

    def layout(paged: Any, geometries: Sequence[Any]) -> Any:
        found = original(paged, geometries)
        last = found.groups - 1
        object.__setattr__(found, "layer_groups", tuple(last - at for at in found.layer_groups))
        return found

    patch.setattr(start, "portable_layout", layout)


MUTATIONS = (
    windows_are_a_block_off,
    heads_are_swapped,
    layers_are_in_the_order_of_their_groups,
    groups_are_in_the_other_order,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_breakage_is_seen(mutation: Callable[[Patch], None], short_dir: Path, node: Node) -> None:
    for seed in range(SEEDS):
        try:
            simulate(seed, short_dir, node, mutation)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS} runs did not show it")
