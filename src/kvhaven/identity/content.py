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

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)

PIECE_BYTES: Final = 64 << 20
"""A file is hashed in pieces of this size, so that several threads can read one file."""
MOST_ENTRIES: Final = 4096
"""Files that are remembered; beyond, those that were asked for longest ago are forgotten."""

_BUFFER_BYTES: Final = 4 << 20
_READERS_MOST: Final = 8
_NICENESS: Final = 10
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed so shortly before it was read may change again without another time."""
_ENTRY: Final = re.compile(rb"1 ([0-9a-f]{32}) ([0-9a-f]{16})\n")


class FileChangedError(KVHavenError):
    """A file is another one than when it was looked at first."""


class ReadingStoppedError(KVHavenError):
    """The caller asked to stop."""


class Stamp(NamedTuple):
    """What tells that a file is the same, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Return the stamp in a file's status."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @property
    def name(self) -> str:
        """Return the name under which the file's digest is remembered."""
        return "-".join(f"{part:x}" for part in self)


class DigestMemory:
    """Digests of files by their stamps, a small file each, in a directory of this user's own.

    Without a directory nothing is remembered. Safe for use by several processes: an entry appears
    whole, and one that is damaged is as good as none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def open(cls, *candidates: Path) -> "DigestMemory":
        """Return a memory in the first of these directories that can be used."""
        for directory in candidates:
            try:
                for made in (directory.parent, directory):  # `parents` would go by the umask
                    made.mkdir(mode=0o700, parents=True, exist_ok=True)
                shared = any(map(_shared, (directory, directory.parent)))
            except OSError as error:
                logger.debug("%s cannot hold digests of files: %s", directory, error)
                continue
            if shared:
                logger.warning("%s is not used for digests: others may write there", directory)
            elif os.access(directory, os.W_OK):
                return cls(directory)
        return cls(None)

    def get(self, stamp: Stamp) -> str | None:
        """Return the digest of the file with that stamp, None if it is not known."""
        if self._directory is None:
            return None
        path = self._directory / stamp.name
        try:
            entry = _ENTRY.fullmatch(path.read_bytes())
            if entry is None or entry[2].decode() != _check(stamp, entry[1].decode()):
                return None
            os.utime(path)  # asked for: it is forgotten later than others
        except OSError:
            return None
        return entry[1].decode()

    def put(self, stamp: Stamp, digest: str, read_at_ns: int) -> None:
        """Remember a file's digest, if it had not changed shortly before it was read."""
        settled = max(stamp.mtime_ns, stamp.ctime_ns) < read_at_ns - _SETTLED_NS
        if self._directory is None or not settled:
            return
        path = self._directory / stamp.name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_text(f"1 {digest} {_check(stamp, digest)}\n")
            temporary.rename(path)
        except OSError as error:  # a full disk: the file is read again next time
            logger.debug("%s is not remembered: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def prune(self) -> None:
        """Forget the files that were asked for longest ago, beyond `MOST_ENTRIES`."""
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
        """Wait until no other process reads what `name` stands for, then be the one that does.

        Returns as well when `stopped` says so, or where no lock can be had.
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
    """Return the digest of each file: xxh3-128 (hex) over its size and those of its pieces.

    What `memory` does not know is read, by threads of low priority; `on_read` is told the bytes
    that were read since the last call. Raises `FileChangedError` when a file has not the stamp
    that was given, or changes; `ReadingStoppedError` when `stop` is set; `OSError`.
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
    """Return `work` of each item, done by several threads; the first error ends all.

    They are daemons: an executor's threads would keep a process that ends in a hurry until all is
    read.
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
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
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
                raise ReadingStoppedError(f"{path} is not read any further")
            count = os.preadv(file, [buffer[: end - offset]], offset)
            if count == 0:
                raise FileChangedError(f"{path} was cut while it was read")
            digest.update(buffer[:count])
            offset += count
            on_read(count)
    finally:
        os.close(file)
    return digest.digest()


def _shared(directory: Path) -> bool:
    """Whether others may put files, or another directory, in the place of what is there."""
    status = directory.stat()
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return bool(others) or status.st_uid not in {0, os.geteuid()}


def _digest_of(size: int, pieces: Sequence[bytes]) -> str:
    return xxhash.xxh3_128_hexdigest(size.to_bytes(8, "little") + b"".join(pieces))


def _check(stamp: Stamp, digest: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"1 {stamp.name} {digest}".encode())


def _be_nice() -> None:
    """Read behind everything else, on all cores: vLLM pins its CPU workers to one."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, max(niceness, _NICENESS))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, usable_cores())
