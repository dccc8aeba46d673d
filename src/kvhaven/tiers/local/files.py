# SPDX-License-Identifier: Apache-2.0
"""Blocking file operations of the disk tier; they run in the tier's threads."""

import contextlib
import itertools
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import Namespace, StoredShard
from kvhaven.tiers.direct_io import write_whole
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import HEADER_BYTES, may_hold, stored_bytes
from kvhaven.tiers.format.manifest import (
    MANIFEST_NAME,
    MOST_BYTES,
    folder_name,
    pack_manifest,
    unpack_manifest,
)
from kvhaven.tiers.local.lock import Directory
from kvhaven.types import Checksum, ChunkKey, TenantId

_log = logging.getLogger(__name__)

REJECTED: Final = "rejected"
BATCH: Final = 128
"""Names that a listing examines before it yields a batch."""

_FOLDER: Final = re.compile(r"[0-9a-f]{16}")
_SUBFOLDER: Final = re.compile(r"[0-9a-f]")
_FILE: Final = re.compile(r"([0-9a-f]{64})(?:\.t([0-9a-f]{16}))?\.(g[^/]*)\.kv")
_TEMPORARY: Final = re.compile(r"\.([0-9a-f]+)\.[0-9]+\.tmp")


class DamagedFileError(TierMissError):
    """A file failed a check. `inode` distinguishes it from a file that replaced it since."""

    def __init__(self, message: str, inode: int) -> None:
        super().__init__(message)
        self.inode = inode


class Listed(msgspec.Struct, frozen=True):
    """Batch of a listing: plausible shards, files of a wrong size, and debris."""

    found: dict[StoredShard, int]
    """Shards with a possible size, and that size in bytes."""
    misfits: list[tuple[StoredShard, int]]
    """Shards whose file has a wrong size or type, and the inode of that file."""
    debris: list[str]
    """Paths of files that are not shards of the table."""


class ShardFiles:
    """Shard files of one open directory: read, write, delete, list.

    Thread-safe for different shards; two changes of one shard must not overlap. All methods
    raise `OSError` for errors of the file system, besides the errors that each method names.
    """

    def __init__(
        self, directory: Directory, *, codec: ShardCodec, direct: bool, keep_rejected: int
    ) -> None:
        self.directory = directory
        self.direct = direct
        self._codec = codec
        self._fd = directory.fd
        self._flag = os.O_DIRECT if direct else 0
        self._keep_rejected = keep_rejected
        self._nonce = secrets.token_hex(6)
        self._numbers = itertools.count()  # its next() is atomic
        self._local = threading.local()

    def write(
        self, namespace: Namespace, shard: StoredShard, payload: memoryview, checksum: Checksum
    ) -> int:
        """Write a temporary file in one call and rename it; return its size in bytes."""
        packed = self._codec.pack(shard, payload, checksum)
        page = self._header_page()
        page[:] = packed.head
        began = time.perf_counter()
        path = shard_path(shard)
        folder = shard_folder(shard)
        temporary = self._temporary(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag
        try:
            file = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        except FileNotFoundError:
            self._make_folder(namespace, folder)
            file = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            try:
                write_whole(file, [page, packed.body])
            finally:
                os.close(file)
            os.rename(temporary, path, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            self._remove(temporary)
            raise
        seconds = time.perf_counter() - began
        self._codec.moved(Lane.WRITE, shard.namespace, packed.size, seconds)
        return packed.size

    def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify a shard; return its checksum.

        Raises `DamagedFileError` if the file fails a check, and `TierMissError` if there is no
        file.
        """
        path = shard_path(shard)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | self._flag
        try:
            file = os.open(path, flags, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError):
            raise TierMissError(f"{path} is not stored") from None
        except OSError:
            self._reject_oddity(path)
            raise
        page = self._header_page()
        began = time.perf_counter()
        try:
            status = os.fstat(file)
            size = status.st_size if stat.S_ISREG(status.st_mode) else -1
            fits = may_hold(size, shard.payload_bytes)
            got = os.preadv(file, [page, into[: size - HEADER_BYTES]], 0) if fits else size
        finally:
            os.close(file)
        if not fits or got != size:
            most = stored_bytes(shard.payload_bytes)
            raise DamagedFileError(f"{path} has {got} bytes instead of {most}", status.st_ino)
        seconds = time.perf_counter() - began
        self._codec.moved(Lane.READ, shard.namespace, size, seconds)
        try:
            return self._codec.unpack(page[:], into, size, shard)
        except TierMissError as error:
            raise DamagedFileError(f"{path}: {error}", status.st_ino) from error

    def delete(self, shards: Sequence[StoredShard], gone: list[StoredShard]) -> None:
        """Remove shards one after the other; append each removed or absent one to `gone`."""
        for shard in shards:
            self._unlink(shard_path(shard))
            gone.append(shard)

    def set_aside(self, shard: StoredShard, inode: int) -> bool:
        """Move a shard's file into `rejected`, which keeps only the newest few.

        Does nothing if the file was replaced (its inode differs). Returns whether the shard has
        no file now.
        """
        path = shard_path(shard)
        try:
            status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if status.st_ino != inode:
            return False
        with contextlib.suppress(FileExistsError):
            os.mkdir(REJECTED, 0o700, dir_fd=self._fd)
        aside = f"{REJECTED}/{time.time_ns():020d}-{shard_name(shard)}"
        os.rename(path, aside, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        for name in sorted(self._names(REJECTED))[: -self._keep_rejected or None]:
            self._remove(f"{REJECTED}/{name}")
        return True

    def add_namespace(self, namespace: Namespace) -> None:
        """Create a namespace's folder with its manifest.

        Raises `TierError` if the folder belongs to another namespace.
        """
        folder = folder_name(namespace)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700, dir_fd=self._fd)
        with contextlib.suppress(TierMissError):
            there = self.manifest(folder)
            if (there.digest, there.table) == (namespace.digest, namespace.table):
                return
            raise TierError(
                f"{self.directory.path / folder} belongs to namespace {there.digest.hex()} with "
                f"{len(there.table.shards)} shards; {namespace.digest.hex()} with "
                f"{len(namespace.table.shards)} cannot be stored there: remove the folder"
            )
        temporary = self._temporary(folder)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self._fd), "wb") as file:
                file.write(pack_manifest(namespace))
            manifest = f"{folder}/{MANIFEST_NAME}"
            os.rename(temporary, manifest, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            self._remove(temporary)
            raise

    def manifest(self, folder: str) -> Namespace:
        """Return a folder's namespace. Raises `TierMissError` if it has no valid manifest."""
        name = f"{folder}/{MANIFEST_NAME}"
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(name, flags, dir_fd=self._fd), "rb") as file:
                return unpack_manifest(file.read(MOST_BYTES), folder)
        except (FileNotFoundError, NotADirectoryError):
            raise TierMissError(f"{name} does not exist") from None

    def folders(self) -> list[str]:
        """Return the names of the namespaces' folders."""
        return sorted(name for name in self._names("") if _FOLDER.fullmatch(name))

    def discard_folder(self, folder: str) -> None:
        """Rename a namespace's folder, so that a new one can be created, then remove it."""
        aside = f".{self._nonce}.{next(self._numbers)}.tmp"
        os.rename(folder, aside, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._remove(aside)

    def list_shards(self, namespace: Namespace) -> Iterator[Listed]:
        """Yield the files in a namespace's folder, in batches of at most `BATCH` names."""
        sizes = {str(shard.id): shard for shard in namespace.table.shards}
        folder = folder_name(namespace)
        for subfolder in self._names(folder):
            if not _SUBFOLDER.fullmatch(subfolder):
                continue
            names = self._names(f"{folder}/{subfolder}")
            for start in range(0, len(names), BATCH):
                listed = Listed({}, [], [])
                for name in names[start : start + BATCH]:
                    path = f"{folder}/{subfolder}/{name}"
                    parts = _FILE.fullmatch(name)
                    shard = sizes.get(parts[3]) if parts else None
                    if parts is None or shard is None or not name.startswith(subfolder):
                        listed.debris.append(path)
                        continue
                    key = ChunkKey(bytes.fromhex(parts[1]))
                    tenant = TenantId(bytes.fromhex(parts[2] or ""))
                    size = shard.payload_bytes
                    stored = StoredShard(namespace.digest, key, shard.id, size, tenant)
                    self._weigh(path, stored, listed)
                yield listed

    def remove_debris(self, paths: Sequence[str]) -> None:
        """Remove debris found by a listing, except files that are being written."""
        for path in paths:
            if self._being_written(path):
                continue
            _log.info("disk tier %s: removed %s, which is not a shard", self.directory.path, path)
            self._remove(path)

    def unfinished(self) -> list[str]:
        """Return the paths of unfinished files outside the shards' folders."""
        return [
            path
            for folder in ("", *self.folders())
            for name in self._names(folder)
            if _TEMPORARY.fullmatch(name) and (path := f"{folder}/{name}".lstrip("/"))
        ]

    def remove_unfinished(self) -> None:
        """Remove files outside the shards' folders that a former owner left unfinished."""
        self.remove_debris(self.unfinished())

    def room(self) -> int:
        """Return the free bytes of the file system, minus a reserve of 1/64 of its size."""
        status = os.statvfs(self._fd)
        return status.f_frsize * (status.f_bavail - status.f_blocks // 64)

    def probe_write(self, size: int) -> None:
        """Verify that a file of `size` bytes can be written."""
        name = self._temporary("")
        file = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600, dir_fd=self._fd
        )
        try:
            os.posix_fallocate(file, 0, size)
            page = self._header_page()
            os.pwrite(file, page, 0)
        finally:
            os.close(file)
            self._remove(name)

    def probe_read(self) -> None:
        """Verify that the directory and a file in it can be read."""
        for folder in self.folders():
            with contextlib.suppress(TierMissError):
                self.manifest(folder)
                return

    def _make_folder(self, namespace: Namespace, folder: str) -> None:
        """Create a folder for shards, and that of its namespace if it was removed."""
        try:
            os.mkdir(folder, 0o700, dir_fd=self._fd)
        except FileExistsError:
            pass
        except FileNotFoundError:
            self.add_namespace(namespace)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=self._fd)

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder; empty if the folder does not exist."""
        try:
            fd = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._fd)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in entries]
        finally:
            os.close(fd)

    def _weigh(self, path: str, stored: StoredShard, listed: Listed) -> None:
        """Add a file to `found` or `misfits`, by its size and type."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
            fits = may_hold(status.st_size, stored.payload_bytes)
            if fits and stat.S_ISREG(status.st_mode):
                listed.found[stored] = status.st_size
            else:
                listed.misfits.append((stored, status.st_ino))

    def _temporary(self, folder: str) -> str:
        name = f".{self._nonce}.{next(self._numbers)}.tmp"
        return f"{folder}/{name}" if folder else name

    def _being_written(self, path: str) -> bool:
        """Return whether this is a temporary file of this instance."""
        temporary = _TEMPORARY.fullmatch(path.rpartition("/")[2])
        return temporary is not None and temporary[1] == self._nonce

    def _reject_oddity(self, path: str) -> None:
        """Raise `DamagedFileError` if the path is not a regular file (a link, a folder, a pipe)."""
        with contextlib.suppress(OSError):
            status = os.stat(path, dir_fd=self._fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedFileError(f"{path} is not a regular file", status.st_ino)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path, dir_fd=self._fd)

    def _remove(self, path: str) -> None:
        """Remove a file or folder; log a failure."""
        try:
            self._unlink(path)
        except IsADirectoryError:
            shutil.rmtree(path, ignore_errors=True, dir_fd=self._fd)
        except OSError as error:
            _log.info("disk tier %s: could not remove %s: %s", self.directory.path, path, error)

    def _header_page(self) -> mmap.mmap:
        """Return this thread's page-aligned buffer of 4096 bytes for headers."""
        page: mmap.mmap | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = mmap.mmap(-1, HEADER_BYTES)
        return page


def shard_folder(shard: StoredShard) -> str:
    """Return the path of a shard's folder below the tier's directory.

    A namespace has 16 such folders: with 256, ext4 spreads them over the disk, and writes of
    1 MiB files were a fifth slower.
    """
    return f"{shard.namespace.hex()[:16]}/{shard.key.hex()[:1]}"


def shard_name(shard: StoredShard) -> str:
    """Return a shard's file name, from which a listing reconstructs the shard."""
    tenant = f".t{shard.tenant.hex()}" if shard.tenant else ""
    return f"{shard.key.hex()}{tenant}.{shard.shard}.kv"


def shard_path(shard: StoredShard) -> str:
    """Return a shard's path below the tier's directory."""
    return f"{shard_folder(shard)}/{shard_name(shard)}"
