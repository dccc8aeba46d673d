# SPDX-License-Identifier: Apache-2.0
"""Lending of chunks to other nodes: the way of the peer plane's threads to the event loop."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from kvhaven.catalog import Catalog
from kvhaven.catalog.announcer import Announcer, Batch, Cursor
from kvhaven.catalog.loans import Loan
from kvhaven.peers.wire import PeerError
from kvhaven.protocol import batches
from kvhaven.service.arena import Arena
from kvhaven.service.driver import Driver
from kvhaven.tiers.base import Namespace
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId

T = TypeVar("T")

_PIECE: Final = 512
"""Chunks that are looked up in one event: 0.5 ms."""
_ANNOUNCED: Final = 1 << 12
"""Digests after which a message is sent; the last piece of a snapshot may be some thousands."""
_PATIENCE_S: Final = 5.0
"""Longest wait for the event loop; a call that has not begun by then is withdrawn."""


class LoopCalls:
    """Calls from threads to the event loop that this was created on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, work: Callable[[], object]) -> None:
        """Have the loop do some work, unless it is closed. Returns immediately."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def call(self, work: Callable[[], T]) -> T:
        """Have the loop do some work, and return its result. Raises `PeerError` if it is late.

        Either the work is not done, or its result is returned: what it creates cannot get lost.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001  raised in the thread
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:
            raise PeerError("the service has ended") from error
        try:
            return future.result(_PATIENCE_S)
        except TimeoutError as error:
            if future.cancel():
                raise PeerError("the service is too busy") from error
            return future.result()


class ArenaLender:
    """A `Lender` of the chunks in the arena. Its methods are called from threads.

    The event loop does the catalog's part, an event each. Created on the loop.
    """

    def __init__(self, driver: Driver, arena: Arena, announcer: Announcer) -> None:
        self._driver = driver
        self._arena = arena
        self._announcer = announcer
        self._calls = LoopCalls()
        self._changed = threading.Condition()
        self._followers = 0
        """Threads that wait for a change."""
        self._told = 0
        driver.observe(self._observe)

    def has(
        self, namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId
    ) -> list[bool]:
        """Return whether each chunk is in the arena as this tenant's."""
        there: list[bool] = []
        for part in batches(keys, _PIECE):
            there += self._event(functools.partial(_has, namespace, part, tenant))
        return there

    def announced(self, cursor: Cursor, wait_s: float) -> Batch:
        """Return what a follower has to hear next; wait for `wait_s` seconds if that is nothing.

        Changes are read on the event loop, a piece at a time.
        """
        batch = self._announced(cursor)
        if batch.whole and not batch.fresh and not batch.added and not batch.removed:
            with self._changed:
                self._followers += 1
                self._changed.wait_for(lambda: self._announcer.seq != batch.cursor.seq, wait_s)
                self._followers -= 1
            batch = self._announced(batch.cursor)
        added, removed, fresh = [*batch.added], [*batch.removed], batch.fresh
        # Parts of a snapshot are merged, but not with changes, which could concern them.
        while not batch.whole and not removed and len(added) < _ANNOUNCED:
            more = self._announced(batch.cursor)
            if more.fresh or more.removed:
                break
            added += more.added
            batch = more
        return Batch(batch.cursor, batch.whole, fresh, added, removed)

    def _announced(self, cursor: Cursor) -> Batch:
        return self._event(lambda catalog: catalog.announced(cursor, _PIECE))

    def _observe(self) -> None:
        """Wake followers that wait for changes. Called on the event loop after each event."""
        if self._followers and self._announcer.seq != self._told:
            self._told = self._announcer.seq
            with self._changed:
                self._changed.notify_all()

    def lend(self, namespace: NamespaceDigest, key: ChunkKey, tenant: TenantId) -> Loan | None:
        """Pin a chunk; None if it is not here or cannot be pinned now."""
        return self._event(lambda catalog: catalog.lend(namespace, key, tenant))

    def memory(self, loan: Loan) -> memoryview:
        """Return the bytes of a loan's extent."""
        return self._arena.memory(loan.extent)

    def namespaces(self) -> Sequence[Namespace]:
        """Return the namespaces of this node's engines."""
        return self._event(lambda catalog: catalog.namespaces())

    def returned(self, loan: Loan) -> None:
        """End a loan. Returns immediately."""

        def end() -> None:
            with self._driver.event() as catalog:
                catalog.returned(loan.number)

        self._calls.post(end)

    def _event(self, event: Callable[[Catalog], T]) -> T:
        """Have the loop do an event, and return its result. Raises `PeerError` if it is late."""

        def work() -> T:
            with self._driver.event() as catalog:
                return event(catalog)

        return self._calls.call(work)


def _has(
    namespace: NamespaceDigest, keys: Sequence[ChunkKey], tenant: TenantId, catalog: Catalog
) -> list[bool]:
    return catalog.has(namespace, keys, tenant)
