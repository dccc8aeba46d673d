# SPDX-License-Identifier: Apache-2.0
"""What a disk tier does when its file system fails: errors, a breaker, and it comes back."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.testing.tiers import (
    content,
    fetch,
    make_namespace,
    make_piece,
    page_buffer,
    scanned,
    store,
    until,
)
from kvhaven.tiers.direct_io import direct_io_works
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.local.tier import DiskTier
from tests.tiers import disk_tier, ext4, run_or_skip, tmpfs

SPACE = make_namespace("model", (64 << 10,))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_leaked_descriptors() -> Iterator[None]:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    yield
    assert len(list(descriptors.iterdir())) <= before


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def temporaries(path: Path) -> list[Path]:
    return list(path.rglob("*.tmp"))


async def fill(tier: DiskTier, start: int = 0) -> tuple[int, int]:
    """Write until it is refused; return how many were stored and how many attempts failed."""
    stored = failed = 0
    while tier.health().writable:
        try:
            await store(tier, make_piece(SPACE, start + stored + failed))
            stored += 1
        except TierError:
            failed += 1
    return stored, failed


async def test_a_full_disk_stops_writes_serves_reads_and_takes_writes_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as small:
        async with disk_tier(small / "tier") as tier:
            await tier.add_namespace(SPACE)
            stored, failed = await fill(tier)
            assert stored >= 10
            assert failed == 3
            health = tier.health()
            assert health.online
            assert "No space left" in health.last_error
            assert not temporaries(small)
            assert len(warnings(caplog)) == 1
            with pytest.raises(TierError, match="writes off"):
                await store(tier, make_piece(SPACE, 1000))
            for number in range(stored):
                assert await fetch(tier, make_piece(SPACE, number).shard)
            assert (await tier.check()).problems == ()

            await asyncio.sleep(0.2)
            assert not tier.health().writable  # probes find it still full
            assert not temporaries(small)
            await tier.delete([make_piece(SPACE, number).shard for number in range(stored // 2)])
            await until(lambda: tier.health().writable)
            assert len(warnings(caplog)) == 2
            await store(tier, make_piece(SPACE, 1001))
            assert (await tier.check()).problems == ()


async def test_the_capacity_is_what_the_disk_has_room_for(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as small:
        async with disk_tier(small / "tier", capacity_bytes=1 << 30) as tier:
            assert tier.health().capacity_bytes == 1 << 30  # nothing is known before the scan
            await tier.add_namespace(SPACE)
            await store(tier, make_piece(SPACE))
            await scanned(tier)
            await until(lambda: 1 << 19 < (tier.health().capacity_bytes or 0) < 1 << 20)


async def test_a_read_only_directory_stops_writes_and_serves_reads(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    async with disk_tier(path) as tier:
        await tier.add_namespace(SPACE)
        pieces = [make_piece(SPACE, number) for number in range(3)]
        await store(tier, *pieces)
        run_or_skip("chattr", "-R", "+i", path)
        try:
            assert (await fill(tier, 10))[0] == 0
            for piece in pieces:
                assert await fetch(tier, piece.shard) == content(piece)
            with pytest.raises(TierError):
                await tier.delete([pieces[0].shard])
            assert tier.health().used_bytes == 3 * (68 << 10)
        finally:
            run_or_skip("chattr", "-R", "-i", path)
        await until(lambda: tier.health().writable)
        # what could not be deleted then is deleted now
        await until(lambda: tier.health().used_bytes == 2 * (68 << 10))
        assert (await tier.check()).problems == ()


async def test_a_file_system_that_turned_read_only_serves_reads(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 32 << 20) as disk:
        async with disk_tier(disk / "tier") as tier:
            await tier.add_namespace(SPACE)
            piece = make_piece(SPACE)
            await store(tier, piece)
            os.sync()
            run_or_skip("mount", "-o", "remount,errors=remount-ro", disk)
            _break(disk)
            assert (await fill(tier, 10))[0] == 0
            assert not tier.health().writable
            assert tier.health().online
            assert await fetch(tier, piece.shard) == content(piece)


async def test_a_read_only_file_system_at_start_is_offline_until_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as small:
        run_or_skip("mount", "-o", "remount,ro", small)
        async with disk_tier(small / "tier") as tier:
            assert not tier.health().online
            assert "Read-only" in tier.health().last_error
            await tier.add_namespace(SPACE)
            await asyncio.sleep(0.2)
            assert len(warnings(caplog)) == 1
            run_or_skip("mount", "-o", "remount,rw", small)
            await until(lambda: tier.health().online)
            await store(tier, make_piece(SPACE))
            assert await scanned(tier) == ({SPACE.digest}, {make_piece(SPACE).shard})


async def test_a_directory_removed_while_running_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache" / "tier"
    async with disk_tier(path) as tier:
        await tier.add_namespace(SPACE)
        pieces = [make_piece(SPACE, number) for number in range(4)]
        await store(tier, *pieces[:2])
        shutil.rmtree(path)
        for piece in pieces:
            with pytest.raises((TierMissError, TierError)):
                await fetch(tier, piece.shard)
        await until(lambda: tier.health().epoch == 2)
        assert tier.health().online
        assert tier.health().used_bytes == 0
        await store(tier, *pieces)
        assert await fetch(tier, pieces[3].shard) == content(pieces[3])
        assert (await tier.check()).problems == ()
        assert len(warnings(caplog)) == 2

        shutil.rmtree(path.parent)  # not even its parent is there: a disk that is gone
        await until(lambda: not tier.health().online)
        with pytest.raises(TierError, match="offline"):
            await store(tier, pieces[0])
        path.parent.mkdir()
        await until(lambda: tier.health().online)
        await store(tier, *pieces)
        assert (await tier.check()).shards == 4


async def test_operations_under_way_survive_that_the_directory_goes(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    piece = make_piece(SPACE)

    async def use(number: int) -> None:
        for step in range(30):
            try:
                await store(tier, make_piece(SPACE, number))
                assert await fetch(tier, make_piece(SPACE, number).shard)
                await tier.delete([make_piece(SPACE, number).shard])
            except (TierError, TierMissError):
                await asyncio.sleep(0.005)
            if number == 0 and step % 10 == 5:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async with disk_tier(path, retry_s=0.01) as tier:
        await tier.add_namespace(SPACE)
        await asyncio.gather(*(use(number) for number in range(8)))
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        # The tier may have noticed already: then it is open anew, and its lock is there.
        await until(lambda: (path / "lock").exists() and tier.health().writable)
        await store(tier, piece)
        assert (await tier.check()).problems == ()
        assert tier.health().used_bytes == 68 << 10


PERMISSION_LOST = """
import asyncio, concurrent.futures.thread, os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from kvhaven.testing.tiers import *
from tests.tiers import *
from kvhaven.errors import TierError

async def main():
    path = Path(sys.argv[1]) / "tier"
    space = make_namespace()
    piece = make_piece(space)
    async with disk_tier(path) as tier:
        await tier.add_namespace(space)
        await store(tier, piece)
        os.chmod(path, 0)
        for _ in range(3):
            try:
                await fetch(tier, piece.shard)
            except TierError as error:
                assert "Permission denied" in str(error), error
            else:
                raise AssertionError("it was read")
        assert not tier.health().online
        await asyncio.sleep(0.2)
        assert not tier.health().online
        os.chmod(path, 0o700)
        await until(lambda: tier.health().online and tier.health().writable)
        assert tier.health().epoch == 1
        assert await fetch(tier, piece.shard) == content(piece)
        assert (await tier.check()).shards == 1
    print("done")

if os.geteuid() == 0:  # nothing is forbidden to root
    os.setuid(65534)
asyncio.run(main())
"""


def test_permission_lost_turns_it_off_and_given_back_on_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        command = [sys.executable, "-c", PERMISSION_LOST, folder, str(ROOT)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.stdout == "done\n", result.stderr


async def test_a_stuck_disk_stops_nobody_but_who_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen file system lets no write return, like a disk that hangs."""
    with ext4(tmp_path / "disk", 32 << 20) as disk:
        async with disk_tier(disk / "tier", stall_s=0.3, executor=TierExecutor(1)) as tier:
            await tier.add_namespace(SPACE)
            piece, late, queued = (make_piece(SPACE, number) for number in range(3))
            await store(tier, piece)
            run_or_skip("fsfreeze", "-f", disk)
            try:
                stuck = asyncio.create_task(store(tier, late))
                await until(lambda: tier.health().queued_writes == 0)
                await asyncio.sleep(0.05)
                with pytest.raises(TimeoutError):  # not begun: taken back at its deadline
                    async with asyncio.timeout(0.05):
                        await store(tier, queued)
                stuck.cancel()
                await asyncio.sleep(0.4)
                assert not stuck.done()  # begun: its buffer is still in use
                assert not tier.health().online
                with pytest.raises(TierError, match="hangs"):
                    await tier.read(piece.shard, page_buffer(64 << 10))
            finally:
                run_or_skip("fsfreeze", "-u", disk)
            with pytest.raises(asyncio.CancelledError):
                await stuck
            assert tier.health().online
            assert len(warnings(caplog)) == 2
            assert await fetch(tier, late.shard) == content(late)  # the index knows
            assert (await tier.check()).problems == ()


async def test_closing_does_not_wait_for_ever_for_a_stuck_disk(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 32 << 20) as disk:
        executor = TierExecutor(1)
        async with disk_tier(disk / "tier", executor=executor) as tier:
            await tier.add_namespace(SPACE)
            run_or_skip("fsfreeze", "-f", disk)
            try:
                stuck = asyncio.create_task(store(tier, make_piece(SPACE)))
                await asyncio.sleep(0.1)
                async with asyncio.timeout(5):
                    await tier.close(0.2)
                with pytest.raises(TierError, match="not finished within"):
                    await stuck
            finally:
                run_or_skip("fsfreeze", "-u", disk)
            assert await executor.close(5)


async def test_a_directory_is_not_held_after_it_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "kvhaven.tiers.local.tier.direct_io_works"

    def fails_once(folder: int) -> bool:
        del folder
        monkeypatch.setattr(name, direct_io_works)
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(name, fails_once)
    async with disk_tier(tmp_path / "tier", retry_s=0.05) as tier:
        await until(lambda: tier.health().online)


async def test_direct_io_is_used_where_it_works_and_needed_where_it_is_on(tmp_path: Path) -> None:
    async with disk_tier(tmp_path / "tier", direct_io="on") as tier:
        if not tier.health().online:
            assert "direct I/O" in tier.health().last_error
            with pytest.raises(TierError, match="offline"):
                await fetch(tier, make_piece(SPACE).shard)


async def test_full_queues_are_no_failure_of_the_disk(tmp_path: Path) -> None:
    executor = TierExecutor(1, max_queued=2)
    async with disk_tier(tmp_path / "tier", executor=executor) as tier:
        await tier.add_namespace(SPACE)
        results = await asyncio.gather(
            *(store(tier, make_piece(SPACE, number)) for number in range(40)),
            return_exceptions=True,
        )
        refused = [result for result in results if result is not None]
        assert refused
        assert all(isinstance(result, TierError) for result in refused)
        assert tier.health().writable
        assert executor.queued(Lane.WRITE) == 0
        assert (await tier.check()).problems == ()


def _break(path: Path) -> None:
    """Make the ext4 file system at `path` believe that it is damaged."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve().name
    try:
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("test")
    except OSError as error:
        pytest.skip(f"no error can be made: {error}")
