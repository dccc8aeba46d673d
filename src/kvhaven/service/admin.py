# SPDX-License-Identifier: Apache-2.0
"""Administrative requests: clear, limit, flush."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.tier_spec import MEMORY
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
from kvhaven.service.driver import Driver
from kvhaven.service.tier_runner import TierRunner
from kvhaven.tiers.base import Tier
from kvhaven.types import NO_TENANT, NamespaceDigest, TenantId

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]


class Admin:
    """Handler of requests that need no session.

    A long request runs as a task: at most one per connection, cancelled when its connection closes.
    """

    def __init__(
        self,
        driver: Driver,
        tiers: Mapping[TierName, Tier],
        runner: TierRunner,
        spawn: Spawn,
    ) -> None:
        self._driver = driver
        self._places = (MEMORY, *tiers)
        self._shared = {name for name, tier in tiers.items() if tier.shared}
        self._runner = runner
        self._spawn = spawn
        self._under_way: dict[Connection, asyncio.Task[None]] = {}
        self._stored = asyncio.Event()
        self._stored.set()
        driver.observe(self._observe)

    def closed(self, connection: Connection) -> None:
        """Cancel the running request of a closed connection."""
        task = self._under_way.pop(connection, None)
        if task is not None:
            task.cancel()

    def _observe(self) -> None:
        """Wake waiting flushes when no write to a tier is left."""
        if not self._stored.is_set() and not self._driver.catalog.unwritten():
            self._stored.set()

    def clear(self, connection: Connection, message: Clear) -> None:
        """Drop a namespace (or all), or a tenant, from one tier, or from memory and local tiers.

        A shared tier is cleared only if it is named. That deletes its chunks for all nodes, and may
        take minutes.
        """
        if message.tier and message.tier not in self._places:
            reason = f"unknown tier {message.tier!r}; expected one of {', '.join(self._places)}"
            connection.send(Refused(message.id, reason))
            return
        namespace = NamespaceDigest(message.namespace) if message.namespace else None
        tier = TierName(message.tier) if message.tier else None
        try:
            tenant = tenant_of(message.tenant) or None
            if message.dry_run:
                counted = self._driver.catalog.usage(namespace, tier, tenant)
                connection.send(Cleared(message.id, *counted))
                return
            # The catalog first, so that it neither writes nor looks up the cleared chunks any more.
            with self._driver.event() as catalog:
                chunks, bytes_ = catalog.clear(namespace, tier, tenant)
        except KVHavenError as error:
            connection.send(Refused(message.id, str(error)))
            return
        if tier is not None and tier in self._shared:
            store = self._clear_store(connection, message.id, tier, Scope(namespace, tenant))
            self._begin(connection, message.id, store)
        else:
            connection.send(Cleared(message.id, chunks, bytes_))

    def limit(self, connection: Connection, message: Limit) -> None:
        """Set a tenant's quotas until the service ends; answer with quotas and usage in bytes."""
        tenant = tenant_of(message.tenant)
        try:
            self.set_quotas(tenant, message.memory, message.disk)
        except KVHavenError as error:
            connection.send(Refused(message.id, str(error)))
            return
        now = self._driver.catalog.tenant_stats(tenant)
        disk = sum(usage.bytes for usage in now.tiers.values())
        answer = Limited(message.id, now.memory_quota, now.disk_quota, now.memory.bytes, disk)
        connection.send(answer)

    def set_quotas(self, tenant: TenantId, memory: int | None, disk: int | None) -> None:
        """Set a tenant's quotas in bytes; `NO_LIMIT`: no quota, None: unchanged.

        Raises `KVHavenError` for requests without a tenant.
        """
        require_tenant(tenant)
        with self._driver.event() as catalog:
            if memory is not None:
                catalog.limit_memory(tenant, quota_of(memory))
            if disk is not None:
                catalog.limit_disk(tenant, quota_of(disk))

    def answer_flush(self, connection: Connection, message: Flush) -> None:
        """Answer when all queued writes are done, or at the deadline."""
        self._begin(connection, message.id, self._answer_flush(connection, message))

    async def flush(self, deadline_s: float) -> int:
        """Wait until no write to a tier is left; return the number left at the deadline."""
        if self._driver.catalog.unwritten():
            self._stored.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._stored.wait()
        return 0 if self._stored.is_set() else self._driver.catalog.unwritten()

    def _begin(self, connection: Connection, id_: int, work: Coroutine[None, None, None]) -> None:
        """Start a long request as a task; refuse it if the connection already has one running."""
        if connection in self._under_way:
            work.close()
            reason = "this connection already runs a flush, or a clear of a shared tier"
            connection.send(Refused(id_, f"{reason}: repeat the request after its answer"))
            return
        task = self._under_way[connection] = self._spawn(work)
        task.add_done_callback(lambda _: self._under_way.pop(connection, None))

    async def _answer_flush(self, connection: Connection, message: Flush) -> None:
        left = await self.flush(message.wait_ms / 1000)
        connection.send(Flushed(message.id, left))

    async def _clear_store(
        self, connection: Connection, id_: int, tier: TierName, scope: Scope
    ) -> None:
        try:
            chunks, bytes_ = await self._runner.clear(tier, scope.namespace, scope.tenant)
        except KVHavenError as error:
            connection.send(Refused(id_, str(error)))
        else:
            connection.send(Cleared(id_, chunks, bytes_))


def require_tenant(tenant: TenantId) -> None:
    """Raise `KVHavenError` for requests without a tenant."""
    if tenant == NO_TENANT:
        raise KVHavenError(
            "requests without a cache salt have no tenant and no quota; specify a tenant"
        )


def quota_of(given: int) -> int | None:
    """Return a quota of a message; None: there is none."""
    return None if given == NO_LIMIT else given
