# SPDX-License-Identifier: Apache-2.0
"""`disk.write`, `disk.read`: GB/s of the disk tier.

The limit is direct I/O of the same pieces without KVHaven: files of the same size (header and
payload) in the same file system, each by one `open`, one `pwritev` or `preadv` and one `close`,
with as many threads and at the same niceness as the tier's. The tier adds to that headers,
names by rename, verifying the checksum of every byte that is read, and handing over between its
threads and the event loop. Wanted is 0.80 of the limit. Where the file system takes no direct
I/O, both go through the page cache, and the table says so.
"""

import asyncio
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from benchmarks.results import BENCH, Result, at_least
from kvhaven.arena.segment import Segment
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.disk import DiskTier
from kvhaven.tiers.executor import NICENESS, TierExecutor
from kvhaven.tiers.header import HEADER_BYTES, stored_bytes
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, Shard, ShardId, ShardTable

_PAYLOAD = 2 << 20
_PIECES = 96
_REPETITIONS = 7


def measure(say: Callable[[str], None]) -> list[Result]:
    """Write and read 192 MiB, KVHaven and plain files by turns."""
    folder = BENCH / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    segment = Segment.create(0, _PAYLOAD * _PIECES)
    segment.prefault(threading.Event())
    segment.memory[:] = os.urandom(1 << 20) * (segment.size >> 20)
    buffers = [segment.memory[at : at + _PAYLOAD] for at in range(0, segment.size, _PAYLOAD)]
    try:
        return asyncio.run(_measure(folder, buffers, say))
    finally:
        for buffer in buffers:
            buffer.release()
        segment.close()
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(
    folder: Path, buffers: Sequence[memoryview], say: Callable[[str], None]
) -> list[Result]:
    executor = TierExecutor()
    tier = DiskTier(folder / "tier", 8 << 30, executor=executor)
    await tier.start()
    shard = Shard(ShardId(0, (0, 8), (0, 4)), _PAYLOAD)
    namespace = Namespace(NamespaceDigest(bytes(32)), {}, ShardTable((shard,)))
    await tier.add_namespace(namespace)
    checksums = [Checksum(xxhash.xxh3_128_digest(buffer)) for buffer in buffers]
    direct = _takes_direct_io(folder)
    plain = _PlainFiles(folder, executor.threads, direct=direct)
    rates: dict[str, list[float]] = {name: [] for name in ("write", "read", "plain", "plain read")}
    total = _PAYLOAD * _PIECES

    for repetition in range(-1, _REPETITIONS):
        shards = [
            StoredShard(
                namespace.digest,
                ChunkKey((repetition + 1).to_bytes(16) + number.to_bytes(16)),
                shard.id,
                _PAYLOAD,
            )
            for number in range(_PIECES)
        ]
        times = {}
        began = time.perf_counter()
        await asyncio.gather(*map(tier.write, shards, buffers, checksums))
        times["write"] = time.perf_counter() - began
        times["plain"] = plain.write(buffers)
        began = time.perf_counter()
        await asyncio.gather(*map(tier.read, shards, buffers))
        times["read"] = time.perf_counter() - began
        times["plain read"] = plain.read(buffers)
        await tier.delete(shards)
        plain.remove()
        if repetition >= 0:  # the first is to warm up
            for name, seconds in times.items():
                rates[name].append(total / seconds / 1e9)
    threads = executor.threads
    await tier.close(10)
    how = "direct I/O" if direct else "I/O through the page cache (no direct I/O here)"
    say(f"{threads} threads, {_PIECES} pieces of {_PAYLOAD >> 10} KiB, {how}")
    what = f"{how} of the same pieces with {threads} threads"
    return [
        at_least("disk.write", rates["write"], "GB/s", rates["plain"], 0.80, what),
        at_least("disk.read", rates["read"], "GB/s", rates["plain read"], 0.80, what),
    ]


class _PlainFiles:
    """Files of a header's size and a payload each, written and read by some threads."""

    def __init__(self, folder: Path, threads: int, *, direct: bool) -> None:
        self._folder = folder
        self._threads = threads
        self._flags = os.O_DIRECT if direct else 0
        self._pages = [Segment.create(0, HEADER_BYTES) for _ in range(threads)]
        self._rounds = itertools.count()
        self._round = 0

    def write(self, buffers: Sequence[memoryview]) -> float:
        """Write new files; return the seconds that took."""
        self._round = next(self._rounds)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags

        def write(number: int, page: memoryview) -> None:
            file = os.open(self._path(number), flags, 0o600)
            written = os.pwritev(file, [page, buffers[number]], 0)
            os.close(file)
            assert written == stored_bytes(_PAYLOAD)

        return self._run(write, len(buffers))

    def read(self, buffers: Sequence[memoryview]) -> float:
        """Read the files written last; return the seconds that took."""

        def read(number: int, page: memoryview) -> None:
            file = os.open(self._path(number), os.O_RDONLY | self._flags)
            got = os.preadv(file, [page, buffers[number]], 0)
            os.close(file)
            assert got == stored_bytes(_PAYLOAD)

        return self._run(read, len(buffers))

    def remove(self) -> None:
        """Remove the files written last."""
        for path in self._folder.glob(f"plain-{self._round}-*"):
            path.unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"plain-{self._round}-{number}"

    def _run(self, work: Callable[[int, memoryview], None], pieces: int) -> float:
        left: Iterator[int] = iter(range(pieces))

        def run(page: memoryview) -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            for number in left:
                work(number, page)

        threads = [threading.Thread(target=run, args=(page.memory,)) for page in self._pages]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def _takes_direct_io(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
