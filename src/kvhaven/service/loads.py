# SPDX-License-Identifier: Apache-2.0
"""Loads: leases from the scheduler's question to the last rank's acknowledgement."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import Acquisition, SessionId, Ticket, Update
from kvhaven.errors import ProtocolError
from kvhaven.protocol import Acquire, Acquired, KeyList, Loaded, Prefetch, Release, tenant_of
from kvhaven.service.sessions import Member, Sessions
from kvhaven.service.turns import Job, Turns
from kvhaven.service.verify import Verifier

logger = logging.getLogger(__name__)

_PIECE: Final = 2048
"""Places of an answer that are made in one go: 0.2 ms."""


class Loads:
    """Turns messages about leases into the catalog's events, and its updates into answers.

    `changed` is called after the catalog was told of something outside of a message;
    `spawn` runs a coroutine as a task of the service.
    """

    def __init__(
        self,
        catalog: Catalog,
        sessions: Sessions,
        verifier: Verifier,
        turns: Turns,
        *,
        spawn: Callable[[Coroutine[None, None, None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._verifier = verifier
        self._turns = turns
        self._spawn = spawn
        self._changed = changed
        self._deadlines: dict[tuple[SessionId, Ticket], asyncio.TimerHandle] = {}

    def prefetch(self, member: Member, message: Prefetch) -> None:
        """Promote and touch, for no ticket."""
        _require_scheduler(member)
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        session = member.session
        self._catalog.prefetch(session.digest, keys, tenant, session.id)

    def acquire(self, member: Member, message: Acquire) -> None:
        """Lease what is resident; answer now, or when what is promoted has come."""
        _require_scheduler(member)
        session, ticket = member.session, Ticket(message.ticket)
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        acquisition = self._catalog.acquire(session.id, ticket, session.digest, keys, tenant)
        if not acquisition.promoting:
            self._answer(member, acquisition)
            return
        self._cancel_deadline(session.id, ticket)
        self._deadlines[session.id, ticket] = asyncio.get_running_loop().call_later(
            message.wait_ms / 1000, self._settle, session.id, ticket
        )
        self._send(member, Acquired(ticket, False, [], b""))

    def updated(self, update: Update) -> None:
        """A lease that waited for promotions is final now."""
        self._cancel_deadline(update.session, update.acquisition.ticket)
        session = self._sessions.get(update.session)
        if session is not None and session.scheduler is not None:
            self._answer(session.scheduler, update.acquisition)

    def release(self, member: Member, message: Release) -> Job:
        """End leases that no rank was told of."""
        _require_scheduler(member)
        for ticket in message.tickets:
            self._cancel_deadline(member.session.id, Ticket(ticket))
            self._catalog.release(member.session.id, Ticket(ticket))
            yield

    def loaded(self, member: Member, message: Loaded) -> Job:
        """Note that a rank's copies have ended."""
        if member.rank is None:
            raise ProtocolError("a scheduler loads no chunks")
        if member.session.namespace is None:
            return  # a ticket of before the service was started anew
        for ticket in message.tickets:
            self._catalog.loaded(member.session.id, Ticket(ticket), member.id)
            yield

    def _settle(self, session: SessionId, ticket: Ticket) -> None:
        """The deadline has passed: what is ready is the answer."""
        self._deadlines.pop((session, ticket), None)
        acquisition = self._catalog.settle(session, ticket)
        known = self._sessions.get(session)
        if known is not None and known.scheduler is not None:
            self._answer(known.scheduler, acquisition)
        self._changed()

    def _cancel_deadline(self, session: SessionId, ticket: Ticket) -> None:
        timer = self._deadlines.pop((session, ticket), None)
        if timer is not None:
            timer.cancel()

    def _answer(self, scheduler: Member, acquisition: Acquisition) -> None:
        """Send a final answer, after the check of resident shards that the settings ask for."""
        if self._verifier.blocks_answers and acquisition.chunks:
            self._spawn(self._answer_verified(scheduler, acquisition))
            return
        self._verifier.sample(acquisition, scheduler.session.table)
        self._turns.start(self._offer(scheduler, acquisition, len(acquisition.chunks)))

    async def _answer_verified(self, scheduler: Member, acquisition: Acquisition) -> None:
        good = await self._verifier.verify(acquisition, scheduler.session.table)
        self._turns.start(self._offer(scheduler, acquisition, good))
        self._changed()

    def _offer(self, scheduler: Member, acquisition: Acquisition, good: int) -> Job:
        """Offer the first `good` chunks; a lease without any is none."""
        ticket, chunks = acquisition.ticket, acquisition.chunks
        if not good:
            self._catalog.release(scheduler.session.id, ticket)
        places: list[tuple[int, int]] = []
        for first in range(0, good, _PIECE):
            extents = chunks.extents(first, min(good, first + _PIECE))
            places += [(extent.segment, extent.offset) for extent in extents]
            yield
        self._send(scheduler, Acquired(ticket, True, places, chunks.sources[:good]))

    @staticmethod
    def _send(scheduler: Member, answer: Acquired) -> None:
        """Answer on the connection that the scheduler has now; without one nobody waits."""
        if scheduler.connection is not None:
            scheduler.connection.send(answer)


def _require_scheduler(member: Member) -> None:
    if member.rank is not None:
        raise ProtocolError("only a scheduler asks for leases")
