# SPDX-License-Identifier: Apache-2.0
"""Blocks of a failed synchronous load in vLLM's prefix cache: no request may find them later."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from kvhaven.engine.loader import Loader
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_model import Model
from tests.simulation.engine_world import CHUNK, PATIENT, Engine, Setup
from tests.simulation.node import Node, running_node
from tests.simulators import simulated

pytestmark = pytest.mark.slow

SETUP = Setup(
    asynchronous_scheduling=False,
    load_mode="sync",
    budget=100,
    settings=(*PATIENT, ("step_budget_ms", 1000)),
)
PREFIX = [at * at % 7 for at in range(2 * CHUNK)]
SHORT, LONG = [*PREFIX, 1], [*PREFIX, *(at * at % 5 for at in range(30))]


@pytest.fixture
def engine(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yield an engine with synchronous loads, which finds the prefix in the service alone."""
    with running_node(short_dir) as node, simulated("cuda", devices=1) as device:
        setup = replace(SETUP, service_address=node.address)
        engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch, device)
        engine.wait_ready()
        try:
            run(engine, "before", SHORT)
            wait_until(lambda: saved(node))
            assert engine.scheduler.reset_prefix_cache()
            yield engine
        finally:
            for one in engine.devices:
                one.abandon()
            engine.close()


def saved(node: Node) -> bool:
    catalog = node.status().catalog
    return catalog.resident_chunks == 2 and not catalog.reserved_bytes


def run(engine: Engine, name: str, prompt: list[int]) -> None:
    """Run a request to its end; it compares what it reads."""
    engine.add(name, prompt, 3)
    finish(engine)
    assert engine.outputs[name] == engine.model.continuation(None, prompt, 3)


def finish(engine: Engine) -> None:
    def ended() -> bool:
        engine.step()
        engine.tick()
        return not engine.busy

    wait_until(ended, 60)
    for device in engine.devices:
        device.synchronize()


def fail_a_load(engine: Engine, during: Callable[[], None] = lambda: None) -> None:
    """Run a step whose load fails; call `during` between its compute and its end, as vLLM may."""
    update = engine.scheduler.update_from_output

    def updated(*given: object) -> object:
        during()
        engine.scheduler.update_from_output = update
        return update(*given)

    engine.scheduler.update_from_output = updated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "start", lambda loads, job, **_: loads.fail(job, "as the test says"))
        finish(engine)
    assert engine.counters["failed_loads"] == 1


def test_of_a_request_that_is_aborted_in_that_step(engine: Engine) -> None:
    engine.add("aborted", LONG, 3)
    fail_a_load(engine, lambda: engine.abort("aborted"))
    run(engine, "short", SHORT)
    run(engine, "long", LONG)


def test_of_a_request_that_shares_them_and_computes_more(engine: Engine) -> None:
    engine.add("loads", SHORT, 3)
    engine.add("shares", LONG, 3)
    fail_a_load(engine)
    states = {engine.requests[name].status.name for name in ("loads", "shares")}
    assert states == {"FINISHED_ERROR"}
    run(engine, "short", SHORT)
    run(engine, "long", LONG)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_connectors_of_a_multiconnector_follow_the_policy_of_the_engine(
    policy: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives them configurations of their own, with the default policy."""
    folders = [short_dir / "1", short_dir / "2"]
    for folder in folders:
        folder.mkdir()
    with running_node(folders[0]) as one, running_node(folders[1]) as two:
        setup = replace(SETUP, on_failed_load=policy, second_address=two.address)
        setup = replace(setup, service_address=one.address)
        engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
        try:
            assert engine.scheduler.recompute_kv_load_failures is (policy == "recompute")
            for connector in engine.connector.sub_connectors:
                assert connector._scheduler._asynchronous is (policy == "recompute")
        finally:
            engine.close()
