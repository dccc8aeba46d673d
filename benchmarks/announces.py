# SPDX-License-Identifier: Apache-2.0
"""`announce.loop`: milliseconds to lease 512 resident chunks while another node follows this one.

A node has 100,000 chunks. An engine saves 500 a second, each of which evicts another: 1,000
changes. Another node follows them. Both are services in processes of their own, over loopback.

- `announce.loop.p50`, `.p99`: at the node that announces. Limit of the p99: 5 ms.
- `announce.loop.alone.p99`: the same without a follower, alternating; `announce.loop.p50.ratio` and
  `.p99.ratio` are the medians of the rounds' ratios.
- `announce.follower.p99`: at the follower. Limit: 5 ms.
- `announce.snapshot`: seconds from the start of the following service until it has all chunks.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.acquires import acquire_all, await_resident, engine, percentile, save_chunks
from benchmarks.results import BENCH, Result, at_most, plain
from examples.demo.processes import NodeService, ProcessError, free_port, node_service

_ARENA = "400MiB"
_CHUNKS = 100_000
_BATCH = 500
_SAVES = 5
_EACH_S = 0.01
_LEASED = 512
_ROUNDS = 5
_START_S = 120.0


def measure(say: Callable[[str], None]) -> list[Result]:
    """Alternate between a node with a follower and without."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvhaven-bench-") as runtime:
        folder = Path(runtime)
        first = node_service(
            folder / "first",
            BENCH / "announce-first.log",
            max_local_cpu_size=_ARENA,
            peer_listen=f"127.0.0.1:{port}",
            runtime_dir=runtime,
        )
        with first as service, engine(str(service.socket), "measured") as (rank, scheduler):
            keys = save_chunks(rank, "measured", _LEASED)
            await_resident(scheduler, keys)
            context = multiprocessing.get_context("spawn")
            full, stop = context.Event(), context.Event()
            arguments = (str(service.socket), full, stop)
            load = context.Process(target=_save, args=arguments, daemon=True)
            load.start()
            try:
                while not full.wait(0.2):  # kept in use: else they would be evicted
                    acquire_all(scheduler, keys, 10)
                    if not load.is_alive():
                        raise ProcessError("the engine that fills the arena ended")
                return _alternate(folder, port, service, lambda: acquire_all(scheduler, keys), say)
            finally:
                stop.set()
                load.join(10)
                load.kill()


def _alternate(
    folder: Path,
    port: int,
    service: NodeService,
    acquire: Callable[[], list[float]],
    say: Callable[[str], None],
) -> list[Result]:
    alone, followed, following, snapshots = [], [], [], []
    for number in range(_ROUNDS):
        alone.append(acquire())
        began = time.perf_counter()
        second = node_service(
            folder / f"second-{number}",
            BENCH / "announce-second.log",
            max_local_cpu_size="64MiB",
            peers=f"127.0.0.1:{port}",
            runtime_dir=folder,
        )
        with second as other, engine(str(other.socket), "other") as (rank, scheduler):
            chunks = _await_snapshot(other)
            snapshots.append(time.perf_counter() - began)
            keys = save_chunks(rank, "other", _LEASED)
            await_resident(scheduler, keys)
            followed.append(acquire())
            following.append(acquire_all(scheduler, keys))
        counts = service.status()["catalog"]
        say(
            f"p99 alone {percentile(alone[-1], 99):.2f} ms, followed "
            f"{percentile(followed[-1], 99):.2f} ms, at the follower "
            f"{percentile(following[-1], 99):.2f} ms; {chunks} chunks after {snapshots[-1]:.1f} s, "
            f"{counts['evictions']} evictions"
        )
    ratios = {
        p: [percentile(b, p) / percentile(a, p) for a, b in zip(alone, followed, strict=True)]
        for p in (50, 99)
    }
    what, count = "set by the design", sum(map(len, followed))
    p99 = {name: _median(rows, 99) for name, rows in (("", followed), ("other", following))}
    return [
        plain("announce.loop.p50", _median(followed, 50), "ms", count),
        at_most("announce.loop.p99", p99[""], "ms", 5.0, count, what),
        plain("announce.loop.alone.p99", _median(alone, 99), "ms", count),
        plain("announce.loop.p50.ratio", statistics.median(ratios[50]), "", _ROUNDS),
        plain("announce.loop.p99.ratio", statistics.median(ratios[99]), "", _ROUNDS),
        at_most("announce.follower.p99", p99["other"], "ms", 5.0, count, what),
        plain("announce.snapshot", statistics.median(snapshots), "s", _ROUNDS),
    ]


def _median(rows: list[list[float]], percent: int) -> float:
    return statistics.median(percentile(row, percent) for row in rows)


def _await_snapshot(service: NodeService) -> int:
    """Wait until a node has heard of all chunks; return their number."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        (peer,) = service.status()["peers"]
        if peer["followed"] and peer["chunks_announced"] >= _CHUNKS:
            return int(peer["chunks_announced"])
        time.sleep(0.05)
    raise ProcessError(f"a node did not hear of {_CHUNKS} chunks within {_START_S} s")


def _save(address: str, full: Any, stop: Any) -> None:
    """Fill the arena, then save 500 chunks a second until `stop` is set."""
    with engine(address, "load") as (rank, _):
        for number in range(_CHUNKS // _BATCH + 10):
            save_chunks(rank, f"first {number}", _BATCH)
        full.set()
        number, due = 0, time.monotonic()
        while not stop.is_set():
            save_chunks(rank, f"later {number}", _SAVES)
            number += 1
            due += _EACH_S
            time.sleep(max(0.0, due - time.monotonic()))
