# SPDX-License-Identifier: Apache-2.0
"""The scheduler's client: asks for leases, and answers from a local table."""

import enum
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvhaven.arena.segment import MappedSegment
from kvhaven.client.arena import close_all, close_descriptors, map_arena
from kvhaven.client.link import Link
from kvhaven.protocol import (
    Acquire,
    Acquired,
    Attached,
    AttachScheduler,
    Prefetch,
    Release,
    ServiceMessage,
)
from kvhaven.types import ChunkKey, ShardTable

logger = logging.getLogger(__name__)

_PROBE_EVERY_S = 1.0
_LATE_BEFORE_SLOW = 2


class Lease(msgspec.Struct, frozen=True):
    """Chunks pinned for a load: `extents` are `(segment, offset)` in the arena of `service`.

    `sources` has a byte per chunk, 0 for memory and 1 for a tier below.
    """

    ticket: int
    service: str
    extents: Sequence[tuple[int, int]]
    sources: bytes
    offsets: tuple[int, ...]
    """Where each rank's shard starts in an extent, in bytes."""


class Outcome(enum.Enum):
    """What the table says of a ticket that has no lease to offer."""

    PENDING = "pending"
    MISS = "miss"


class _Question:
    """A ticket's state."""

    __slots__ = ("answered", "asked", "lease", "pledged", "promoting")

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.answered = False
        self.promoting = False
        self.pledged = False
        self.lease: Lease | None = None


class SchedulerClient:
    """Leases for one engine. `look_up` and the others never block; answers come by a thread.

    A ticket's life: `ask`, then `look_up` until it is no longer pending, then either
    `pledge` (the engine was told; the lease survives a reconnect), `dispatched` (the ranks
    have it and will end it), or `release`.
    """

    def __init__(
        self,
        address: str,
        attach: AttachScheduler,
        *,
        lookup_deadline_s: float,
        promote_deadline_s: float,
        ensure_service: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup_deadline_s = lookup_deadline_s
        self._promote_deadline_s = promote_deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._questions: dict[int, _Question] = {}
        self._late: dict[int, float] = {}
        self._tickets = itertools.count(1)
        self._mapping: list[MappedSegment] = []
        self._table = ShardTable(())
        self._slow_answers = 0
        self._last_probe = 0.0
        self.service = ""
        self.namespace = b""
        self.deadlines_missed = 0
        self._link = Link(address, attach, self, ensure_service=ensure_service)

    def start(self, timeout_s: float) -> None:
        """Attach. Raises as `Link.start` does."""
        self._link.start(timeout_s)

    def close(self) -> None:
        """Release what is left and disconnect."""
        with self._lock:
            open_tickets = list(self._questions)
        self.release(open_tickets)
        self._link.close()
        close_all(self._mapping)

    @property
    def responsive(self) -> bool:
        """Whether asking makes sense: attached, and the last answers came in time."""
        return self._link.up and self._slow_answers < _LATE_BEFORE_SLOW

    @property
    def services_in_use(self) -> frozenset[str]:
        """The services in whose arenas a pledged lease may lie, and the present one."""
        with self._lock:
            return frozenset(
                {self.service}
                | {
                    question.lease.service
                    for question in self._questions.values()
                    if question.lease is not None
                }
            )

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Have what is stored below memory promoted, and the chain marked as used."""
        if keys and self.responsive:
            self._link.post(Prefetch(b"".join(keys)))

    def ask(self, keys: Sequence[ChunkKey]) -> int | None:
        """Ask for a lease on the longest prefix of `keys`; return its ticket.

        None when the service is away or slow: that is a miss, at once. Now and then one
        question is sent to a slow service all the same, to see whether it has recovered.
        """
        now = self._clock()
        if not self.responsive:
            if self._link.up and now - self._last_probe > _PROBE_EVERY_S:
                self._last_probe = now
                self._probe(keys, now)
            return None
        ticket = next(self._tickets)
        with self._lock:
            self._questions[ticket] = _Question(now)
        if not self._post_question(ticket, keys):
            with self._lock:
                self._questions.pop(ticket, None)
            return None
        return ticket

    def look_up(self, ticket: int) -> Lease | Outcome:
        """Return the lease, or that it is pending, or that it is a miss (and over)."""
        with self._lock:
            question = self._questions.get(ticket)
            if question is None:
                return Outcome.MISS
            if question.answered:
                if question.lease is None:
                    del self._questions[ticket]
                    return Outcome.MISS
                return question.lease
            waited = self._clock() - question.asked
            patience = self._lookup_deadline_s + (
                self._promote_deadline_s if question.promoting else 0.0
            )
            if waited < patience:
                return Outcome.PENDING
            del self._questions[ticket]
            self._late[ticket] = question.asked
            self._slow_answers += 1
            self.deadlines_missed += 1
        self._post_release([ticket])
        return Outcome.MISS

    def wait(self, ticket: int, timeout_s: float) -> Lease | Outcome:
        """Like `look_up`, but wait for news of a ticket that was not heard of yet."""
        with self._lock:
            question = self._questions.get(ticket)
            if question is not None and not (question.answered or question.promoting):
                self._news.wait_for(lambda: question.answered or question.promoting, timeout_s)
        return self.look_up(ticket)

    def pledge(self, ticket: int) -> None:
        """The engine was promised these tokens: keep the lease whatever the connection does."""
        with self._lock:
            if ticket in self._questions:
                self._questions[ticket].pledged = True

    def dispatched(self, ticket: int) -> None:
        """The ranks are told to load; their acknowledgements end the lease."""
        with self._lock:
            self._questions.pop(ticket, None)

    def release(self, tickets: Sequence[int]) -> None:
        """End leases that no rank was told of. Unknown tickets are fine."""
        with self._lock:
            known = [ticket for ticket in tickets if self._questions.pop(ticket, None)]
        if known:
            self._post_release(known)

    # --- called by the link -----------------------------------------------------------------

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Take the answer; leases that nobody waits for any more are given back."""
        same = service == self.service
        if not same or not self._mapping:
            # Mapping the arena (its pages stay untouched) proves to the service that this
            # process lives, like a rank's mapping does.
            mapped = map_arena(answer.segments, descriptors)
            close_all(self._mapping)
            self._mapping = mapped
        else:
            close_descriptors(descriptors)
        assert answer.table is not None
        with self._lock:
            given_up = list(self._late)
            self._late.clear()
            self._slow_answers = 0
            self.service, self.namespace, self._table = service, answer.namespace, answer.table
        if same and given_up:
            self._post_release(given_up)

    def received(self, message: ServiceMessage) -> None:
        """Enter an answer into the table; a late one that nobody wants has been released."""
        if not isinstance(message, Acquired):
            return
        now = self._clock()
        with self._lock:
            asked = self._late.pop(message.ticket, None)
            if asked is not None:
                in_time = now - asked < self._lookup_deadline_s
                self._slow_answers = 0 if in_time else _LATE_BEFORE_SLOW
                return
            question = self._questions.get(message.ticket)
            if question is None:
                return
            self._slow_answers = 0
            question.promoting = True
            self._news.notify_all()
            if message.final:
                question.answered = True
                question.lease = (
                    Lease(
                        message.ticket,
                        self.service,
                        message.extents,
                        message.sources,
                        self._table.offsets,
                    )
                    if message.extents
                    else None
                )

    def detached(self) -> None:
        """Nothing will be answered: what is not pledged is a miss now."""
        with self._lock:
            for ticket, question in self._questions.items():
                if not question.pledged:
                    self._late[ticket] = question.asked
                    question.answered, question.lease = True, None
            self._news.notify_all()

    # --- helpers ----------------------------------------------------------------------------

    def _post_question(self, ticket: int, keys: Sequence[ChunkKey]) -> bool:
        return self._link.post(
            Acquire(ticket, b"".join(keys), int(self._promote_deadline_s * 1000))
        )

    def _probe(self, keys: Sequence[ChunkKey], now: float) -> None:
        ticket = next(self._tickets)
        with self._lock:
            self._late[ticket] = now
        if self._post_question(ticket, keys[:1]):
            self._post_release([ticket])

    def _post_release(self, tickets: list[int]) -> None:
        self._link.post_reliable(lambda seq: Release(seq, tickets))
