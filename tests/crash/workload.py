# SPDX-License-Identifier: Apache-2.0
"""Engines of several processes that store and load at random until they are stopped or killed.

A scheduler process plans, rank processes copy; they talk through pipes like vLLM's do. Each
verifies every byte it loads and reports what was wrong.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvhaven.client.embedded import EmbeddedService
from kvhaven.client.scheduler import LeasedChunks
from kvhaven.config import Settings
from kvhaven.types import ChunkKey
from tests.crash.engine import Rank, Scheduler, prompt

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])

START_S = 20.0


class Plan(NamedTuple):
    """One step of an engine, for each of its ranks."""

    load: LeasedChunks | None
    keys: tuple[ChunkKey, ...]
    save: int
    """The save's number; 0 for none."""
    services: frozenset[str]


class Work(NamedTuple):
    """What an engine does: prompts and their length in chunks; `pause_s` makes copies last.

    Its scheduler may have another address (a proxy's); `first` is its first prompt's number.
    """

    address: str
    engine: str
    world_size: int
    seed: int
    prompts: int = 12
    length: int = 12
    first: int = 0
    pause_s: float = 0.0002
    scheduler_address: str = ""
    embedded: Settings | None = None
    heads: int = 0
    """How many the model has; 0 for one each rank."""


def seed_of_this_run() -> int:
    """Return the seed: `KVHAVEN_SEED`, or a new one. It is printed, for a replay."""
    seed = int(os.environ.get("KVHAVEN_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
    print(f"KVHAVEN_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    return seed


def events_of_this_run(default: int) -> int:
    """Return how many events to run: `KVHAVEN_EVENTS`, or the default."""
    return int(os.environ.get("KVHAVEN_EVENTS", default))


def _starter(work: Work) -> dict[str, Any]:
    if work.embedded is None:
        return {}
    return {"ensure_service": EmbeddedService(work.embedded, work.address).ensure}


def rank_main(work: Work, number: int, plans: Connection, reports: Connection) -> None:
    """Be a rank: follow plans until their pipe ends, or an exception has to be reported."""
    dice = random.Random(f"{work.seed} {number}")
    rank = Rank(
        work.address,
        number,
        work.world_size,
        engine=work.engine,
        pause_s=work.pause_s,
        heads=work.heads,
        **_starter(work),
    )
    try:
        rank.start(START_S)
        plans.send("ready")
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                plan: Plan = plans.recv()
                plans.send(_follow(rank, plan, dice))
        rank.close()
    except Exception as error:  # noqa: BLE001 - the test is told
        with contextlib.suppress(OSError):
            reports.send(f"rank {number} of {work.engine}: {type(error).__name__}: {error}")


def _follow(rank: Rank, plan: Plan, dice: random.Random) -> tuple[int, int]:
    loaded = rank.load(plan.load, plan.keys) if plan.load is not None else 0
    saved = 0
    if plan.save:
        keys = plan.keys[loaded:]
        parent = plan.keys[loaded - 1] if loaded else None
        grants = rank.reserve(keys, parent, wait_s=0.2, save=plan.save)
        if dice.random() < 0.05:
            rank.client.abort(grants)
        else:
            rank.client.commit([rank.write(grant) for grant in grants])
            saved = len(grants)
    rank.client.keep_arenas(plan.services)
    return loaded, saved


def scheduler_main(
    work: Work, ranks: Sequence[Connection], orders: Connection, reports: Connection
) -> None:
    """Be a scheduler: step at random; `orders` are "verify" and "stop", answered by a count."""
    dice = random.Random(f"{work.seed} scheduler")
    address = work.scheduler_address or work.address
    scheduler = Scheduler(address, work.world_size, engine=work.engine, **_starter(work))
    try:
        for rank in ranks:
            rank.recv()
        scheduler.start(START_S)
        orders.send("ready")
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            _schedule(work, scheduler, ranks, orders, dice)
        scheduler.close()
    except Exception as error:  # noqa: BLE001 - the test is told
        with contextlib.suppress(OSError):
            reports.send(f"scheduler of {work.engine}: {type(error).__name__}: {error}")


def _schedule(
    work: Work,
    scheduler: Scheduler,
    ranks: Sequence[Connection],
    orders: Connection,
    dice: random.Random,
) -> None:
    prompts = [prompt(work.first + number, work.length) for number in range(work.prompts)]
    steps = loaded = 0
    while True:
        if orders.poll():
            order = orders.recv()
            if order == "count":
                orders.send((steps, loaded))
            elif order == "verify":
                orders.send(sum(_step(scheduler, ranks, keys) for keys in prompts))
            else:
                return
        keys = dice.choice(prompts)[: dice.randint(1, work.length)]
        if dice.random() < 0.2:
            scheduler.client.prefetch(keys)
        if dice.random() < 0.1:
            # Aborted before it was planned: given back, perhaps before the answer came.
            lease_id = scheduler.client.ask(keys)
            if lease_id is not None:
                scheduler.client.release([lease_id])
            continue
        steps += 1
        loaded += _step(scheduler, ranks, keys, save=steps if dice.random() < 0.8 else 0)


def _step(
    scheduler: Scheduler, ranks: Sequence[Connection], keys: Sequence[ChunkKey], *, save: int = 0
) -> int:
    lease = scheduler.acquire(keys)
    if lease is not None:
        scheduler.client.dispatched(lease.lease_id)
    services = scheduler.client.services_in_use
    for rank in ranks:
        rank.send(Plan(lease, tuple(keys), save, services))
    return min(int(rank.recv()[0]) for rank in ranks)


class WorkingEngine:
    """The processes of one engine, seen from the test."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._reports, reports = _processes.Pipe(duplex=False)
        self._orders, orders = _processes.Pipe()
        ours, theirs = zip(*(_processes.Pipe() for _ in range(work.world_size)), strict=True)
        self.ranks = [
            _processes.Process(target=rank_main, args=(work, n, theirs[n], reports), daemon=True)
            for n in range(work.world_size)
        ]
        self.scheduler = _processes.Process(
            target=scheduler_main, args=(work, ours, orders, reports), daemon=True
        )
        for process in self.processes:
            process.start()
        for connection in (*ours, *theirs, orders, reports):
            connection.close()

    @property
    def processes(self) -> list[Any]:
        """The ranks and the scheduler."""
        return [*self.ranks, self.scheduler]

    def wait_ready(self) -> "WorkingEngine":
        """Wait until it steps."""
        assert self._answer() == "ready"
        return self

    def count(self) -> tuple[int, int]:
        """Return steps done and chunks loaded."""
        steps, loaded = self._ask("count")
        return steps, loaded

    def verify(self) -> int:
        """Load every prompt as far as it is cached; return how many chunks were right."""
        return int(self._ask("verify"))

    def stop(self) -> None:
        """Have it end in good order."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.send("stop")
        for process in self.processes:
            process.join(20)
            assert process.exitcode == 0, f"{process} did not end: {self.complaints()}"
        self.check()

    def kill(self, *processes: Any) -> None:
        """Kill -9 these processes (none named: all)."""
        for process in processes or self.processes:
            process.kill()
        for process in processes or self.processes:
            process.join(20)

    @staticmethod
    def freeze(process: Any) -> None:
        """SIGSTOP, and wait until it is stopped."""
        os.kill(process.pid, signal.SIGSTOP)
        end = time.monotonic() + 5
        while _state(process.pid) != "T" and time.monotonic() < end:
            time.sleep(0.001)

    @staticmethod
    def thaw(process: Any) -> None:
        """SIGCONT."""
        os.kill(process.pid, signal.SIGCONT)

    def complaints(self) -> list[str]:
        """Return what its processes reported to be wrong."""
        found = []
        with contextlib.suppress(EOFError, OSError):
            while self._reports.poll():
                found.append(self._reports.recv())
        return found

    def check(self) -> None:
        """Fail if any byte was wrong, or anything was raised."""
        complaints = self.complaints()
        assert not complaints, complaints

    def _ask(self, order: str) -> Any:
        self._orders.send(order)
        return self._answer()

    def _answer(self) -> Any:
        if not self._orders.poll(60):
            raise AssertionError(f"no answer: {self.complaints()}")
        try:
            return self._orders.recv()
        except EOFError:
            raise AssertionError(f"the scheduler ended: {self.complaints()}") from None


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123 - one line
        return stat.read().rpartition(")")[2].split()[0]
