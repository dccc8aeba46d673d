# SPDX-License-Identifier: Apache-2.0
"""A request whose load failed, before others in vLLM's queue whose loads have ended.

vLLM (0.32, by its sources) schedules requests that hold blocks before all others. One whose load
failed at its first token stays at the head of that queue, though it gave its blocks back. If those
behind it hold so many that its prompt does not fit, neither it nor they are ever scheduled.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the scheduler is vLLM's")

from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_model import Model
from tests.simulation.engine_world import Engine, Setup
from tests.simulation.node import Node, running_node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30"),
]

TIGHT = Setup(
    asynchronous_scheduling=False,
    blocks=111,
    budget=48,
    prefix_caching=False,
    window=64,
    local=True,
    settings=(
        ("step_budget_ms", 1000),
        ("lookup_deadline_ms", 60_000),
        ("promote_deadline_ms", 60_000),
        ("save_deadline_ms", 60_000),
    ),
)
"""Loaded, the longer prompt takes 46 of 110 blocks, the other 45; computed, it takes 78."""
LONGER, OTHER = [at * at % 7 for at in range(103)], [at * at % 5 for at in range(60)]
CHUNKS = 16
"""Nine of the group with full attention, and those that begin or end a prompt's last window."""


@pytest.fixture
def node(short_dir: Path) -> Iterator[Node]:
    with running_node(short_dir) as started:
        yield started


def run_until_idle(engine: Engine, seconds: float) -> bool:
    """Run until no request is left, at most so long; return whether that was reached."""
    end = time.monotonic() + seconds
    while engine.busy:
        engine.step()
        engine.tick()
        if time.monotonic() > end:
            return False
    for device in engine.devices:
        device.synchronize()
    return True


def fail_the_first_of_two(engine: Engine, node: Node, seconds: float) -> bool:
    """Have both prompts loaded, and the longer one's load fail; return whether both end."""
    engine.wait_ready()
    for name, prompt in (("a", LONGER), ("b", OTHER)):
        engine.add(name, prompt, 1)
        assert run_until_idle(engine, 120)

    def saved() -> bool:
        catalog = node.status().catalog
        return catalog.resident_chunks == CHUNKS and not catalog.reserved_bytes

    wait_until(saved)
    (device,) = engine.devices
    device.fail_loads = 1
    engine.add("longer", LONGER, 2)
    engine.add("other", OTHER, 2)
    wait_until(lambda: both_are_loaded(engine), 60)
    return run_until_idle(engine, seconds)


def both_are_loaded(engine: Engine) -> bool:
    """Schedule once, without time for copies; return whether both requests wait for their load."""
    engine.step()
    states = {engine.requests[name].status.name for name in ("longer", "other")}
    return states == {"WAITING_FOR_REMOTE_KVS"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_those_behind_it_are_scheduled(
    asynchronous: bool, short_dir: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = replace(TIGHT, service_address=node.address, asynchronous_scheduling=asynchronous)
    engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
    try:
        assert fail_the_first_of_two(engine, node, 120)
        for name, prompt in (("longer", LONGER), ("other", OTHER)):
            assert engine.outputs[name] == engine.model.continuation(None, prompt, 2)
        assert engine.counters["failed_loads"] == 1
    finally:
        engine.close()
