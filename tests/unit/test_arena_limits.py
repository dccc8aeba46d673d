# SPDX-License-Identifier: Apache-2.0
"""Limits as read from files like those of real machines; `test_arena_containers.py` is real."""

from pathlib import Path

import pytest

from kvhaven.arena.limits import (
    ArenaSize,
    MemoryLimit,
    MemoryLimits,
    arena_size,
    format_bytes,
    memory_limits,
    room_to_grow,
)
from kvhaven.errors import ArenaError

MIB, GIB = 1 << 20, 1 << 30


class Machine:
    """A /proc and cgroup mounts under a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroups = root / "sys fs"  # mountinfo writes the blank as \040
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"
        )
        self.mounts = ["22 1 0:20 / / rw - ext4 /dev/vda rw"]

    def mount(self, kind: str, root: str = "/", options: str = "rw") -> Path:
        top = self.cgroups / kind / options
        top.mkdir(parents=True)
        shown = str(top).replace(" ", r"\040")
        self.mounts.append(f"35 24 0:30 {root} {shown} rw shared:9 - {kind} {kind} {options}")
        (self.proc / "self/mountinfo").write_text("\n".join(self.mounts) + "\n")
        return top

    def enter(self, *groups: str) -> None:
        (self.proc / "self/cgroup").write_text("\n".join(groups) + "\n")

    def found(self) -> dict[str, int]:
        limits = memory_limits(self.proc).limits
        assert limits[0].name == "this machine (/proc/meminfo)"
        assert (limits[0].total, limits[0].available) == (16 * GIB, 8 * GIB)
        return {
            limit.name.removeprefix(f"the control group ({self.cgroups}/").rstrip(")"): (
                limit.available
            )
            for limit in limits[1:]
        }


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v1(group: Path, limit: int, used: int, cache: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {cache}\n")


def v2(group: Path, limit: int | str, used: int, cache: int = 0, high: str = "max") -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.high").write_text(f"{high}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_a_machine_without_control_groups_is_bound_by_its_free_memory(machine: Machine) -> None:
    assert machine.found() == {}


def test_every_group_above_us_binds_in_version_2(machine: Machine) -> None:
    top = machine.mount("cgroup2")
    machine.enter("0::/a/b/c")
    v2(top / "a", 4 * GIB, GIB, cache=MIB)
    v2(top / "a/b", "max", GIB)
    v2(top / "a/b/c", 3 * GIB, GIB, high=str(2 * GIB))
    v2(top / "other", 1, 1)
    assert machine.found() == {
        "cgroup2/rw/a/memory.max": 3 * GIB + MIB,
        "cgroup2/rw/a/b/c/memory.max": 2 * GIB,
        "cgroup2/rw/a/b/c/memory.high": GIB,
    }


def test_every_group_above_us_binds_in_version_1(machine: Machine) -> None:
    machine.mount("cgroup2", options="rw,nsdelegate")
    machine.mount("cgroup", options="rw,cpu")
    top = machine.mount("cgroup", options="rw,memory")
    machine.enter("5:cpu,cpuacct:/elsewhere", "4:memory:/a/b", "0::/")
    v1(top, 9223372036854771712, GIB)
    v1(top / "a", 4 * GIB, GIB)
    v1(top / "a/b", 2 * GIB, 3 * GIB, cache=GIB // 2)
    assert machine.found() == {
        "cgroup/rw,memory/a/memory.limit_in_bytes": 3 * GIB,
        "cgroup/rw,memory/a/b/memory.limit_in_bytes": 0,
    }


@pytest.mark.parametrize(
    ("root", "ours"),
    [("/docker/f00", "/docker/f00"), ("/docker/f00", "/"), ("/", "/../../x"), ("/", "/")],
)
def test_in_a_container_the_mount_is_our_group(machine: Machine, root: str, ours: str) -> None:
    top = machine.mount("cgroup2", root=root)
    machine.enter(f"0::{ours}")
    v2(top, GIB, MIB)
    assert machine.found() == {"cgroup2/rw/memory.max": GIB - MIB}


def test_a_group_below_a_containers_mount_is_found(machine: Machine) -> None:
    top = machine.mount("cgroup", root="/docker/f00", options="rw,memory")
    machine.enter("4:memory:/docker/f00/inner")
    v1(top, 2 * GIB, GIB)
    v1(top / "inner", GIB, GIB)
    assert sorted(machine.found().values()) == [0, GIB]


def test_garbage_does_not_stop_us(machine: Machine) -> None:
    top = machine.mount("cgroup2")
    machine.enter("0::/a")
    (top / "a").mkdir()
    (top / "a/memory.max").write_text("lots\n")
    (top / "a/memory.current").write_text("")
    assert machine.found() == {}
    (machine.proc / "meminfo").unlink()
    assert memory_limits(machine.proc).limits == ()


def only(total: int, available: int) -> MemoryLimits:
    roomy = MemoryLimit("roomy", 1 << 50, 1 << 49)
    return MemoryLimits((roomy, MemoryLimit("the box", total, available)))


def test_mounts_with_names_in_any_encoding_do_not_stop_us(machine: Machine) -> None:
    top = machine.mount("cgroup2")
    machine.enter("0::/a")
    v2(top / "a", GIB, MIB)
    mounts = machine.proc / "self/mountinfo"
    odd = (b"caf\xe9", "one\u2028two".encode(), b"one\x1dtwo")
    others = [b"23 1 8:1 / /media/%s rw - ext4 /dev/sdb rw\n" % name for name in odd]
    mounts.write_bytes(b"".join(others) + mounts.read_bytes())
    assert machine.found() == {"cgroup2/rw/a/memory.max": GIB - MIB}


def test_what_fits_is_given_as_it_is() -> None:
    granted = arena_size(GIB, strict=True, limits=only(16 * GIB, 2 * GIB))
    assert (granted.bytes, granted.reason) == (GIB, "")
    assert arena_size(5000, strict=True, limits=only(GIB, GIB)).bytes == 8192


def test_unknown_limits_do_not_bind() -> None:
    assert arena_size(GIB, strict=True, limits=MemoryLimits(())).bytes == GIB


@pytest.mark.parametrize(
    ("total", "kept"),
    [(100 * GIB, 5 * GIB), (8 * GIB, 512 * MIB), (GIB, 128 * MIB), (256 * MIB, 32 * MIB)],
)
def test_headroom_is_kept_and_scales_down_for_small_groups(total: int, kept: int) -> None:
    assert arena_size(total, strict=False, limits=only(total, total)).bytes == total - kept


def test_too_much_is_made_smaller_with_a_reason() -> None:
    granted = arena_size(10 * GIB, strict=False, limits=only(8 * GIB, 3 * GIB))
    assert granted.bytes == 3 * GIB - 512 * MIB
    for word in ("the box allows 8 GiB", "3 GiB are free", "max_local_cpu_size", "2.5 GiB"):
        assert word in granted.reason


def test_too_much_is_refused_when_strict() -> None:
    with pytest.raises(ArenaError, match=r"10 GiB does not fit: the box .* at most 2.5 GiB"):
        arena_size(10 * GIB, strict=True, limits=only(8 * GIB, 3 * GIB))


@pytest.mark.parametrize("available", [0, 100 * MIB, 190 * MIB])
def test_less_than_the_floor_is_refused(available: int) -> None:
    with pytest.raises(ArenaError, match=r"the box allows 1 GiB.*smallest useful arena, 64 MiB"):
        arena_size(GIB, strict=False, limits=only(GIB, available))


def test_a_small_arena_that_fits_is_not_bound_by_the_floor() -> None:
    assert arena_size(4 * MIB, strict=False, limits=only(GIB, GIB)).bytes == 4 * MIB


def test_an_arena_grows_as_long_as_the_rest_is_free() -> None:
    """Its size left the headroom; what others took of it since then is what it is there for."""
    assert room_to_grow(2 * GIB, only(8 * GIB, 2 * GIB)) == ArenaSize(2 * GIB, "")
    assert room_to_grow(2 * GIB, MemoryLimits(())) == ArenaSize(2 * GIB, "")


def test_an_arena_whose_rest_is_not_free_any_more_leaves_others_their_headroom() -> None:
    room = room_to_grow(2 * GIB, only(8 * GIB, GIB))
    assert room.bytes == GIB - 512 * MIB
    assert "the box allows 8 GiB, of which 1 GiB are free, and 512 MiB stay" in room.reason
    assert room_to_grow(2 * GIB, only(8 * GIB, 512 * MIB)).bytes == 0
    assert room_to_grow(2 * GIB, only(8 * GIB, 0)).bytes == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5000 * GIB, "5000 GiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_this_machine_has_a_limit() -> None:
    tightest = memory_limits().tightest
    assert tightest is not None
    assert 0 < tightest.available <= tightest.total
