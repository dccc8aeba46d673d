# SPDX-License-Identifier: Apache-2.0
"""Unix sockets: their directories, lock files, and the user at the other end."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvhaven.errors import KVHavenError

ADDRESS_BYTES: Final = 107
"""Longest path of a unix socket: `sun_path` of unix(7), without its closing zero."""

_POLL_S = 0.02
_PROBE_S = 1.0
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred` of unix(7): process, user and group id."""


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return int(uid)


def prepare_directory(address: str) -> None:
    """Create the directory of a socket, for this user alone, or check an existing one.

    Raises `KVHavenError` if the path is too long for a socket, or if other users could put files
    there, such as in a directory in /tmp that another user created first.
    """
    if len(os.fsencode(address)) > ADDRESS_BYTES:
        raise KVHavenError(
            f"{address} is too long for a unix socket (got {len(os.fsencode(address))} bytes); "
            f"expected at most {ADDRESS_BYTES} bytes. Set runtime_dir to a shorter path"
        )
    directory = Path(address).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise KVHavenError(
            f"{directory} cannot hold a socket: {error.strerror or error}. Set runtime_dir to "
            "another directory"
        ) from error
    shared = status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in {0, os.geteuid()} or shared:
        raise KVHavenError(
            f"{directory} belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, so another user could run a false service there. "
            "Remove it, or set runtime_dir to a directory of your own"
        )


def listens(address: str) -> bool:
    """Return whether a process listens at `address`, even if it is too busy to accept now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(address)
        except TimeoutError:  # its queue is full
            return True
        except OSError as error:
            return error.errno == errno.EAGAIN
        return True


@contextlib.contextmanager
def lock_file(
    path: str, wait_s: float = 0.0, *, in_vain: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Hold the lock file at `path`, and remove it at the end; yield whether the lock is held.

    Waits up to `wait_s` seconds, or until `in_vain` returns True because the lock is no longer
    needed. The kernel drops the lock with the process, however it ends; then an unlocked file
    remains. Raises `KVHavenError` if the file cannot be created.
    """
    end = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= end or in_vain():
            yield False
            return
        time.sleep(_POLL_S)
    try:
        yield True
    finally:
        Path(path).unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(path: str) -> int | None:
    """Lock the file at `path`; return None if it is locked, or its last holder removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise KVHavenError(f"{path} cannot be created: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116 - as fstat
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
