# SPDX-License-Identifier: Apache-2.0
"""A directory belongs to one service. With real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhaven.catalog import TierSpec
from kvhaven.config import Settings
from kvhaven.errors import ConfigError, TierError
from kvhaven.service.driver import Driver
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.tier_setup import make_tiers
from kvhaven.testing.tiers import content, fetch, make_namespace, make_piece, scanned, store, until
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.local.lock import Directory
from kvhaven.tiers.local.tier import DiskTier
from kvhaven.types import TenantId
from tests.tiers import disk_tier
from tests.unit.catalog_kit import DISK, Node

SPACE = make_namespace()
PIECE = make_piece(SPACE)

HOLDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from kvhaven.testing.tiers import make_namespace, make_piece, store
from tests.tiers import disk_tier

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


async def test_what_is_deleted_while_nothing_is_open_is_gone_when_it_is_open_again(
    tmp_path: Path,
) -> None:
    """Also when it could not be deleted at once; what is written again stays."""
    path, again = tmp_path / "tier", make_piece(SPACE, 1)
    async with disk_tier(path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE, again)
        (path / "lock").unlink()
        with contextlib.closing(Directory(path)):
            await until(lambda: not tier.health().online)
            with pytest.raises(TierError):
                await tier.delete([PIECE.shard, again.shard])
        await until(lambda: tier.health().epoch == 2)
        await store(tier, again)
        assert await scanned(tier) == ({SPACE.digest}, {again.shard})
        await until(lambda: len([*path.rglob("*.kv")]) == 1)
        assert await fetch(tier, again.shard) == content(again)
        assert (await tier.check()).clean


class LingeringScan(DiskTier):
    """A disk tier whose first scan goes on only when it is let go."""

    scans = 0
    let_go = False

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        self.scans += 1
        first = self.scans == 1
        async for found in super().scan(tenant):
            await until(lambda: self.let_go or not first)
            yield found


async def test_an_older_scan_that_fails_last_causes_no_other_one(tmp_path: Path) -> None:
    tier = LingeringScan(tmp_path / "tier", 1 << 20, executor=TierExecutor(), retry_s=0.05)
    node = Node(tiers=[TierSpec(DISK, 1 << 20)])
    driver = Driver(node.catalog)
    runner = TierRunner(driver, {DISK: tier}, lambda _: memoryview(b""), lookup_s=1)
    await tier.start()
    try:
        await tier.add_namespace(SPACE)
        runner.check_health()
        await until(lambda: tier.scans == 1)
        (tmp_path / "tier" / "lock").unlink()
        await until(lambda: tier.health().epoch == 2)
        runner.check_health()
        await until(lambda: len(runner._tasks) == 1 and tier.scans == 2)
        tier.let_go = True
        await until(lambda: not runner._tasks)
        runner.check_health()
        assert not runner._tasks
        assert node.catalog.stats().tiers[DISK].scanned
    finally:
        await runner.close(5)


class FailingScan(DiskTier):
    """A disk tier whose first scans fail as no tier should."""

    failures = 1
    scans = 0

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        self.scans += 1
        if self.scans <= self.failures:
            raise ValueError("of a tier of others")
        async for found in super().scan(tenant):
            yield found


async def test_a_scan_that_ends_by_any_error_is_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FailingScan(tmp_path / "tier", 1 << 20, executor=TierExecutor())
    node = Node(tiers=[TierSpec(DISK, 1 << 20)])
    runner = TierRunner(Driver(node.catalog), {DISK: tier}, lambda _: memoryview(b""), lookup_s=1)
    await tier.start()
    try:
        await tier.add_namespace(SPACE)
        for scans, complete in ((1, False), (2, True)):
            runner.check_health()
            await until(lambda: not runner._tasks)
            assert (tier.scans, node.catalog.stats().tiers[DISK].scanned) == (scans, complete)
        assert "the scan ended early: ValueError('of a tier of others')" in caplog.text
    finally:
        await runner.close(5)


async def test_a_scan_that_fails_always_is_not_always_under_way(tmp_path: Path) -> None:
    """Each failure of a read or write checks the tier's health, and may repeat a scan."""
    tier = FailingScan(tmp_path / "tier", 1 << 20, executor=TierExecutor())
    tier.failures = 1000
    node = Node(tiers=[TierSpec(DISK, 1 << 20)])
    runner = TierRunner(Driver(node.catalog), {DISK: tier}, lambda _: memoryview(b""), lookup_s=1)
    await tier.start()
    try:
        await tier.add_namespace(SPACE)
        begin = time.monotonic()
        for _ in range(100):
            runner.check_health()
            await until(lambda: not runner._tasks)
        most = 3 + (time.monotonic() - begin)  # two, and then at most one a second
        assert tier.scans <= most
    finally:
        await runner.close(5)


# --- others must not be able to put files there -------------------------------------------------


OWN = f"kvhaven-{os.geteuid()}"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
async def test_where_all_may_write_a_directory_of_our_own_is_used(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An emptyDir of Kubernetes has mode 777. A file that others put there would be loaded."""
    path = tmp_path / "tier"
    path.mkdir()
    path.chmod(mode)
    make_tiers(Settings(local_disk=str(path)))
    assert f"all users may write to {path}" in caplog.text
    assert f"{path / OWN} is used" in caplog.text
    for _ in range(2):
        async with disk_tier(path) as tier:
            await tier.add_namespace(SPACE)
            await store(tier, PIECE)
            assert await fetch(tier, PIECE.shard) == content(PIECE)
    assert (path / OWN).stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.iterdir()] == [OWN]
    assert path.stat().st_mode & 0o7777 == mode


def open_to_others(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


def of_another_user(own: Path) -> None:
    own.mkdir(mode=0o700)
    os.chown(own, 12345, -1)


def link(own: Path) -> None:
    (own.parent.parent / "mine").mkdir(mode=0o700)
    own.symlink_to(own.parent.parent / "mine")


@pytest.mark.parametrize(
    "prepare",
    [
        open_to_others,
        link,
        pytest.param(
            of_another_user,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give it away"),
        ),
    ],
)
async def test_what_others_prepared_in_place_of_our_directory_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    path = tmp_path / "tier"
    path.mkdir()
    path.chmod(0o777)
    prepare(path / OWN)
    with pytest.raises(ConfigError, match=f"local_disk: .*{path / OWN}"):
        make_tiers(Settings(local_disk=str(path)))
    async with disk_tier(path) as tier:  # as if it had been prepared after the start
        assert not tier.health().online
        assert list((path / OWN).iterdir()) == []


async def test_files_of_a_private_directory_stay_where_they_are(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier") as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
    make_tiers(Settings(local_disk=str(tmp_path / "tier")))
    assert (tmp_path / "tier" / "lock").exists()
    assert not (tmp_path / "tier" / OWN).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_refused_and_taken_when_it_is_ours(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tier"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"owner 12345"):
        make_tiers(Settings(local_disk=str(path)))
    async with disk_tier(path, retry_s=0.02) as tier:
        health = tier.health()
        assert not health.online
        assert "other users may write" in str(health.last_error)
        os.chown(path, 0, -1)
        await until(lambda: tier.health().online)


async def test_a_group_that_may_write_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tier"
    path.mkdir()
    path.chmod(0o770)
    make_tiers(Settings(local_disk=str(path)))
    assert "may write to" in caplog.text
    async with disk_tier(path) as tier:
        assert tier.health().online
