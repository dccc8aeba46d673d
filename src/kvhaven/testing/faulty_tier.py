# SPDX-License-Identifier: Apache-2.0
"""A tier that wraps another one and misbehaves, for tests: ours, and those of who runs KVHaven."""

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
    """How often each fault comes: 0 never, 1 with every call that it fits."""

    delay: float = 0.0
    """A call takes up to `longest_delay_s` more."""
    error: float = 0.0
    """A call raises `TierError`; in half of the cases after it did what it was asked."""
    stall: float = 0.0
    """A call does nothing until it is cancelled, the tier is closed, or `stall_s` have passed."""
    truncate: float = 0.0
    """The end of a payload is zero: in the store (a write), or in what arrived (a read)."""
    flip: float = 0.0
    """A bit of a payload is another one: in the store (a write), or in what arrived (a read)."""
    lose: float = 0.0
    """A write or delete returns, and nothing happened; a scan leaves a shard out."""
    duplicate: float = 0.0
    """A call is made twice, as by a client that did not hear the answer."""
    lie: float = 0.0
    """`contains` says the contrary of what is so, for each shard."""
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
"""Each fault now and then: most calls still work, and no long sequence of them does."""


class FaultyTier:
    """Does what `inner` does, and one of `faults` now and then, by a generator with `seed`.

    The faults depend on the seed and on the order of the calls, and on nothing else. They are
    all such as the contract allows, so whoever uses a tier rightly serves no wrong byte: what
    is damaged in the store fails its checksum there, and what is damaged on its way here ends
    as `TierMissError`, as it does in a tier that verifies what arrived. `health` and `check`
    are the inner tier's own. `injected` counts the faults by name.
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
        """End what stalls, and close the inner tier."""
        self._closed.set()
        await self._inner.close(deadline_s)

    async def add_namespace(self, namespace: Namespace) -> None:
        """Add it to the inner tier, or fail."""
        await self._call(lambda: self._inner.add_namespace(namespace))

    async def scan(
        self, tenant: TenantId | None = None
    ) -> AsyncIterator[tuple[Namespace, Mapping[StoredShard, int]]]:
        """Yield what the inner tier does, some shards left out, or fail on the way."""
        async for namespace, shards in self._inner.scan(tenant):
            await self._call(_nothing)
            left = {shard: size for shard, size in shards.items() if not self._hit("lose")}
            yield namespace, left

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Ask the inner tier, and lie about some."""
        answers = await self._call(lambda: self._inner.contains(shards))
        return [answer ^ self._hit("lie") for answer in answers]

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read from the inner tier; what was damaged on its way is a miss."""
        damage = self._damage(shard)
        checksum = await self._call(lambda: self._inner.read(shard, into))
        if damage is not None:
            damage(into)
            raise TierMissError(f"injected: {shard.key.hex()} was damaged on its way")
        return checksum

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write to the inner tier, or nothing, or something else under the same checksum."""
        damage = self._damage(shard)
        if self._hit("lose"):
            await self._call(_nothing)
            return stored_bytes(shard.payload_bytes)
        if damage is not None:
            copy = memoryview(mmap.mmap(-1, len(payload)))  # where direct I/O can take it from
            copy[:] = payload
            damage(copy)
            payload = copy
        return await self._call(lambda: self._inner.write(shard, payload, checksum))

    async def delete(self, shards: Sequence[StoredShard]) -> None:
        """Delete from the inner tier, or nothing."""
        lost = self._hit("lose")
        await self._call(_nothing if lost else lambda: self._inner.delete(shards))

    def health(self) -> TierHealth:
        """Return the inner tier's figures."""
        return self._inner.health()

    async def check(self) -> TierAudit:
        """Audit the inner tier."""
        return await self._inner.check()

    def _hit(self, fault: str) -> bool:
        """Draw whether a fault comes now."""
        hit = bool(self._random.random() < getattr(self._faults, fault))
        self.injected[fault] += hit
        return hit

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await `work` once or twice, late, or not at all."""
        # All is drawn before the first wait: the order in which calls end changes nothing.
        delay_s = self._random.random() * self._faults.longest_delay_s
        delayed, stalled, failed = self._hit("delay"), self._hit("stall"), self._hit("error")
        after = failed and self._random.random() < 0.5
        twice = self._hit("duplicate")
        if delayed:
            await asyncio.sleep(delay_s)
        if stalled:
            await self._stall()
        if failed and not after:
            raise TierError(f"injected: tier {self.name} failed before it did anything")
        result = await work()
        if twice:
            result = await work()
        if after:
            raise TierError(f"injected: tier {self.name} failed after it did what was asked")
        return result

    async def _stall(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._faults.stall_s):
                await self._closed.wait()
        raise TierError(f"injected: tier {self.name} did not answer")

    def _damage(self, shard: StoredShard) -> Callable[[memoryview], None] | None:
        """Draw what happens to a payload on its way, if anything does."""
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
    """Do nothing, where a call is lost."""
