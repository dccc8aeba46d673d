# SPDX-License-Identifier: Apache-2.0
"""One directory, one service: opening a store's directory and holding its lock."""

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from kvhaven.errors import ConfigError

_log = logging.getLogger(__name__)

LOCK_NAME: Final = "lock"
_HOLDER_BYTES: Final = 512


def private_name() -> str:
    """Return the name of our own directory in one where others may write, too."""
    return f"kvhaven-{os.geteuid()}"


def check_place(path: Path) -> None:
    """Say at the start how private a store's directory is; one that is not there is fine.

    Raises `ConfigError` where the store cannot be ours alone, or `OSError` as `stat` does.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_mode & stat.S_IWOTH:
        own = path / private_name()
        _log.warning(
            "local_disk: all users may write to %s (mode %o), and whoever may decides which KV "
            "engines load; %s is used, which nobody else may write",
            path,
            stat.S_IMODE(status.st_mode),
            own,
        )
        path = own
        try:
            status = path.lstat()  # a link could lead to any directory of ours
        except FileNotFoundError:
            return
    _require_private(path, status)
    if status.st_mode & stat.S_IWGRP:
        _log.warning(
            "local_disk: group %d may write to %s, and so decide which KV engines load; if that "
            "is not intended, run `chmod g-w %s`",
            status.st_gid,
            path,
            path,
        )


def _require_private(path: Path, status: os.stat_result) -> None:
    """Refuse a directory in which other users may put files. Raises `ConfigError`.

    Checksums find damage, not forgery: whoever may write there decides what engines load.
    """
    mode, own = stat.S_IMODE(status.st_mode), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"local_disk: {path} is no directory; remove it, or name another one.")
    if mode & stat.S_IWOTH or status.st_uid not in {0, own}:
        raise ConfigError(
            f"local_disk: other users may write to {path} (got mode {mode:o}, owner "
            f"{status.st_uid}); expected a directory that only user {own} may write, as stored KV "
            f"is checked for damage, not for forgery. Run `chown {own} {path}; chmod go-w {path}`, "
            "or name another directory."
        )


def _open_private(path: Path) -> tuple[Path, int]:
    """Open a directory, or our own one in it where all users may write there.

    Everything goes by what is open: others may rename what they find at a path. Raises
    `ConfigError` where neither is ours alone, `OSError`.
    """
    with contextlib.ExitStack() as undo:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, file)
        if os.fstat(file).st_mode & stat.S_IWOTH:
            path /= private_name()
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=file)
            file = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=file)
            undo.callback(os.close, file)
        _require_private(path, os.fstat(file))
        return path, os.dup(file)


class DirectoryHeldError(Exception):
    """Another service holds the directory; the message is what it wrote into the lock."""


class Directory:
    """A store's directory, opened and locked; its descriptor serves all further paths.

    The lock is an OFD lock on the file `lock`: the kernel drops it when the process is gone,
    however it went. All work goes through `fd`, never through the path again, so a directory
    that was moved, removed or mounted over cannot make us write where our lock is not held.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock `path`, making it where its parent exists, or our own directory in it.

        The latter where all users may write to `path`. Raises `DirectoryHeldError`, `ConfigError`
        where others may write, or `OSError` when it cannot be made, opened or written.
        """
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        self.path, self.fd = _open_private(path)
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
