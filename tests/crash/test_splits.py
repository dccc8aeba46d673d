# SPDX-License-Identifier: Apache-2.0
"""Engines that divide a model's heads differently, on one service and one disk, with kills.

What an engine of one rank has written is loaded by one of two or four, and the reverse, and
every byte is compared.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, audit_disk, eventually, flush, settled, status_of
from tests.crash.workload import Work, WorkingEngine, events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash


def node_with_disk(folder: Path, **settings: object) -> NodeProcess:
    return NodeProcess(
        folder / "s.sock",
        folder / "log",
        local_disk=folder / "disk",
        max_local_disk_size="32MiB",
        **settings,
    )


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(("writer", "reader"), [(1, 2), (2, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_what_one_engine_wrote_another_loads_from_memory_and_from_disk(
    short_dir: Path, writer: int, reader: int, heads: int
) -> None:
    keys = prompt("p", 10)
    with node_with_disk(short_dir) as node:
        with Engine(node.address, writer, engine="writer", heads=heads) as engine:
            assert engine.save(keys) == 10
            with Engine(node.address, reader, engine="reader", heads=heads) as other:
                assert eventually(lambda: other.load(keys)) == 10
            flush(node.address)
            node.kill()
        audit = audit_disk(short_dir / "disk")
        assert audit.clean, audit.problems
        node.start()
        with Engine(node.address, reader, engine="reader", heads=heads) as other:
            eventually(lambda: other.load(keys) == 10)  # the scan goes on meanwhile
            assert status_of(node.address).catalog.promoted_chunks == 10
            assert other.save(keys) == 0
        settled(node.address, members=0)
        node.stop()


def test_engines_of_all_sizes_work_on_one_model_while_they_are_killed(short_dir: Path) -> None:
    seed, events = seed_of_this_run(), events_of_this_run(12)
    dice = random.Random(seed)
    node = node_with_disk(short_dir, max_local_cpu_size="2MiB", verify_memory="off")
    with node:
        engines: list[WorkingEngine] = []
        try:
            for event in range(events):
                while len(engines) < 2:
                    engines.append(start(node, event, len(engines), dice))
                time.sleep(dice.random() * 0.3)
                strike(node, engines, short_dir / "disk", dice)
                for engine in engines:
                    engine.check()
            for engine in engines:
                eventually(lambda engine=engine: engine.count()[1] > 0, 30)  # type: ignore[misc]
                engine.verify()
                engine.stop()
        finally:
            for engine in engines:
                engine.kill()
        settled(node.address, members=0)
        # A last engine of another size loads whatever is cached.
        with Engine(node.address, 2, engine="last", heads=4) as last:
            assert sum(last.load(prompt(number, 12)) for number in range(12)) > 0
        settled(node.address, members=0)
        node.stop()


def start(node: NodeProcess, event: int, number: int, dice: random.Random) -> WorkingEngine:
    world_size = dice.choice((1, 2, 4))
    work = Work(node.address, f"e{event}-{number}", world_size, dice.getrandbits(30), heads=4)
    return WorkingEngine(work).wait_ready()


def strike(
    node: NodeProcess, engines: list[WorkingEngine], disk: Path, dice: random.Random
) -> None:
    """Kill the service, or somebody of an engine, which then goes as a whole."""
    if dice.random() < 0.3:
        node.kill()
        audit = audit_disk(disk)
        assert audit.clean, audit.problems
        node.start()
        return
    engine = engines.pop(dice.randrange(len(engines)))
    engine.kill(*some(engine.processes, dice))
    time.sleep(dice.random() * 0.05)
    engine.check()
    engine.kill()


def some(processes: Sequence[object], dice: random.Random) -> list[object]:
    """Return one of these, or all."""
    return [dice.choice(processes)] if dice.random() < 0.7 else list(processes)
