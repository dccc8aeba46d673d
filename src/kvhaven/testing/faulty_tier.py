# SPDX-License-Identifier: Apache-2.0
"""Fault-injecting wrapper around a tier, for tests of KVHaven and of its users."""

import asyncio
import contextlib
import mmap
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from kvhaven.errors import TierError, TierMissError
from kvhaven.tiers.base import Namespace, StoredShard, Tier, TierAudit, TierHealth
from kvhaven.tiers.format.header import stored_bytes
from kvhaven.types import Checksum, TenantId

T = TypeVar("T")


class Faults(msgspec.Struct, frozen=True):
    """Probability of each fault, from 0 (never) to 1 (in every call to which it applies)."""

    delay: float = 0.0
    """A call takes up to `longest_delay_s` seconds longer."""
    error: float = 0.0
    """A call raises `TierError`; in half of the cases after it was executed."""
    stall: float = 0.0
    """A call hangs until it is cancelled, the tier is closed, or `stall_s` seconds have passed."""
    truncate: float = 0.0
    """The end of a payload is zeroed: in the store (a write) or in the bytes received (a read)."""
    flip: float = 0.0
    """One bit of a payload is flipped: in the store (a write) or in the bytes received (a read)."""
    lose: float = 0.0
    """A write or delete returns without effect; a scan omits a shard."""
    duplicate: float = 0.0
    """A call is executed twice, as by a client that missed the reply."""
    lie: float = 0.0
    """`contains` returns the opposite result, drawn for each shard."""
    longest_delay_s: float = 0.01
    stall_s: float = 3600.0


EVERYTHING: Final = Faults(
    delay=0.1,
    error=0.05,
    stall=0.01,
    truncate=0.05,
    flip=0.05,
    lose=0.05,
    duplicate=0.05,
    lie=0.05,
)
"""All faults, each rarely: most calls succeed, but no long sequence of calls does."""


class FaultyTier:
    """Tier that forwards calls to `inner` and injects `faults`, drawn by a generator with `seed`.

    The faults depend only on the seed and the order of the calls. The contract of `Tier` allows
    all of them, so a correct caller serves no wrong byte: a payload damaged in the store fails
    its checksum there, and a payload damaged in transit ends as `TierMissError`, as in any tier
    that verifies its reads. `health` and `check` are those of the inner tier. `injected` counts
    the faults by name.
    """

    def __init__(self, inner: Tier, seed: int, faults: Faults = EVERYTHING) -> None:
        self.name = inner.name
        self.shared = inner.shared
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._closed = asyncio.Event()

    async def start(self) -> None:
        """Start the inner tier."""
        await self._inner.start()

    async def close(self, deadline_s: float) -> None:
        """End stalled calls, and close the inner tier."""
        self._closed.set()
        await self._inner.close(deadline_s)

    async def add_namespace(self, namespace: Namespace) -> None:
        """Register the namespace with the inner tier, or fail."""
        await self._call(lambda: self._inner.add_namespace(namespace))

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield the inner tier's shards except some, or fail during the scan."""
        async for namespace, shards in self._inner.scan(tenant):
            await self._call(_nothing)
            left = {shard: size for shard, size in shards.items() if not self._hit("lose")}
            yield namespace, left

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Call the inner tier, and invert some results."""
        answers = await self._call(lambda: self._inner.contains(shards))
        return [answer ^ self._hit("lie") for answer in answers]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read from the inner tier; a payload damaged in transit is a miss."""
        damage = self._damage(shard)
        checksum = await self._call(lambda: self._inner.read(shard, into))
        if damage is not None:
            damage(into)
            raise TierMissError(f"injected: {shard.key.hex()} was damaged in transit")
        return checksum

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write the payload, nothing, or a damaged payload with the original checksum."""
        damage = self._damage(shard)
        if self._hit("lose"):
            await self._call(_nothing)
            return stored_bytes(shard.payload_bytes)
        if damage is not None:
            copy = memoryview(mmap.mmap(-1, len(payload)))  # page-aligned for direct I/O
            copy[:] = payload
            damage(copy)
            payload = copy
        return await self._call(lambda: self._inner.write(shard, payload, checksum))

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Delete from the inner tier, or do nothing."""
        lost = self._hit("lose")
        await self._call(_nothing if lost else lambda: self._inner.delete(shards))

    def health(self) -> TierHealth:
        """Return the inner tier's health."""
        return self._inner.health()

    async def check(self) -> TierAudit:
        """Audit the inner tier."""
        return await self._inner.check()

    def _hit(self, fault: str) -> bool:
        """Draw whether a fault occurs now."""
        hit = bool(self._random.random() < getattr(self._faults, fault))
        self.injected[fault] += hit
        return hit

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work` once, twice, late, or never."""
        # Draw everything before the first wait, so the order in which calls end has no effect.
        delay_s = self._random.random() * self._faults.longest_delay_s
        delayed, stalled, failed = self._hit("delay"), self._hit("stall"), self._hit("error")
        after = failed and self._random.random() < 0.5
        twice = self._hit("duplicate")
        if delayed:
            await asyncio.sleep(delay_s)
        if stalled:
            await self._stall()
        if failed and not after:
            raise TierError(f"injected: tier {self.name} failed before the call")
        result = await work()
        if twice:
            result = await work()
        if after:
            raise TierError(f"injected: tier {self.name} failed after the call")
        return result

    async def _stall(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._faults.stall_s):
                await self._closed.wait()
        raise TierError(f"injected: tier {self.name} did not answer")

    def _damage(self, shard: StoredShard) -> Callable[[memoryview], None] | None:
        """Draw the damage to a payload in transit; None for no damage."""
        at = self._random.randrange(max(1, shard.payload_bytes))
        bit = 1 << self._random.randrange(8)
        flipped, cut = self._hit("flip"), self._hit("truncate")
        if not (flipped or cut) or not shard.payload_bytes:
            return None

        def damage(payload: memoryview) -> None:
            if cut:
                payload[at:] = bytes(len(payload) - at)
            if flipped:
                payload[at] ^= bit

        return damage


async def _nothing() -> None:
    """Do nothing, in place of a lost call."""
