# SPDX-License-Identifier: Apache-2.0
"""What people ask: status, clear, flush."""

import asyncio
from collections.abc import Callable

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import TierName
from kvhaven.catalog.catalog import MEMORY
from kvhaven.errors import KVHavenError
from kvhaven.protocol import Clear, Cleared, Flush, Flushed, Refused
from kvhaven.service.connection import Connection
from kvhaven.types import NamespaceDigest

_FLUSH_POLL_S = 0.005


class People:
    """Answers requests that need no session. `act` does what the catalog wants done."""

    def __init__(
        self, catalog: Catalog, tiers: tuple[TierName, ...], act: Callable[[], None]
    ) -> None:
        self._catalog = catalog
        self._places = (MEMORY, *tiers)
        self._act = act

    def clear(self, connection: Connection, message: Clear) -> None:
        """Drop a namespace from a tier, or all from everywhere."""
        if message.tier and message.tier not in self._places:
            reason = f"no tier {message.tier!r} here; there are {', '.join(self._places)}"
            connection.send(Refused(message.id, reason))
            return
        try:
            chunks, bytes_ = self._catalog.clear(
                NamespaceDigest(message.namespace) if message.namespace else None,
                TierName(message.tier) if message.tier else None,
            )
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
