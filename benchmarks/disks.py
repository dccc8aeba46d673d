# SPDX-License-Identifier: Apache-2.0
"""`disk.write`, `disk.read`, `disk.contains`: the disk tier; `fs.*`: the filesystem tier.

The limit is direct I/O of the same pieces without KVHaven (see `PlainFiles`). The tiers add
headers, names by rename, verification of the checksum of every byte read, and switches between
their threads and the event loop. The target is 0.85 of the limit. If the file system does not
support direct I/O, both use the page cache, and the table says so. The filesystem tier also syncs
its files, and the disk tier looks up in memory.
"""

import asyncio
from collections.abc import Callable

from benchmarks.plain_files import PlainFiles
from benchmarks.rates import Memory, empty_folder, measure_rates, memory
from benchmarks.results import Result
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.local.tier import DiskTier
from kvhaven.tiers.registry import PER_CORE, THREADS

_PART = 0.85


def measure(say: Callable[[str], None]) -> list[Result]:
    """Measure the disk tier."""
    with memory() as held:
        return measure_disk(held, say)


def measure_disk(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Measure writes, reads and lookups of the disk tier."""

    async def run() -> list[Result]:
        executor = TierExecutor()
        tier = DiskTier(folder / "tier", 8 << 30, executor=executor)
        plain = PlainFiles(folder / "plain", executor.threads)
        return await measure_rates(tier, plain, held, _PART, say)

    with empty_folder("disk") as folder:
        return asyncio.run(run())


def measure_directory(held: Memory, say: Callable[[str], None]) -> list[Result]:
    """Measure writes, reads and lookups of the filesystem tier."""

    async def run() -> list[Result]:
        (folder / "tier").mkdir()
        executor = TierExecutor(THREADS, per_core=PER_CORE)
        tier = filesystem_tier(folder / "tier", executor=executor)
        plain = PlainFiles(folder / "plain", executor.threads)
        return await measure_rates(tier, plain, held, _PART, say)

    with empty_folder("fs") as folder:
        return asyncio.run(run())
