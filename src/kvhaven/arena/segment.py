# SPDX-License-Identifier: Apache-2.0
"""Segments: the arena's shared memory, as the service creates it and as workers map it."""

import contextlib
import errno
import fcntl
import os
import threading
from typing import Self

from kvhaven.arena.limits import format_bytes, memory_limits
from kvhaven.arena.locks import byte_is_locked, lock_byte
from kvhaven.arena.mapping import SharedMapping
from kvhaven.errors import ArenaError
from kvhaven.types import PAGE_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h; since Linux 6.3, and required where vm.memfd_noexec = 2
_ALLOCATION_PIECE = 256 << 20
_BLOCK = 512  # unit of st_blocks, see stat(2)


class Segment:
    """Segment on the side of its owner, the service. Made by `create`.

    The service passes `fd` to workers; `memory` is the service's writable mapping. The service
    locks no byte, so every lock that it sees belongs to another process. The memory is freed when
    the service has closed the segment and the last worker's mapping has ended.

    The size is fixed from the beginning, but memory can be allocated gradually: the first
    `allocated` bytes are, the rest of the file is a hole. The hole must not be touched, because the
    kernel kills a process that touches memory it cannot provide.
    """

    def __init__(self, index: int, fd: int, mapping: SharedMapping, allocated: int) -> None:
        self.index = index
        self.fd = fd
        self.allocated = allocated
        self._mapping = mapping

    @classmethod
    def create(cls, index: int, size: int, allocated: int | None = None) -> Self:
        """Create a sealed segment of `size` bytes, the first `allocated` (None: all) in memory.

        Both are whole pages. Every byte is 0. Raises `ArenaError` with the size and the reason, as
        `extend` does; nothing is left behind in that case.
        """
        if size <= 0 or size % PAGE_BYTES:
            raise ArenaError(
                f"segment {index} of {size} bytes: invalid size; expected a positive multiple of "
                f"{PAGE_BYTES}"
            )
        with contextlib.ExitStack() as undo:
            try:
                fd = _memfd(f"kvhaven-arena-{index}")
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                mapping = SharedMapping(fd, size)
                undo.callback(mapping.close)
            except OSError as error:
                raise _refused(index, size, error) from error
            segment = cls(index, fd, mapping, 0)
            segment.extend(size if allocated is None else allocated)
            undo.pop_all()
        return segment

    def extend(self, length: int) -> None:
        """Allocate the next `length` bytes (whole pages), piece by piece.

        Before each piece it checks that memory and every control group have room for the rest,
        because the kernel kills a process that exceeds a limit. Other threads can run meanwhile.
        Raises `ArenaError` with the size and the reason; `allocated` counts the bytes allocated so
        far.
        """
        end = self.allocated + length
        while (rest := end - self.allocated) > 0:
            limit = memory_limits().tightest
            if limit is not None and limit.available < rest:
                raise ArenaError(
                    f"segment {self.index} of {format_bytes(self.size)} does not fit: {limit}, and "
                    f"{format_bytes(rest)} are still to be allocated; set max_local_cpu_size lower"
                )
            piece = min(_ALLOCATION_PIECE, rest)
            try:
                os.posix_fallocate(self.fd, self.allocated, piece)
            except OSError as error:
                raise _refused(self.index, self.size, error) from error
            self.allocated += piece

    @property
    def size(self) -> int:
        """Size in bytes, including the hole."""
        return self._mapping.size

    @property
    def memory(self) -> memoryview:
        """All bytes, writable."""
        return self._mapping.memory

    @property
    def address(self) -> int:
        """Address of byte 0 in this process."""
        return self._mapping.address

    def mapped_by_others(self, byte: int) -> bool:
        """Return whether a process holds the lock on `byte`, that is, still maps the segment."""
        return byte_is_locked(self.fd, byte)

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill the service's page tables (see `SharedMapping.prefault`)."""
        self._mapping.prefault(stop, offset, end)

    def close(self) -> None:
        """Unmap the segment and close `fd`. Raises `BufferError` while views of `memory` exist.

        The memory itself stays as long as a worker maps it. Does nothing the second time.
        """
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedSegment:
    """Segment on a worker's side: a mapping, and a lock that lives as long. Made by `map`."""

    def __init__(self, index: int, mapping: SharedMapping) -> None:
        self.index = index
        self._mapping = mapping

    @classmethod
    def map(
        cls, index: int, fd: int, size: int, lock_byte: int, allocated: int | None = None
    ) -> Self:
        """Map the segment of a received descriptor, and lock `lock_byte` while it is mapped.

        The whole segment is mapped; touch only the first `allocated` bytes (None: all) until the
        service reports more.

        Takes ownership of `fd`: it is closed in any case, so pass a duplicate to keep one. The file
        is opened anew through /proc, because a received descriptor shares the sender's open file
        description and with it the sender's locks. A forked child inherits mapping and lock.

        Raises `ArenaError` if the file has another size than `size`, is not sealed or has fewer
        allocated bytes than `allocated` (touching the others could kill this process), if another
        process holds the lock, or if the kernel refuses.
        """
        own = -1
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            _examine(index, own, size, size if allocated is None else allocated)
            _lock(index, own, lock_byte)
            return cls(index, SharedMapping(own, size))
        except OSError as error:
            raise ArenaError(
                f"segment {index} of {format_bytes(size)} cannot be mapped: {_reason(error)}"
            ) from error
        finally:
            for used in (own, fd):
                with contextlib.suppress(OSError):
                    os.close(used)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._mapping.size

    @property
    def memory(self) -> memoryview:
        """All bytes, writable."""
        return self._mapping.memory

    @property
    def address(self) -> int:
        """Address of byte 0 in this process, for ctypes and torch.

        Valid until `close`, and while this object exists.
        """
        return self._mapping.address

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill this process's page tables (see `SharedMapping.prefault`)."""
        self._mapping.prefault(stop, offset, end)

    def close(self) -> None:
        """Unmap the segment, which frees the lock unless a forked child still maps it.

        Raises `BufferError` while views of `memory` exist (slices, arrays, tensors). The segment
        then stays mapped and locked until the next `close` or the end of the process. Users of
        `address` alone are not noticed: they must have ended before.
        """
        self._mapping.close()


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _refused(index: int, size: int, error: OSError) -> ArenaError:
    return ArenaError(
        f"segment {index} of {format_bytes(size)} cannot be allocated: {_reason(error)}; "
        "set max_local_cpu_size lower, or free memory"
    )


def _examine(index: int, fd: int, size: int, allocated: int) -> None:
    """Refuse a file that was not made by `Segment.create`."""
    status = os.fstat(fd)
    if status.st_size != size:
        raise ArenaError(
            f"segment {index}: wrong size (got {status.st_size} bytes); expected {size}"
        )
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ArenaError(f"segment {index} is not sealed against resizing (got seals {seals:#x})")
    if status.st_blocks * _BLOCK < allocated:
        raise ArenaError(
            f"segment {index} has holes: {status.st_blocks * _BLOCK} of {allocated} bytes are "
            "allocated"
        )


def _lock(index: int, fd: int, byte: int) -> None:
    if not lock_byte(fd, byte):
        raise ArenaError(f"segment {index}: another process holds the lock on byte {byte}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
