# SPDX-License-Identifier: Apache-2.0
"""Real control groups and a real small /dev/shm: a smaller arena or a refusal, never a kill."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")

Run = Callable[[int, str], subprocess.CompletedProcess[str]]


def limit_file() -> tuple[Path, str]:
    """Return where groups can be made, and the name of their limit; skips where they cannot."""
    if os.access(V1 / "cgroup.procs", os.W_OK):
        return V1, "memory.limit_in_bytes"
    subtree = V2 / "cgroup.subtree_control"
    if os.access(subtree, os.W_OK) and "memory" in subtree.read_text().split():
        return V2, "memory.max"
    pytest.skip("no control group can be made here: needs root and a writable cgroup mount")


@pytest.fixture
def run_limited() -> Iterator[Run]:
    """Run Python code in a control group of its own, limited to some MiB."""
    top, limit = limit_file()
    group = top / f"kvhaven-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")

    def run(mib: int, code: str) -> subprocess.CompletedProcess[str]:
        (group / limit).write_text(str(mib * MIB))
        enter = f'echo $$ > {group}/cgroup.procs && exec "$0" -c "$1"'
        return subprocess.run(
            ["sh", "-c", enter, sys.executable, code], capture_output=True, text=True, check=False
        )

    yield run
    group.rmdir()


MAKE = """
from kvhaven.arena.limits import arena_size
from kvhaven.arena.segment import Segment
from kvhaven.errors import ArenaError
try:
    granted = arena_size(1 << 30, strict={strict})
    segment = Segment.create(0, granted.bytes)
    for offset in range(0, segment.size, 4096):
        segment.memory[offset] = 1
    print(segment.size, granted.reason)
except ArenaError as error:
    print("refused:", error)
"""


def test_a_limit_below_the_size_makes_a_smaller_arena_that_says_so(run_limited: Run) -> None:
    done = run_limited(300, MAKE.format(strict=False))
    assert done.returncode == 0, done.stderr
    size, reason = done.stdout.split(maxsplit=1)
    assert 150 * MIB <= int(size) <= 270 * MIB
    assert "kvhaven-test-" in reason
    assert "allows 300 MiB" in reason
    assert "instead of max_local_cpu_size = 1 GiB" in reason


@pytest.mark.parametrize(("mib", "strict"), [(300, True), (64, False)])
def test_a_limit_below_what_is_asked_for_is_refused_clearly(
    run_limited: Run, mib: int, strict: bool
) -> None:
    done = run_limited(mib, MAKE.format(strict=strict))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused:")
    assert f"allows {mib} MiB" in done.stdout
    assert "max_local_cpu_size" in done.stdout


def test_a_segment_beyond_the_limit_is_refused_even_when_nobody_asked_before(
    run_limited: Run,
) -> None:
    code = """
from kvhaven.arena.segment import Segment
from kvhaven.errors import ArenaError
try:
    Segment.create(0, 1 << 30)
except ArenaError as error:
    print("refused:", error)
"""
    done = run_limited(300, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: segment 0 of 1 GiB does not fit")
    assert "allows 300 MiB" in done.stdout


def test_an_arena_that_outgrows_its_limit_stays_as_it_is_and_nobody_is_killed(
    run_limited: Run,
) -> None:
    """It fitted when its size was chosen; what others took since then is not taken from them."""
    code = """
import asyncio, logging
from kvhaven.service.arena import Arena
logging.basicConfig(format="%(levelname)s %(message)s")
async def main():
    arena = Arena(400 << 20, strict=False, first_bytes=64 << 20, step_bytes=64 << 20)
    assert arena.size == 400 << 20
    others = bytearray(250 << 20)
    for offset in range(0, len(others), 4096):
        others[offset] = 1
    ended = asyncio.Event()
    arena.grow(lambda: arena.allocating or ended.set())
    await ended.wait()
    view = arena._segment.memory
    for offset in range(0, arena.usable, 4096):
        view[offset] = 1
    print(arena.usable)
asyncio.run(main())
"""
    done = run_limited(600, code)
    assert done.returncode == 0, done.stderr
    assert 150 * MIB <= int(done.stdout) < 340 * MIB
    assert int(done.stdout) % (2 * MIB) == 0
    assert "WARNING the arena stays at" in done.stderr
    assert "of 400 MiB: the control group" in done.stderr
    assert "allows 600 MiB" in done.stderr
    assert "free memory or raise that limit" in done.stderr


def test_page_cache_in_the_group_does_not_make_the_arena_smaller(
    run_limited: Run, tmp_path: Path
) -> None:
    kind = subprocess.run(["stat", "-fc", "%T", tmp_path], capture_output=True, check=True).stdout
    if kind.strip() == b"tmpfs":
        pytest.skip(f"{tmp_path} is on tmpfs, which has no page cache that can be dropped")
    file = tmp_path / "cache"
    fill = f"""
import os
with open({str(file)!r}, "wb") as out:
    for _ in range(150):
        out.write(bytes(1 << 20))
    out.flush()
    os.fsync(out.fileno())
"""
    done = run_limited(300, fill + MAKE.format(strict=False))
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith("refused")
    assert int(done.stdout.split()[0]) >= 150 * MIB


def test_a_small_dev_shm_does_not_matter() -> None:
    code = """
import os
from kvhaven.arena.segment import MappedSegment, Segment
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
segment = Segment.create(0, 160 << 20)
mapped = MappedSegment.map(0, os.dup(segment.fd), segment.size, 1)
mapped.memory[-4:] = b"last"
assert bytes(segment.memory[-4:]) == b"last"
print("served")
"""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    probe = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m tmpfs /dev/shm"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"no mount namespace can be made here: {probe.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "served", done.stderr
