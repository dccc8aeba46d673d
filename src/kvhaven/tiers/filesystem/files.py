# SPDX-License-Identifier: Apache-2.0
"""Blocking file operations of the filesystem tier, which many nodes write; run in its threads."""

import contextlib
import errno
import itertools
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.direct_io import write_whole
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import DamagedShardError, ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold
from kvhaven.tiers.format.manifest import MOST_BYTES
from kvhaven.tiers.shared.store import (
    FOLDER,
    Blob,
    blob_name,
    require_size,
    unpack,
)
from kvhaven.types import Checksum

_log = logging.getLogger(__name__)

MARKER: Final = "kvhaven.store"
"""Distinguishes the store from the empty directory that remains when its mount vanishes."""

DEBRIS_S: Final = 3600.0
"""Age in seconds, by the server's clock, at which a temporary file counts as abandoned."""

TOUCH_S: Final = 3600.0
"""Resolution of recorded last-use times in seconds."""

_MARKER_TEXT: Final = b"KVHaven keeps KV-cache shards here. See docs/tiers.md.\n"
_SUBFOLDER: Final = re.compile(r"[0-9a-f]{2}")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]+\.[0-9]+\.tmp")
_GONE: Final = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}
"""Another node removed the file, before it was opened or afterwards (NFS: a stale handle)."""


class SharedFiles:
    """Files of one open directory that other nodes use as well. Thread-safe.

    The class needs nothing that NFS lacks: no locks, no links. A file appears by rename,
    complete and flushed, and is never modified. All methods raise `OSError` for errors of the
    file system, besides the errors that each method names.
    """

    def __init__(self, path: Path, *, mode: int, codec: ShardCodec, known: bool) -> None:
        """Open `path`. With `known`, it must already be a store, as it was opened before.

        Raises `TierError` if the directory does not exist, or `known` is set and it is not a store.
        """
        self.path = path
        self.direct = False
        self._mode = mode
        self._codec = codec
        self._folder_mode = mode | (mode & 0o444) >> 2
        self._nonce = secrets.token_hex(8)
        self._numbers = itertools.count()  # its next() is atomic
        self._local = threading.local()
        self._ahead_s: float | None = None
        """Server's clock minus this process's monotonic clock; None until measured."""
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise TierError(f"{path} does not exist: mount it, or create the directory") from None
        try:
            self._mark(known=known)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)

    def still_there(self) -> bool:
        """Return whether the path still leads to the open directory, and its marker is present."""
        try:
            there = os.path.samestat(self.path.stat(), os.fstat(self.fd))
            os.stat(MARKER, dir_fd=self.fd)
        except OSError:
            return False
        return there

    def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write a temporary file, flush it to the server's disk, and rename it.

        Returns the bytes written; 0 if the shard was present.
        """
        path = blob_name(shard)
        if self.contains([shard])[0]:
            return 0
        packed = self._codec.pack(shard, payload, checksum)
        page = self._header_page()
        page[:] = packed.head
        began = time.perf_counter()
        self._put(path, [page, packed.body], os.O_DIRECT if self.direct else 0)
        seconds = time.perf_counter() - began
        self._codec.moved(Lane.WRITE, shard.namespace, packed.size, seconds)
        return packed.size

    def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify. Raises `TierMissError` if absent, `DamagedShardError` if damaged."""
        path = blob_name(shard)
        page = self._header_page()
        began = time.perf_counter()
        try:
            size, got = self._read_whole(path, shard, page, into)
        except OSError as error:
            if error.errno in _GONE:
                raise TierMissError(f"{path} is not stored") from None
            if error.errno == errno.ELOOP:
                raise DamagedShardError(f"{path} is a symbolic link", b"link") from None
            raise
        require_size(size, shard, path)
        if got != size:
            raise OSError(errno.EIO, f"only {got} of {size} bytes of {path} could be read")
        seconds = time.perf_counter() - began
        self._codec.moved(Lane.READ, shard.namespace, size, seconds)
        return unpack(self._codec, page[:], into, size, shard, path)

    def contains(self, shards: Sequence[StoredShard]) -> list[bool]:
        """Return whether each shard is present with a possible size."""
        return [
            (size := self._size(blob_name(shard))) is not None
            and may_hold(size, shard.payload_bytes)
            for shard in shards
        ]

    def remove_all(self, paths: Sequence[str]) -> None:
        """Remove files one after the other."""
        for path in paths:
            self.remove(path)

    def load(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        found = self.load_dated(name)
        return None if found is None else found[0]

    def load_dated(self, name: str) -> tuple[bytes, float] | None:
        """Return a small file's content and mtime (server's clock); None if it does not exist."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(name, flags, dir_fd=self.fd), "rb") as file:
                return file.read(MOST_BYTES), os.fstat(file.fileno()).st_mtime
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, except temporary files; empty if there is no folder."""
        names = self._remove_old_temporaries(folder, self._names(folder))
        return [name for name in names if not name.startswith(".")]

    def save(self, name: str, content: bytes) -> None:
        """Write a small file atomically; an existing file is replaced."""
        self._put(name, [memoryview(content)], 0)

    def folders(self) -> list[str]:
        """Return the names of the namespaces' folders."""
        names = self._remove_old_temporaries("", self._names(""))
        return sorted(name for name in names if FOLDER.fullmatch(name))

    def list_blobs(self, folder: str) -> Iterator[list[Blob]]:
        """Yield the files of a folder, one subfolder at a time; remove old temporary files."""
        self._remove_old_temporaries(folder, self._names(folder))
        for subfolder in self._names(folder):
            if not _SUBFOLDER.fullmatch(subfolder):
                continue
            names = self._names(f"{folder}/{subfolder}")
            names = self._remove_old_temporaries(f"{folder}/{subfolder}", names)
            yield self._blobs(f"{folder}/{subfolder}", names)

    def list_subfolder(self, subfolder: str) -> list[Blob]:
        """Return the shard files in a subfolder; remove old temporary files."""
        names = [name for name in self.names(subfolder) if name.endswith(".kv")]
        return self._blobs(subfolder, names)

    def remove_unused(self, blob: Blob) -> bool:
        """Remove a file unless it was used after it was listed; return whether it was removed."""
        status = self._status(blob.name)
        if status is None or blob.used_at is None or status.st_mtime > blob.used_at:
            return False
        self.remove(blob.name)
        return True

    def probe_write(self) -> None:
        """Verify that a file can be written and removed."""
        name = self._temporary("")
        self._write_new(name, [self._header_page()], 0)
        self.remove(name)

    def server_time(self) -> float:
        """Return the server's time in seconds, taken from a file created now."""
        name = self._temporary("")
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode, dir_fd=self.fd)
        try:
            now = os.fstat(file).st_mtime
            self._ahead_s = now - time.monotonic()
            return now
        finally:
            os.close(file)
            self.remove(name)

    def _mark(self, *, known: bool) -> None:
        try:
            os.stat(MARKER, dir_fd=self.fd)
        except FileNotFoundError:
            if known:
                raise TierError(
                    f"{self.path} is not a KVHaven store: the file {MARKER} is missing. Mount the "
                    f"store, or start a service on this directory to create a new store."
                ) from None
        else:
            return
        file = os.open(MARKER, os.O_WRONLY | os.O_CREAT, self._mode, dir_fd=self.fd)
        try:
            os.write(file, _MARKER_TEXT)
        finally:
            os.close(file)

    def _put(self, path: str, buffers: list[mmap.mmap | memoryview], flag: int) -> None:
        """Write a file under a temporary name and rename it; create its folder if necessary."""
        folder = path.rpartition("/")[0]
        temporary = self._temporary(folder)
        try:
            self._write_new(temporary, buffers, flag)
        except FileNotFoundError:
            for parent in (folder.partition("/")[0], folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, self._folder_mode, dir_fd=self.fd)
            self._write_new(temporary, buffers, flag)
        try:
            os.rename(temporary, path, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            self._try_remove(temporary)
            raise

    def _write_new(self, name: str, buffers: list[mmap.mmap | memoryview], flag: int) -> None:
        """Write a new file; on failure leave none.

        NFS reports a full or failing server only when data are flushed, at fsync or close.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag
        file = os.open(name, flags, self._mode, dir_fd=self.fd)
        try:
            try:
                write_whole(file, buffers)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError:
            self._try_remove(name)
            raise

    def _read_whole(
        self, path: str, shard: StoredShard, page: mmap.mmap, into: memoryview
    ) -> tuple[int, int]:
        """Return a file's size, and the bytes read (0 if the size is impossible for the shard)."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if self.direct else 0)
        file = os.open(path, flags, dir_fd=self.fd)
        try:
            status = os.fstat(file)
            size = _size_of(status)
            got = 0
            if may_hold(size, shard.payload_bytes):
                got = os.preadv(file, [page, into[: size - HEADER_BYTES]], 0)
            self._note_use(file, status.st_mtime)
            return size, got
        finally:
            os.close(file)

    def _note_use(self, file: int, used_at: float) -> None:
        """Update a file's mtime, at most once an hour: eviction removes the oldest files first."""
        if self._ahead_s is None or time.monotonic() + self._ahead_s - used_at < TOUCH_S:
            return
        with contextlib.suppress(OSError):  # without permission the file only looks older
            os.utime(file)

    def _blobs(self, folder: str, names: Iterable[str]) -> list[Blob]:
        found = []
        for name in names:
            path = f"{folder}/{name}"
            status = self._status(path)
            if status is not None:
                found.append(Blob(path, _size_of(status), status.st_mtime))
        return found

    def _size(self, path: str) -> int | None:
        """Return a file's size; None if the path does not exist, -1 if it is not a regular file."""
        status = self._status(path)
        if status is None:
            return None
        return _size_of(status)

    def _status(self, path: str) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder; empty if the folder does not exist."""
        try:
            fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.fd)
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in entries]
        finally:
            os.close(fd)

    def _remove_old_temporaries(self, folder: str, names: list[str]) -> list[str]:
        """Remove abandoned temporary files; return the names without temporary files."""
        temporaries = [name for name in names if _TEMPORARY.fullmatch(name)]
        if not temporaries:
            return names
        now = self.server_time()
        for name in temporaries:
            path = f"{folder}/{name}".lstrip("/")
            with contextlib.suppress(FileNotFoundError):
                written = os.stat(path, dir_fd=self.fd, follow_symlinks=False).st_mtime
                if now - written > DEBRIS_S:
                    self._try_remove(path)
        return [name for name in names if not _TEMPORARY.fullmatch(name)]

    def _temporary(self, folder: str) -> str:
        name = f".{self._nonce}.{next(self._numbers)}.tmp"
        return f"{folder}/{name}" if folder else name

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder; one that is already gone is not an error."""
        try:
            os.unlink(path, dir_fd=self.fd)
        except IsADirectoryError:
            os.rmdir(path, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _GONE:
                raise

    def _try_remove(self, path: str) -> None:
        try:
            self.remove(path)
        except OSError as error:
            _log.info("could not remove %s: %s", self.path / path, error)

    def _header_page(self) -> mmap.mmap:
        """Return this thread's page-aligned buffer of 4096 bytes for headers."""
        page: mmap.mmap | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = mmap.mmap(-1, HEADER_BYTES)
        return page


def _size_of(status: os.stat_result) -> int:
    """Return a file's size; -1 if it is not a regular file."""
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
