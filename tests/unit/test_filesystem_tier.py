# SPDX-License-Identifier: Apache-2.0
"""The filesystem tier when its server, its mount or another node misbehaves."""

import asyncio
import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvhaven.errors import TierError, TierMissError
from kvhaven.testing.tiers import (
    content,
    fetch,
    make_namespace,
    make_piece,
    opened,
    scanned,
    store,
    until,
)
from kvhaven.tiers.base import Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem.files import MARKER
from kvhaven.tiers.filesystem.tier import filesystem_tier
from kvhaven.tiers.shared.store import blob_name
from tests.tiers import ext4, run_or_skip, tmpfs

SPACE = make_namespace("model", (64 << 10,))
PIECE = make_piece(SPACE)


@pytest.fixture(autouse=True)
def _no_leaked_descriptors() -> Iterator[None]:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    yield
    assert len(list(descriptors.iterdir())) <= before


def shared(path: Path, **settings: Any) -> AbstractAsyncContextManager[Tier]:
    settings.setdefault("executor", TierExecutor())
    return opened(filesystem_tier(path, retry_s=0.05, **settings))


@contextlib.contextmanager
def bound(server: Path, path: Path) -> Iterator[None]:
    """Mount the directory `server` at `path`; it may be unmounted and mounted meanwhile."""
    server.mkdir()
    path.mkdir()
    run_or_skip("mount", "--bind", server, path)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=False, capture_output=True)


def temporaries(path: Path) -> list[Path]:
    return list(path.rglob("*.tmp"))


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


async def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "mnt"
    async with shared(path) as tier:
        assert not tier.health().online
        assert "mount it" in tier.health().last_error
        await tier.add_namespace(SPACE)
        with pytest.raises(TierError, match="offline"):
            await store(tier, PIECE)
        assert not path.exists()
        path.mkdir()
        await until(lambda: tier.health().online)
        await store(tier, PIECE)
        assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})


async def test_nothing_is_written_where_a_mount_has_vanished(tmp_path: Path) -> None:
    server, path = tmp_path / "server", tmp_path / "mnt"
    with bound(server, path):
        async with shared(path) as tier:
            await tier.add_namespace(SPACE)
            await store(tier, PIECE)
            run_or_skip("umount", "-l", path)
            await until(lambda: MARKER in tier.health().last_error)
            with pytest.raises(TierError, match="Mount the store"):
                await store(tier, make_piece(SPACE, 1))
            assert not list(path.iterdir())
            run_or_skip("mount", "--bind", server, path)
            await until(lambda: tier.health().online)
            assert tier.health().epoch == 2
            assert await fetch(tier, PIECE.shard) == content(PIECE)
            await store(tier, make_piece(SPACE, 1))
            assert (await tier.check()).shards == 2


async def test_a_full_server_stops_writes_and_serves_reads(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as small:
        async with shared(small) as tier:
            await tier.add_namespace(SPACE)
            stored = []
            for number in range(40):
                piece = make_piece(SPACE, number)
                try:
                    await store(tier, piece)
                except TierError:
                    continue
                stored.append(piece)
            assert 10 <= len(stored) < 16
            assert not tier.health().writable
            assert "No space left" in tier.health().last_error
            assert not temporaries(small)
            for piece in stored:
                assert await fetch(tier, piece.shard) == content(piece)
            await asyncio.to_thread((small / blob_name(stored[0].shard)).unlink)
            await until(lambda: tier.health().writable)
            assert (await tier.check()).problems == ()


async def test_only_temporaries_older_than_an_hour_are_debris(tmp_path: Path) -> None:
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        folder = (tmp_path / blob_name(PIECE.shard)).parent
        young, old, foreign = folder / ".ab.1.tmp", folder / ".cd.2.tmp", folder / "notes.txt"
        for file in (young, old, foreign, tmp_path / ".ef.3.tmp", folder.parent / ".01.4.tmp"):
            file.write_text("x")
            os.utime(file, (0, time.time() - (3500 if file == young else 3700)))
        assert await scanned(tier) == ({SPACE.digest}, {PIECE.shard})
        assert temporaries(tmp_path) == [young]
        assert foreign.exists()  # it is not ours to remove
        assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_a_file_that_another_node_removed_is_a_miss(tmp_path: Path) -> None:
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        (tmp_path / blob_name(PIECE.shard)).unlink()
        with pytest.raises(TierMissError):
            await fetch(tier, PIECE.shard)
        await store(tier, PIECE)
        assert await fetch(tier, PIECE.shard) == content(PIECE)


@pytest.mark.parametrize("call", ["open", "preadv"])
async def test_a_stale_handle_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.ESTALE))
            with pytest.raises(TierMissError):
                await fetch(tier, PIECE.shard)
        assert tier.health().errors == 0
        assert await fetch(tier, PIECE.shard) == content(PIECE)


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
async def test_a_server_that_fails_turns_the_tier_off_and_on_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing(number))
            patch.setattr(os, "stat", failing(number))
            for _ in range(3):
                with pytest.raises((TierError, TierMissError)):
                    await fetch(tier, PIECE.shard)
            await until(lambda: not tier.health().online)
        await until(lambda: tier.health().online)
        assert await fetch(tier, PIECE.shard) == content(PIECE)


@pytest.mark.parametrize("call", ["fsync", "rename"])
async def test_what_the_server_did_not_take_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.EIO))
            with pytest.raises(TierError, match="Input/output"):
                await store(tier, PIECE)
        assert list(await tier.contains([PIECE.shard])) == [False]
        assert not temporaries(tmp_path)
        await store(tier, PIECE)
        assert await fetch(tier, PIECE.shard) == content(PIECE)


async def test_what_failed_its_check_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that was flipped on the way here alone costs nobody else the shard."""
    flips = [1, 1, 1]

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        got = real(file, buffers, offset)
        if flips:
            buffers[1][flips.pop() + len(flips)] ^= 1
        return got

    real = os.preadv
    async with shared(tmp_path) as tier:
        await tier.add_namespace(SPACE)
        await store(tier, PIECE)
        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(TierMissError):  # damaged twice, each time in another place
            await fetch(tier, PIECE.shard)
        assert tier.health().rejected == 1
        assert await fetch(tier, PIECE.shard) == content(PIECE)  # damaged, then right
        assert not flips


async def test_files_and_folders_have_the_mode_that_was_set(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        async with shared(tmp_path, mode=0o640) as tier:
            await tier.add_namespace(SPACE)
            await store(tier, PIECE)
    finally:
        os.umask(before)
    file = tmp_path / blob_name(PIECE.shard)
    modes = [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o640, 0o750, 0o750]


async def test_a_hung_server_stops_nobody_but_who_waits_for_it(tmp_path: Path) -> None:
    with ext4(tmp_path / "disk", 32 << 20) as disk:
        executor = TierExecutor(1)
        async with shared(disk, stall_s=0.3, deadline_s=0.2, executor=executor) as tier:
            await tier.add_namespace(SPACE)
            await store(tier, PIECE)
            run_or_skip("fsfreeze", "-f", disk)
            try:
                stuck = asyncio.create_task(store(tier, make_piece(SPACE, 1)))
                await until(lambda: executor.running == 1)
                with pytest.raises(TierError, match=r"within 0\.2 s"):  # it waits for the thread
                    await store(tier, make_piece(SPACE, 2))
                await until(lambda: not tier.health().online)
                assert not stuck.done()  # its buffer is still in use
                with pytest.raises(TierError, match="hangs"):
                    await fetch(tier, PIECE.shard)
            finally:
                run_or_skip("fsfreeze", "-u", disk)
            with pytest.raises(TierError, match="within"):
                await stuck
            assert tier.health().online
            assert await fetch(tier, PIECE.shard) == content(PIECE)
            await until(lambda: tier.health().writable)
            assert (await tier.check()).problems == ()


async def test_direct_io_that_is_demanded_and_not_there_is_said(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", 1 << 20) as small:
        async with shared(small, direct_io="on") as tier:
            if not tier.health().online:
                assert "direct I/O" in tier.health().last_error
