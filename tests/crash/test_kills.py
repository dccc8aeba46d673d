# SPDX-License-Identifier: Apache-2.0
"""Kill -9 of anybody at any moment, in the middle of stores and loads.

After each: every byte that is loaded is right, nothing is held by the dead, the disk is clean.
`KVHAVEN_EVENTS` says how often, `KVHAVEN_SEED` replays a run.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.node import NodeProcess, audit_disk, eventually, settled, status_of
from tests.crash.workload import Work, WorkingEngine, events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

VICTIMS = ("service", "rank", "scheduler", "engine", "everything")


def test_kills_at_random_moments_leave_nothing_wrong(short_dir: Path) -> None:
    seed, events = seed_of_this_run(), events_of_this_run(50)
    dice = random.Random(seed)
    disk = short_dir / "disk"
    node = NodeProcess(
        short_dir / "s.sock",
        short_dir / "log",
        max_local_cpu_size="2MiB",
        local_disk=disk,
        max_local_disk_size="16MiB",
        verify_memory="off",
    )
    killed = dict.fromkeys(VICTIMS, 0)
    with node:
        for event in range(events):
            world_size, heads = dice.choice(((1, 0), (2, 0), (1, 2), (2, 4), (3, 1)))
            name = f"engine{event % 3}"
            work = Work(node.address, name, world_size, seed + event, heads=heads)
            engine = WorkingEngine(work).wait_ready()
            try:
                time.sleep(dice.random() * 0.2)
                victim = dice.choice(VICTIMS)
                killed[victim] += 1
                strike(victim, engine, node, disk, dice)
                engine.check()
            finally:
                engine.kill()
            settled(node.address, members=0)
        # A last engine loads whatever is cached.
        engine = WorkingEngine(Work(node.address, "last", 1, seed)).wait_ready()
        engine.verify()
        engine.stop()
        settled(node.address, members=0)
        node.stop()
    assert audit_disk(disk).clean
    assert sum(killed.values()) == events
    print(killed)  # noqa: T201 - shown when it fails


def strike(
    victim: str, engine: WorkingEngine, node: NodeProcess, disk: Path, dice: random.Random
) -> None:
    """Kill the victim, and see that those who live on go on."""
    if victim in {"service", "everything"}:
        node.kill()
        if victim == "everything":
            engine.kill()
        audit = audit_disk(disk)
        assert audit.clean, audit.problems
        node.start()
        if victim == "service":
            before = engine.count()
            eventually(lambda: has_gone_on(engine, before), 30)
            engine.verify()
            engine.stop()
        return
    if victim == "rank":
        engine.kill(dice.choice(engine.ranks))
    elif victim == "scheduler":
        engine.kill(engine.scheduler)
    else:
        engine.kill()
    time.sleep(dice.random() * 0.05)


def has_gone_on(engine: WorkingEngine, before: tuple[int, int]) -> bool:
    """Whether it has stepped, and loaded something, since."""
    steps, loaded = engine.count()
    time.sleep(0.01)
    return steps > before[0] and loaded > before[1]


def test_a_service_killed_again_and_again_is_found_again(short_dir: Path) -> None:
    """One engine lives through it all; arenas of dead services do not pile up."""
    seed = seed_of_this_run()
    dice = random.Random(seed)
    node = NodeProcess(
        short_dir / "s.sock",
        short_dir / "log",
        max_local_cpu_size="2MiB",
        local_disk=short_dir / "disk",
    )
    with node:
        engine = WorkingEngine(Work(node.address, "engine", 2, seed)).wait_ready()
        try:
            for _ in range(4):
                time.sleep(dice.random() * 0.2)
                node.kill()
                time.sleep(dice.random() * 0.1)
                node.start()
                before = engine.count()
                eventually(lambda before=before: has_gone_on(engine, before), 30)  # type: ignore[misc]
                assert arenas_mapped_by(engine.ranks[0].pid) <= 2
            engine.stop()
        finally:
            engine.kill()
        settled(node.address, members=0)


def arenas_mapped_by(pid: int | None) -> int:
    """Return how many segments a process maps."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return maps.count("/memfd:kvhaven-arena")


@pytest.mark.parametrize("kill", ["ranks first", "scheduler first"])
def test_leases_of_a_dead_engine_end_with_its_last_process(short_dir: Path, kill: str) -> None:
    with NodeProcess(short_dir / "s.sock", short_dir / "log") as node:
        work = Work(node.address, "engine", 2, 1, pause_s=0.005)
        engine = WorkingEngine(work).wait_ready()
        order: list[Callable[[], None]] = [
            lambda: engine.kill(*engine.ranks),
            lambda: engine.kill(engine.scheduler),
        ]
        eventually(lambda: status_of(node.address).catalog.leases)
        for strike_ in order if kill == "ranks first" else order[::-1]:
            strike_()
        settled(node.address, members=0)
