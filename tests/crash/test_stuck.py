# SPDX-License-Identifier: Apache-2.0
"""A service that is stopped, and one that serves for long: engines go on, nothing grows."""

import contextlib
import random
import resource
import socket
from pathlib import Path

import pytest

from kvhaven.client.control import connect
from kvhaven.types import Checksum
from tests.crash.engine import Engine, Rank, Scheduler, prompt
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.workload import events_of_this_run

pytestmark = pytest.mark.crash

KEYS = prompt("p", 8)


def test_a_stopped_service_costs_a_deadline_and_is_back_at_once(short_dir: Path) -> None:
    with NodeProcess(short_dir / "s.sock", short_dir / "log") as node:
        rank, scheduler = Rank(node.address), Scheduler(node.address, lookup_s=0.1)
        rank.start()
        scheduler.start()
        rank.save(KEYS)
        assert eventually(lambda: scheduler.load(KEYS, [rank])) == 8
        for _ in range(2):
            with node.frozen():
                before = scheduler.client.deadlines_missed + rank.client.deadlines_missed
                for step in range(50):
                    assert scheduler.load(KEYS, [rank]) == 0
                    assert rank.save(prompt("q", 3), wait_s=0.05) == 0
                    if step > 5:
                        assert not scheduler.client.responsive
                missed = scheduler.client.deadlines_missed + rank.client.deadlines_missed
                assert missed - before < 10, "who found out waits no more, but for a probe"
            eventually(lambda: scheduler.load(KEYS, [rank]) == 8, 60)
            eventually(lambda: rank.save(prompt("r", 2)), 60)
            settled(node.address, members=2)
            with connect(node.address) as control:
                control.clear()
            rank.save(KEYS)
        scheduler.close()
        rank.close()


def test_an_engine_starts_without_a_service_that_is_stopped(short_dir: Path) -> None:
    with NodeProcess(short_dir / "s.sock", short_dir / "log") as node:
        rank = Rank(node.address)
        with node.frozen():
            with contextlib.suppress(Exception):
                rank.start(0.2)
            assert rank.save(KEYS) == 0
        eventually(lambda: rank.client.up)
        assert rank.client.wait_ready(60)
        assert rank.save(KEYS) == 8
        with node.frozen():
            rank.close()


def test_a_service_takes_all_descriptors_that_it_may_have(short_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = NodeProcess(short_dir / "s.sock", short_dir / "log")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with node:
            assert resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def anonymous_kib(pid: int) -> int:
    """Return what a process has for itself, the arena not counted."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_a_service_that_runs_for_long_does_not_grow(short_dir: Path) -> None:
    """Its garbage collector is off: nothing it does again and again may leave cycles behind."""
    dice = random.Random(1)
    prompts = [prompt(number, 16) for number in range(40)]
    with (
        NodeProcess(
            short_dir / "s.sock",
            short_dir / "log",
            max_local_cpu_size="2MiB",
            local_disk=short_dir / "disk",
            log_level="ERROR",
        ) as node,
        Engine(node.address) as engine,
    ):
        pid, rank, scheduler = node.process.pid, engine.ranks[0], engine.scheduler.client
        before = (0, 0)
        count = events_of_this_run(20_000)
        for number in range(count):
            keys = dice.choice(prompts)
            lease_id = scheduler.ask(keys)
            if lease_id is not None:
                scheduler.wait(lease_id, 0.01)
                scheduler.release([lease_id])
            if number % 3 == 0:
                grants = rank.reserve(keys)
                if number % 2:
                    rank.client.abort(grants)
                else:  # with a wrong checksum: what comes back from disk is refused there
                    rank.client.commit([(grant, [Checksum(bytes(16))]) for grant in grants])
            if number % 10 == 0:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(node.address)
                    sock.send(b"\x05\0\0\0garbage")
            if number % 50 == 0:
                status_of(node.address)
            if number == count // 4:
                before = anonymous_kib(pid), descriptors(pid)
        assert status_of(node.address).tiers["disk"].rejected > 100
        assert anonymous_kib(pid) - before[0] < 4096
        assert descriptors(pid) <= before[1] + 4
