# SPDX-License-Identifier: Apache-2.0
"""Loads: leases, from the scheduler's request to the last rank's acknowledgement."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple

from kvhaven.catalog.actions import Acquisition, LeaseId, SessionId, Update
from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.leases import Reading
from kvhaven.catalog.misses import Gap
from kvhaven.catalog.worth import WAIT_MEASURED, Price
from kvhaven.errors import ProtocolError
from kvhaven.protocol import (
    Acquire,
    Acquired,
    KeyList,
    Loaded,
    Locate,
    Located,
    Prefetch,
    Release,
    batches,
    tail_of,
    tenant_of,
)
from kvhaven.service.accounts import Accounts, Question
from kvhaven.service.driver import Driver
from kvhaven.service.engines import AttachedEngines, AttachedProcess
from kvhaven.service.reuse import ReuseLog
from kvhaven.service.turns import Job
from kvhaven.service.verify import Verifier

logger = logging.getLogger(__name__)

_LEAST_WAIT_S: Final = 0.005
"""Shortest limit of a wait by the time to compute: shorter ones are within the noise."""
_FOUND_EVERY_S: Final = 0.005
"""Shortest interval at which a wait follows how many chunks lookups have found in tiers."""
_FOUND_EVERY: Final = 0.1
"""That interval, as a share of the time waited so far."""
_PIECE: Final = 2048
"""Places of an answer that one piece of a job collects; takes 0.2 ms."""
_LOCATED: Final = 1024
"""Chunks that one piece of a job looks for."""


class Wait(NamedTuple):
    """Wait of a lease for promotions: since when, for how long at most, and what limits it.

    `chunks` is the number of chunks asked for. With a `price`, the wait also ends when the chunks
    from tiers could have been computed.
    """

    session: SessionId
    lease_id: LeaseId
    began: float
    most_s: float
    chunks: int
    price: Price | None

    def left_s(self, reading: Reading | None, now: float) -> float:
        """Return the time until the deadline, or until it has to be computed again."""
        left_s = self.began + self.most_s - now
        if self.price is None or reading is None:
            return left_s
        end = self.chunks if reading.more else reading.end
        times = WAIT_MEASURED if reading.measured else 1.0
        worth_s = max(_LEAST_WAIT_S, times * self.price.seconds(reading.first, end))
        left_s = min(left_s, self.began + worth_s - now)
        pause_s = max(_FOUND_EVERY_S, _FOUND_EVERY * (now - self.began))
        return min(left_s, pause_s) if reading.more else left_s


class Loads:
    """Handler of messages about leases: catalog events in, and the catalog's updates out.

    `spawn` runs a coroutine as a task of the service.
    """

    def __init__(
        self,
        driver: Driver,
        sessions: AttachedEngines,
        verifier: Verifier,
        spawn: Callable[[Coroutine[None, None, None]], object],
        accounts: Accounts,
    ) -> None:
        self._driver = driver
        self._sessions = sessions
        self._verifier = verifier
        self._spawn = spawn
        self._accounts = accounts
        self.reuse = ReuseLog()
        self._questions: dict[tuple[SessionId, LeaseId], Question] = {}
        self._deadlines: dict[tuple[SessionId, LeaseId], asyncio.TimerHandle] = {}

    def prefetch(self, member: AttachedProcess, message: Prefetch) -> None:
        """Touch and promote chunks, without a lease. Raises `ProtocolError` for a rank."""
        _require_scheduler(member)
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        session = member.session
        self._driver.catalog.prefetch(session.digest, keys, tenant, session.id)

    def acquire(self, member: AttachedProcess, message: Acquire) -> None:
        """Lease resident chunks; answer now, or when the promotions have ended.

        With promotions, a first answer that is not final is sent now, and the final one after
        `wait_ms` at the latest. Raises `ProtocolError` for a rank.
        """
        _require_scheduler(member)
        session, lease_id = member.session, LeaseId(message.lease_id)
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        question = None
        if message.prompt_tokens and member.engine.chunk_tokens:
            began = asyncio.get_running_loop().time()
            tokens = message.prompt_tokens, message.computed_tokens
            question = Question(member.engine, keys, *tokens, tenant, message.request, began)
            question.limited = message.limited
        price = Price(message.compute_s, message.growth_s) if message.compute_s else None
        acquisition = self._driver.catalog.acquire(
            session.id, lease_id, session.digest, keys, tenant, tail_of(message.tail), price
        )
        if not acquisition.promoting:
            self._answer(member, acquisition, question)
            return
        self._cancel_deadline(session.id, lease_id)
        now = asyncio.get_running_loop().time()
        if question is not None:
            question.awaited = True
            self._questions[session.id, lease_id] = question
        self._send(member, Acquired(lease_id, False, [], b""))
        # The final answer may follow immediately: the wait may be 0.
        self._wait(Wait(session.id, lease_id, now, message.wait_ms / 1000, len(keys), price))

    def locate(self, member: AttachedProcess, message: Locate) -> Job:
        """Answer which chunks are in memory or in a tier. Raises `ProtocolError` for a rank."""
        _require_scheduler(member)
        keys, tenant = KeyList(message.keys), tenant_of(message.tenant)
        digest, found = member.session.digest, b""
        for part in batches(keys, _LOCATED):
            if found:
                yield
            found += self._driver.catalog.located(digest, part, tenant)
        if member.connection is not None:
            member.connection.send(Located(message.id, found))

    def updated(self, update: Update) -> None:
        """Send the final answer of a lease that waited for promotions."""
        lease = update.session, update.acquisition.lease_id
        if lease not in self._deadlines:  # it was answered, or released, while this had to wait
            return
        self._cancel_deadline(*lease)
        session = self._sessions.get(update.session)
        question = self._questions.pop(lease, None)
        if session is not None and session.scheduler is not None:
            self._answer(session.scheduler, update.acquisition, question)

    def release(self, member: AttachedProcess, message: Release) -> Job:
        """End leases that no rank has received. Raises `ProtocolError` for a rank."""
        _require_scheduler(member)
        for lease_id in message.lease_ids:
            self._cancel_deadline(member.session.id, LeaseId(lease_id))
            self._count(
                self._questions.pop((member.session.id, LeaseId(lease_id)), None), b"", late=True
            )
            self._driver.catalog.release(member.session.id, LeaseId(lease_id))
            yield

    def loaded(self, member: AttachedProcess, message: Loaded) -> Job:
        """Record that a rank's copies have ended. Raises `ProtocolError` for a scheduler."""
        if member.rank is None:
            raise ProtocolError("a scheduler sent Loaded; only ranks load chunks")
        session = member.session
        bytes_ = session.rank_bytes(member.rank)
        for lease_id in message.lease_ids:
            chunks = self._driver.catalog.loaded(session.id, LeaseId(lease_id), member.id)
            member.engine.traffic.loaded_bytes += chunks * bytes_
            yield

    def _wait(self, wait: Wait) -> None:
        """Wait until a lease's deadline, which moves as more of its chunks are found in tiers."""
        reading = None
        if wait.price is not None:
            reading = self._driver.catalog.reading(wait.session, wait.lease_id)
        left_s = wait.left_s(reading, asyncio.get_running_loop().time())
        if left_s <= 0:
            self._finalize(wait.session, wait.lease_id)
            return
        self._deadlines[wait.session, wait.lease_id] = asyncio.get_running_loop().call_later(
            left_s, self._wait, wait
        )

    def _finalize(self, session: SessionId, lease_id: LeaseId) -> None:
        """Answer at the deadline with the chunks that are ready."""
        self._deadlines.pop((session, lease_id), None)
        reading = self._driver.catalog.reading(session, lease_id)
        with self._driver.event() as catalog:
            acquisition = catalog.finalize(session, lease_id)
        missed = reading.end - len(acquisition.chunks) if reading is not None else 0
        known = self._sessions.get(session)
        question = self._questions.pop((session, lease_id), None)
        if known is not None and known.scheduler is not None:
            self._answer(known.scheduler, acquisition, question, late=True, missed=missed)

    def _cancel_deadline(self, session: SessionId, lease_id: LeaseId) -> None:
        timer = self._deadlines.pop((session, lease_id), None)
        if timer is not None:
            timer.cancel()

    def _answer(
        self,
        scheduler: AttachedProcess,
        acquisition: Acquisition,
        question: Question | None,
        *,
        late: bool = False,
        missed: int = 0,
    ) -> None:
        """Send a final answer, after verifying the shards if `verify_memory` is `always`."""
        if self._verifier.blocks_answers and acquisition.chunks:
            self._spawn(
                self._answer_verified(scheduler, acquisition, question, late=late, missed=missed)
            )
            return
        self._verifier.sample(acquisition, scheduler.session.described)
        chunks = acquisition.chunks
        self._count(question, chunks.sources, late=late, slow=acquisition.skipped > 0)
        self._driver.turns.start(self._offer(scheduler, acquisition, len(chunks), missed))

    async def _answer_verified(
        self,
        scheduler: AttachedProcess,
        acquisition: Acquisition,
        question: Question | None,
        *,
        late: bool,
        missed: int,
    ) -> None:
        good = await self._verifier.verify(acquisition, scheduler.session.described)
        sources, slow = acquisition.chunks.sources[:good], acquisition.skipped > 0
        self._count(question, sources, late=late, slow=slow)
        with self._driver.event():
            self._driver.turns.start(self._offer(scheduler, acquisition, good, missed))

    def _offer(
        self, scheduler: AttachedProcess, acquisition: Acquisition, good: int, missed: int
    ) -> Job:
        """Offer the first `good` chunks; a lease without chunks is released."""
        lease_id, chunks = acquisition.lease_id, acquisition.chunks
        if not good:
            self._driver.catalog.release(scheduler.session.id, lease_id)
        places: list[tuple[int, int]] = []
        for first in range(0, good, _PIECE):
            extents = chunks.extents(first, min(good, first + _PIECE))
            places += [(extent.segment, extent.offset) for extent in extents]
            yield
        sources = chunks.sources[:good]
        self._send(
            scheduler, Acquired(lease_id, True, places, sources, acquisition.skipped, missed)
        )

    def _count(
        self, question: Question | None, found: bytes, *, late: bool, slow: bool = False
    ) -> None:
        """Count a lookup with the sources of its final answer, and why that ends where it ends."""
        if question is None:
            return
        gap = None
        if len(found) < len(question.keys):
            catalog, engine = self._driver.catalog, question.engine
            gap = catalog.gap(engine.session.digest, question.keys, len(found), question.tenant)
            if late:
                gap = Gap(Reason.LATE, gap.chunks)
            elif slow:
                gap = Gap(Reason.SLOW_TIER, gap.chunks)
        now = asyncio.get_running_loop().time()
        memory = self._accounts.answered(question, found, gap, now)
        self.reuse.note(question, memory, now)

    @staticmethod
    def _send(scheduler: AttachedProcess, answer: Acquired) -> None:
        """Answer on the scheduler's present connection; without one, no client waits for it."""
        if scheduler.connection is not None:
            scheduler.connection.send(answer)


def _require_scheduler(member: AttachedProcess) -> None:
    if member.rank is not None:
        raise ProtocolError("a rank sent a message about leases that only schedulers send")
