# SPDX-License-Identifier: Apache-2.0
"""Directory lock: opens a store's directory for one service and holds its lock."""

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
    """Return the name of this user's private directory inside a world-writable one."""
    return f"kvhaven-{os.geteuid()}"


def check_place(path: Path) -> None:
    """Check at startup that a store's directory is private; it need not exist yet.

    Logs a warning if all users, or the group, may write to it. Raises `ConfigError` if the store
    cannot be private, and `OSError` as `stat` does.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_mode & stat.S_IWOTH:
        own = path / private_name()
        _log.warning(
            "local_disk: all users may write to %s (mode %o), and a user who may write decides "
            "which KV engines load; %s is used instead, which only this user may write",
            path,
            stat.S_IMODE(status.st_mode),
            own,
        )
        path = own
        try:
            status = path.lstat()  # a link could lead to any of our directories
        except FileNotFoundError:
            return
    _require_private(path, status)
    if status.st_mode & stat.S_IWGRP:
        _log.warning(
            "local_disk: group %d may write to %s and thus decide which KV engines load; if this "
            "is not intended, run `chmod g-w %s`",
            status.st_gid,
            path,
            path,
        )


def _require_private(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` if other users may create files in a directory.

    Checksums detect damage, not forgery: a user who may write there decides what engines load.
    """
    mode, own = stat.S_IMODE(status.st_mode), os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"local_disk: {path} is not a directory. Remove it, or name another one.")
    if mode & stat.S_IWOTH or status.st_uid not in {0, own}:
        raise ConfigError(
            f"local_disk: other users may write to {path} (got mode {mode:o}, owner "
            f"{status.st_uid}); expected a directory that only user {own} may write, since stored "
            f"KV is checked for damage, not for forgery. Run `chown {own} {path}; chmod go-w "
            f"{path}`, or name another directory."
        )


def _open_private(path: Path) -> tuple[Path, int]:
    """Open a directory, or this user's private directory in it if it is world-writable.

    All checks use open descriptors, since other users may rename paths. Raises `ConfigError` if
    neither directory is private, and `OSError` if one cannot be opened.
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
    """Another service holds the directory; the message is the text in its lock file."""


class Directory:
    """Open and locked directory of a store; all paths are relative to its descriptor `fd`.

    The lock is an OFD lock on the file `lock`: the kernel releases it when the process ends,
    for whatever reason. No operation uses the path again, so a directory that is moved, removed
    or mounted over cannot cause writes where the lock is not held.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock `path`, or the private directory in it if `path` is world-writable.

        The directory is created if its parent exists. Raises `DirectoryHeldError` if another
        service holds it, `ConfigError` if other users may write to it, and `OSError` if it
        cannot be created, opened or written.
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
        """Return whether the lock file in the directory is still the one that this object holds."""
        try:
            named = os.stat(LOCK_NAME, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self._lock_fd))

    def close(self) -> None:
        """Release the lock and close the descriptors."""
        os.close(self._lock_fd)
        os.close(self.fd)

    def _lock(self) -> None:
        # struct flock: l_type, l_whence, l_start, l_len (0: to the end), l_pid (0 for OFD)
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            fcntl.fcntl(self._lock_fd, fcntl.F_OFD_SETLK, wanted)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(self._lock_fd, _HOLDER_BYTES, 0).decode(errors="replace").strip()
            raise DirectoryHeldError(holder or "a process that left no name in it") from error
        if not self.ours():
            raise DirectoryHeldError("a process that replaced the lock file just now")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        text = f"pid {os.getpid()} on {socket.gethostname()} since {now}\n"
        os.ftruncate(self._lock_fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock is held without a name
            os.pwrite(self._lock_fd, text.encode(), 0)
