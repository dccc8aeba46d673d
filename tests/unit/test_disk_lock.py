# SPDX-License-Identifier: Apache-2.0
"""A directory belongs to one service. With real processes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhaven.errors import TierError
from tests.tiers import content, disk_tier, fetch, make_namespace, make_piece, scanned, store, until

SPACE = make_namespace()
PIECE = make_piece(SPACE)

HOLDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.tiers import disk_tier, make_namespace, make_piece, store

async def main():
    async with disk_tier(Path(sys.argv[1])) as tier:
        await tier.add_namespace(make_namespace())
        await store(tier, make_piece(make_namespace()))
        print("ready" if tier.health().online else "offline", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
ROOT = Path(__file__).parents[2]


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directory and stored `PIECE` there."""
    command = [sys.executable, "-c", HOLDER, str(path), str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


async def test_a_second_service_runs_without_and_names_the_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path / "tier") as process:
        begin = time.monotonic()
        async with disk_tier(tmp_path / "tier", lock_wait_s=0.3) as tier:
            assert time.monotonic() - begin >= 0.3
            health = tier.health()
            assert not health.online
            assert not health.writable
            assert f"pid {process.pid} on {os.uname().nodename} since 20" in health.holder
            with pytest.raises(TierError, match=f"held by pid {process.pid}"):
                await fetch(tier, PIECE.shard)
            await tier.add_namespace(SPACE)  # it is remembered
            await asyncio.sleep(0.3)
            assert sum(r.levelname == "WARNING" for r in caplog.records) == 1

            process.send_signal(signal.SIGKILL)
            await until(lambda: tier.health().online)
            assert tier.health().holder == ""
            assert tier.health().epoch == 1
            assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})
            assert await fetch(tier, PIECE.shard) == content(PIECE)
            assert sum(r.levelname == "WARNING" for r in caplog.records) == 2


async def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    for _ in range(3):
        with holder(tmp_path / "tier") as process:
            process.kill()
            process.wait()
            async with disk_tier(tmp_path / "tier", lock_wait_s=0) as tier:
                assert tier.health().online


async def test_a_short_overlap_is_waited_for(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier") as first:
        asyncio.get_running_loop().call_later(0.1, lambda: tasks.append(close()))
        tasks: list[asyncio.Task[None]] = []

        def close() -> "asyncio.Task[None]":
            return asyncio.create_task(first.close(1))

        async with disk_tier(tmp_path / "tier", lock_wait_s=10, retry_s=60) as second:
            assert second.health().online
        await asyncio.gather(*tasks)


async def test_two_tiers_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier") as first:
        async with disk_tier(tmp_path / "tier", lock_wait_s=0) as second:
            assert first.health().online
            assert f"pid {os.getpid()}" in second.health().holder
        async with disk_tier(tmp_path / "other", lock_wait_s=0) as other:
            assert other.health().online


async def test_whoever_lost_the_lock_file_does_not_go_on_as_if_it_held_it(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier") as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        (tmp_path / "tier" / "lock").unlink()
        await until(lambda: tier.health().epoch == 2)
        async with disk_tier(tmp_path / "tier", lock_wait_s=0) as second:
            assert not second.health().online
        assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})
        assert (await tier.check()).clean
