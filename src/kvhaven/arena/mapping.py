# SPDX-License-Identifier: Apache-2.0
"""A shared mapping of a whole file: its bytes, its address, and filling its page tables."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable

from kvhaven.types import PAGE_BYTES

_Populate = Callable[[mmap.mmap, int, int, int], int]
"""Fills page tables: mapping, its address, offset, length; returns 0 or errno."""

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # linux/mman.h; since Linux 5.14
# While the kernel fills a piece, no other thread of this process can mmap: milliseconds.
_POPULATE_PIECE = 8 << 20
_TOUCH_PIECE = 4 << 20  # touched with the GIL held: about a millisecond

# Python's own `mmap.madvise` keeps the GIL while the kernel works, 10 ms and more a piece.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class SharedMapping:
    """Maps `size` bytes of `fd` shared and writable; `fd` stays the caller's.

    `memory` is a view of all its bytes; `address` is that of byte 0 in this process. The
    mapping keeps a duplicate of `fd`. Raises OSError when the kernel refuses.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)
        self._closed = False
        self._lock = threading.Lock()  # held for each piece of a prefault, and to unmap

    def prefault(self, stop: threading.Event, offset: int = 0, end: int | None = None) -> None:
        """Fill this process's page tables, so that copies need not wait for page faults.

        From `offset` to `end` (default: all); holes of the file would be allocated by it. Changes
        no byte. Meant for a background thread: it lets others run, looks at `stop` before each
        piece of 8 MiB, and ends when the mapping is closed. Never raises for what the kernel
        refuses: it is logged, and only speed is lost.
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
                _log.warning("prefault of %d bytes ended at %d: %s", end, offset, reason)
                return

    def close(self) -> None:
        """Unmap. Does nothing the second time.

        Raises BufferError while views of `memory` are alive (slices, arrays, tensors): then
        it all stays mapped and usable, and goes with the process or with the next `close`.
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
    """Let the kernel map a piece writably; EINVAL from a kernel too old for that."""
    failed = _madvise(address + offset, length, _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0


def _touch(mapping: mmap.mmap, _address: int, offset: int, length: int) -> int:
    """Read a byte of each page: for a shared mapping of memory that maps it writably as well.

    Never writes: the bytes are other people's.
    """
    with memoryview(mapping) as whole, whole[offset : offset + length] as piece:
        bytes(piece[::PAGE_BYTES])
    return 0
