# SPDX-License-Identifier: Apache-2.0
"""Lookups of engines whose KV has several parts: one number of chunks that all parts have."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvhaven.client.scheduler import LeasedChunks, Outcome, SchedulerClient
from kvhaven.config import Settings
from kvhaven.engine.lookups import ASK_AGAIN_S, Lookups
from kvhaven.engine.parts import KvPart, usable_chunks
from kvhaven.engine.request_state import PartLoad, PartSearch, PendingLoad, RequestState

_MOST_ATTEMPTS: Final = 4
"""Maximum number of candidates that a lookup leases; chunks may be evicted meanwhile."""
_KNOWN: Final = bytes([0, 1]) + bytes(254)
"""Whether a place of chunks is wanted, see `protocol.Located`: in memory or in a tier, ..."""
_ANYWHERE: Final = bytes([0, 1, 1]) + bytes(253)
"""... or perhaps in a shared tier."""


class PartLookups:
    """Lookups for the `parts` of an engine, of which the first one needs the whole prefix.

    `first` has the budget for waiting and the loads in progress; `clients` are those of the parts.
    If the windows of the largest possible hit are in memory, that hit is leased. Otherwise all
    parts are asked which chunks they have, and the largest number of chunks is leased after which a
    request can continue. Only if every part's lease is complete, it is offered; otherwise the next
    smaller number is tried. Loads are asynchronous, and end before the last token: its window would
    begin before that of the token after it.

    All leases together wait for `promote_deadline_ms` at most. After that, a lease has the chunks
    that are ready, and smaller numbers are still tried: each takes an exchange with the service,
    within the lookup's deadline, and smaller hits may be in memory.
    """

    def __init__(
        self,
        settings: Settings,
        parts: Sequence[KvPart],
        clients: Sequence[SchedulerClient],
        first: Lookups,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = tuple(parts)
        self._has_state = any(part.is_state for part in parts)
        self._clients = tuple(clients)
        self._first = first
        self._clock = clock
        self._patience_s = settings.promote_deadline_ms / 1000

    def configure(self, settings: Settings) -> None:
        """Set the deadlines from now on."""
        self._first.configure(settings)
        self._patience_s = settings.promote_deadline_ms / 1000

    def new_step(self) -> None:
        """Reset the budget for waiting."""
        self._first.new_step()

    def lease(self, state: RequestState) -> LeasedChunks | Outcome:
        """Return the first part's lease once all parts have theirs; `state.search` has the others.

        The lease covers the chunks from the computed tokens to the end of the hit.
        """
        size = state.chunk_size
        first, most = state.computed // size, (state.request.num_tokens - 1) // size
        if state.permissions.load_tokens is not None:
            most = min(most, (state.computed + state.permissions.load_tokens) // size)
        if most * size <= state.computed:
            self._first.count(state)
            return Outcome.MISS
        wanted = most - 1 if self._has_state else first
        if self._first.another_loads(state, state.chain.keys[wanted], last=self._has_state):
            return Outcome.PENDING
        search = state.search
        if search is not None and (search.computed, search.most) != (state.computed, most):
            self.drop(state)
            search = None
        if search is None:
            if self._clock() < state.ask_after:
                return Outcome.MISS
            search = state.search = PartSearch(state.computed, most, self._clock())
            self._lease_largest(state, search)
        answer = self._go_on(state, search)
        if answer is Outcome.MISS:
            self.drop(state)
            state.ask_after = self._clock() + ASK_AGAIN_S
        return answer

    def gained_tokens(self, state: RequestState, chunks: int, *, has_tail: bool = False) -> int:  # noqa: ARG002 - tails have no windows
        """Return the number of tokens that the first `chunks` chunks add to the computed ones."""
        return chunks * state.chunk_size - state.computed

    def take(self, state: RequestState, offer: PendingLoad) -> None:
        """Note that the engine loads an offer, so that the ranks will end its leases."""
        for other in offer.others:
            self._clients[other.part].dispatched(other.lease.lease_id)
        self._first.take(state, offer)
        state.search = None

    def drop(self, state: RequestState) -> None:
        """Release the request's leases, unless they were passed to the ranks."""
        search, state.search, state.offer = state.search, None, None
        if search is not None:
            for ids in (search.located, search.leases):
                self._release(ids)

    def load_ended(self, request_id: str) -> None:
        """Note that this request's load ended or was aborted: other requests stop waiting."""
        self._first.load_ended(request_id)

    # --- helpers ----------------------------------------------------------------------------

    def _go_on(self, state: RequestState, search: PartSearch) -> LeasedChunks | Outcome:
        """Do what can be done now."""
        if search.found is not None:
            return search.found
        while True:
            if not search.leases:
                if search.present is None and not self._locate(state, search):
                    return Outcome.PENDING
                if not self._try(state, search):
                    return Outcome.MISS
            leases = self._leased(search)
            if leases is None:
                return Outcome.PENDING
            lease = self._complete(state, search, leases)
            if lease is not None:
                return lease
            self._release(search.leases)
            search.attempts += search.present is not None
            if search.attempts >= _MOST_ATTEMPTS:
                return Outcome.MISS

    def _lease_largest(self, state: RequestState, search: PartSearch) -> None:
        """Request the largest hit if all its windows are in memory; its prefix may be in a tier."""
        if not self._first.may_wait:
            return
        self._plan(state, search, search.most)
        search.leases.append(None)
        self._ask_from(state, search, 1)
        if self._all_whole(search, 1):
            search.leases[0] = self._ask(state, search, 0)
            state.junction = search.most
        else:
            self._release(search.leases)

    def _locate(self, state: RequestState, search: PartSearch) -> bool:
        """Ask all parts which chunks they have; return whether all have answered."""
        first = search.computed // state.chunk_size
        if not search.located:
            search.located = [
                client.locate(chain.keys[first : search.most], chain.tenant)
                for client, chain in zip(self._clients, state.chains, strict=True)
            ]
            search.places = [Outcome.PENDING] * len(self._parts)
        for index, (client, id_) in enumerate(zip(self._clients, search.located, strict=True)):
            if search.places[index] is Outcome.PENDING:
                search.places[index] = (
                    Outcome.MISS
                    if id_ is None
                    else self._first.within_budget(functools.partial(client.located, id_))
                )
        if Outcome.PENDING in search.places:
            return False
        search.present = [_presence(p, first, search.most) for p in search.places]
        search.known = [_presence(p, first, search.most, _KNOWN) for p in search.places]
        found = search.present[0]
        state.junction = next((c for c, has in enumerate(found) if not has), search.most)
        return True

    def _try(self, state: RequestState, search: PartSearch) -> bool:
        """Request leases for the best candidate; return False if there is none.

        After the first one, a candidate of which all windows are in known places is preferred:
        there are many chunks at which a shared tier might have windows.
        """
        present, size = search.present, state.chunk_size
        assert present is not None
        search.end = 0
        if search.attempts:
            search.end = self._usable(search, [present[0], *search.known[1:]], size)
        search.end = search.end or self._usable(search, present, size)
        if not search.end:
            self._first.count(state)
            return False
        self._plan(state, search, search.end)
        self._ask_from(state, search, 0)
        return None not in search.leases

    def _plan(self, state: RequestState, search: PartSearch, end: int) -> None:
        size = state.chunk_size
        search.end = end
        search.ranges = [part.chunks(end, search.computed, size) for part in self._parts]

    def _ask_from(self, state: RequestState, search: PartSearch, first: int) -> None:
        """Request the leases of the parts from `first` on."""
        for part in range(first, len(self._parts)):
            search.leases.append(self._ask(state, search, part))

    def _ask(self, state: RequestState, search: PartSearch, part: int) -> int | None:
        """Request a part's lease. The first part's is the one that is counted."""
        chain, wanted, client = state.chains[part], search.ranges[part], self._clients[part]
        keys = chain.keys[wanted.start : wanted.stop]
        left_s = max(0.0, search.began + self._patience_s - self._clock())
        if part:
            return client.ask(keys, chain.tenant, promote_s=left_s)
        about = self._first.about(state)
        lease_id = client.ask(keys, chain.tenant, promote_s=left_s, about=about)
        state.told = state.told or lease_id is not None
        state.lease_start = wanted.start
        return lease_id

    def _usable(
        self, search: PartSearch, present: Sequence[Sequence[bool]], chunk_size: int
    ) -> int:
        return usable_chunks(
            self._parts,
            present,
            most=search.most,
            computed=search.computed,
            chunk_size=chunk_size,
        )

    def _leased(self, search: PartSearch) -> list[LeasedChunks | None] | None:
        """Return the leases of all parts; None while one is pending.

        A lease that the service refused is None.
        """
        leases: list[LeasedChunks | None] = []
        for part in range(len(self._parts)):
            answer = self._lease_of(search, part)
            if answer is Outcome.PENDING:
                return None
            leases.append(answer if isinstance(answer, LeasedChunks) else None)
        return leases

    def _all_whole(self, search: PartSearch, first: int) -> bool:
        """Return whether the parts from `first` on have all their chunks, now."""
        for part in range(first, len(self._parts)):
            answer = self._lease_of(search, part)
            if not isinstance(answer, LeasedChunks):
                return False
            if len(answer.extents) < len(search.ranges[part]):
                return False
        return True

    def _lease_of(self, search: PartSearch, part: int) -> LeasedChunks | Outcome:
        lease_id = search.leases[part]
        if lease_id is None:
            return Outcome.MISS
        wait = functools.partial(self._clients[part].wait, lease_id)
        return self._first.within_budget(wait)

    def _complete(
        self, state: RequestState, search: PartSearch, leases: Sequence[LeasedChunks | None]
    ) -> LeasedChunks | None:
        """Return the first part's lease if all have all chunks; note what is missing otherwise."""
        whole: list[LeasedChunks] = []
        for index, (wanted, lease) in enumerate(zip(search.ranges, leases, strict=True)):
            got = len(lease.extents) if lease is not None else 0
            if lease is not None and got == len(wanted):
                whole.append(lease)
                continue
            missing = wanted.start + got
            if index == 0 and lease is not None:  # a refused lease says nothing about the prefix
                state.junction = missing
            if search.present is not None:
                search.present[index][missing] = search.known[index][missing] = False
        if len(whole) < len(leases):
            return None
        search.found = whole[0]
        search.others = tuple(
            PartLoad(index, wanted.start, lease)
            for index, (wanted, lease) in enumerate(zip(search.ranges, whole, strict=True))
            if index
        )
        return search.found

    def _release(self, ids: list[int | None]) -> None:
        for client, id_ in zip(self._clients, ids, strict=False):
            if id_ is not None:
                client.release([id_])
        ids.clear()


def _presence(
    places: bytes | Outcome, first: int, most: int, wanted: bytes = _ANYWHERE
) -> list[bool]:
    """Return for each chunk whether its place is wanted; those before `first` are not needed."""
    found = list(map(bool, places.translate(wanted))) if isinstance(places, bytes) else []
    found = found[: most - first]
    return [True] * first + found + [False] * (most - first - len(found))
