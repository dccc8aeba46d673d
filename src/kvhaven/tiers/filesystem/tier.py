# SPDX-License-Identifier: Apache-2.0
"""Filesystem tier: a directory on NFS, CephFS, VAST, ... that many nodes write."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kvhaven.errors import TierError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.direct_io import direct_io_works
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.filesystem.files import SharedFiles
from kvhaven.tiers.filesystem.ownership import NAME as OWNER
from kvhaven.tiers.filesystem.quota_manager import QuotaManager
from kvhaven.tiers.filesystem.usage import Limits
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import stored_bytes
from kvhaven.tiers.local.tier import DirectIO
from kvhaven.tiers.shared.store import (
    Blob,
    StoreFailedError,
    manifest_name,
)
from kvhaven.tiers.shared.tier import SharedTier
from kvhaven.types import Checksum

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH: Final = 64
"""Names that one thread looks up one after the other; threads share larger batches."""


def filesystem_tier(
    path: Path,
    *,
    executor: TierExecutor,
    direct_io: DirectIO = "auto",
    mode: int = 0o600,
    compress: bool = False,
    deadline_s: float = 10.0,
    limits: Limits | None = None,
    known: bool = False,
    **watching: Any,  # settings of SharedTier, passed on
) -> SharedTier:
    """Return a tier over the directory `path`, which must exist; see `FilesystemStore`.

    With `known`, the directory must already be a store; otherwise opening makes it one.
    """
    store = FilesystemStore(
        path,
        executor=executor,
        direct_io=direct_io,
        mode=mode,
        compress=compress,
        deadline_s=deadline_s,
        limits=limits,
        known=known,
    )
    return SharedTier(store, codec=store.codec, **watching)


class FilesystemStore:
    """`SharedStore` over the directory `path`; `SharedStore` documents the methods.

    The store owns `executor`; `close` closes it. `direct_io` "auto" uses direct I/O if the file
    system supports it; "on" keeps the store offline if it does not. Files get `mode` (the
    process's umask applies), folders the same plus search permission. An operation that waits
    for a thread for `deadline_s` seconds fails; an operation that a thread has begun ends with
    its system call. With `limits`, writes need credits, and one of the services that use the
    directory removes expired and excess files (see `QuotaManager`); without, no files are removed.
    """

    name = "fs"

    def __init__(
        self,
        path: Path,
        *,
        executor: TierExecutor,
        direct_io: DirectIO,
        mode: int,
        compress: bool,
        deadline_s: float,
        limits: Limits | None,
        known: bool = False,
    ) -> None:
        self.title = f"filesystem tier {path}"
        self.codec = ShardCodec(self.title, zstd=compress)
        self._path = path
        self._executor = executor
        self._direct_io = direct_io
        self._mode = mode
        self._deadline_s = deadline_s
        self._files: _Users | None = None
        self._known = known
        self.quota_manager = QuotaManager(limits, self._run, self.title) if limits else None

    async def open(self) -> None:
        """Open the directory; a directory opened before must still be the same store."""
        if self.quota_manager is not None:
            await self.quota_manager.stop()
        if self._files is not None:
            self._files.retire()
            self._files = None
        try:
            self._files = _Users(await self._executor.run(Lane.BACKGROUND, self._open))
        except OSError as error:
            raise TierError(str(error)) from error
        self._known = True
        if self.quota_manager is not None:
            self.quota_manager.start()

    async def still_open(self) -> bool:
        """Return whether the path still leads to the open directory."""
        return await self._run(Lane.BACKGROUND, SharedFiles.still_there)

    async def close(self, deadline_s: float) -> None:
        """Finish running operations, end the threads and close the directory."""
        if self.quota_manager is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self.quota_manager.stop()
        await self._executor.close(deadline_s)
        if self._files is not None:
            self._files.retire()
            self._files = None

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify in a thread."""
        return await self._run(Lane.READ, lambda files: files.read(shard, into))

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write in a thread. Raises `TierError` if the write has no credit."""
        size = stored_bytes(shard.payload_bytes)
        if self.quota_manager is not None:
            self.quota_manager.purse.take(size)
        written = 0
        try:
            written = await self._run(
                Lane.WRITE, lambda files: files.write(shard, payload, checksum)
            )
        except asyncio.CancelledError:
            written = size  # it may have been written
            raise
        finally:
            if self.quota_manager is not None:
                self.quota_manager.purse.refund(size - written)
        return written

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Look up the batch, divided among the threads."""

        def ask(files: SharedFiles, part: Sequence[StoredShard]) -> list[bool]:
            return files.contains(part)

        parts = [shards[at : at + _BATCH] for at in range(0, len(shards), _BATCH)]
        answers = await asyncio.gather(
            *(self._run(Lane.READ, functools.partial(ask, part=part)) for part in parts)
        )
        return [there for answer in answers for there in answer]

    async def remove(self, names: Sequence[str]) -> None:
        """Remove the batch in parts, so that writes run in between."""
        for at in range(0, len(names), _BATCH):
            part = names[at : at + _BATCH]
            await self._run(Lane.WRITE, functools.partial(SharedFiles.remove_all, paths=part))

    async def load_manifest(self, folder: str) -> bytes | None:
        """Read a manifest."""
        return await self._run(Lane.WRITE, lambda files: files.load(manifest_name(folder)))

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Write a manifest."""
        await self._run(Lane.WRITE, lambda files: files.save(manifest_name(folder), content))

    async def folders(self) -> Sequence[str]:
        """List the namespaces' folders."""
        return await self._run(Lane.BACKGROUND, SharedFiles.folders)

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """List a folder; each subfolder is a separate job of the threads."""
        with self._require().used() as files:  # the listing needs the descriptor between pages
            listing = files.list_blobs(folder)
            while True:
                page = await self._run(Lane.BACKGROUND, lambda _: next(listing, None))
                if page is None:
                    return
                yield page

    async def now(self) -> float:
        """Return the time that the server gives a new file."""
        return await self._run(Lane.BACKGROUND, SharedFiles.server_time)

    async def probe(self, lane: Lane) -> None:
        """List the directory, or write a file in it."""
        reads = lane is Lane.READ
        await self._run(
            Lane.BACKGROUND, lambda files: files.folders() if reads else files.probe_write()
        )

    def queued(self, lane: Lane) -> int:
        """Return how many calls wait for a thread."""
        return self._executor.queued(lane)

    def longest_running_s(self) -> float:
        """Return the seconds since the oldest running system call began."""
        return self._executor.longest_running_s()

    async def _run(self, lane: Lane, work: Callable[[SharedFiles], T]) -> T:
        """Call `work` in a thread.

        Raises `StoreFailedError` for errors of the file system, and `TierError` if the directory
        is not open or the deadline has passed.
        """
        limit = asyncio.timeout(self._deadline_s)
        with self._require().used() as files:
            try:
                async with limit:
                    return await self._executor.run(lane, lambda: work(files))
            except OSError as error:  # a TimeoutError may come from the file system
                if limit.expired():
                    reason = f"{self.title}: not finished within {self._deadline_s} s"
                    raise TierError(reason) from None
                raise StoreFailedError(str(error)) from error

    def _require(self) -> "_Users":
        if self._files is None:
            raise TierError(f"{self.title} is not open")
        return self._files

    def _open(self) -> SharedFiles:
        files = SharedFiles(self._path, mode=self._mode, codec=self.codec, known=self._known)
        with contextlib.ExitStack() as undo:
            undo.callback(files.close)
            files.direct = self._direct_io != "off" and direct_io_works(files.fd)
            if self._direct_io == "on" and not files.direct:
                raise TierError(
                    'its file system does not support direct I/O: set it to "auto" or "off"'
                )
            if self.quota_manager is None and not self._known and files.load(OWNER) is not None:
                _log.warning(
                    "%s: other services enforce limits on it, this service has none and may "
                    "exceed them: set max_remote_size and the other limits as they do",
                    self.title,
                )
            undo.pop_all()
        return files


class _Users:
    """Reference count of an open directory's descriptor. Used on the event loop only."""

    def __init__(self, files: SharedFiles) -> None:
        self._files = files
        self._count = 0
        self._retired = False

    @contextlib.contextmanager
    def used(self) -> Iterator[SharedFiles]:
        """Keep the directory open during a call."""
        self._count += 1
        try:
            yield self._files
        finally:
            self._count -= 1
            self._close_when_idle()

    def retire(self) -> None:
        """Close the directory once no call uses it."""
        self._retired = True
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._retired and not self._count:
            self._retired = False
            self._files.close()
