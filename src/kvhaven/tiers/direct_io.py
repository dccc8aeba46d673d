# SPDX-License-Identifier: Apache-2.0
"""Direct I/O of whole pages, for the disk tier and the filesystem tier."""

import contextlib
import errno
import mmap
import os
import secrets

from kvhaven.tiers.format.header import HEADER_BYTES


def direct_io_works(folder: int) -> bool:
    """Return whether an open folder's file system supports direct I/O: write and read a page."""
    name = f".{secrets.token_hex(6)}.0.tmp"
    page = mmap.mmap(-1, HEADER_BYTES)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        file = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            os.pwrite(file, page, 0)
            return os.preadv(file, [page], 0) == HEADER_BYTES
        finally:
            os.close(file)
    except OSError as error:
        return error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def write_whole(file: int, buffers: list[mmap.mmap | memoryview]) -> None:
    """Write all buffers at the file's start in one call. Raises `OSError` (ENOSPC) if cut short."""
    wanted = sum(len(buffer) for buffer in buffers)
    written = os.pwritev(file, buffers, 0)
    if written != wanted:
        reason = f"{os.strerror(errno.ENOSPC)}, only {written} of {wanted} bytes were written"
        raise OSError(errno.ENOSPC, reason)
