# SPDX-License-Identifier: Apache-2.0
"""Other connectors beside ours in a MultiConnector: failed loads, and requests for other nodes."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_model import Model, Runner
from tests.simulation.engine_world import Engine
from tests.simulation.node import running_node
from tests.simulation.test_failed_sync_loads import LONG, SETUP, SHORT, fail_a_load, finish, run

pytestmark = pytest.mark.slow


def test_kv_of_its_failed_load_is_not_saved(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connectors are ours, each with a node of its own. The first one's load fails."""
    folders = [short_dir / name for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
    with running_node(folders[0]) as first, running_node(folders[1]) as second:

        def engine_with(*addresses: str) -> Engine:
            setup = replace(SETUP, service_address=addresses[0], second_address=addresses[1])
            engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
            engine.wait_ready()
            return engine

        engine = engine_with(first.address, "")
        run(engine, "before", SHORT)
        wait_until(lambda: first.status().catalog.resident_chunks == 2)
        engine.close()
        engine = engine_with(first.address, second.address)
        engine.add("fails", LONG, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "_expect", lambda *_: None)  # vLLM drops what it computes
            fail_a_load(engine)
        engine.close()
        assert second.status().catalog.resident_chunks == 0
        engine = engine_with(second.address, "")
        run(engine, "short", SHORT)
        run(engine, "long", LONG)
        engine.close()


def test_two_connectors_do_not_both_answer_for_another_node(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's NIXL connector answers with the same names: the MultiConnector ended the engine."""
    folders = [short_dir / name for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
    with running_node(folders[0]) as first, running_node(folders[1]) as second:
        setup = replace(SETUP, service_address=first.address, second_address=second.address)
        engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
        engine.wait_ready()
        engine.add("prefilled", LONG, 1, params={"kv_transfer_params": {"do_remote_decode": True}})
        finish(engine)
        assert not engine.handovers
        engine.close()
