# SPDX-License-Identifier: Apache-2.0
"""The services of a node that one API shows: the one it was started for, and its neighbours."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, NamedTuple

from kvhaven.client.unix import listens
from kvhaven.gateway.app import Gateway
from kvhaven.gateway.models import ServiceRow
from kvhaven.gateway.observer import SILENT_S, Observer
from kvhaven.gateway.views import health_of

PREFIX: Final = "/services"
"""Below `PREFIX/NAME` are all paths of another service."""
MOST_SERVICES: Final = 64
_LOOK_S: Final = 2.0
_GONE_S: Final = 30.0
"""A neighbour that has been silent for this long, with no listening socket, is forgotten."""
_PATTERNS: Final = ("service.sock", "engine-*.sock")

logger = logging.getLogger(__name__)


class _Shown(NamedTuple):
    gateway: Gateway
    observer: Observer
    task: asyncio.Task[None]


class Services:
    """A gateway for each service of a node, by name: its socket's file name without suffix.

    `first` is that of `observer`. Neighbours are found by their sockets in the same directory,
    every two seconds: engines with an embedded service come and go. `make` returns the gateway of a
    service.
    """

    def __init__(
        self, first: Gateway, observer: Observer, make: Callable[[Observer], Gateway]
    ) -> None:
        self.first = first
        self._make = make
        self._own = Path(observer.address)
        self._observer = observer
        self._shown: dict[str, _Shown] = {}

    def named(self, name: str) -> Gateway | None:
        """Return the gateway of a service, if it is shown."""
        if name == self._own.stem:
            return self.first
        found = self._shown.get(name)
        return found.gateway if found is not None else None

    def rows(self, gateway: Gateway) -> list[ServiceRow]:
        """Return all services, the first one first; `gateway` is the one that was asked."""
        return [_row(name, path, one, gateway) for name, path, one in self._all()]

    async def run(self) -> None:
        """Show the services until cancelled."""
        async with self.first.running():
            try:
                while True:
                    try:
                        await self._look()
                    except Exception:  # the services that are shown must stay
                        logger.exception("api: looking for other services failed")
                    await asyncio.sleep(_LOOK_S)
            finally:
                for name in list(self._shown):
                    await self._forget(name)

    def _all(self) -> Iterator[tuple[str, str, tuple[Gateway, Observer]]]:
        yield self._own.stem, "/", (self.first, self._observer)
        for name, one in sorted(self._shown.items()):
            yield name, f"{PREFIX}/{name}/", (one.gateway, one.observer)

    async def _look(self) -> None:
        """Show the neighbours that listen, and forget those that are gone."""
        answering = {n for n, one in self._shown.items() if one.observer.silent_s < SILENT_S}
        found = await asyncio.to_thread(self._neighbours, answering)
        for name, one in list(self._shown.items()):
            if name not in found and one.observer.silent_s > _GONE_S:
                await self._forget(name)
        for name, address in found.items():
            if name not in self._shown and len(self._shown) + 1 < MOST_SERVICES:
                observer = Observer(address, self._observer.interval_s, sample=True)
                gateway = self._make(observer)
                task = asyncio.create_task(_run(gateway), name=f"service {name}")
                self._shown[name] = _Shown(gateway, observer, task)
                logger.info("api: also shows the service at %s", address)

    def _neighbours(self, answering: AbstractSet[str]) -> dict[str, str]:
        """Return the addresses of the services that listen in the directory, by name.

        Those that are `answering` are not probed.
        """
        files = {file for pattern in _PATTERNS for file in self._own.parent.glob(pattern)}
        return {
            file.stem: str(file)
            for file in sorted(files - {self._own})[:MOST_SERVICES]
            if file.stem in answering or listens(str(file))
        }

    async def _forget(self, name: str) -> None:
        one = self._shown.pop(name)
        one.task.cancel()
        # Not awaited directly: its cancellation would be taken for that of this task, or hide it.
        await asyncio.gather(one.task, return_exceptions=True)


async def _run(gateway: Gateway) -> None:
    async with gateway.running():
        await asyncio.Event().wait()


def _row(name: str, path: str, one: tuple[Gateway, Observer], asked: Gateway) -> ServiceRow:
    gateway, observer = one
    health, answers = health_of(observer)
    engines = observer.seen.snapshot.engines if observer.seen is not None else 0
    return ServiceRow(
        id=name,
        path=path,
        address=observer.address,
        status=health.status if answers else "silent",
        engines=engines,
        here=gateway is asked,
    )
