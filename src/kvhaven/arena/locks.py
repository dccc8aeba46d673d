# SPDX-License-Identifier: Apache-2.0
"""Locks that live exactly as long as a mapping: OFD locks on single bytes.

An open-file-description (OFD) lock belongs to the result of an `open` call, not to a process. The
kernel drops it with the last reference: descriptors, their duplicates in forked children, *and
memory mappings made through it*. A process that opens a segment anew, locks a byte, maps the
segment and closes the descriptor therefore holds the lock exactly as long as the mapping exists,
however the process ends. Format and rules: fcntl(2), "Open file description locks".
"""

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid (must be 0 for OFD locks)."""


def lock_byte(fd: int, byte: int) -> bool:
    """Lock a byte for `fd`'s open file description; return False if another one holds the lock.

    The byte may lie beyond the end of the file. Raises `OSError` for any failure but a conflict.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(byte))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def byte_is_locked(fd: int, byte: int) -> bool:
    """Return whether an open file description other than `fd`'s holds a lock on the byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(byte))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _request(byte: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
