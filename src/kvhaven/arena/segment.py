# SPDX-License-Identifier: Apache-2.0
"""Segments: the arena's shared memory, as the service makes it and as a worker maps it."""

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
_MFD_NOEXEC_SEAL = 0x8  # linux/memfd.h; since Linux 6.3, and demanded where vm.memfd_noexec = 2
_ALLOCATION_PIECE = 256 << 20
_BLOCK = 512  # unit of st_blocks, see stat(2)


class Segment:
    """A segment as its owner, the service, has it. Made by `create`.

    `fd` is what is handed to workers; `memory` is the service's own writable mapping. The
    service locks no byte of it, so every lock it sees is somebody else's. The memory is gone
    when the service has closed it and the last worker's mapping ended.

    Its size is fixed from the beginning, its memory may be allocated gradually: the first
    `allocated` bytes are, the rest of the file is a hole. The hole must not be touched: touching
    memory that cannot be had kills the process.
    """

    def __init__(self, index: int, fd: int, mapping: SharedMapping, allocated: int) -> None:
        self.index = index
        self.fd = fd
        self.allocated = allocated
        self._mapping = mapping

    @classmethod
    def create(cls, index: int, size: int, allocated: int | None = None) -> Self:
        """Make a segment of `size` bytes, sealed, the first `allocated` of them (None: all) there.

        Both are whole pages. Every byte is 0. Raises ArenaError with the size and the reason, as
        `extend` does; nothing is left behind then.
        """
        if size <= 0 or size % PAGE_BYTES:
            raise ArenaError(
                f"segment {index} of {size} bytes: it must be a positive multiple of {PAGE_BYTES}"
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

        Before each piece it looks whether memory and every control group above us have room for
        the rest, since the kernel kills whoever asks for too much. Lets other threads run. Raises
        ArenaError with the size and the reason; `allocated` says how far it came.
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
        """Its size in bytes, the hole included."""
        return self._mapping.size

    @property
    def memory(self) -> memoryview:
        """All its bytes, writable."""
        return self._mapping.memory

    def mapped_by_others(self, byte: int) -> bool:
        """Whether a process holds the lock on `byte`, that is: still maps the segment."""
        return byte_is_locked(self.fd, byte)

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill the service's page tables (see `SharedMapping.prefault`)."""
        self._mapping.prefault(stop, offset, end)

    def close(self) -> None:
        """Unmap it and close `fd`. Raises BufferError while views of `memory` are alive.

        The memory itself stays as long as a worker maps it. Does nothing the second time.
        """
        self._mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MappedSegment:
    """A segment as a worker has it: a mapping, and the lock that lives as long as it. See `map`."""

    def __init__(self, index: int, mapping: SharedMapping) -> None:
        self.index = index
        self._mapping = mapping

    @classmethod
    def map(
        cls, index: int, fd: int, size: int, lock_byte: int, allocated: int | None = None
    ) -> Self:
        """Map the segment behind a received descriptor, and lock `lock_byte` while it is mapped.

        All of it is mapped; touch only the first `allocated` bytes (None: all) until the service
        says that there are more.

        Takes `fd` over: it is closed in any case, so hand in a duplicate to keep one. The file
        is opened anew through /proc, since a received descriptor shares the sender's open file
        description and with it the sender's locks. A forked child inherits mapping and lock.

        Raises ArenaError when the size is not `size`, when the file is not sealed or has fewer
        bytes than `allocated` (touching the others could kill us), when somebody holds the lock,
        or when the kernel refuses.
        """
        own = -1
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            _examine(index, own, size, size if allocated is None else allocated)
            _lock(index, own, lock_byte)
            return cls(index, SharedMapping(own, size))
        except OSError as error:
            raise ArenaError(
                f"segment {index} of {format_bytes(size)} could not be mapped: {_reason(error)}"
            ) from error
        finally:
            for used in (own, fd):
                with contextlib.suppress(OSError):
                    os.close(used)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self._mapping.size

    @property
    def memory(self) -> memoryview:
        """All its bytes, writable."""
        return self._mapping.memory

    @property
    def address(self) -> int:
        """Where byte 0 lies in this process, for ctypes and torch.

        Valid until `close`, and as long as this object lives.
        """
        return self._mapping.address

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill this process's page tables (see `SharedMapping.prefault`)."""
        self._mapping.prefault(stop, offset, end)

    def close(self) -> None:
        """Unmap it, which frees the lock unless a forked child maps it still.

        Raises BufferError while views of `memory` are alive (slices, arrays, tensors): then
        it stays mapped and locked, and goes with the process or with the next `close`. What
        only knows `address` is not noticed: its user must be gone before.
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
        f"segment {index} of {format_bytes(size)} could not be had: {_reason(error)}; "
        "set max_local_cpu_size lower, or free memory"
    )


def _examine(index: int, fd: int, size: int, allocated: int) -> None:
    """Refuse a file that is not as `Segment.create` makes it."""
    status = os.fstat(fd)
    if status.st_size != size:
        raise ArenaError(f"segment {index} has {status.st_size} bytes, {size} were announced")
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & _SEALS != _SEALS:
        raise ArenaError(f"segment {index} could change its size: seals {seals:#x}")
    if status.st_blocks * _BLOCK < allocated:
        raise ArenaError(
            f"segment {index} has holes: {status.st_blocks * _BLOCK} of {allocated} bytes allocated"
        )


def _lock(index: int, fd: int, byte: int) -> None:
    if not lock_byte(fd, byte):
        raise ArenaError(f"segment {index}: another process holds the lock on byte {byte}")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
