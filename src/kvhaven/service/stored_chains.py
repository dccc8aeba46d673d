# SPDX-License-Identifier: Apache-2.0
"""Stored chains: what other nodes write to a shared tier now, awaited there chunk by chunk."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Final

from kvhaven.catalog.actions import TierName
from kvhaven.errors import KVHavenError
from kvhaven.peers.tier import PeerTier
from kvhaven.protocol import KeyList, PullChain, batches, tenant_of
from kvhaven.service.driver import Driver
from kvhaven.service.tier_runner import TierRunner
from kvhaven.service.turns import Job
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

_MOST_CHAINS: Final = 256
_MOST_KEYS: Final = 1 << 12
"""Chunks of a chain that are awaited."""
_POLL_S: Final = 0.02
LONGEST_POLL_S: Final = 0.25
"""A tier that remembers absent shards for longer would hide those that are written meanwhile."""
_LONGEST_S: Final = 60.0
"""Longest time for which a chain is awaited, however slowly its chunks come."""
_NEXT: Final = 16
"""Missing chunks that are asked for while a chain is awaited. They are stored in about their order,
and each costs an object store a request: of a long chain, all would be thousands a second."""
_PIECE: Final = 128
"""Chunks that are expected or answered before others may use the event loop."""


class StoredChains:
    """Chains that another node has prefilled and may still be writing to a shared tier.

    A prefill node writes behind: when its request ends, its last chunks are not stored yet. Without
    peers nothing tells when they are, so the tier is asked for the next ones, at growing intervals.
    A chain of which nothing is stored when it is first looked up is not awaited, nor one of which
    no further chunk comes for `stall_s` seconds. `spawn` runs a coroutine as a task of the service.
    """

    def __init__(
        self,
        driver: Driver,
        runner: TierRunner,
        stall_s: float,
        spawn: Callable[[Coroutine[None, None, None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._runner = runner
        self._stall_s = stall_s
        self._spawn = spawn
        self._clock = clock
        self._open = 0
        self.awaited = 0
        """Chains of which something was stored, and something not yet."""

    def __len__(self) -> int:
        """Return the number of chains that are awaited now."""
        return self._open

    def pull(self, digest: NamespaceDigest, order: PullChain) -> None:
        """Await a chain's chunks that are in no known place and that no other node has offered.

        Raises `ProtocolError` for malformed keys.
        """
        keys, tenant = KeyList(order.keys)[:_MOST_KEYS], tenant_of(order.tenant)
        tier = self._tier()
        if tier is None or not keys or self._open >= _MOST_CHAINS:
            return
        try:
            namespace = self._driver.catalog.namespace(digest)
        except KVHavenError:
            return
        self._open += 1
        self._driver.turns.start(self._expect(tier, namespace, tenant, keys))

    def _expect(
        self, tier: TierName, namespace: Namespace, tenant: TenantId, keys: Sequence[ChunkKey]
    ) -> Job:
        catalog, numbers = self._driver.catalog, dict[ChunkKey, int]()
        for part in batches(keys, _PIECE):
            wanted = [key for key in part if not catalog.is_looked_up(key)]
            numbers |= catalog.expected(tier, namespace.digest, wanted, tenant)
            yield
        self._spawn(self._await(tier, namespace, tenant, numbers))

    def _end(self, tier: TierName, numbers: Mapping[ChunkKey, int], *, answered: bool) -> Job:
        """Answer that the rest is not stored, or that the tier gave no answer."""
        self._open -= 1
        found: dict[ChunkKey, int] | None = {} if answered else None
        for part in batches([*numbers.values()], _PIECE):
            for number in part:
                self._driver.catalog.tier_looked_up(tier, number, found)
            yield

    def _tier(self) -> TierName | None:
        """Return the fastest shared tier that is not other nodes' memory, and is online."""
        for name, tier in self._runner.tiers.items():
            if tier.shared and tier.name != PeerTier.name and tier.health().online:
                return name
        return None

    async def _await(
        self, tier: TierName, namespace: Namespace, tenant: TenantId, numbers: dict[ChunkKey, int]
    ) -> None:
        """Ask for the missing chunks until all are stored, or none is for too long."""
        found: bool | None = None
        try:
            if not numbers:
                return
            began = moved = self._clock()
            pause_s, most = _POLL_S, _NEXT
            found = await self._ask(tier, namespace, tenant, numbers, len(numbers))
            self.awaited += bool(found and numbers)
            if not found:
                return
            while numbers and self._clock() - began < _LONGEST_S:
                await asyncio.sleep(pause_s)
                left = len(numbers)
                found = await self._ask(tier, namespace, tenant, numbers, most)
                # More if they come faster than they are asked for.
                most = 2 * most if left - len(numbers) >= most else _NEXT
                if found:
                    pause_s, moved = _POLL_S, self._clock()
                elif self._clock() - moved >= self._stall_s:
                    return
                pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
        finally:
            self._driver.turns.start(self._end(tier, numbers, answered=found is not None))

    async def _ask(
        self,
        tier: TierName,
        namespace: Namespace,
        tenant: TenantId,
        numbers: dict[ChunkKey, int],
        most: int,
    ) -> bool | None:
        """Ask which of the first `most` missing chunks are stored now; return whether any is.

        Returns None if the tier gave no answer.
        """
        keys = [*islice(numbers, most)]
        there = await self._runner.ask(tier, namespace, tenant, keys)
        if there is None:
            return None
        found = [key for key, has in zip(keys, there, strict=True) if has]
        for part in batches(found, _PIECE):
            with self._driver.event() as catalog:
                for key in part:
                    complete = {key: namespace.table.complete}
                    catalog.tier_looked_up(tier, numbers.pop(key), complete)
            await asyncio.sleep(0)
        return bool(found)
