# SPDX-License-Identifier: Apache-2.0
"""What people ask: status, clear, flush."""

import asyncio
from collections.abc import Callable, Mapping

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.catalog import MEMORY
from kvhaven.errors import KVHavenError
from kvhaven.protocol import Clear, Cleared, Flush, Flushed, Refused
from kvhaven.service.connection import Connection
from kvhaven.service.tier_runner import TierRunner
from kvhaven.tiers.base import Tier
from kvhaven.types import NamespaceDigest

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
        """Drop a namespace (or all) from a tier, or from memory and all tiers of our own.

        A shared tier, which must be named, is cleared for everybody; that may take minutes.
        """
        if message.tier and message.tier not in self._places:
            reason = f"no tier {message.tier!r} here; there are {', '.join(self._places)}"
            connection.send(Refused(message.id, reason))
            return
        namespace = NamespaceDigest(message.namespace) if message.namespace else None
        tier = TierName(message.tier) if message.tier else None
        try:
            # First: so that nothing is written there, or believed to be there, that was before.
            chunks, bytes_ = self._catalog.clear(namespace, tier)
            self._act()
            if tier is not None and tier in self._shared:
                chunks, bytes_ = await self._runner.clear(tier, namespace)
        except KVHavenError as error:
            connection.send(Refused(message.id, str(error)))
            return
        connection.send(Cleared(message.id, chunks, bytes_))

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
        return sum(
            tier.queued_writes + tier.outstanding_writes
            for tier in self._catalog.stats().tiers.values()
            if tier.online
        )
