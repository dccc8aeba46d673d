# SPDX-License-Identifier: Apache-2.0
"""Processes that are stopped, cut off, or forked: what they may still touch is not reused.

A closed socket proves nothing. The arena is so small that others would get the zombie's memory
at once, if anybody gave it to them.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvhaven.service.status import MemberStatus
from tests.crash.node import NodeProcess, eventually, settled, status_of
from tests.crash.proxy import Proxy
from tests.crash.workload import Work, WorkingEngine, events_of_this_run, seed_of_this_run

pytestmark = pytest.mark.crash

SLOW_S = 0.004
"""Between the pieces of a zombie's copies, so that it can be stopped in the middle of one."""


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeProcess]:
    with NodeProcess(
        short_dir / "s.sock",
        short_dir / "log",
        max_local_cpu_size="1MiB",
        verify_memory="off",
    ) as node:
        yield node


@contextlib.contextmanager
def working(work: Work) -> Iterator[WorkingEngine]:
    engine = WorkingEngine(work)
    try:
        yield engine.wait_ready()
    finally:
        for process in engine.processes:
            with contextlib.suppress(ProcessLookupError, TypeError):
                engine.thaw(process)
        engine.kill()


def member(node: NodeProcess, engine: str, role: str) -> MemberStatus:
    """Return what status says of a process."""
    return next(
        m
        for m in status_of(node.address).members
        if m.session.startswith(f"{engine}#") and m.role == role
    )


def freeze_in_a_store(node: NodeProcess, engine: WorkingEngine) -> None:
    """Stop a rank while it holds reservations that it is writing."""
    for _ in range(200):
        eventually(lambda: status_of(node.address).catalog.reserved_bytes)
        engine.freeze(engine.ranks[0])
        time.sleep(0.2)  # a commit may be on its way
        if status_of(node.address).catalog.reserved_bytes:
            return
        engine.thaw(engine.ranks[0])
    pytest.fail("the rank could not be stopped in the middle of a store")


def churn(node: NodeProcess, engine: WorkingEngine, turns: int = 2) -> None:
    """Let an engine overwrite all of the arena that it can get, so many times."""
    capacity = status_of(node.address).arena_bytes
    extent = 3 * 4096
    before = status_of(node.address).catalog.evictions
    enough = before + turns * capacity // extent
    eventually(lambda: status_of(node.address).catalog.evictions > enough, 60)
    engine.check()


def test_a_rank_stopped_in_a_store_keeps_its_extents_until_it_is_back(
    node: NodeProcess, short_dir: Path
) -> None:
    with (
        Proxy(short_dir / "p.sock", node.address) as proxy,
        working(Work(proxy.address, "zombie", 1, 1, pause_s=SLOW_S)) as zombie,
        contextlib.ExitStack() as stack,
    ):
        freeze_in_a_store(node, zombie)
        proxy.drop()
        eventually(lambda: not member(node, "zombie", "rank 0").connected)
        held = member(node, "zombie", "rank 0").quarantined_bytes
        assert held > 0
        # Begins only now: what was reserved before was the zombie's.
        other = stack.enter_context(working(Work(node.address, "other", 1, 2, first=6)))
        churn(node, other)
        assert member(node, "zombie", "rank 0").quarantined_bytes == held
        zombie.thaw(zombie.ranks[0])
        # It goes on writing to where it was; what it commits then is discarded.
        eventually(lambda: member(node, "zombie", "rank 0").connected)
        churn(node, other, 1)
        before = zombie.count()
        eventually(lambda: zombie.count()[0] > before[0] + 5, 30)
        for engine in (zombie, other):
            engine.verify()
            engine.stop()
        settled(node.address, members=0)


def test_a_rank_stopped_in_a_load_still_finds_what_it_was_promised(
    node: NodeProcess, short_dir: Path
) -> None:
    with (
        Proxy(short_dir / "p.sock", node.address) as proxy,
        working(Work(proxy.address, "zombie", 1, 3, prompts=2, pause_s=SLOW_S)) as zombie,
        working(Work(node.address, "other", 1, 4, first=50)) as other,
    ):
        eventually(lambda: status_of(node.address).catalog.hit_chunks > 20, 30)
        for _ in range(200):
            zombie.freeze(zombie.ranks[0])
            held = member(node, "zombie", "rank 0")
            if status_of(node.address).catalog.leased_bytes and zombie_leases(node):
                break
            zombie.thaw(zombie.ranks[0])
            time.sleep(0.01)
        proxy.drop()
        eventually(lambda: not member(node, "zombie", "rank 0").connected)
        held = member(node, "zombie", "rank 0")
        churn(node, other)
        assert member(node, "zombie", "rank 0").quarantined_bytes == held.quarantined_bytes
        zombie.thaw(zombie.ranks[0])
        before = zombie.count()
        eventually(lambda: zombie.count()[1] > before[1], 30)  # it compared every byte
        for engine in (zombie, other):
            engine.check()
            engine.stop()
        settled(node.address, members=0)


def zombie_leases(node: NodeProcess) -> int:
    return status_of(node.address).catalog.leases


def test_a_schedulers_connection_lost_in_a_load_changes_nothing(
    node: NodeProcess, short_dir: Path
) -> None:
    with (
        Proxy(short_dir / "p.sock", node.address) as proxy,
        working(
            Work(node.address, "e", 2, 5, pause_s=SLOW_S, scheduler_address=proxy.address)
        ) as engine,
        working(Work(node.address, "other", 1, 6, first=6)) as other,
    ):
        for _ in range(10):
            time.sleep(0.05)
            before = engine.count()
            proxy.drop()
            churn(node, other, 1)
            eventually(lambda before=before: engine.count()[0] > before[0], 30)  # type: ignore[misc]
            engine.check()
        engine.verify()
        for each in (engine, other):
            each.stop()
        settled(node.address, members=0)


def test_a_zombie_that_dies_gives_all_back(node: NodeProcess, short_dir: Path) -> None:
    with (
        Proxy(short_dir / "p.sock", node.address) as proxy,
        working(Work(proxy.address, "zombie", 1, 7, pause_s=SLOW_S)) as zombie,
    ):
        freeze_in_a_store(node, zombie)
        proxy.drop()
        eventually(lambda: member(node, "zombie", "rank 0").quarantined_bytes)
        time.sleep(0.3)
        assert member(node, "zombie", "rank 0").quarantined_bytes
        zombie.kill()
        settled(node.address, members=0)


def test_an_engine_restarted_beside_its_zombie_works(node: NodeProcess, short_dir: Path) -> None:
    """Under the same engine id: the zombie's extents stay in quarantine, the new one serves."""
    with Proxy(short_dir / "p.sock", node.address) as proxy:
        with working(Work(proxy.address, "engine", 1, 8, pause_s=SLOW_S)) as zombie:
            freeze_in_a_store(node, zombie)
            proxy.drop()
            zombie.kill(zombie.scheduler)
            eventually(lambda: member(node, "engine", "rank 0").quarantined_bytes)
            with working(Work(node.address, "engine", 1, 9)) as new:
                churn(node, new)
                assert status_of(node.address).catalog.quarantined_bytes
                new.verify()
                new.stop()
            zombie.thaw(zombie.ranks[0])
            for rank in zombie.ranks:
                rank.join(20)
            zombie.check()
        settled(node.address, members=0)


FORKING = """
import os, sys, time
from tests.crash.engine import Rank, prompt
rank = Rank(sys.argv[1]).start()
grants = rank.reserve(prompt("p", 4))
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, len(grants), flush=True)
sys.stdin.readline()
if sys.argv[2] == "close":
    rank.close()
    print("closed", flush=True)
    sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize("end", ["exit", "kill", "close"])
def test_a_forked_child_keeps_the_quarantine_until_it_is_gone(node: NodeProcess, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, node.address, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child, granted = map(int, parent.stdout.readline().split())
        try:
            assert granted == 4
            if end == "kill":
                parent.kill()
            else:
                parent.stdin.write("\n")
                parent.stdin.flush()
            # The child does not keep the connection: the loss is seen at once.
            eventually(lambda: not member(node, "engine", "rank 0").connected)
            time.sleep(0.3)
            assert member(node, "engine", "rank 0").quarantined_bytes == 4 * 3 * 4096
        finally:
            os.kill(child, signal.SIGKILL)
        if end == "close":
            parent.stdin.write("\n")
            parent.stdin.flush()
        parent.wait(10)
    settled(node.address, members=0)


FORKING_WHILE_A_THREAD_CALLS = """
import os, signal, sys, threading
from kvhaven.client.scheduler import Outcome
from tests.crash.engine import Rank, Scheduler, prompt
rank, scheduler = Rank(sys.argv[1]).start(), Scheduler(sys.argv[1]).start()
held = threading.Barrier(3)
def hold(client):
    with client._lock:
        held.wait()
        threading.Event().wait()
for client in (rank.client, scheduler.client):
    threading.Thread(target=hold, args=(client,), daemon=True).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    asked = scheduler.client.wait(1, 0.01), rank.client.reserve(None, prompt("p", 4), 1)
    rank.client.close()
    os._exit(asked != (Outcome.MISS, None))
print(os.waitpid(child, 0)[1], flush=True)
os._exit(0)
"""


def test_a_forked_child_misses_even_if_a_thread_was_within_a_call(node: NodeProcess) -> None:
    program = [sys.executable, "-c", FORKING_WHILE_A_THREAD_CALLS, node.address]
    status = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert int(status) == 0


def test_zombies_at_random(node: NodeProcess, short_dir: Path) -> None:
    """Anybody is stopped, cut off, continued or killed, while others fill the arena."""
    seed, events = seed_of_this_run(), events_of_this_run(30)
    dice = random.Random(seed)
    with (
        Proxy(short_dir / "p.sock", node.address) as ranks,
        Proxy(short_dir / "q.sock", node.address) as schedulers,
        working(Work(node.address, "other", 1, seed)) as other,
    ):
        engine: WorkingEngine | None = None
        for event in range(events):
            if engine is None:
                work = Work(
                    ranks.address,
                    f"engine{event % 2}",
                    dice.randint(1, 2),
                    seed + event,
                    pause_s=SLOW_S / 4,
                    scheduler_address=schedulers.address,
                )
                engine = WorkingEngine(work).wait_ready()
            torment(engine, (ranks, schedulers), dice)
            engine.check()
            other.check()
            if not all(process.is_alive() for process in engine.processes):
                engine.kill()
                engine = None
        if engine is not None:
            engine.verify()
            engine.stop()
        other.verify()
        other.stop()
    settled(node.address, members=0)
    assert status_of(node.address).catalog.evictions > 100


def torment(engine: WorkingEngine, proxies: Sequence[Proxy], dice: random.Random) -> None:
    """Stop some of its processes, cut some connections, perhaps kill it, and let it go on."""
    time.sleep(dice.random() * 0.05)
    stopped = [process for process in engine.processes if dice.random() < 0.4]
    for process in stopped:
        engine.freeze(process)
    for proxy in proxies:
        if dice.random() < 0.5:
            proxy.drop()
    time.sleep(dice.random() * 0.15)
    if dice.random() < 0.2:
        engine.kill()
    for process in stopped:
        if process.is_alive():
            engine.thaw(process)
