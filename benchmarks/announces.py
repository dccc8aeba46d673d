# SPDX-License-Identifier: Apache-2.0
"""`announce.loop`: milliseconds to lease 512 resident chunks while another node follows this one.

A node has 100,000 chunks. An engine saves 500 a second, each of which evicts another: 1,000
changes. Another node follows them. Both are services in processes of their own, over loopback.

- `announce.loop.p50`, `.p99`: at the node that announces. Limit of the p99: 5 ms.
- `announce.loop.alone.p99`: the same without a follower, alternating; `announce.loop.p50.ratio` and
  `.p99.ratio` are the medians of the rounds' ratios.
- `announce.follower.p99`: at the follower. Limit: 5 ms.
- `announce.lookup`: milliseconds to look up 64 chunks that the node does not have, at a follower.
  Limit: to ask the node, alternating.
- `announce.snapshot`: seconds from the start of the following service until it has all chunks.
"""

import asyncio
import functools
import hashlib
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
from kvhaven.peers.addresses import Address
from kvhaven.peers.tier import PeerTier
from kvhaven.tiers.base import StoredShard
from kvhaven.types import NO_TENANT, ChunkKey, NamespaceDigest, ShardId

_ARENA = "400MiB"
_CHUNKS = 100_000
_BATCH = 500
_SAVES = 5
_EACH_S = 0.01
_LEASED = 512
_ROUNDS = 5
_LOOKUPS = 500
_LOOKED_UP = 64
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
                acquire = functools.partial(acquire_all, scheduler, keys)
                results = _alternate(folder, port, service, acquire, say)
                return [*results, asyncio.run(_look_up(port))]
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


async def _look_up(port: int) -> Result:
    """Look up unknown chunks in what the node has announced, and by asking it."""
    tier = PeerTier([Address("127.0.0.1", port)], token=b"", deadline_s=5.0)
    await tier.start()
    try:
        end = time.monotonic() + _START_S
        while not all(peer.followed for peer in tier.peers()):
            if time.monotonic() > end:
                raise ProcessError(f"a node was not followed within {_START_S} s")
            await asyncio.sleep(0.05)
        (status,) = tier.peers()
        peer = tier.named(status.node)
        if peer is None:
            raise ProcessError("a node cannot be asked")
        space, shard = NamespaceDigest(bytes(32)), ShardId(0, (0, 1), (0, 1))
        followed, asked = [], []
        for number in range(_LOOKUPS):
            text = (f"{number} {chunk}".encode() for chunk in range(_LOOKED_UP))
            keys = [ChunkKey(hashlib.sha256(one).digest()) for one in text]
            began = time.perf_counter()
            await tier.contains([StoredShard(space, key, shard, 4096) for key in keys])
            middle = time.perf_counter()
            await peer.has(space, NO_TENANT, keys)
            asked.append((time.perf_counter() - middle) * 1e3)
            followed.append((middle - began) * 1e3)
    finally:
        await tier.close(5)
    limit = statistics.median(asked)
    value = statistics.median(followed)
    return at_most("announce.lookup", value, "ms", limit, _LOOKUPS, "a question to the node")


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
