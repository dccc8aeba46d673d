# SPDX-License-Identifier: Apache-2.0
"""Two node services, each with an arena and a disk of its own, over one shared directory.

What one computes, the other loads; every byte that is loaded is compared. `KVHAVEN_EVENTS` says
how often the writer is killed, `KVHAVEN_SEED` replays a run.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.client.control import connect
from kvhaven.tiers.base import TierAudit
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from tests.commands import kvhaven
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeProcess, audit_disk, eventually, flush, settled, status_of
from tests.crash.workload import Work, WorkingEngine, events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

KEYS = prompt("p", 24)
PROMPTS, LENGTH = 12, 12
"""Of the engines that work at random."""


@pytest.fixture
def shared(short_dir: Path) -> Path:
    path = short_dir / "shared"
    path.mkdir()
    return path


def node_of(short_dir: Path, name: str, **settings: object) -> NodeProcess:
    """Return a node of 2 MiB, so that it has to read things again."""
    defaults: dict[str, object] = {
        "max_local_cpu_size": "2MiB",
        "local_disk": short_dir / f"{name}-disk",
        "max_local_disk_size": "16MiB",
        "remote_url": f"file://{short_dir}/shared",
        "remote_lookup_ttl_s": 0.2,
        "verify_memory": "off",
    }
    return NodeProcess(short_dir / f"{name}.sock", short_dir / f"{name}.log", **defaults | settings)


def audit_shared(path: Path) -> TierAudit:
    """Check every byte of the shared directory."""

    async def run() -> TierAudit:
        tier = filesystem_tier(path, executor=TierExecutor(1))
        await tier.start()
        try:
            return await tier.check()
        finally:
            await tier.close(10)

    return asyncio.run(run())


@contextlib.contextmanager
def working(work: Work) -> Iterator[WorkingEngine]:
    """Have an engine store and load at random."""
    engine = WorkingEngine(work).wait_ready()
    try:
        yield engine
        engine.check()
    finally:
        engine.kill()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_node_loads_what_another_computed(short_dir: Path, shared: Path, world_size: int) -> None:
    with node_of(short_dir, "a") as a, node_of(short_dir, "b") as b:
        with Engine(a.address, world_size) as engine:
            assert engine.save(KEYS) == len(KEYS)
        flush(a.address)
        with Engine(b.address, world_size) as engine:
            assert engine.load([*KEYS, *prompt("unknown", 4)]) == len(KEYS)
            asked = status_of(b.address).catalog.tiers
            assert [t.found for t in asked.values() if t.shared] == [len(KEYS)]
            assert engine.load(KEYS) == len(KEYS)
        flush(b.address)
        status = status_of(b.address)
        assert [t.chunks for t in status.catalog.tiers.values() if not t.shared] == [len(KEYS)]
        assert status.catalog.failed_promotions == 0
        settled(b.address, members=0)
    assert audit_shared(shared).clean


def test_a_node_that_only_reads_writes_nothing_there(short_dir: Path, shared: Path) -> None:
    with (
        node_of(short_dir, "a", remote_write="off") as a,
        Engine(a.address) as engine,
    ):
        assert engine.save(KEYS) == len(KEYS)
        flush(a.address)
    assert list(shared.rglob("*.kv")) == []


def test_clearing_the_shared_tier_clears_it_for_both(short_dir: Path, shared: Path) -> None:
    with node_of(short_dir, "a") as a, node_of(short_dir, "b") as b:
        with Engine(a.address) as engine:
            engine.save(KEYS)
        flush(a.address)
        with connect(b.address) as control:
            control.clear()
            assert list(shared.rglob("*.kv")), "without its name, it is not touched"
            assert control.clear(tier="fs", wait_s=10).chunks == len(KEYS)
        assert list(shared.rglob("*.kv")) == []
        with Engine(b.address) as engine:
            assert engine.load(KEYS) == 0


def test_two_nodes_write_and_read_the_same_at_once(short_dir: Path, shared: Path) -> None:
    seed = seed_of_this_run()
    with node_of(short_dir, "a") as a, node_of(short_dir, "b") as b:
        works = [Work(node.address, "engine", 2, seed + n) for n, node in enumerate((a, b))]
        with working(works[0]) as one, working(works[1]) as two:
            time.sleep(4)
            assert one.verify() > 0
            assert two.verify() > 0
            one.stop()
            two.stop()
        for node in (a, b):
            settled(node.address, members=0)
            tiers = status_of(node.address).catalog.tiers.values()
            assert [t.found for t in tiers if t.shared] > [0]
            node.stop()
    assert audit_shared(shared).clean
    for name in ("a", "b"):
        assert audit_disk(short_dir / f"{name}-disk").clean


def test_a_node_killed_while_it_writes_leaves_nothing_wrong(short_dir: Path, shared: Path) -> None:
    seed, events = seed_of_this_run(), events_of_this_run(8)
    dice = random.Random(seed)
    loaded = 0
    with node_of(short_dir, "b", remote_write="off") as b:
        for event in range(events):
            with node_of(short_dir, f"a{event}") as a:
                # Longer prompts each time, so that there is always something new to write.
                work = Work(a.address, "engine", 1, seed + event, PROMPTS, LENGTH + 2 * event)
                with working(work) as engine:
                    time.sleep(0.1 + dice.random() * 0.4)
                    a.kill()
                    engine.check()
            with Engine(b.address) as reader:
                for number in range(PROMPTS):
                    loaded += reader.load(prompt(number, LENGTH + 2 * event))
            settled(b.address, members=0)
        assert loaded > 0
    kvhaven("tier", "gc", str(shared))
    assert "; 0 problems" in kvhaven("tier", "verify", str(shared))


def test_files_that_vanish_while_they_are_read_are_misses(short_dir: Path, shared: Path) -> None:
    seed = seed_of_this_run()
    dice = random.Random(seed)
    with node_of(short_dir, "a") as a, node_of(short_dir, "b", local_disk="") as b:
        stop = threading.Event()
        stolen = 0

        def vanish() -> None:
            nonlocal stolen
            while not stop.wait(dice.random() * 0.2):
                for file in shared.rglob("*.kv"):
                    if dice.random() < 0.3:
                        file.unlink(missing_ok=True)
                        stolen += 1

        thief = threading.Thread(target=vanish)
        thief.start()
        try:
            work = Work(a.address, "engine", 1, seed)
            with working(work) as writer, Engine(b.address) as reader:
                start = time.monotonic()
                loads = loaded = 0
                # As long as it takes, on a slow machine, until something was loaded and stolen.
                while (spent := time.monotonic() - start) < 5 or (
                    spent < 40 and not (loaded and stolen)
                ):
                    with connect(b.address) as control:
                        control.clear()
                    loads += 1
                    loaded += reader.load(prompt(dice.randrange(PROMPTS), LENGTH))
                writer.stop()
        finally:
            stop.set()
            thief.join()
        settled(b.address, members=0)
        status = status_of(b.address)
        assert loaded > 0
        assert stolen > 0
        assert status.tiers["fs"].online
        assert status.tiers["fs"].errors == 0
        print(loads, loaded, status.tiers["fs"])  # noqa: T201 - shown when it fails
        eventually(lambda: audit_shared(shared).clean)
