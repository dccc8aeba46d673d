# SPDX-License-Identifier: Apache-2.0
"""Digests of whole files, read by several threads and remembered on disk."""

import contextlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import xxhash

from kvhaven.client.unix import lock_file
from kvhaven.devices.cpu import usable_cores
from kvhaven.errors import KVHavenError
from kvhaven.niceness import lower_thread_priority

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

PIECE_BYTES: Final = 64 << 20
"""A file is hashed in pieces of this size, so that several threads can read one file."""
MOST_ENTRIES: Final = 4096
"""Maximum number of remembered files; beyond it, the least recently used are forgotten."""

_BUFFER_BYTES: Final = 4 << 20
_READERS_MOST: Final = 8
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed this shortly before it was read may change again with the same time."""
_ENTRY: Final = re.compile(rb"1 ([0-9a-f]{32}) ([0-9a-f]{16})\n")


class FileChangedError(KVHavenError):
    """A file is not the one that was found first, or has changed since."""


class ReadingStoppedError(KVHavenError):
    """The caller stopped the reading."""


class Stamp(NamedTuple):
    """Metadata that shows that a file is unchanged, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Return the stamp of a file from its status."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @property
    def name(self) -> str:
        """The name of the entry that remembers the file's digest."""
        return "-".join(f"{part:x}" for part in self)


class DigestMemory:
    """Persistent digests of files, by stamp, in a directory that belongs to this user.

    Each entry is a small file. Without a directory nothing is remembered. Several processes can
    share it: entries appear atomically, and damaged entries are ignored.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def open(cls, *candidates: Path) -> "DigestMemory":
        """Return a memory in the first usable directory of these."""
        for directory in candidates:
            try:
                for made in (directory.parent, directory):  # `parents` would use the umask
                    made.mkdir(mode=0o700, parents=True, exist_ok=True)
                shared = any(map(_shared, (directory, directory.parent)))
            except OSError as error:
                logger.debug("%s: cannot be used for digests of files: %s", directory, error)
                continue
            if shared:
                logger.warning("%s: not used for digests: other users may write there", directory)
            elif os.access(directory, os.W_OK):
                return cls(directory)
        return cls(None)

    def get(self, stamp: Stamp) -> str | None:
        """Return the digest of the file with this stamp, None if it is unknown."""
        if self._directory is None:
            return None
        path = self._directory / stamp.name
        try:
            entry = _ENTRY.fullmatch(path.read_bytes())
            if entry is None or entry[2].decode() != _check(stamp, entry[1].decode()):
                return None
            os.utime(path)  # marks the entry as recently used
        except OSError:
            return None
        return entry[1].decode()

    def put(self, stamp: Stamp, digest: str, read_at_ns: int) -> None:
        """Remember a file's digest, unless the file changed shortly before it was read."""
        settled = max(stamp.mtime_ns, stamp.ctime_ns) < read_at_ns - _SETTLED_NS
        if self._directory is None or not settled:
            return
        path = self._directory / stamp.name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_text(f"1 {digest} {_check(stamp, digest)}\n")
            temporary.rename(path)
        except OSError as error:  # a full disk: the file is read again next time
            logger.debug("%s: digest not remembered: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def prune(self) -> None:
        """Delete the least recently used entries beyond `MOST_ENTRIES`."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            entries = sorted(
                os.scandir(self._directory), key=lambda entry: entry.stat().st_mtime_ns
            )
            for entry in entries[: max(0, len(entries) - MOST_ENTRIES)]:
                Path(entry.path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def turn(self, name: str, stopped: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock that lets one process at a time read the files that `name` stands for.

        Waits for the lock; continues without it once `stopped` returns True, or if the file system
        does not support locks.
        """
        with contextlib.ExitStack() as held:
            if self._directory is not None:
                with contextlib.suppress(KVHavenError, OSError):  # not all file systems lock
                    path = str(self._directory / f"{name}.lock")
                    held.enter_context(lock_file(path, float("inf"), in_vain=stopped))
            yield


def digest_files(
    files: Mapping[Path, Stamp],
    memory: DigestMemory,
    *,
    stop: threading.Event,
    on_read: Callable[[int], None] = lambda _: None,
) -> dict[Path, str]:
    """Return the digest of each file: xxh3-128 (hex) over its size and its pieces' digests.

    Threads of low priority read the files that `memory` does not have; `on_read` receives the
    number of bytes read since the last call. Raises `FileChangedError` if a file does not have
    the given stamp or changes while it is read, `ReadingStoppedError` once `stop` is set, and
    `OSError` if storage fails.
    """
    digests = {path: known for path, stamp in files.items() if (known := memory.get(stamp))}
    missing = {path: stamp for path, stamp in files.items() if path not in digests}
    read_at_ns = time.time_ns()
    pieces = [
        (path, offset)
        for path, stamp in missing.items()
        for offset in range(0, stamp.size, PIECE_BYTES)
    ]
    found = _in_threads(
        pieces, lambda piece: _digest_piece(piece[0], missing[piece[0]], piece[1], stop, on_read)
    )
    for path, stamp in missing.items():
        if Stamp.of(path.stat()) != stamp:
            raise FileChangedError(f"{path} changed while it was read")
        of_file = [found[path, offset] for offset in range(0, stamp.size, PIECE_BYTES)]
        digests[path] = _digest_of(stamp.size, of_file)
        memory.put(stamp, digests[path], read_at_ns)
    if missing:
        memory.prune()
    return digests


def _in_threads(items: Sequence[T], work: Callable[[T], bytes]) -> dict[T, bytes]:
    """Return `work(item)` for each item, computed by several threads; the first error ends all.

    The threads are daemons: an executor's threads would delay the end of the process until
    everything is read.
    """
    found: dict[T, bytes] = {}
    failed: list[BaseException] = []
    left, lock = iter(items), threading.Lock()

    def take() -> None:
        _be_nice()
        while not failed:
            with lock:
                try:
                    item = next(left)
                except StopIteration:
                    return
            try:
                found[item] = work(item)
            except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                failed.append(error)

    count = min(len(items), _READERS_MOST, max(2, len(usable_cores())))
    threads = [
        threading.Thread(target=take, name=f"kvhaven-identity-{number}", daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def _digest_piece(
    path: Path, stamp: Stamp, offset: int, stop: threading.Event, on_read: Callable[[int], None]
) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, stamp.size - offset)))
    end = min(offset + PIECE_BYTES, stamp.size)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if Stamp.of(os.fstat(file)) != stamp:
            raise FileChangedError(f"{path} changed before it was read")
        while offset < end:
            if stop.is_set():
                raise ReadingStoppedError(f"{path}: reading was stopped")
            count = os.preadv(file, [buffer[: end - offset]], offset)
            if count == 0:
                raise FileChangedError(f"{path} was truncated while it was read")
            digest.update(buffer[:count])
            offset += count
            on_read(count)
    finally:
        os.close(file)
    return digest.digest()


def _shared(directory: Path) -> bool:
    """Return whether other users may replace the directory or files in it."""
    status = directory.stat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return bool(others) or status.st_uid not in {0, os.geteuid()}


def _digest_of(size: int, pieces: Sequence[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(size.to_bytes(8, "little") + b"".join(pieces))


def _check(stamp: Stamp, digest: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"1 {stamp.name} {digest}".encode())


def _be_nice() -> None:
    """Lower this thread's priority, and allow all cores, as vLLM pins its CPU workers to one."""
    lower_thread_priority()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, usable_cores())
