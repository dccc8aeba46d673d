# SPDX-License-Identifier: Apache-2.0
"""Kill -9, and stops, while the arena is being allocated and engines use what there is of it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.client.unix import listens
from tests.crash.node import MIB, NodeProcess, eventually, settled, status_of
from tests.crash.workload import Work, WorkingEngine, seed_of_this_run

pytestmark = pytest.mark.crash

SLOW = """
import functools, os, sys, time
from kvhaven.cli import main
from kvhaven.service import main as service

allocate = os.posix_fallocate

def slowly(fd, offset, length):
    time.sleep(0.05 if offset else 0)
    while offset >= 4 << 20 and not os.path.exists(sys.argv[-1] + ".open"):
        time.sleep(0.01)
    allocate(fd, offset, length)

os.posix_fallocate = slowly
service.Arena = functools.partial(service.Arena, first_bytes=1 << 20, step_bytes=1 << 20)
main()
"""


class SlowNode(NodeProcess):
    """A service whose arena has 1 MiB at first, then 4 MiB, and 16 when the test lets it."""

    program = ("-c", SLOW)

    def open(self) -> None:
        """Let the arena become whole."""
        Path(f"{self.address}.open").touch()


@pytest.fixture
def node(short_dir: Path) -> Iterator[SlowNode]:
    node = SlowNode(short_dir / "s.sock", short_dir / "log")
    yield node
    if node.process.poll() is None:
        node.kill()


@pytest.fixture
def engine(node: SlowNode) -> Iterator[WorkingEngine]:
    """An engine that is there before the service, so that it works from its first moment."""
    work = Work(node.address, "e", 2, seed_of_this_run(), prompts=60, length=24)
    engine = WorkingEngine(work)
    node.start()
    try:
        yield engine.wait_ready()
    finally:
        engine.kill()


def steps(engine: WorkingEngine, more: int = 10) -> None:
    """Wait until it has done some steps, and loaded something."""
    before = engine.count()

    def has_gone_on() -> bool:
        done, loaded = engine.count()
        return done >= before[0] + more and loaded > before[1]

    eventually(has_gone_on, 60)
    engine.check()


def is_allocating(node: SlowNode) -> bool:
    status = status_of(node.address)
    return status.arena_allocating and status.arena_allocated_bytes < 16 * MIB


def ends_well(node: SlowNode, engine: WorkingEngine) -> None:
    """Have the arena become whole, and see that all of it is used and every byte is right."""
    node.open()
    eventually(lambda: status_of(node.address).arena_bytes == 16 * MIB, 60)
    eventually(lambda: status_of(node.address).arena_used_bytes > 8 * MIB, 60)
    engine.verify()
    engine.stop()
    settled(node.address, members=0)


def test_an_engine_works_while_the_arena_grows(node: SlowNode, engine: WorkingEngine) -> None:
    steps(engine)
    assert is_allocating(node)
    ends_well(node, engine)


def test_a_service_that_is_killed_meanwhile_is_followed_by_another(
    node: SlowNode, engine: WorkingEngine
) -> None:
    for _ in range(2):
        steps(engine)
        assert is_allocating(node)
        node.kill()
        node.start()
    ends_well(node, engine)


def test_a_rank_that_is_killed_meanwhile_leaves_nothing(
    node: SlowNode, engine: WorkingEngine
) -> None:
    steps(engine)
    engine.kill(engine.ranks[1])
    assert is_allocating(node)
    engine.kill()
    settled(node.address, members=0)
    other = WorkingEngine(Work(node.address, "other", 1, 1, prompts=60, length=24)).wait_ready()
    try:
        ends_well(node, other)
    finally:
        other.kill()


def test_a_rank_that_is_stopped_while_the_arena_grows_gets_what_came_when_it_goes_on(
    node: SlowNode, engine: WorkingEngine
) -> None:
    steps(engine)
    engine.freeze(engine.ranks[0])
    assert is_allocating(node)
    node.open()
    eventually(lambda: not is_allocating(node), 60)
    engine.thaw(engine.ranks[0])
    ends_well(node, engine)


def test_a_stop_waits_for_a_piece_and_not_for_the_arena(
    node: SlowNode, engine: WorkingEngine
) -> None:
    steps(engine)
    assert is_allocating(node)
    node.process.terminate()
    eventually(lambda: not listens(node.address))
    node.open()
    assert node.process.wait(120) == 0
    (reached,) = re.findall(r"arena: (\d+) MiB of 16 MiB allocated, ", node.log.read_text())
    assert 4 <= int(reached) <= 6, "one step may have been under way"
