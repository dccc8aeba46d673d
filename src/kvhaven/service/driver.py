# SPDX-License-Identifier: Apache-2.0
"""Driver of the catalog: events go in, and the actions that come out are carried out."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import Action
from kvhaven.service.turns import Job, Turns

logger = logging.getLogger(__name__)

_MOST_ACTIONS: Final = 1024
"""Actions that may wait before the catalog's own work waits for them."""


class Driver:
    """The only way from the service to its catalog. Used on the event loop only.

    Every change of the catalog happens inside `event`, or in a piece of a job of `turns`. After
    each of them the driver collects the catalog's actions, carries them out in `turns`, and lets
    the catalog go on with its own work (`Catalog.work`). Questions, which change nothing, may be
    put to `catalog` directly.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.turns = Turns(self._drain)
        self._actions: deque[Action] = deque()
        self._perform: Callable[[Action], None] | None = None
        self._observers: list[Callable[[], None]] = []
        self._acting = self._working = False

    def start(self, perform: Callable[[Action], None]) -> None:
        """Have every action carried out by `perform`, which does not wait for its result."""
        self._perform = perform
        self._drain()

    def observe(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each event. It must be quick and must not change the catalog."""
        self._observers.append(observer)

    @contextmanager
    def event(self) -> Iterator[Catalog]:
        """Yield the catalog, its clock set, for one event; then carry out what follows from it.

        Also after an exception: what the event did before it is done. Events may nest.
        """
        self.catalog.tick(asyncio.get_running_loop().time())
        try:
            yield self.catalog
        finally:
            self._drain()

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do, except what tiers are doing."""
        return self.turns.idle and not self.catalog.busy

    def _drain(self) -> None:
        """Collect the catalog's actions, and give them and its work their turns."""
        self._actions += self.catalog.take_actions()
        if self._actions and not self._acting and self._perform is not None:
            self._acting = True
            self.turns.start(self._act(self._perform))
        if self.catalog.busy and not self._working:
            self._working = True
            self.turns.add(self._work())
        for observer in self._observers:
            observer()

    def _act(self, perform: Callable[[Action], None]) -> Job:
        try:
            while self._actions:
                try:
                    perform(self._actions.popleft())
                except Exception:  # the other actions are carried out all the same
                    logger.exception("an action of the catalog failed")
                yield
        finally:
            self._acting = False

    def _work(self) -> Job:
        try:
            while self.catalog.busy:
                try:
                    if len(self._actions) < _MOST_ACTIONS:
                        self.catalog.work()
                except Exception:  # the catalog has dropped that job: the others go on
                    logger.exception("a job of the catalog failed")
                yield
        finally:
            self._working = False
