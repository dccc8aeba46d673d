# SPDX-License-Identifier: Apache-2.0
"""Shared mapping of a whole file: its bytes, its address, and prefaulting of its pages."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable

from kvhaven.types import PAGE_BYTES

_Populate = Callable[[mmap.mmap, int, int, int], int]
"""Function that fills page tables: mapping, its address, offset, length; returns 0 or errno."""

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # linux/mman.h; since Linux 5.14
# While the kernel fills a piece, for milliseconds, no other thread of this process can mmap.
_POPULATE_PIECE = 8 << 20
_TOUCH_PIECE = 4 << 20  # read with the GIL held, for about a millisecond

# Python's `mmap.madvise` holds the GIL during the call, 10 ms and more per piece.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class SharedMapping:
    """Shared, writable mapping of `size` bytes of `fd`; the caller keeps `fd`.

    `memory` is a view of all bytes; `address` is the address of byte 0 in this process. The mapping
    keeps a duplicate of `fd`. Raises `OSError` if the kernel refuses the mapping.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)
        self._closed = False
        self._lock = threading.Lock()  # held during each prefaulted piece and during unmapping

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill this process's page tables, so that copies cause no page faults.

        Covers the bytes from `offset` to `end` (default: all); holes of the file in this range
        would be allocated. Changes no byte. Intended for a background thread: it releases the GIL,
        checks `stop` before each piece of 8 MiB, and ends when the mapping is closed. Failures of
        the kernel are logged and not raised, because they only cost speed.
        """
        end = self.size if end is None else end
        piece = _POPULATE_PIECE
        populate: _Populate = _populate
        while offset < end and not stop.is_set():
            length = min(piece, end - offset)
            with self._lock:
                if self._closed:
                    return
                failure = populate(self._map, self.address, offset, length)
            if failure == 0:
                offset += length
            elif failure == errno.EINVAL:
                piece, populate = _TOUCH_PIECE, _touch
            elif failure not in {errno.EINTR, errno.EAGAIN}:
                reason = os.strerror(failure)
                _log.warning("prefault of %d bytes stopped at byte %d: %s", end, offset, reason)
                return

    def close(self) -> None:
        """Unmap the file. Does nothing the second time.

        Raises `BufferError` while views of `memory` exist (slices, arrays, tensors). The whole
        mapping then stays usable until the next `close` or the end of the process.
        """
        with self._lock:
            if self._closed:
                return
            self.memory.release()
            try:
                self._map.close()
            except BufferError:
                self.memory = memoryview(self._map)
                raise
            self._closed = True


def _populate(_mapping: mmap.mmap, address: int, offset: int, length: int) -> int:
    """Ask the kernel to map a piece writably; returns EINVAL if the kernel is too old for that."""
    failed = _madvise(address + offset, length, _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def _touch(mapping: mmap.mmap, _address: int, offset: int, length: int) -> int:
    """Read a byte of each page; in a shared mapping of memory this maps the page writably as well.

    Never writes, because other processes use the bytes.
    """
    with memoryview(mapping) as whole, whole[offset : offset + length] as piece:
        bytes(piece[::PAGE_BYTES])
    return 0
