# SPDX-License-Identifier: Apache-2.0
"""Memory limits for the arena: free memory, and every control group of this process.

Pages of a segment are charged to the control group of the process that touches them first. Beyond a
limit the kernel kills a process instead of refusing memory, so the limits are read before memory is
allocated. Sources: proc(5), cgroups(7), and the kernel's
Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from kvhaven.errors import ArenaError
from kvhaven.types import align_up

_MIB = 1 << 20
_HEADROOM = 512 * _MIB
_UNLIMITED_V1 = 1 << 62  # memory.limit_in_bytes is the largest multiple of a page when unset
_GRAIN = 2 * _MIB  # a reduced arena is a multiple of this


class MemoryLimit(msgspec.Struct, frozen=True):
    """One limit: its name with its file, the bytes it allows, and the bytes unused under it."""

    name: str
    total: int
    available: int

    @property
    def headroom(self) -> int:
        """Bytes to leave to other processes: 5%, at least 512 MiB, but at most an eighth."""
        return min(max(self.total // 20, _HEADROOM), self.total // 8)

    def __str__(self) -> str:
        return (
            f"{self.name} allows {format_bytes(self.total)}, "
            f"of which {format_bytes(self.available)} are free"
        )


class MemoryLimits(msgspec.Struct, frozen=True):
    """All limits that apply to this process."""

    limits: tuple[MemoryLimit, ...]

    @property
    def tightest(self) -> MemoryLimit | None:
        """The limit that leaves least after its headroom; None when no limit could be read."""
        return min(self.limits, key=lambda limit: limit.available - limit.headroom, default=None)


class ArenaSize(msgspec.Struct, frozen=True):
    """Allowed size of the arena in bytes, and the reason if it was reduced (empty otherwise)."""

    bytes: int
    reason: str


def memory_limits(proc: Path = Path("/proc")) -> MemoryLimits:
    """Return the current limits. Reads a few small files under `proc` and the cgroup mounts.

    A file that cannot be read is skipped: a limit that does not exist does not apply.
    """
    found = [*_meminfo(proc), *_cgroups(proc)]
    return MemoryLimits(tuple(found))


def arena_size(
    wanted: int, *, strict: bool, floor: int = 64 * _MIB, limits: MemoryLimits | None = None
) -> ArenaSize:
    """Return the allowed size of an arena that was requested with `wanted` bytes.

    The result is `wanted`, in whole pages, if every limit leaves its headroom besides; otherwise it
    is the size that the tightest limit leaves. Memory that old workers still map counts as used, so
    after a restart of the service the new arena fits beside the old one. Raises `ArenaError` if the
    result would be smaller than `wanted` and `strict` is set, or smaller than `floor`; the message
    names the limit.
    """
    wanted = align_up(wanted)
    tightest = (limits or memory_limits()).tightest
    if tightest is None:
        return ArenaSize(wanted, "")
    room = tightest.available - tightest.headroom
    if room >= wanted:
        return ArenaSize(wanted, "")
    allowed = max(room // _GRAIN * _GRAIN, 0)
    reason = f"{tightest}, and {format_bytes(tightest.headroom)} stay reserved for others"
    advice = "free memory or raise that limit"
    if allowed < max(floor, 1):
        raise ArenaError(
            f"an arena of max_local_cpu_size = {format_bytes(wanted)} cannot be created: {reason}; "
            f"the rest is less than the smallest useful arena, {format_bytes(floor)}; {advice}"
        )
    advice = f"set max_local_cpu_size to at most {format_bytes(allowed)}, or {advice}"
    if strict:
        raise ArenaError(
            f"an arena of max_local_cpu_size = {format_bytes(wanted)} does not fit: {reason}; "
            f"{advice}"
        )
    return ArenaSize(
        allowed,
        f"the arena has {format_bytes(allowed)} instead of max_local_cpu_size = "
        f"{format_bytes(wanted)}: {reason}; {advice}",
    )


def room_to_grow(rest: int, limits: MemoryLimits | None = None) -> ArenaSize:
    """Return how many of the `rest` bytes of an arena may be allocated, and a reason if fewer.

    All of them if they are free, because the headroom exists for memory that other processes took
    since the size was chosen. Otherwise the bytes that leave the tightest limit its headroom,
    possibly none.
    """
    tightest = (limits or memory_limits()).tightest
    if tightest is None or tightest.available >= rest:
        return ArenaSize(rest, "")
    allowed = (tightest.available - tightest.headroom) // _GRAIN * _GRAIN
    reason = f"{tightest}, and {format_bytes(tightest.headroom)} stay reserved for others"
    return ArenaSize(max(0, min(allowed, rest)), reason)


def format_bytes(size: int) -> str:
    """Return a size for messages, for example `1.5 GiB`."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB"]
    while abs(value) >= 1024 and len(units) > 1:  # noqa: PLR2004 - the binary prefixes
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _meminfo(proc: Path) -> Iterator[MemoryLimit]:
    fields = _fields(proc / "meminfo")
    total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
    if total is not None and available is not None:
        yield MemoryLimit("this machine (/proc/meminfo)", total * 1024, available * 1024)


def _cgroups(proc: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control groups and of all visible groups above them."""
    groups = {}  # path of the group by controller; "" is version 2
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    for line in _lines(proc / "self/mountinfo"):
        # 35 24 0:30 ROOT MOUNTPOINT options [optional ...] - FSTYPE source SUPEROPTIONS
        before, _, after = line.partition(" - ")
        root, mounted = (_unescape(field) for field in before.split()[3:5])
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2" and "" in groups:
            found, read = groups[""], _read_v2
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in groups:
            found, read = groups["memory"], _read_v1
        else:
            continue
        top = Path(mounted)
        folder = top / _below(found, root)
        for group in (folder, *folder.parents):
            yield from read(group)
            if group == top:
                break


def _below(path: str, root: str) -> PurePosixPath:
    """Return the path of the group `path` below a mount that shows the hierarchy from `root` on.

    In a container the mount often shows only this process's group, and `path` is the host's name
    for it, or lies outside of the cgroup namespace (`/../x`). The mount itself is the group then.
    """
    group = PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(root):
        return PurePosixPath()
    return group.relative_to(root)


def _read_v2(group: Path) -> Iterator[MemoryLimit]:
    # Above memory.high the kernel kills no process, but throttles all of them heavily.
    for file in ("memory.max", "memory.high"):
        limit, used = _number(group / file), _number(group / "memory.current")
        if limit is not None and used is not None:
            cache = _fields(group / "memory.stat").get("inactive_file", 0)
            yield _limit(group / file, limit, used, cache)


def _read_v1(group: Path) -> Iterator[MemoryLimit]:
    file = group / "memory.limit_in_bytes"
    limit, used = _number(file), _number(group / "memory.usage_in_bytes")
    if limit is not None and limit < _UNLIMITED_V1 and used is not None:
        # Fields that begin with "total_" are sums over the group and those below it.
        cache = _fields(group / "memory.stat").get("total_inactive_file", 0)
        yield _limit(file, limit, used, cache)


def _limit(file: Path, limit: int, used: int, cache: int) -> MemoryLimit:
    """Return a limit; inactive page cache is free: the kernel drops it before it kills."""
    available = limit - used + min(cache, used)
    return MemoryLimit(f"the control group ({file})", limit, max(available, 0))


def _number(file: Path) -> int | None:
    """Return the number in a file; None if it holds no number (`max`) or does not exist."""
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    """Return the `name number` lines of a file as a dictionary."""
    pairs = (line.split() for line in _lines(file))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def _lines(file: Path) -> list[str]:
    try:
        # Other mounts may have names in any encoding, with any separators of lines but this one.
        text = file.read_text(errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def _unescape(field: str) -> str:
    r"""Decode the escapes of mountinfo for blanks in paths, such as `\040`."""
    return field.encode("latin-1", "replace").decode("unicode_escape")
