# SPDX-License-Identifier: Apache-2.0
"""What people ask: status, clear, limit, flush."""

import asyncio
from collections.abc import Callable, Mapping

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.tierspec import MEMORY
from kvhaven.errors import KVHavenError
from kvhaven.protocol import (
    NO_LIMIT,
    Clear,
    Cleared,
    Flush,
    Flushed,
    Limit,
    Limited,
    Refused,
    tenant_of,
)
from kvhaven.service.connection import Connection
from kvhaven.service.tier_runner import TierRunner
from kvhaven.tiers.base import Tier
from kvhaven.types import NO_TENANT, NamespaceDigest

_FLUSH_POLL_S = 0.005


class People:
    """Answers requests that need no session. `act` does what the catalog wants done."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: Mapping[TierName, Tier],
        runner: TierRunner,
        act: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._places = (MEMORY, *tiers)
        self._shared = {name for name, tier in tiers.items() if tier.shared}
        self._runner = runner
        self._act = act

    async def clear(self, connection: Connection, message: Clear) -> None:
        """Drop a namespace (or all), or a tenant, from a tier, or from memory and our own tiers.

        A shared tier, which must be named, is cleared for everybody; that may take minutes.
        """
        if message.tier and message.tier not in self._places:
            reason = f"no tier {message.tier!r} here; there are {', '.join(self._places)}"
            connection.send(Refused(message.id, reason))
            return
        namespace = NamespaceDigest(message.namespace) if message.namespace else None
        tier = TierName(message.tier) if message.tier else None
        try:
            tenant = tenant_of(message.tenant) or None
            # First: so that nothing is written there, or believed to be there, that was before.
            chunks, bytes_ = self._catalog.clear(namespace, tier, tenant)
            self._act()
            if tier is not None and tier in self._shared:
                chunks, bytes_ = await self._runner.clear(tier, namespace, tenant)
        except KVHavenError as error:
            connection.send(Refused(message.id, str(error)))
            return
        connection.send(Cleared(message.id, chunks, bytes_))

    def limit(self, connection: Connection, message: Limit) -> None:
        """Change a tenant's quotas until the service ends, and say what counts now."""
        tenant = tenant_of(message.tenant)
        if tenant == NO_TENANT:
            reason = "requests without a cache salt are no tenant's and have no quota; name one"
            connection.send(Refused(message.id, reason))
            return
        if message.memory is not None:
            self._catalog.limit_memory(tenant, _quota(message.memory))
        if message.disk is not None:
            self._catalog.limit_disk(tenant, _quota(message.disk))
        self._act()
        now = self._catalog.tenant_stats(tenant)
        disk = sum(usage.bytes for usage in now.tiers.values())
        answer = Limited(message.id, now.memory_quota, now.disk_quota, now.memory.bytes, disk)
        connection.send(answer)

    async def answer_flush(self, connection: Connection, message: Flush) -> None:
        """Answer when everything is stored, or at the deadline."""
        left = await self.flush(message.wait_ms / 1000)
        connection.send(Flushed(message.id, left))

    async def flush(self, deadline_s: float) -> int:
        """Wait until nothing is queued for a tier; return what is left at the deadline."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while True:
            left = self._writes_left()
            if not left or loop.time() >= end:
                return left
            await asyncio.sleep(_FLUSH_POLL_S)

    def _writes_left(self) -> int:
        self._act()
        return self._catalog.unwritten()


def _quota(given: int) -> int | None:
    return None if given == NO_LIMIT else given
