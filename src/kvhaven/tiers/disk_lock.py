# SPDX-License-Identifier: Apache-2.0
"""One directory, one service: opening a store's directory and holding its lock."""

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Final

LOCK_NAME: Final = "lock"
_HOLDER_BYTES: Final = 512


class DirectoryHeldError(Exception):
    """Another service holds the directory; the message is what it wrote into the lock."""


class Directory:
    """A store's directory, opened and locked; its descriptor serves all further paths.

    The lock is an OFD lock on the file `lock`: the kernel drops it when the process is gone,
    however it went. All work goes through `fd`, never through the path again, so a directory
    that was moved, removed or mounted over cannot make us write where our lock is not held.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock `path`, making it where its parent exists.

        Raises `DirectoryHeldError`, or `OSError` when it cannot be made, opened or written.
        """
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock_fd = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.fd)
        except OSError:
            os.close(self.fd)
            raise
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def ours(self) -> bool:
        """Return whether the lock is still the one that others would ask for."""
        try:
            named = os.stat(LOCK_NAME, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._lock_fd))

    def close(self) -> None:
        """Give the lock and the descriptors up."""
        os.close(self._lock_fd)
        os.close(self.fd)

    def _lock(self) -> None:
        # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid (0 for OFD)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, wanted)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(self._lock_fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
            raise DirectoryHeldError(holder or "a process that did not say who it is") from error
        if not self.ours():
            raise DirectoryHeldError("somebody who removed the lock at this moment")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = f"pid {os.getpid()} on {socket.gethostname()} since {now}\n"
        os.ftruncate(self._lock_fd, 0)
        with contextlib.suppress(OSError):  # a full disk: it is held, only without a name
            os.pwrite(self._lock_fd, text.encode(), 0)
