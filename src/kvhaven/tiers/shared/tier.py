# SPDX-License-Identifier: Apache-2.0
"""Shared tier: a tier over a store that other services use too (filesystem, S3, Redis)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import Namespace, StoredShard, TierAudit, TierHealth
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.codec import DamagedShardError, ShardCodec, compression_of
from kvhaven.tiers.format.header import may_hold, require_length
from kvhaven.tiers.format.manifest import pack_manifest
from kvhaven.tiers.health import HealthMonitor
from kvhaven.tiers.local.index import Index
from kvhaven.tiers.shared.known_shards import KnownShards
from kvhaven.tiers.shared.maintenance import audit
from kvhaven.tiers.shared.store import (
    Names,
    SharedStore,
    StoreFailedError,
    blob_name,
    folder_of,
    read_manifest,
    tenant_of,
)
from kvhaven.types import NO_TENANT, Checksum, TenantId

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_MANIFESTS: Final = 100_000
_MOST_OWED: Final = 100_000
_MANIFEST_S: Final = 60.0
"""Seconds between checks of a manifest, since a whole namespace may have been removed."""


class SharedTier:
    """Tier over `store`, which other services read, write and delete from as well.

    All reads are verified. A shard that fails its check is read once more before it is removed
    for all nodes, since it may have been damaged only in transit. The tier keeps no index of
    the shards, but `presence`, if given, caches lookup results for seconds. `codec` is the
    store's, for `health`. Every `retry_s` seconds the tier retries a failed open and probes the
    operations that its breakers turned off: one breaker for reads and one for writes, each
    opened by `failures` failures in a row. An operation that hangs for `stall_s` seconds turns
    the tier off until it returns. `clock` returns monotonic seconds. `Tier` documents the
    methods.
    """

    shared = True

    def __init__(
        self,
        store: SharedStore,
        *,
        presence: KnownShards | None = None,
        codec: ShardCodec | None = None,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = 1.0,
        stall_s: float = 10.0,
        failures: int = 3,
    ) -> None:
        self.name = store.name
        self._store = store
        self._title = store.title
        self._presence = presence
        self._codec = codec
        self._clock = clock
        self._retry_s = retry_s
        slowest = store.longest_running_s
        self._health = HealthMonitor(
            self._title, slowest, clock, failures=failures, retry_s=retry_s, stall_s=stall_s
        )
        self._index = Index()  # of namespaces alone
        self._manifests: dict[str, float] = {}  # by folder: not checked again before this time
        self._owed: set[StoredShard] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._epoch = 0
        self._reads = self._writes = self._misses = self._rejected = 0

    @property
    def store(self) -> SharedStore:
        """The underlying store, for tools."""
        return self._store

    async def start(self) -> None:
        """Open the store and start its periodic maintenance. See `Tier.start`."""
        tried = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(tried), name=f"kvhaven-{self.name}-keeper")
        await self._health.started(tried)

    async def close(self, deadline_s: float) -> None:
        """Finish within `deadline_s` seconds and close the store."""
        if self._keeper is not None:
            self._keeper.cancel()
        await self._store.close(deadline_s)
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        self._health.offline = "closed"

    async def add_namespace(self, namespace: Namespace) -> None:
        """Register a namespace and write its manifest (later, if the tier is offline)."""
        self._index.add_namespace(namespace)
        if self._health.serves(Lane.WRITE):
            await self._ensure_manifest(namespace, NO_TENANT)

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield the shards that are present now; blobs that are not shards are left alone."""
        self._health.require(Lane.READ)
        for folder in await self._do(Lane.BACKGROUND, self._store.folders()):
            if tenant not in {None, tenant_of(folder)}:
                continue
            namespace = await self._recognise(folder)
            if namespace is None:
                continue
            yield namespace, {}
            names = Names(namespace)
            listing = self._store.list_blobs(folder)
            while (page := await self._do(Lane.BACKGROUND, anext(listing, None))) is not None:
                found = {
                    shard: blob.size
                    for blob in page
                    if (shard := names.shard(blob.name)) is not None
                    and may_hold(blob.size, shard.payload_bytes)
                }
                if found:
                    yield namespace, found

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Look up the shards that are not cached, in one batch."""
        self._health.require(Lane.READ)
        known = {shard: self._recall(shard) if self._exists(shard) else False for shard in shards}
        unknown = [shard for shard, there in known.items() if there is None]
        if unknown:
            found = await self._do(Lane.READ, self._store.contains(unknown))
            for shard, there in zip(unknown, found, strict=True):
                known[shard] = there
                self._note(shard, there=there)
        return [bool(known[shard]) for shard in shards]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify a shard into `into`."""
        require_length(shard, into)
        self._health.require(Lane.READ)
        if self._recall(shard) is False:
            self._misses += 1
            raise TierMissError(f"{shard.key.hex()} was absent a moment ago")
        try:
            checksum = await self._read_twice(shard, into)
        except DamagedShardError as error:
            await self._reject(shard, error)
            raise
        except TierMissError:
            self._misses += 1
            self._note(shard, there=False)
            raise
        self._reads += 1
        self._note(shard, there=True)
        return checksum

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write a shard unless it is present."""
        require_length(shard, payload)
        self._health.require(Lane.WRITE)
        namespace = self._index.namespace(shard.namespace)
        if namespace is None or not self._index.fits(shard):
            raise TierError(
                f"{self._title}: namespace {shard.namespace.hex()} with shard {shard.shard} of "
                f"{shard.payload_bytes} bytes is not registered; call add_namespace first"
            )
        self._owed.discard(shard)
        if self._recall(shard):
            return 0
        await self._ensure_manifest(namespace, shard.tenant)
        written = await self._do(Lane.WRITE, self._store.write(shard, payload, checksum))
        self._writes += 1
        self._note(shard, there=True)
        return written

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Remove shards for all nodes; failed deletes are retried later."""
        try:
            self._health.require(Lane.WRITE)
            await self._remove(shards)
        except TierError:
            self._owed.update(shards[: max(0, _MOST_OWED - len(self._owed))])
            raise
        for shard in shards:
            self._note(shard, there=False)

    def health(self) -> TierHealth:
        """Return the current state and counters."""
        online = self._health.serves(Lane.READ)
        return TierHealth(
            online=online,
            writable=online and self._health.serves(Lane.WRITE),
            epoch=self._epoch,
            capacity_bytes=None,
            used_bytes=0,
            queued_reads=self._store.queued(Lane.READ),
            queued_writes=self._store.queued(Lane.WRITE),
            reads=self._reads,
            writes=self._writes,
            misses=self._misses,
            errors=self._health.errors,
            rejected=self._rejected,
            last_error=self._health.last_error,
            compression=compression_of(self._codec),
        )

    async def check(self) -> TierAudit:
        """Read and verify the whole store. For tools: it takes long."""
        self._health.require(Lane.READ)
        shards = used_bytes = 0
        problems: list[str] = []
        audited = audit(self._store)
        while (one := await self._do(Lane.BACKGROUND, anext(audited, None))) is not None:
            if one.problem:
                problems.append(one.problem)
            else:
                shards += 1
                used_bytes += one.size
        return TierAudit(shards, used_bytes, tuple(problems))

    async def _remove(self, shards: Sequence[StoredShard]) -> None:
        await self._do(Lane.WRITE, self._store.remove([blob_name(shard) for shard in shards]))

    async def _do(self, lane: Lane, work: Awaitable[T]) -> T:
        """Await an operation of the store, and record whether the store failed."""
        try:
            result = await work
        except StoreFailedError as error:
            raise self._health.failed(lane, error) from error
        except TierMissError:
            self._health.succeeded(lane)
            raise
        self._health.succeeded(lane)
        return result

    def _exists(self, shard: StoredShard) -> bool:
        """Return whether the shard can exist; True if its namespace is not registered.

        The stored size alone cannot tell shards of similar lengths apart.
        """
        known = self._index.namespace(shard.namespace) is not None
        return not known or self._index.fits(shard)

    def _recall(self, shard: StoredShard) -> bool | None:
        return None if self._presence is None else self._presence.recall(shard)

    def _note(self, shard: StoredShard, *, there: bool) -> None:
        if self._presence is not None:
            self._presence.note(shard, there=there)

    async def _read_twice(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read; repeat if a check failed. Raises `DamagedShardError` if it failed twice."""
        try:
            return await self._do(Lane.READ, self._store.read(shard, into))
        except DamagedShardError as error:
            evidence = error.evidence
        try:
            return await self._do(Lane.READ, self._store.read(shard, into))
        except DamagedShardError as error:
            if error.evidence != evidence:
                error.evidence = b""
            raise

    async def _reject(self, shard: StoredShard, error: DamagedShardError) -> None:
        """Remove a shard with equal damage in two reads; unequal damage arose in transit."""
        self._rejected += 1
        self._note(shard, there=False)
        # Log only the text: a log handler that keeps the error would keep its response open.
        if not error.evidence:
            _log.warning(
                "%s: a shard arrived with different damage in two reads: %s",
                self._title,
                str(error),
            )
            return
        _log.warning("%s: removed a damaged shard: %s", self._title, str(error))
        with contextlib.suppress(TierError):  # the next read rejects it again
            await self._remove([shard])

    async def _ensure_manifest(self, namespace: Namespace, tenant: TenantId) -> None:
        """Write a folder's manifest unless present. Raises `TierError` if it does not match."""
        folder = folder_of(namespace.digest, tenant)
        if self._clock() < self._manifests.get(folder, 0.0):
            return
        there = None
        with contextlib.suppress(TierMissError):  # absent or damaged: it is rewritten
            there = await self._do(Lane.WRITE, read_manifest(self._store, folder))
        if there is None:
            content = pack_manifest(namespace)
            await self._do(Lane.WRITE, self._store.save_manifest(folder, content))
        elif (there.digest, there.table) != (namespace.digest, namespace.table):
            raise TierError(
                f"{self._title}: {folder} belongs to namespace {there.digest.hex()} with "
                f"{len(there.table.shards)} shards; {namespace.digest.hex()} with "
                f"{len(namespace.table.shards)} cannot be stored there: remove the folder"
            )
        if len(self._manifests) >= _MOST_MANIFESTS:
            self._manifests.clear()
        self._manifests[folder] = self._clock() + _MANIFEST_S

    async def _recognise(self, folder: str) -> Namespace | None:
        """Return a folder's namespace; log and return None if it is invalid or contradictory."""
        try:
            namespace = await self._do(Lane.BACKGROUND, read_manifest(self._store, folder))
            self._index.add_namespace(namespace)
        except (TierMissError, TierError) as error:
            _log.warning("%s: ignored a folder: %s", self._title, str(error))
            return None
        return namespace

    async def _keep(self, tried: asyncio.Event) -> None:
        """Periodically open a closed store, run due probes, and retry failed deletes."""
        while True:
            try:
                await self._look_after()
            except TierError as error:
                _log.debug("%s: %s", self._title, str(error))
            except Exception:  # noqa: BLE001 - the maintenance task must survive any error
                _log.exception("%s: its periodic maintenance failed", self._title)
            tried.set()
            await asyncio.sleep(self._retry_s)

    async def _look_after(self) -> None:
        if not self._health.offline:
            if await self._do(Lane.BACKGROUND, self._store.still_open()):
                for lane in (Lane.READ, Lane.WRITE):
                    await self._probe(lane)
                if self._owed and self._health.serves(Lane.WRITE):
                    owed = list(self._owed)
                    await self._remove(owed)
                    self._owed.difference_update(owed)
                return
            self._health.closed("the store that was opened is gone")
        try:
            await self._store.open()
        except TierError as error:
            self._health.closed(str(error))
            return
        self._epoch += 1
        self._manifests.clear()
        if self._presence is not None:
            self._presence.clear()
        self._health.opened()
        _log.info("%s: open", self._title)

    async def _probe(self, lane: Lane) -> None:
        if not self._health.take_probe(lane):
            return
        success = False
        try:
            await self._do(Lane.BACKGROUND, self._store.probe(lane))
            success = True
        except TierError:
            pass  # recorded; the breaker's pause grows
        finally:
            self._health.probed(lane, success=success)
