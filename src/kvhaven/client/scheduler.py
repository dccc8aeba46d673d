# SPDX-License-Identifier: Apache-2.0
"""The scheduler's client: requests leases, and answers lookups from a local table."""

import enum
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvhaven.arena.segment import MappedSegment
from kvhaven.client.arena import close_all, close_descriptors, map_arena
from kvhaven.client.link import Link
from kvhaven.errors import ProtocolError
from kvhaven.protocol import (
    MOST_ITEMS,
    MOST_KEYS,
    Acquire,
    Acquired,
    Attached,
    AttachScheduler,
    EndChain,
    EngineSettings,
    Locate,
    Located,
    ModelState,
    OfferChain,
    Prefetch,
    PullChain,
    RankModel,
    Release,
    ServiceMessage,
    SettingsTaken,
    batches,
)
from kvhaven.types import NO_TENANT, ChunkKey, TenantId

logger = logging.getLogger(__name__)

_PROBE_EVERY_S = 1.0
_LATE_BEFORE_SLOW = 2
_LATE_MOST = 1024
"""Most lease ids given up whose answers are still awaited, to measure how late they come."""


class Asking(NamedTuple):
    """A request that a lookup is the first one for: its tokens, those that the engine has, its id.

    The engine's id of the request has at most `MOST_NAME` characters.
    """

    prompt_tokens: int
    computed_tokens: int
    request: str = ""


class Worth(NamedTuple):
    """Limits of a lookup: the time to compute what it asks for (see `Acquire`), 0 if unknown.

    `limited` says that the request loads no more than what is asked for.
    """

    compute_s: float = 0.0
    growth_s: float = 0.0
    limited: bool = False


WHATEVER = Worth()
"""A lookup for chunks that are loaded even if computing them is faster."""
NOT_COUNTED = Asking(0, 0)
"""A lookup that does not count in statistics: a repeated one, or a probe."""


class LeasedChunks(msgspec.Struct, frozen=True):
    """Chunks pinned for a load: `extents` are `(segment, offset)` in the arena of `service`.

    `sources` has a byte per chunk, 0 for memory and 1 for a tier below.
    """

    lease_id: int
    service: str
    extents: Sequence[tuple[int, int]]
    sources: bytes
    offsets: tuple[int, ...]
    """Bytes from an extent's start to each rank's first shard; the rank's other shards follow."""
    tail: bool = False
    """Whether the last chunk is the tail that was asked for."""


class Outcome(enum.Enum):
    """The state of a lookup that has no lease."""

    PENDING = "pending"
    MISS = "miss"


class _Question:
    """The state of one lookup."""

    __slots__ = ("answered", "asked", "chunks", "lease", "patience_s", "places", "promoting")

    def __init__(self, asked: float, chunks: int, patience_s: float) -> None:
        self.asked = asked
        self.chunks = chunks  # without the tail
        self.patience_s = patience_s
        self.answered = False
        self.promoting = False
        self.lease: LeasedChunks | None = None
        self.places = b""  # of a question about places, which has no lease


class SchedulerClient:
    """Leases for one engine. Only `start`, `wait` and `close` block; a thread receives the answers.

    Life of a lease id: `ask`, then `look_up` until it is no longer pending, then either
    `dispatched` (the ranks have it and will end the lease) or `release`. A lease survives the loss
    of the connection, and of the service.
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
        self._attach = attach
        self._lookup_deadline_s = lookup_deadline_s
        self._promote_deadline_s = promote_deadline_s
        self._clock = clock
        self._lease_ids = itertools.count(1)
        self._mapping: list[MappedSegment] = []
        self._lock_bytes: tuple[int, ...] = ()
        self._lock = threading.Lock()
        # All below is guarded by the lock; `service` and figures may be read without it.
        self._news = threading.Condition(self._lock)
        self._questions: dict[int, _Question] = {}
        self._late: dict[int, float] = {}  # time of the request by lease id
        self._offsets: tuple[int, ...] = ()
        self._slow_answers = 0
        self._slow_chunks = self._late_chunks = 0
        self._next_probe = 0.0
        self.service = ""
        self.namespace = b""
        self.models: Mapping[int, ModelState] = {}
        """The content of each rank's model, by rank; replaced as a whole, never changed."""
        self.changed: EngineSettings | None = None
        """Settings that the service has changed since its start; None: none."""
        self.deadlines_missed = 0
        self._link = Link(address, self, ensure_service=ensure_service)

    @property
    def closing(self) -> threading.Event:
        """Set once `close` was called."""
        return self._link.closing

    def start(self, timeout_s: float) -> None:
        """Attach. Raises as `Link.start` does."""
        self._link.start(timeout_s)

    def close(self) -> None:
        """Release all open leases and disconnect."""
        with self._lock:
            open_leases = list(self._questions)
        self.release(open_leases)
        if self._link.close():
            close_all(self._mapping)

    @property
    def responsive(self) -> bool:
        """Whether the service is attached and its last answers came in time."""
        return self._link.up and self._slow_answers < _LATE_BEFORE_SLOW

    @property
    def services_in_use(self) -> frozenset[str]:
        """The services whose arenas may hold a lease, and the present one."""
        with self._lock:
            return frozenset(
                {self.service}
                | {
                    question.lease.service
                    for question in self._questions.values()
                    if question.lease is not None
                }
            )

    def configure(self, lookup_deadline_s: float, promote_deadline_s: float) -> None:
        """Set the deadlines of lookups from now on."""
        self._lookup_deadline_s = lookup_deadline_s
        self._promote_deadline_s = promote_deadline_s

    def settings_taken(self, generation: int) -> None:
        """Tell the service that its changed settings apply."""
        self._link.post(SettingsTaken(generation))

    def prefetch(self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT) -> None:
        """Request the promotion of chunks from the tiers, and mark the chain as used."""
        if keys and self.responsive:
            self._link.post(Prefetch(b"".join(keys[:MOST_KEYS]), tenant))

    def offer_chain(
        self,
        request: str,
        to: str,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> None:
        """Announce a request's chain, and the `tail` behind it, to the node at `to`.

        It stays announced until `end_chain`.
        """
        if (keys or tail is not None) and self.responsive:
            wanted, behind = b"".join(keys[:MOST_KEYS]), _behind(keys, tail)
            self._link.post(OfferChain(request, to, wanted, tenant, behind))

    def pull_chain(
        self,
        source: str,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
    ) -> None:
        """Have the node `source`, which has prefilled this chain, send it; `ask` follows."""
        if (keys or tail is not None) and self.responsive:
            wanted, behind = b"".join(keys[:MOST_KEYS]), _behind(keys, tail)
            self._link.post(PullChain(source, wanted, tenant, behind))

    def end_chain(self, request: str) -> None:
        """Note that a request whose chain was announced has ended."""
        self._link.post(EndChain(request))

    def ask(
        self,
        keys: Sequence[ChunkKey],
        tenant: TenantId = NO_TENANT,
        tail: ChunkKey | None = None,
        promote_s: float | None = None,
        about: Asking = NOT_COUNTED,
        worth: Worth = WHATEVER,
    ) -> int | None:
        """Request a lease on the longest prefix of a tenant's `keys`; return its lease id.

        `tail` is the key of the tail behind them; it is leased if all of `keys` are. The answer may
        wait `promote_s` seconds for promotions (None: `promote_deadline_s`), or less with `worth`.
        `about` is what the service counts.

        Returns None, an immediate miss, if the service is away or slow. Once a second, one request
        still goes to a slow service, to see whether it has recovered.
        """
        now = self._clock()
        if not self.responsive:
            self._probe_if_due(keys, tenant, now)
            return None
        lease_id = next(self._lease_ids)
        patience_s = self._promote_deadline_s if promote_s is None else promote_s
        with self._lock:  # held, so that `detached` releases it only if this connection is lost
            if not self._post_question(lease_id, keys, tenant, tail, patience_s, about, worth):
                return None
            self._questions[lease_id] = _Question(now, len(keys), patience_s)
        return lease_id

    def locate(self, keys: Sequence[ChunkKey], tenant: TenantId = NO_TENANT) -> int | None:
        """Ask which of a tenant's chunks are in memory or in a tier; `located` has the answer.

        Returns None if the service is away or slow, which is then probed as by `ask`.
        """
        if not self.responsive:
            self._probe_if_due(keys, tenant, self._clock())
            return None
        id_ = next(self._lease_ids)
        with self._lock:
            self._questions[id_] = _Question(self._clock(), len(keys), 0.0)
        if not self._link.post(Locate(id_, b"".join(keys[:MOST_KEYS]), tenant)):
            with self._lock:
                self._questions.pop(id_, None)
            return None
        return id_

    def located(self, id_: int, timeout_s: float = 0.0) -> bytes | Outcome:
        """Return the answer to `locate`, a byte for each chunk (see `protocol.Located`).

        Waits at most `timeout_s` seconds for it. Without an answer before the lookup's deadline it
        is a miss. Any answer but that it is pending ends the id.
        """
        with self._lock:
            question = self._questions.get(id_)
            if question is None:
                return Outcome.MISS
            if timeout_s > 0:
                self._news.wait_for(lambda: question.answered, timeout_s)
            if question.answered:
                self._questions.pop(id_, None)
                return question.places or Outcome.MISS
            if self._clock() - question.asked < self._lookup_deadline_s:
                return Outcome.PENDING
            self._questions.pop(id_, None)
            self._note_late(id_, question.asked)
            self._slow_answers += 1
            self.deadlines_missed += 1
            return Outcome.MISS

    def count(self, about: Asking, tenant: TenantId = NO_TENANT) -> bool:
        """Tell the service of a request that needs no lookup; return whether it was told."""
        if not self.responsive:
            return False
        return self._post_question(next(self._lease_ids), (), tenant, None, 0.0, about)

    def look_up(self, lease_id: int) -> LeasedChunks | Outcome:
        """Return the lease, or that it is pending, or that it is a miss, which ends the id."""
        with self._lock:
            question = self._questions.get(lease_id)
            if question is None:
                return Outcome.MISS
            if question.answered:
                if question.lease is None:
                    del self._questions[lease_id]
                    return Outcome.MISS
                return question.lease
            waited = self._clock() - question.asked
            patience = self._lookup_deadline_s + (
                question.patience_s if question.promoting else 0.0
            )
            if waited < patience:
                return Outcome.PENDING
            del self._questions[lease_id]
            self._note_late(lease_id, question.asked)
            self._slow_answers += 1
            self.deadlines_missed += 1
        self._post_release([lease_id])
        return Outcome.MISS

    def wait(self, lease_id: int, timeout_s: float) -> LeasedChunks | Outcome:
        """Wait for the first news of a lease id, at most `timeout_s` seconds; then `look_up`."""
        with self._lock:
            question = self._questions.get(lease_id)
            if question is not None and not (question.answered or question.promoting):
                self._news.wait_for(lambda: question.answered or question.promoting, timeout_s)
        return self.look_up(lease_id)

    def dispatched(self, lease_id: int) -> None:
        """Note that the ranks are told to load; their acknowledgements end the lease."""
        with self._lock:
            self._questions.pop(lease_id, None)

    def release(self, lease_ids: Sequence[int]) -> None:
        """End leases that were not passed to a rank. Unknown lease ids are ignored."""
        with self._lock:
            known = [lease_id for lease_id in lease_ids if self._questions.pop(lease_id, None)]
        if known:
            self._post_release(known)

    def take_skipped(self) -> tuple[int, int]:
        """Return the chunks not loaded since the last call: in slow tiers, and not read in time."""
        if not (self._slow_chunks or self._late_chunks):
            return 0, 0
        with self._lock:
            skipped = self._slow_chunks, self._late_chunks
            self._slow_chunks = self._late_chunks = 0
            return skipped

    # --- called by the link -----------------------------------------------------------------

    def greeting(self) -> AttachScheduler:
        """Return the attach message."""
        return self._attach

    def attached(self, service: str, answer: Attached, descriptors: list[int]) -> None:
        """Store the answer, and map the arena unless it is already mapped under these locks.

        The mapping (its pages stay untouched) proves to the service that this process lives, like a
        rank's mapping.
        """
        if len(answer.offsets) != self._attach.world_size:
            close_descriptors(descriptors)
            raise ProtocolError(
                f"the service sent the shards of {len(answer.offsets)} ranks; "
                f"expected {self._attach.world_size}"
            )
        lock_bytes = tuple(segment.lock_byte for segment in answer.segments)
        if self._mapping and (service, lock_bytes) == (self.service, self._lock_bytes):
            close_descriptors(descriptors)
        else:
            mapped = map_arena(answer.segments, descriptors)
            close_all(self._mapping)
            self._mapping, self._lock_bytes = mapped, lock_bytes
        with self._lock:
            self._late.clear()
            self._slow_answers = 0
            self.changed = None  # what applies now follows
            self.service, self.namespace = service, answer.namespace
            self._offsets = answer.offsets

    def received(self, message: ServiceMessage) -> None:
        """Enter an answer into the table; the lease of a late answer is already released."""
        if isinstance(message, RankModel):
            self.models = {**self.models, message.rank: message.model}
            return
        if isinstance(message, EngineSettings):
            self.changed = message
            return
        if isinstance(message, Located):
            self._enter_places(message)
            return
        if not isinstance(message, Acquired):
            return
        with self._lock:
            question = self._answered(message.lease_id)
            if question is None or question.answered:  # `detached` has released the lease
                return
            question.promoting = True
            self._news.notify_all()
            if message.final:
                question.answered = True
                self._slow_chunks += message.slow
                self._late_chunks += message.late
                question.lease = (
                    LeasedChunks(
                        message.lease_id,
                        self.service,
                        message.extents,
                        message.sources,
                        self._offsets,
                        len(message.extents) > question.chunks,
                    )
                    if message.extents
                    else None
                )

    def _enter_places(self, message: Located) -> None:
        with self._lock:
            question = self._answered(message.id)
            if question is not None and not question.answered:
                question.answered, question.places = True, message.places
                self._news.notify_all()

    def _answered(self, id_: int) -> _Question | None:
        """Note that an answer has come; return its question, None if nobody waits any more."""
        asked = self._late.pop(id_, None)
        question = self._questions.get(id_)
        if question is not None or (
            asked is not None and self._clock() - asked < self._lookup_deadline_s
        ):
            self._slow_answers = 0
        return question

    def detached(self) -> None:
        """Turn open lookups into misses and release them: they will not be answered.

        Leases remain: the service keeps them as long as it sees that this process lives, and
        nothing writes to the memory of a service that has ended.
        """
        with self._lock:
            void = [t for t, question in self._questions.items() if not question.answered]
            for lease_id in void:
                self._questions[lease_id].answered = True
            self._late.clear()
            self._news.notify_all()
        if void:
            self._post_release(void)

    def forked(self) -> None:
        """Renew the lock in a forked child."""
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)

    # --- helpers ----------------------------------------------------------------------------

    def _post_question(
        self,
        lease_id: int,
        keys: Sequence[ChunkKey],
        tenant: TenantId,
        tail: ChunkKey | None,
        patience_s: float,
        about: Asking,
        worth: Worth = WHATEVER,
    ) -> bool:
        wanted, wait_ms = b"".join(keys[:MOST_KEYS]), int(patience_s * 1000)
        behind = _behind(keys, tail)
        return self._link.post(Acquire(lease_id, wanted, wait_ms, tenant, behind, *about, *worth))

    def _probe_if_due(self, keys: Sequence[ChunkKey], tenant: TenantId, now: float) -> None:
        """Send one request to a slow service, once a second."""
        if self._link.up and now >= self._next_probe:
            self._next_probe = now + _PROBE_EVERY_S
            self._probe(keys, tenant, now)

    def _probe(self, keys: Sequence[ChunkKey], tenant: TenantId, now: float) -> None:
        lease_id = next(self._lease_ids)
        with self._lock:
            self._note_late(lease_id, now)
        patience_s = self._promote_deadline_s
        if self._post_question(lease_id, keys[:1], tenant, None, patience_s, NOT_COUNTED):
            self._post_release([lease_id])

    def _note_late(self, lease_id: int, asked: float) -> None:
        self._late[lease_id] = asked
        if len(self._late) > _LATE_MOST:
            del self._late[next(iter(self._late))]

    def _post_release(self, lease_ids: list[int]) -> None:
        for part in batches(lease_ids, MOST_ITEMS):
            self._link.post_reliable(functools.partial(Release, lease_ids=part), self.service)


def _behind(keys: Sequence[ChunkKey], tail: ChunkKey | None) -> bytes:
    """Return the key of the tail in a message, which is only useful with the whole chain."""
    return tail if tail is not None and len(keys) <= MOST_KEYS else b""
