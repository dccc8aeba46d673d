# SPDX-License-Identifier: Apache-2.0
"""Thousands of random requests on an arena that is far too small; every byte is compared.

`KVHAVEN_EVENTS` says how many requests each engine makes, `KVHAVEN_SEED` replays a run.
"""

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvhaven.client.scheduler import Outcome
from kvhaven.types import ChunkKey
from tests.crash.engine import Engine, prompt
from tests.crash.node import MIB, NodeThread, audit_disk, eventually, flush, leaks, settled
from tests.crash.workload import events_of_this_run, seed_of_this_run

LENGTH = 16
BEYOND = "used_beyond_resident"


def prompts_of(engine: Engine) -> list[list[ChunkKey]]:
    """Return what an engine is asked; keys name the namespace too, so models have their own."""
    namespace = engine.ranks[0].attach.namespace.hex()
    return [prompt(f"{namespace} {number}", LENGTH) for number in range(20)]


def requests(engine: Engine, dice: random.Random, count: int, aborted: float) -> None:
    """Make requests as an engine does: ask, load what there is, save the rest, or abort midway."""
    rank, scheduler = engine.ranks[0], engine.scheduler.client
    prompts = prompts_of(engine)
    for number in range(count):
        keys = dice.choice(prompts)[: dice.randint(1, LENGTH)]
        if dice.random() < 0.3:
            scheduler.prefetch(keys)
        if dice.random() < aborted:
            abort(engine, keys, dice)
            continue
        loaded = engine.load(keys)
        parent = keys[loaded - 1] if loaded else None
        for each in engine.ranks:
            each.save(keys[loaded:], parent, save=number)
        rank.client.keep_arenas(scheduler.services_in_use)


def abort(engine: Engine, keys: Sequence[ChunkKey], dice: random.Random) -> None:
    """Give a request up at some point of its life."""
    scheduler = engine.scheduler.client
    lease_id = scheduler.ask(keys)
    if lease_id is None:
        return
    when = dice.randrange(4)
    if when == 0:
        scheduler.release([lease_id])
        return
    lease = scheduler.wait(lease_id, dice.random() * 0.005)
    if isinstance(lease, Outcome) or when == 1:
        scheduler.release([lease_id])
    else:
        scheduler.dispatched(lease_id)
        for rank in engine.ranks:  # what was begun is finished and acknowledged
            rank.load(lease, keys)
    if when == 3:
        for rank in engine.ranks:
            grants = rank.reserve(keys)
            done = dice.randint(0, len(grants))
            rank.client.commit([rank.write(grant) for grant in grants[:done]])
            rank.client.abort(grants[done:])


def run_all(
    engines: Sequence[Engine], run: Callable[[Engine, random.Random], None], seed: int
) -> None:
    """Run something in a thread for each engine; raise what one of them raised."""
    failures: list[BaseException] = []

    def work(engine: Engine, number: int) -> None:
        try:
            run(engine, random.Random(f"{seed} {number}"))
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(engine, number))
        for number, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def stressed(short_dir: Path, seed: int, count: int, aborted: float, **settings: Any) -> None:
    disk = short_dir / "disk"
    with NodeThread(
        short_dir / "s.sock",
        max_local_cpu_size=MIB,
        local_disk=str(disk),
        max_local_disk_size=3 * MIB,
        **settings,
    ) as node:
        with (
            Engine(node.address, engine="a") as first,
            Engine(node.address, 2, engine="b", model="b") as other,
            Engine(node.address, engine="c") as third,
        ):
            run_all((first, other, third), lambda e, dice: requests(e, dice, count, aborted), seed)
            node.check()
            status = node.status()
            assert status.catalog.evictions > count // 10
            assert status.damaged_chunks == 0
        settled(node.address, members=0)
        flush(node.address)
        node.check()
    assert audit_disk(disk).clean


def test_every_byte_is_right_beside_evictions(short_dir: Path) -> None:
    stressed(short_dir, seed_of_this_run(), events_of_this_run(1500), 0.2, verify_memory="off")


def test_nothing_leaks_when_every_request_is_aborted(short_dir: Path) -> None:
    seed, count = seed_of_this_run(), events_of_this_run(1500)
    with NodeThread(short_dir / "s.sock", max_local_cpu_size=MIB) as node:
        with (
            Engine(node.address, 2, engine="a") as first,
            Engine(node.address, engine="c") as other,
        ):
            run_all((first, other), lambda e, dice: requests(e, dice, count, 1.0), seed)
            # What one rank has committed and the other not ages like a chunk: no leak.
            eventually(lambda: set(leaks(node.status())) <= {"reserved_bytes", BEYOND})
            node.check()
        settled(node.address, members=0)


def test_two_engines_side_by_side_with_everything_verified(short_dir: Path) -> None:
    stressed(short_dir, seed_of_this_run(), events_of_this_run(300), 0.1, verify_memory="always")
