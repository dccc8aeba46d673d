# SPDX-License-Identifier: Apache-2.0
"""The largest tenants, for metrics: there may be as many tenants as users."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import Final, NamedTuple

import msgspec

from kvhaven.errors import KVHavenError
from kvhaven.gateway.observer import Observer
from kvhaven.service.snapshot import TenantRow

MOST: Final = 20
OTHERS: Final = "other"
PAUSE_S: Final = 15.0
"""Between two walks over all tenants; each page of 100 takes a millisecond of the service."""

logger = logging.getLogger(__name__)


class TenantBytes(NamedTuple):
    """Bytes of a tenant by place."""

    id: str
    bytes: dict[str, int]


class Tenants:
    """The `MOST` tenants with the most bytes, and all others together, as of the last walk.

    There is a walk at the start, and one after each time that somebody reads them, but not more
    often than every `PAUSE_S` seconds.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._largest: list[TenantBytes] = []
        self._read = asyncio.Event()
        self._read.set()

    def largest(self) -> list[TenantBytes]:
        """Return them, the largest first."""
        self._read.set()
        return self._largest

    async def run(self) -> None:
        """Walk over the tenants until cancelled."""
        while True:
            await self._read.wait()
            await self._observer.newer("")
            self._read.clear()
            try:
                self._largest = largest(await self._all())
            except (KVHavenError, msgspec.MsgspecError) as error:
                logger.warning("api: the tenants are not known: %s", error)
            await asyncio.sleep(PAUSE_S)

    async def _all(self) -> list[TenantBytes]:
        found: list[TenantBytes] = []
        cursor = ""
        while True:
            raw, cursor = await self._observer.rows("tenants", cursor)
            rows = msgspec.json.decode(raw, type=list[TenantRow])
            found += [TenantBytes(row.id, row.bytes) for row in rows]
            if not cursor:
                return found


def largest(tenants: Iterable[TenantBytes]) -> list[TenantBytes]:
    """Return the `MOST` largest tenants, and `OTHERS` with the sums of the rest, if any."""
    known = list(tenants)
    first = nlargest(MOST, known, key=lambda tenant: sum(tenant.bytes.values()))
    named, rest = {tenant.id for tenant in first}, Counter[str]()
    for tenant in known:
        if tenant.id not in named:
            rest.update(tenant.bytes)
    return [*first, TenantBytes(OTHERS, dict(rest))] if len(known) > MOST else first
