# SPDX-License-Identifier: Apache-2.0
"""Disk tier: shards as files in a local directory that belongs to one service."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvhaven.errors import ConfigError, TierError, TierMissError
from kvhaven.maps import StripedDict
from kvhaven.protocol import batches
from kvhaven.tiers.base import Namespace, StoredShard, TierAudit, TierHealth
from kvhaven.tiers.direct_io import direct_io_works
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import ShardCodec, compression_of
from kvhaven.tiers.format.header import require_length, stored_bytes
from kvhaven.tiers.format.manifest import folder_name
from kvhaven.tiers.health import HealthMonitor
from kvhaven.tiers.local.audit import audit
from kvhaven.tiers.local.files import DamagedFileError, Listed, ShardFiles
from kvhaven.tiers.local.index import Index
from kvhaven.tiers.local.lock import Directory, DirectoryHeldError
from kvhaven.tiers.local.store import OpenStore, name_of
from kvhaven.types import Checksum, TenantId

_log = logging.getLogger(__name__)

DirectIO = Literal["auto", "on", "off"]
T = TypeVar("T")

_LOCK_POLL_S: Final = 0.05
_DELETED_AT_ONCE: Final = 256
_SLACK: Final = 16
"""Writes may exceed the capacity by 1/16, since the catalog's deletes may follow its writes."""


class DiskTier:
    """Tier that stores shards in files `<namespace>/<x>/<key>.<shard>.kv` below `path`.

    The tier owns `executor`; `close` closes it. The catalog enforces `capacity_bytes`; the tier
    itself refuses writes beyond that plus a sixteenth. `direct_io` "auto" uses direct I/O if the
    file system supports it; "on" keeps the tier offline if it does not. `compress` enables zstd
    where it pays off (see `ShardCodec`). If another service holds the directory, `start` waits
    `lock_wait_s` seconds for it.

    Every `retry_s` seconds the tier verifies that it still owns the directory, reopens it if
    not, and probes the operations that its breakers turned off: one breaker for reads and one
    for writes, each opened by `failures` failures in a row. A system call that takes longer than
    `stall_s` seconds turns the tier off until it returns. The newest `keep_rejected` files that
    failed a check are kept in `rejected/`, in addition to the capacity. `clock` returns monotonic
    seconds. `Tier` documents the methods.
    """

    name = "disk"
    shared = False

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        executor: TierExecutor,
        direct_io: DirectIO = "auto",
        compress: bool = False,
        clock: Callable[[], float] = time.monotonic,
        lock_wait_s: float = 1.0,
        retry_s: float = 1.0,
        stall_s: float = 10.0,
        failures: int = 3,
        keep_rejected: int = 16,
    ) -> None:
        self.path = path
        self._capacity_bytes = capacity_bytes
        self._executor = executor
        self._direct_io = direct_io
        self._clock = clock
        self._lock_wait_s = lock_wait_s
        self._retry_s = retry_s
        self._keep_rejected = keep_rejected
        self._title = f"disk tier {path}"
        self._codec = ShardCodec(self._title, zstd=compress)
        slowest = executor.longest_running_s
        self._health = HealthMonitor(
            self._title, slowest, clock, failures=failures, retry_s=retry_s, stall_s=stall_s
        )
        self._opened: OpenStore | None = None
        self._index = Index()
        # Shards whose deletion failed, by `name_of`; also those of former openings.
        self._owed = StripedDict[bytes, StoredShard]()
        self._largest_bytes = 4096  # of one file
        self._epoch = 0
        self._keeper: asyncio.Task[None] | None = None
        self._reads = self._writes = self._misses = self._rejected = 0

    async def start(self) -> None:
        """Open the directory and start its periodic maintenance. See `Tier.start`."""
        tried = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(tried), name="kvhaven-disk-keeper")
        await self._health.started(tried)

    async def close(self, deadline_s: float) -> None:
        """Finish within `deadline_s` seconds and close the directory."""
        if self._keeper is not None:
            self._keeper.cancel()
        await self._executor.close(deadline_s)
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        if self._opened is not None:
            self._opened.retire()
        self._opened = None
        self._health.offline = "closed"

    async def add_namespace(self, namespace: Namespace) -> None:
        """Register a namespace and write its manifest (later, if the tier is offline)."""
        self._index.add_namespace(namespace)
        if self._health.serves(Lane.WRITE):
            await self._ensure_manifest(self._require(Lane.WRITE), namespace)

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield the shards in batches of a few hundred names, and remove debris."""
        opened = self._require(Lane.READ)
        run = functools.partial(self._run, opened, Lane.BACKGROUND)
        await run(opened.files.remove_unfinished)
        for folder in await run(opened.files.folders):
            namespace = await self._recognise(opened, folder)
            if namespace is None:
                continue
            yield namespace, {}
            listings = opened.files.list_shards(namespace)
            while opened is self._opened:
                with opened.index.listing() as add:
                    listed: Listed | None = await run(functools.partial(next, listings, None))
                    kept = add(self._not_owed(listed.found)) if listed else {}
                if listed is None:
                    break
                await run(functools.partial(opened.files.remove_debris, listed.debris))
                for shard, inode in listed.misfits:
                    await self._reject(opened, shard, inode, "its size or type is wrong")
                yield (
                    namespace,
                    {shard: size for shard, size in kept.items() if tenant in {None, shard.tenant}},
                )
        if opened is not self._opened:
            raise TierError(f"{self._title} was closed during the scan")
        opened.scanned = True

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Return the state in the index; no file is accessed."""
        index = self._require(Lane.READ).index
        return [shard in index for shard in shards]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify a shard into `into`."""
        require_length(shard, into)
        opened = self._require(Lane.READ)
        try:
            work = functools.partial(opened.files.read, shard, into)
            checksum = await self._run(opened, Lane.READ, work)
        except DamagedFileError as error:
            await self._reject(opened, shard, error.inode, str(error))
            raise
        except TierMissError:
            self._misses += 1
            if shard in opened.index:
                await self._set_aside(opened, shard)
            raise
        self._reads += 1
        return checksum

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write a shard unless it is present."""
        require_length(shard, payload)
        opened = self._require(Lane.WRITE)
        namespace = opened.index.namespace(shard.namespace)
        if namespace is None or not opened.index.fits(shard):
            raise TierError(
                f"{self._title}: namespace {shard.namespace.hex()} with shard {shard.shard} of "
                f"{shard.payload_bytes} bytes is not registered; call add_namespace first"
            )
        async with opened.change([shard]):
            self._owed.pop(name_of(shard), None)
            if shard in opened.index:
                return opened.index.size(shard)
            size = stored_bytes(shard.payload_bytes)
            used = opened.index.used_bytes + opened.writing_bytes
            if used + size > self._capacity_bytes + self._capacity_bytes // _SLACK:
                raise TierError(
                    f"{self._title}: no room for {size} bytes ({used} of {self._capacity_bytes} "
                    f"bytes are in use): delete shards first"
                )
            self._largest_bytes = max(self._largest_bytes, size)
            opened.writing_bytes += size
            try:
                await self._ensure_manifest(opened, namespace)
                work = functools.partial(opened.files.write, namespace, shard, payload, checksum)
                then = functools.partial(opened.index.add, shard)
                taken: int = await self._run(opened, Lane.WRITE, work, then)
            finally:
                opened.writing_bytes -= size
        self._writes += 1
        return taken

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Remove shards' files; failed deletes are retried later.

        Retries continue after the directory was reopened; scans do not report these shards.
        """
        if not self._health.serves(Lane.READ):
            self._owe(shards)
        opened = self._require(Lane.READ)
        async with opened.change(shards):
            await self._remove(opened, shards)

    def resize(self, capacity_bytes: int) -> None:
        """Set the capacity; the catalog evicts what exceeds a smaller one."""
        self._capacity_bytes = capacity_bytes

    def health(self) -> TierHealth:
        """Return the current state and counters."""
        online = self._health.serves(Lane.READ)
        return TierHealth(
            online=online,
            writable=online and self._health.serves(Lane.WRITE),
            epoch=self._epoch,
            capacity_bytes=self._room_for(),
            used_bytes=self._index.used_bytes,
            queued_reads=self._executor.queued(Lane.READ),
            queued_writes=self._executor.queued(Lane.WRITE),
            reads=self._reads,
            writes=self._writes,
            misses=self._misses,
            errors=self._health.errors,
            rejected=self._rejected,
            last_error=self._health.last_error,
            holder=self._health.holder,
            compression=compression_of(self._codec),
        )

    async def check(self) -> TierAudit:
        """Compare index and files, and verify every file's header and payload."""
        opened = self._require(Lane.READ)
        run = functools.partial(self._run, opened, Lane.BACKGROUND)
        return await audit(opened.files, opened.index, run)

    def _require(self, lane: Lane) -> OpenStore:
        """Return the open store. Raises `TierError` if operations of `lane` are off."""
        self._health.require(lane)
        assert self._opened is not None
        return self._opened

    async def _run(
        self,
        opened: OpenStore,
        lane: Lane,
        work: Callable[[], T],
        then: Callable[[T], None] | None = None,
    ) -> T:
        """Run blocking work. Raises `TierError` for errors of the file system."""
        with opened.used():
            try:
                result = await self._executor.run(lane, work, then)
            except OSError as error:
                raise self._health.failed(lane, error) from error
        self._health.succeeded(lane)
        return result

    async def _delete_owed(self, opened: OpenStore) -> None:
        """Retry failed deletes, except of shards that were written again since."""
        for part in self._owed.parts():
            for shards in batches(list(part.values()), _DELETED_AT_ONCE):
                async with opened.change(shards):
                    still = [shard for shard in shards if name_of(shard) in self._owed]
                    await self._remove(opened, still)

    def _owe(self, shards: Sequence[StoredShard]) -> None:
        """Record shards whose deletion failed, for a retry."""
        for shard in shards:
            self._owed[name_of(shard)] = shard

    def _not_owed(self, found: Mapping[StoredShard, int]) -> Mapping[StoredShard, int]:
        """Return the shards found, without those that await deletion."""
        if not self._owed:
            return found
        return {shard: size for shard, size in found.items() if name_of(shard) not in self._owed}

    async def _remove(self, opened: OpenStore, shards: Sequence[StoredShard]) -> None:
        gone: list[StoredShard] = []
        try:
            work = functools.partial(opened.files.delete, shards, gone)
            await self._run(opened, Lane.WRITE, work)
        except TierError:
            self._owe(shards)
            raise
        finally:
            for shard in gone:
                self._owed.pop(name_of(shard), None)
                opened.index.discard(shard)

    async def _reject(self, opened: OpenStore, shard: StoredShard, inode: int, why: str) -> None:
        """Set aside a file that failed a check."""
        self._rejected += 1
        _log.warning("%s: set a file aside: %s (%s)", self._title, why, shard.key.hex())
        await self._set_aside(opened, shard, inode)

    async def _set_aside(self, opened: OpenStore, shard: StoredShard, inode: int = 0) -> None:
        """Move the file with `inode` away; drop the shard from the index if no file remains.

        Never raises `TierError`: a file that could not be moved is rejected again later.
        """

        def forget(absent: bool) -> None:
            if absent:
                opened.index.discard(shard)

        with contextlib.suppress(TierError):
            async with opened.change([shard]):
                work = functools.partial(opened.files.set_aside, shard, inode)
                await self._run(opened, Lane.WRITE, work, then=forget)

    async def _ensure_manifest(self, opened: OpenStore, namespace: Namespace) -> None:
        if namespace.digest not in opened.manifests:
            work = functools.partial(opened.files.add_namespace, namespace)
            await self._run(opened, Lane.WRITE, work)
            opened.manifests.add(namespace.digest)

    async def _recognise(self, opened: OpenStore, folder: str) -> Namespace | None:
        """Return a folder's namespace; a folder without a valid manifest is removed."""
        run = functools.partial(self._run, opened, Lane.BACKGROUND)
        try:
            namespace: Namespace = await run(functools.partial(opened.files.manifest, folder))
        except TierMissError as error:
            for known in self._index.namespaces():
                if folder_name(known) == folder:  # its manifest is being written, or was damaged
                    await self._ensure_manifest(opened, known)
                    return known
            self._rejected += 1
            _log.warning("%s: removed a folder without valid manifest: %s", self._title, error)
            await run(functools.partial(opened.files.discard_folder, folder))
            return None
        try:
            opened.index.add_namespace(namespace)
        except TierError as error:
            _log.warning("%s: ignored a folder: %s", self._title, error)
            return None
        opened.manifests.add(namespace.digest)
        return namespace

    def _room_for(self) -> int:
        """Return the capacity in bytes: the configured one, or less if the disk has less room."""
        opened = self._opened
        if opened is None or opened.room_bytes is None or not opened.scanned:
            return self._capacity_bytes
        return min(self._capacity_bytes, opened.index.used_bytes + opened.room_bytes)

    async def _keep(self, tried: asyncio.Event) -> None:
        """Periodically reopen a directory that is closed or no longer ours, and run due probes."""
        lock_wait_s = self._lock_wait_s
        while True:
            try:
                await self._look_after(lock_wait_s)
            except TierError as error:
                _log.debug("%s: %s", self._title, error)
            except Exception:  # noqa: BLE001 - the maintenance task must survive any error
                _log.exception("%s: its periodic maintenance failed", self._title)
            tried.set()
            lock_wait_s = 0.0
            await asyncio.sleep(self._retry_s)

    async def _look_after(self, lock_wait_s: float) -> None:
        opened = self._opened
        if opened is not None:
            if await self._run(opened, Lane.BACKGROUND, opened.files.directory.ours):
                room = await self._run(opened, Lane.BACKGROUND, opened.files.room)
                opened.room_bytes = max(0, room - opened.writing_bytes)
                for lane in (Lane.READ, Lane.WRITE):
                    await self._probe(opened, lane)
                if self._owed and self._health.serves(Lane.WRITE):
                    await self._delete_owed(opened)
                return
            opened.retire()
            self._opened = None
            self._health.closed("the directory or its lock was removed")
        await self._open(lock_wait_s)

    async def _probe(self, opened: OpenStore, lane: Lane) -> None:
        if not self._health.take_probe(lane):
            return
        work = opened.files.probe_read
        if lane is Lane.WRITE:
            work = functools.partial(opened.files.probe_write, self._largest_bytes)
        success = False
        try:
            await self._run(opened, Lane.BACKGROUND, work)
            success = True
        except TierError:
            pass  # recorded; the breaker's pause grows
        finally:
            self._health.probed(lane, success=success)

    async def _open(self, wait_s: float) -> None:
        """Try to open the directory, for up to `wait_s` seconds while another service holds it."""
        end = self._clock() + wait_s
        while True:
            try:
                await self._executor.run(Lane.BACKGROUND, self._open_files, self._take_over)
            except DirectoryHeldError as error:
                if self._clock() < end:
                    await asyncio.sleep(_LOCK_POLL_S)
                    continue
                self._health.closed(f"the directory is held by {error}", holder=str(error))
            except (OSError, TierError, ConfigError) as error:
                self._health.closed(str(error))
            return

    def _open_files(self) -> ShardFiles:
        if not self._epoch:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        directory = Directory(self.path)
        with contextlib.ExitStack() as undo:
            undo.callback(directory.close)
            direct = self._direct_io != "off" and direct_io_works(directory.fd)
            if self._direct_io == "on" and not direct:
                raise TierError(
                    'its file system does not support direct I/O: set it to "auto" or "off"'
                )
            files = ShardFiles(
                directory, codec=self._codec, direct=direct, keep_rejected=self._keep_rejected
            )
            undo.pop_all()
        return files

    def _take_over(self, files: ShardFiles) -> None:
        """Adopt an opened directory: namespaces stay registered, but the index starts empty."""
        index = Index()
        for namespace in self._index.namespaces():
            index.add_namespace(namespace)
        self._index = index
        self._opened = OpenStore(files, index)
        self._epoch += 1
        self._health.opened()
        _log.info("%s: open, direct I/O %s", self._title, "on" if files.direct else "off")
