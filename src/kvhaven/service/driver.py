# SPDX-License-Identifier: Apache-2.0
"""Driver of the catalog: passes events in, and executes the resulting actions."""

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
"""With this many unexecuted actions, the catalog's jobs pause."""


class Driver:
    """The service's only access to its catalog; used on the event loop only.

    Every change of the catalog happens inside `event`, or in a piece of a job of `turns`. After
    each change, the driver collects the catalog's actions, executes them in `turns`, and lets the
    catalog continue its own jobs (`Catalog.work`). Queries, which change nothing, may call
    `catalog` directly.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.turns = Turns(self._drain)
        self._actions: deque[Action] = deque()
        self._perform: Callable[[Action], None] | None = None
        self._observers: list[Callable[[], None]] = []
        self._acting = self._working = False

    def start(self, perform: Callable[[Action], None]) -> None:
        """Execute every action with `perform`, which must not wait for the action's result."""
        self._perform = perform
        self._drain()

    def observe(self, observer: Callable[[], None]) -> None:
        """Call `observer` after each event. It must be quick and must not change the catalog."""
        self._observers.append(observer)

    @contextmanager
    def event(self) -> Iterator[Catalog]:
        """Set the catalog's clock and yield it for one event; then collect the actions.

        Actions are also collected after an exception, because the event may have changed the
        catalog before it. Events may nest.
        """
        self.catalog.tick(asyncio.get_running_loop().time())
        try:
            yield self.catalog
        finally:
            self._drain()

    @property
    def idle(self) -> bool:
        """Whether no job or action is left, except for operations that run in tiers."""
        return self.turns.idle and not self.catalog.busy

    def _drain(self) -> None:
        """Collect the catalog's actions, and schedule them and the catalog's jobs."""
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
                except Exception:  # the other actions must still be executed
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
                except Exception:  # the catalog has dropped that job; the others continue
                    logger.exception("a job of the catalog failed")
                yield
        finally:
            self._working = False
