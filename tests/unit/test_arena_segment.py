# SPDX-License-Identifier: Apache-2.0
"""Segments in one process: how they are made, mapped, filled and given up."""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.arena import mapping
from kvhaven.arena.segment import MappedSegment, Segment
from kvhaven.errors import ArenaError

MIB, GIB = 1 << 20, 1 << 30
SIZE = 9 * MIB  # no whole number of prefault pieces
BYTE = 3


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment.create(2, SIZE)
    yield made
    made.close()


@pytest.fixture
def mapped(segment: Segment) -> Iterator[MappedSegment]:
    made = MappedSegment.map(2, os.dup(segment.fd), SIZE, BYTE)
    yield made
    made.close()


def open_descriptors() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


def resident_bytes(address: int) -> int:
    """Bytes of the mapping that this process's page tables cover, from /proc/self/smaps."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    rss = next(line for line in lines[start:] if line.startswith("Rss:"))
    return int(rss.split()[1]) * 1024


def test_a_segment_is_zeroed_allocated_in_full_and_sealed(segment: Segment) -> None:
    assert (segment.index, segment.size, len(segment.memory)) == (2, SIZE, SIZE)
    assert not any(segment.memory)
    assert os.fstat(segment.fd).st_blocks * 512 >= SIZE
    for size in (SIZE - 4096, SIZE + 4096, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert not os.get_inheritable(segment.fd)


def test_both_sides_see_the_same_bytes(segment: Segment, mapped: MappedSegment) -> None:
    mapped.memory[SIZE - 3 :] = b"end"
    segment.memory[:5] = b"start"
    assert bytes(segment.memory[SIZE - 3 :]) == b"end"
    assert ctypes.string_at(mapped.address, 5) == b"start"
    assert (mapped.index, mapped.size) == (2, SIZE)


@pytest.mark.parametrize("size", [0, -4096, 4095, 4097])
def test_a_size_that_is_no_whole_number_of_pages_is_refused(size: int) -> None:
    with pytest.raises(
        ArenaError, match=f"{size} bytes: invalid size; expected a positive multiple of 4096"
    ):
        Segment.create(0, size)


def test_a_segment_larger_than_memory_is_refused_and_leaves_nothing() -> None:
    before = open_descriptors()
    with pytest.raises(ArenaError, match=r"segment 0 of 1.049e\+06 GiB .*max_local_cpu_size lower"):
        Segment.create(0, 1 << 50)
    assert open_descriptors() == before


def test_a_refusal_by_the_kernel_names_size_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_descriptors()
    with pytest.raises(ArenaError, match=r"segment 1 of 4 MiB .*No space left on device"):
        Segment.create(1, 4 * MIB)
    assert open_descriptors() == before


# --- a segment that grows ---------------------------------------------------------------------


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def growing() -> Iterator[Segment]:
    """A segment of which the first two MiB are there."""
    made = Segment.create(2, SIZE, 2 * MIB)
    yield made
    made.close()


def test_a_segment_has_its_size_and_seals_before_its_memory(growing: Segment) -> None:
    assert (growing.size, growing.allocated) == (SIZE, 2 * MIB)
    assert allocated_bytes(growing.fd) == 2 * MIB
    for size in (SIZE - 4096, SIZE + 4096, 0):
        with pytest.raises(PermissionError):
            os.ftruncate(growing.fd, size)
    growing.extend(3 * MIB)
    assert (growing.allocated, allocated_bytes(growing.fd)) == (5 * MIB, 5 * MIB)
    growing.extend(SIZE - 5 * MIB)
    assert (growing.allocated, allocated_bytes(growing.fd)) == (SIZE, SIZE)
    assert not any(growing.memory)


def test_who_mapped_a_part_sees_what_comes_later(growing: Segment) -> None:
    mapped = MappedSegment.map(2, os.dup(growing.fd), SIZE, BYTE, 2 * MIB)
    mapped.prefault(threading.Event(), 0, 2 * MIB)
    assert allocated_bytes(growing.fd) == 2 * MIB, "prefaulting has filled the hole"
    assert resident_bytes(mapped.address) == 2 * MIB
    growing.extend(MIB)
    growing.memory[3 * MIB - 4 : 3 * MIB] = b"late"
    assert bytes(mapped.memory[3 * MIB - 4 : 3 * MIB]) == b"late"
    assert allocated_bytes(growing.fd) == 3 * MIB
    mapped.close()


def test_a_segment_that_has_less_than_was_announced_is_refused(growing: Segment) -> None:
    with pytest.raises(ArenaError, match="has holes: 2097152 of 2101248 bytes are allocated"):
        MappedSegment.map(2, os.dup(growing.fd), SIZE, BYTE, 2 * MIB + 4096)
    with pytest.raises(ArenaError, match="has holes"):
        MappedSegment.map(2, os.dup(growing.fd), SIZE, BYTE)


def test_what_the_kernel_refuses_leaves_a_segment_as_it_was(
    growing: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    growing.memory[:4] = b"kept"
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ArenaError, match=r"segment 2 of 9 MiB .*No space left on device"):
            growing.extend(MIB)
    assert growing.allocated == 2 * MIB
    assert bytes(growing.memory[:4]) == b"kept"
    growing.extend(MIB)
    assert growing.allocated == 3 * MIB


def test_mapping_takes_the_descriptor_over(segment: Segment) -> None:
    received = os.dup(segment.fd)
    mapped = MappedSegment.map(2, received, SIZE, BYTE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(received)
    before = open_descriptors()
    mapped.close()
    assert len(open_descriptors()) == len(before) - 1  # the duplicate that Python's mmap keeps
    mapped.close()


@pytest.mark.parametrize("size", [SIZE - 4096, SIZE + 4096, 0])
def test_a_segment_of_another_size_is_refused(segment: Segment, size: int) -> None:
    before = open_descriptors()
    with pytest.raises(ArenaError, match=rf"got {SIZE} bytes\); expected {size}"):
        MappedSegment.map(2, os.dup(segment.fd), size, BYTE)
    assert open_descriptors() == before
    assert not segment.mapped_by_others(BYTE)


def test_a_file_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, SIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(ArenaError, match="not sealed against resizing"):
        MappedSegment.map(0, fd, SIZE, BYTE)


def test_a_file_with_holes_is_refused() -> None:
    fd = os.memfd_create("holes", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    os.posix_fallocate(fd, 0, SIZE - 4096)
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(ArenaError, match="has holes"):
        MappedSegment.map(0, fd, SIZE, BYTE)


def test_a_descriptor_that_is_no_file_is_refused() -> None:
    read, write = os.pipe()
    with pytest.raises(ArenaError):
        MappedSegment.map(0, read, 0, BYTE)
    os.close(write)
    with pytest.raises(ArenaError, match="cannot be mapped"):
        MappedSegment.map(0, read, SIZE, BYTE)


def test_prefault_fills_the_page_tables_and_changes_nothing(
    segment: Segment, mapped: MappedSegment
) -> None:
    segment.memory[:] = pattern = bytes(range(256)) * (SIZE // 256)
    assert resident_bytes(mapped.address) == 0
    mapped.prefault(threading.Event())
    assert resident_bytes(mapped.address) == SIZE
    assert mapped.memory == pattern


def test_an_old_kernel_is_served_by_reading_a_byte_of_each_page(
    segment: Segment, mapped: MappedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    segment.memory[:] = pattern = bytes(range(256)) * (SIZE // 256)
    mapped.prefault(threading.Event())
    assert resident_bytes(mapped.address) == SIZE
    assert mapped.memory == pattern


def test_prefault_stops_when_told(mapped: MappedSegment) -> None:
    stop = threading.Event()
    stop.set()
    mapped.prefault(stop)
    assert resident_bytes(mapped.address) == 0


def test_a_prefault_that_the_kernel_refuses_is_logged_once_and_harmless(
    mapped: MappedSegment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_mapping: mmap.mmap, _address: int, _offset: int, _length: int) -> int:
        return errno.ENOMEM

    monkeypatch.setattr(mapping, "_populate", refused)
    with caplog.at_level(logging.WARNING):
        mapped.prefault(threading.Event())
    assert [r.getMessage() for r in caplog.records] == [
        f"prefault of {SIZE} bytes stopped at byte 0: Cannot allocate memory"
    ]
    mapped.memory[:4] = b"fine"


def test_closing_ends_a_prefault_under_way() -> None:
    size = 256 * MIB
    segment = Segment.create(0, size)
    mapped = MappedSegment.map(0, os.dup(segment.fd), size, BYTE)
    stop = threading.Event()
    thread = threading.Thread(target=mapped.prefault, args=(stop,))
    thread.start()
    mapped.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
    segment.close()
    mapped.prefault(stop)  # nothing to do any more


def test_close_with_living_views_leaves_it_mapped_and_locked(segment: Segment) -> None:
    mapped = MappedSegment.map(2, os.dup(segment.fd), SIZE, BYTE)
    view = mapped.memory[4096:8192]
    array = (ctypes.c_char * 8).from_buffer(mapped.memory, 64)
    for _ in range(2):
        with pytest.raises(BufferError):
            mapped.close()
    view[:3] = b"abc"
    assert bytes(mapped.memory[4096:4099]) == b"abc"
    assert segment.mapped_by_others(BYTE)
    del array
    view.release()
    mapped.close()
    assert not segment.mapped_by_others(BYTE)


def test_the_service_can_close_twice_and_its_descriptor_goes(segment: Segment) -> None:
    fd = segment.fd
    view = segment.memory[:8]
    with pytest.raises(BufferError):
        segment.close()
    os.fstat(fd)
    view.release()
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
