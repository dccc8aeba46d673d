# SPDX-License-Identifier: Apache-2.0
"""Executor of the catalog's tier actions; it reports the results to the catalog."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from kvhaven.catalog.actions import TierDelete, TierLookup, TierName, TierRead, TierWrite
from kvhaven.catalog.histograms import SECONDS, Buckets, Histogram
from kvhaven.catalog.shared_index import LOOKUP_SHARDS
from kvhaven.catalog.tier_spec import WriteMode
from kvhaven.errors import KVHavenError, TierError, TierMissError
from kvhaven.maps import OrderedMap
from kvhaven.peers.tier import PeerTier
from kvhaven.protocol import batches
from kvhaven.service.driver import Driver
from kvhaven.service.tier_speed import SpeedMeter
from kvhaven.tiers.base import Namespace, StoredShard, Tier
from kvhaven.types import Checksum, ChunkKey, Extent, NamespaceDigest, TenantId, align_up

T = TypeVar("T")
A = TypeVar("A", TierRead, TierWrite)
OP_READ: Final = "read"
OP_WRITE: Final = "write"

_PATIENCE_S: Final = 0.25
"""Longest time that a write to a shared tier waits for the tier's reads."""
_AT_ONCE: Final = 64
"""Most chunks that are read from a tier, or written to it, concurrently; others wait."""
_DELETED_AT_ONCE: Final = 128
"""Most shards that a tier deletes in one batch; one chunk with more shards is a batch, too."""
_RESCAN_S: Final = 1.0
"""Pause after a tier's second scan in a row that failed; it doubles with each further one."""
_LONGEST_RESCAN_S: Final = 60.0
_FOUND_AT_ONCE: Final = 64
"""Shards found by a scan that are reported in one event."""

logger = logging.getLogger(__name__)


class _Lane(Generic[A]):
    """Queue of the reads, or of the writes, of one tier, with bounded concurrency."""

    def __init__(
        self,
        do: Callable[[A], Coroutine[None, None, None]],
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self.waiting: deque[A] = deque()
        self.idle = asyncio.Event()
        self.idle.set()
        self._do: Callable[[A], Coroutine[None, None, None]] = do
        self._spawn = spawn
        self._under_way = 0

    def add(self, action: A) -> None:
        """Queue an action."""
        self.waiting.append(action)
        self.idle.clear()
        self._begin()

    def _begin(self) -> None:
        while self.waiting and self._under_way < _AT_ONCE:
            self._under_way += 1
            self._spawn(self._one(self.waiting.popleft()))

    async def _one(self, action: A) -> None:
        try:
            await self._do(action)
        finally:
            self._under_way -= 1
        self._begin()
        if not self._under_way:
            self.idle.set()


TierSwitch = Literal["on", "off", "read_only"]


class TierTraffic(msgspec.Struct, frozen=True):
    """Bytes of chunks that were read from a tier into memory, or written to it, and their times.

    Bytes that were read are those in memory, bytes that were written those in the tier.
    """

    bytes: int
    seconds: Buckets


class _Traffic:
    """Mutable `TierTraffic`."""

    def __init__(self) -> None:
        self._bytes = 0
        self._seconds = Histogram(SECONDS)

    def add(self, bytes_: int, began: float) -> None:
        """Count a chunk whose transfer began at a time of the event loop."""
        self._bytes += bytes_
        self._seconds.observe(asyncio.get_running_loop().time() - began)

    def figures(self) -> TierTraffic:
        return TierTraffic(self._bytes, self._seconds.buckets())


class _Deletes:
    """Pending deletes of a tier, and the batch being deleted, by name."""

    def __init__(self) -> None:
        self.waiting = OrderedMap[bytes, TierDelete]()
        self.batch: frozenset[bytes] = frozenset()
        self.deleting = asyncio.Lock()

    def has(self, name: bytes) -> bool:
        """Return whether the delete of a chunk is pending or running."""
        return name in self.waiting or name in self.batch


class _FailedScan(NamedTuple):
    """The last scan of a tier, which failed; it is not repeated for a while."""

    epoch: int
    until: float
    pause_s: float


class TierRunner:
    """Executor of tier actions, as tasks of the event loop.

    Reads, writes and deletes are bounded in number, per tier. `memory_of` returns the service's
    view of an extent. A lookup is answered within `lookup_s` seconds, regardless of the tier. While
    a tier has not answered a late lookup, no request waits for lookups in that tier.
    """

    def __init__(
        self,
        driver: Driver,
        tiers: Mapping[TierName, Tier],
        memory_of: Callable[[Extent], memoryview],
        *,
        lookup_s: float,
    ) -> None:
        self._driver = driver
        self.tiers = tiers
        self._memory_of = memory_of
        self.states: dict[TierName, TierSwitch] = {}
        """Tiers that an operator switched: off, or read only."""
        self._introduced: set[tuple[TierName, NamespaceDigest]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._scanned: dict[TierName, int] = {}
        self._not_scanned: dict[TierName, _FailedScan] = {}
        self._lookup_s = lookup_s
        self._late: dict[TierName, asyncio.Task[Sequence[bool] | None]] = {}
        self._reads = {name: _Lane[TierRead](self._read, self._spawn) for name in tiers}
        self._writes = {name: _Lane[TierWrite](self._write, self._spawn) for name in tiers}
        self._deletes = {name: _Deletes() for name in tiers}
        self._clearing = {name: asyncio.Lock() for name in tiers}
        self._meters = {name: SpeedMeter() for name in tiers}
        self._traffic = {name: {OP_READ: _Traffic(), OP_WRITE: _Traffic()} for name in tiers}

    def look_up_within(self, seconds: float) -> None:
        """Answer further lookups within this time (setting `promote_deadline_ms`)."""
        self._lookup_s = seconds

    def traffic(self) -> dict[str, dict[str, TierTraffic]]:
        """Return bytes and times of chunks that were read and written, by tier and operation."""
        return {
            str(name): {op: known.figures() for op, known in ops.items()}
            for name, ops in self._traffic.items()
        }

    def state_of(self, name: TierName) -> TierSwitch:
        """Return how an operator has switched a tier."""
        return self.states.get(name, "on")

    def mode_of(self, name: TierName, configured: WriteMode) -> WriteMode:
        """Return how a tier is written now, if the settings say `configured`."""
        if isinstance(self.tiers[name], PeerTier) or self.state_of(name) == "read_only":
            return WriteMode.OFF
        return configured

    async def ask(
        self, name: TierName, namespace: Namespace, tenant: TenantId, keys: Sequence[ChunkKey]
    ) -> list[bool] | None:
        """Return which chunks a shared tier has now; None if it failed, or gave no answer in time.

        No answer says nothing about the chunks. Many are looked up in several batches, one after
        another, each as long as a lookup of the catalog may be.
        """
        bits, found = len(namespace.table.shards), list[bool]()
        for part in batches(keys, max(1, LOOKUP_SHARDS // bits)):
            action = TierLookup(name, 0, namespace, tuple(part), tenant)
            shards = [shard for key in part for shard in self._shards(action, key)]
            there = await self._in_time(name, shards)
            if there is None:
                return None
            found += [all(there[at * bits : (at + 1) * bits]) for at in range(len(part))]
        return found

    def run(self, action: TierLookup | TierRead | TierWrite | TierDelete) -> None:
        """Start an action; its result is reported to the catalog."""
        if isinstance(action, TierLookup):
            self._spawn(self._look_up(action))
        elif isinstance(action, TierRead):
            self._reads[action.tier].add(action)
        elif isinstance(action, TierWrite):
            self._writes[action.tier].add(action)
        else:
            deletes = self._deletes[action.tier]
            if not deletes.waiting and not deletes.batch:
                self._spawn(self._delete_all(action.tier))
            deletes.waiting[_name(action)] = action

    def check_health(self, *, scan: bool = True) -> None:
        """Report to the catalog which tiers are online; scan local tiers that were opened.

        The scan of a tier that was opened begins before the catalog has it online, which relies on
        that. Without `scan`, a scan that failed is not repeated; a later check repeats it, the
        first time immediately, and then after pauses that double up to a minute.
        """
        with self._driver.event() as catalog:
            for name, tier in self.tiers.items():
                health = tier.health()
                if not health.online:
                    self._late.pop(name, None)  # the tier itself detects its recovery
                elif not tier.shared:
                    if health.capacity_bytes is not None:
                        catalog.tier_capacity(name, health.capacity_bytes)
                    if self._may_scan(name, health.epoch, again=scan):
                        self._scanned[name] = health.epoch
                        catalog.tier_scanned(name, ended=False)
                        self._spawn(self._scan(name, tier, health.epoch))
                catalog.tier_online(name, health.online and self.states.get(name) != "off")

    async def clear(
        self, name: TierName, namespace: NamespaceDigest | None, tenant: TenantId | None
    ) -> tuple[int, int]:
        """Delete a namespace's chunks (None: of all) from a shared tier's store, for all nodes.

        With `tenant`, only that tenant's. Clears of one tier run one after another. Returns the
        number of chunks found and their bytes. Raises `TierError` if the store fails; the deletes
        until then are permanent.
        """
        tier = self.tiers[name]
        chunks = bytes_ = 0
        async with self._clearing[name]:
            async for found, shards in tier.scan(tenant):
                if not shards or namespace not in {None, found.digest}:
                    continue
                await tier.delete(list(shards))
                first = found.table.shards[0].id
                chunks += sum(shard.shard == first for shard in shards)
                bytes_ += sum(shards.values())
        return chunks, bytes_

    async def close(self, deadline_s: float) -> None:
        """Wait up to `deadline_s` seconds for running tasks, then close the tiers."""
        for name in self.tiers:  # queued actions are dropped
            self._reads[name].waiting.clear()
            self._writes[name].waiting.clear()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        await asyncio.gather(*(tier.close(deadline_s) for tier in self.tiers.values()))

    async def _scan(self, name: TierName, tier: Tier, epoch: int) -> None:
        """Report the shards that a tier holds from before it was opened, in the background.

        `epoch` is the tier's epoch when this scan began; a newer scan may end before it.
        """
        found, complete = 0, False
        try:
            async for namespace, shards in tier.scan():
                for part in batches(list(shards.items()), _FOUND_AT_ONCE) if shards else ((),):
                    found += self._found(name, namespace, part)
                    await asyncio.sleep(0)
            complete = True
            self._not_scanned.pop(name, None)
        except Exception as error:  # noqa: BLE001 - whatever ended it, a later check scans again
            if self._scanned.get(name) == epoch:
                del self._scanned[name]
                self._not_scanned[name] = self._failed_scan(name, epoch)
            reason = error if isinstance(error, TierError) else repr(error)
            logger.warning("tier %s: the scan ended early: %s", name, reason)
        finally:
            with self._driver.event() as catalog:
                catalog.tier_scanned(name, ended=True, complete=complete)
        logger.info("tier %s: the scan found %d shards of earlier runs", name, found)

    def _may_scan(self, name: TierName, epoch: int, *, again: bool) -> bool:
        """Return whether a tier is to be scanned; `again`: also if the last scan failed."""
        if self._scanned.get(name) == epoch:
            return False
        failed = self._not_scanned.get(name)
        if failed is None or failed.epoch != epoch:
            return True
        return again and asyncio.get_running_loop().time() >= failed.until

    def _failed_scan(self, name: TierName, epoch: int) -> _FailedScan:
        """Return until when a scan that failed is not repeated."""
        before, now = self._not_scanned.get(name), asyncio.get_running_loop().time()
        if before is None or before.epoch != epoch:
            return _FailedScan(epoch, now, _RESCAN_S)
        pause_s = before.pause_s
        return _FailedScan(epoch, now + pause_s, min(2 * pause_s, _LONGEST_RESCAN_S))

    def _found(
        self, name: TierName, namespace: Namespace, shards: Sequence[tuple[StoredShard, int]]
    ) -> int:
        bits = {shard.id: bit for bit, shard in enumerate(namespace.table.shards)}
        count = 0
        with self._driver.event() as catalog:
            try:
                catalog.add_namespace(namespace)
            except KVHavenError as error:
                logger.warning("tier %s: ignored a namespace: %s", name, error)
                return 0
            for stored, size in shards:
                bit = bits.get(stored.shard)
                if bit is not None and not self._deletes[name].has(_name(stored)):
                    digest, tenant = namespace.digest, stored.tenant
                    catalog.tier_found(name, digest, stored.key, bit, size, tenant)
                    count += 1
        return count

    def _spawn(self, coroutine: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _parts(self, action: TierRead | TierWrite) -> list[tuple[StoredShard, memoryview]]:
        table = action.namespace.table
        memory = self._memory_of(action.extent)
        shards = self._shards(action, action.key)
        return [
            (stored, memory[offset : offset + align_up(stored.payload_bytes)])
            for stored, offset in zip(shards, table.offsets, strict=True)
        ]

    def _shards(
        self, action: TierLookup | TierRead | TierWrite | TierDelete, key: ChunkKey
    ) -> list[StoredShard]:
        """Return the names of all shards of a chunk of an action."""
        namespace, tenant = action.namespace, action.tenant
        tail = action.tail if isinstance(action, TierRead) else 0
        sizes = [namespace.shard_bytes(s.payload_bytes, tail) for s in namespace.table.shards]
        return [
            StoredShard(namespace.digest, key, shard.id, size, tenant)
            for shard, size in zip(namespace.table.shards, sizes, strict=True)
            if size is not None
        ]

    async def _look_up(self, action: TierLookup) -> None:
        """Look up all shards of all chunks in one batch, and report the result in time."""
        shards = [shard for key in action.keys for shard in self._shards(action, key)]
        found: dict[ChunkKey, int] | None = None
        there = await self._in_time(action.tier, shards)
        if there is None:
            self.check_health()
        else:
            bits = len(action.namespace.table.shards)
            found = {
                key: sum(1 << bit for bit in range(bits) if there[at * bits + bit])
                for at, key in enumerate(action.keys)
            }
        with self._driver.event() as catalog:
            catalog.tier_looked_up(action.tier, action.number, found)

    async def _in_time(
        self, name: TierName, shards: Sequence[StoredShard]
    ) -> Sequence[bool] | None:
        """Look up shards in a tier; return None if the tier failed, or gave no answer in time.

        A store that accepts lookups and never answers would delay every request by `lookup_s`.
        Therefore a late lookup continues until the tier's own deadline, which informs the tier's
        breaker. Until a lookup has been answered, further ones go to the tier one at a time, and
        no request waits for them.
        """
        late = self._late.get(name)
        if late is not None and not late.done():
            return None
        # Not awaited directly: a call that runs in a thread ends only with that thread's work.
        asked = self._spawn(self._contains(name, shards))
        if late is None or late.result() is not None:
            self._late.pop(name, None)
            await asyncio.wait([asked], timeout=self._lookup_s)
            if asked.done():
                return asked.result()
        self._late[name] = asked
        return None

    async def _contains(
        self, name: TierName, shards: Sequence[StoredShard]
    ) -> Sequence[bool] | None:
        try:
            there = await self.tiers[name].contains(shards)
        except TierError:
            return None  # counted and logged by the tier
        except Exception:  # a bug of a tier is a miss: the waiting request needs an answer
            logger.exception("tier %s: a lookup failed unexpectedly", name)
            return None
        return there if len(there) == len(shards) else None

    async def _let_reads_go_first(self, name: TierName) -> None:
        """Wait for the reads of a shared tier in progress, for at most `_PATIENCE_S`.

        The disk tier gives reads priority in its threads instead.
        """
        if self.tiers[name].shared:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE_S):
                    await self._reads[name].idle.wait()

    async def _read(self, action: TierRead) -> None:
        checksums: tuple[Checksum, ...] | None = None
        loop = asyncio.get_running_loop()
        began, length = loop.time(), action.extent.length
        meter = self._meters[action.tier]
        begun = meter.begin(length, began)
        try:
            checksums = await self._read_shards(action)
            self._traffic[action.tier][OP_READ].add(length, began)
        except TierMissError:
            pass  # counted and logged by the tier
        except TierError:
            self.check_health()
        except Exception:  # any failure must release the extent and end the wait
            logger.exception("tier %s: a read failed unexpectedly", action.tier)
        meter.end(length, begun, loop.time(), ok=checksums is not None)
        with self._driver.event() as catalog:
            if meter.speed is not None:
                catalog.tier_speed(action.tier, meter.speed)
            catalog.tier_read_done(action.tier, action.key, action.extent, checksums)

    async def _read_shards(self, action: TierRead) -> tuple[Checksum, ...]:
        """Read all shards of a chunk concurrently; return or raise after *every* read has ended."""
        tier = self.tiers[action.tier]
        parts = self._parts(action)
        if len(parts) == 1:
            return (await tier.read(*parts[0]),)
        results = await asyncio.gather(
            *(tier.read(shard, part) for shard, part in parts), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        try:
            if failures:
                raise failures[0]
            return tuple(result for result in results if isinstance(result, bytes))
        finally:
            # The exception refers to this frame: break the cycle, as full collections are disabled.
            del results, failures

    async def _write(self, action: TierWrite) -> None:
        tier = self.tiers[action.tier]
        taken: int | None = None
        try:
            await self._delete_before(action)
            await self._let_reads_go_first(action.tier)
            await self._introduce(action.tier, action.namespace)
            parts = self._parts(action)
            began = asyncio.get_running_loop().time()
            sizes = [
                await tier.write(shard, part, checksum)
                for (shard, part), checksum in zip(parts, action.checksums, strict=True)
            ]
            taken = sum(sizes)
            self._traffic[action.tier][OP_WRITE].add(taken, began)
        except TierError:
            self._introduced.discard((action.tier, action.namespace.digest))
            self.check_health()
        except Exception:  # any failure must release the extent; the chunk is a later miss
            logger.exception("tier %s: a write failed unexpectedly", action.tier)
        with self._driver.event() as catalog:
            catalog.tier_write_done(action.tier, action.key, taken is not None, taken)

    async def _delete_all(self, name: TierName) -> None:
        """Run the pending deletes of a tier, batch by batch, until none is left."""
        deletes = self._deletes[name]
        while deletes.waiting:
            async with deletes.deleting:
                batch: list[bytes] = []
                shards = 0
                for key, action in islice(deletes.waiting.items(), _DELETED_AT_ONCE):
                    shards += len(action.namespace.table.shards)
                    if batch and shards > _DELETED_AT_ONCE:
                        break
                    batch.append(key)
                deletes.batch = frozenset(batch)
                await self._delete(name, [deletes.waiting.pop(key) for key in batch])
                deletes.batch = frozenset()
            await asyncio.sleep(0)  # an offline tier refuses without yielding to the loop

    async def _delete_before(self, action: TierWrite) -> None:
        """Run the pending delete of a chunk before the chunk is written."""
        deletes, name = self._deletes[action.tier], _name(action)
        if deletes.has(name):
            async with deletes.deleting:
                if name in deletes.waiting:
                    await self._delete(action.tier, [deletes.waiting.pop(name)])

    async def _delete(self, name: TierName, actions: Sequence[TierDelete]) -> None:
        shards = [shard for action in actions for shard in self._shards(action, action.key)]
        try:
            await self.tiers[name].delete(shards)
        except TierError:
            self.check_health()
        except Exception:  # the next scan finds a remaining file; no caller waits for deletes
            logger.exception("tier %s: a delete failed unexpectedly", name)

    async def _introduce(self, name: TierName, namespace: Namespace) -> None:
        """Register a namespace with a tier, which is required before the first write."""
        if (name, namespace.digest) not in self._introduced:
            await self.tiers[name].add_namespace(namespace)
            self._introduced.add((name, namespace.digest))


def _name(action: TierDelete | TierWrite | StoredShard) -> bytes:
    """Return the unique name of a chunk within a tier; it begins with the key."""
    namespace = action.namespace
    digest = namespace.digest if isinstance(namespace, Namespace) else namespace
    return action.key + action.tenant + digest
