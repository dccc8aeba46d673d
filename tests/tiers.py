# SPDX-License-Identifier: Apache-2.0
"""What tests of tiers share besides `kvhaven.testing`: the disk tier, and file systems to mount."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.testing.tiers import CAPACITY
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.local.tier import DiskTier


@contextlib.asynccontextmanager
async def disk_tier(path: Path, **settings: Any) -> AsyncIterator[DiskTier]:
    """Open a disk tier that retries fast; `settings` are its constructor's."""
    defaults: dict[str, Any] = {"retry_s": 0.05, "lock_wait_s": 0.2}
    capacity = settings.pop("capacity_bytes", CAPACITY)
    settings.setdefault("executor", TierExecutor())
    tier = DiskTier(path, capacity, **defaults | settings)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(5)


def file_of(path: Path, shard: StoredShard) -> Path:
    """Return the file in which a disk tier at `path` keeps a shard."""
    (file,) = path.glob(f"{shard.namespace.hex()[:16]}/*/{shard.key.hex()}.{shard.shard}.kv")
    return file


def run_or_skip(*command: object) -> None:
    """Run a command that needs rights which not every machine gives.

    It is also looked for where a user's PATH does not lead: Debian has mkfs.ext4 in /usr/sbin.
    """
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    program = shutil.which(str(command[0]), path=places)
    if program is None:
        pytest.skip(f"{command[0]} is not installed (mkfs.ext4: apt-get install e2fsprogs)")
    try:
        subprocess.run([program, *map(str, command[1:])], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"{command[0]} is not possible here: {reason.decode().strip()}")


@contextlib.contextmanager
def tmpfs(path: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes in memory at `path`."""
    path.mkdir(exist_ok=True)
    run_or_skip("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def ext4(path: Path, size: int) -> Iterator[Path]:
    """Mount a real file system of `size` bytes, in a file beside it, at `path`."""
    path.mkdir(exist_ok=True)
    image = path.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size)
    run_or_skip("mkfs.ext4", "-q", image)
    run_or_skip("mount", "-o", "loop", image, path)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
