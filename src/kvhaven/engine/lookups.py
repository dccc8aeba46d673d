# SPDX-License-Identifier: Apache-2.0
"""Lookups of the scheduler side: leases on the chunks that a request can load."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvhaven.client.scheduler import (
    NOT_COUNTED,
    Asking,
    LeasedChunks,
    Outcome,
    SchedulerClient,
    Worth,
)
from kvhaven.config import Settings
from kvhaven.engine.prefill_estimate import PrefillEstimate
from kvhaven.engine.request_state import PendingLoad, RequestState
from kvhaven.engine.requests import printable
from kvhaven.protocol import MOST_NAME, UNKNOWN_NODE
from kvhaven.types import ChunkKey

T = TypeVar("T")

ASK_AGAIN_S = 1.0
"""Time for which a miss is cached."""
_MOST_S = 3600.0


class Lookups:
    """Sends one lookup for a request's missing chunks, and answers from the client's table.

    The total wait in a step stays below `step_budget_ms`. If loads are `asynchronous` and the
    engine has a prefix cache (`shared`), a chunk is not loaded by two requests concurrently: the
    second one waits, for `promote_deadline_ms` at most. The last `spare_tokens` tokens of a hit
    are left to the engine to compute. With an `estimate` of prefill times, a request waits no
    longer for tiers than it would take to compute the chunks, unless another node prefilled it.
    """

    def __init__(
        self,
        settings: Settings,
        client: SchedulerClient,
        *,
        asynchronous: bool,
        shared: bool,
        spare_tokens: int = 0,
        estimate: PrefillEstimate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._asynchronous = asynchronous
        self._shared = shared and asynchronous
        self._spare_tokens = spare_tokens
        self._estimate = estimate
        self.configure(settings)
        self._clock = clock
        self._waited_s = 0.0
        self._loading: dict[ChunkKey, str] = {}
        self._keys_loading: dict[str, list[ChunkKey]] = {}

    def configure(self, settings: Settings) -> None:
        """Set the deadlines from now on."""
        self._budget_s = settings.step_budget_ms / 1000
        self._patience_s = settings.promote_deadline_ms / 1000
        self._awaited_s = settings.pd_wait_ms / 1000
        self._compares = settings.load_or_recompute == "auto"

    def new_step(self) -> None:
        """Reset the budget for waiting."""
        self._waited_s = 0.0

    def lease(self, state: RequestState) -> LeasedChunks | Outcome:
        """Return the lease on the chunks after the computed tokens; request it if necessary."""
        keys, first = state.chain.keys, state.computed // state.chunk_size
        if self.gained_tokens(state, len(keys), has_tail=state.tail is not None) <= 0:
            self.count(state)
            return Outcome.MISS
        keys, tail, limited = self.permitted(state)
        if limited and first >= len(keys):
            self.count(state)
            return Outcome.MISS
        missing = keys[first] if first < len(keys) else tail
        if missing is not None and self.another_loads(state, missing):
            return Outcome.PENDING
        if state.lease_id is not None and state.lease_start > first:
            self.drop(state)
        if state.lease_id is None:
            if self._clock() < state.ask_after:
                return Outcome.MISS
            transfer = state.request.transfer
            awaited_s = self._awaited_s if transfer.awaited else None
            if transfer.awaited and not state.pulled:
                state.pulled = True
                self._client.pull_chain(
                    transfer.source or UNKNOWN_NODE, keys[first:], state.chain.tenant, tail
                )
            state.lease_id = self._client.ask(
                keys[first:],
                state.chain.tenant,
                tail,
                awaited_s,
                self.about(state),
                self.worth(state, first, limited=limited),
            )
            state.told = state.told or state.lease_id is not None
            state.lease_start = first
        answer = Outcome.MISS if state.lease_id is None else self._look_up(state.lease_id)
        if answer is Outcome.MISS:
            state.lease_id = state.offer = None
            state.ask_after = self._clock() + ASK_AGAIN_S
        return answer

    def permitted(self, state: RequestState) -> tuple[list[ChunkKey], ChunkKey | None, bool]:
        """Return the chunks, and the tail, that a request may load, and whether these are fewer."""
        keys = state.chain.keys
        most = state.permissions.load_tokens
        if most is None:
            return keys, state.tail, False
        end = (state.computed + most) // state.chunk_size
        if end >= len(keys) and state.computed + most >= int(state.request.num_tokens):
            return keys, state.tail, False
        return keys[:end], None, True

    def worth(self, state: RequestState, first: int, *, limited: bool = False) -> Worth:
        """Return what the service needs to choose between loading and computing."""
        cost = None
        if self._compares and self._estimate is not None and not state.request.transfer.awaited:
            cost = self._estimate.cost(first * state.chunk_size, state.chunk_size)
        if cost is None:
            return Worth(limited=limited)
        return Worth(min(cost.first_s, _MOST_S), min(cost.growth_s, _MOST_S), limited)

    def gained_tokens(self, state: RequestState, chunks: int, *, has_tail: bool = False) -> int:
        """Return the number of tokens that the first `chunks` chunks add to the computed ones.

        `has_tail`: the last of the request's tokens are a tail that can be loaded, too. If loads
        are synchronous, the last token is not loaded: the engine needs its logits. The last token
        alone is never loaded: the engine computes it in any case, and vLLM would look up a prompt
        of one token again and again.
        """
        tokens = int(state.request.num_tokens)
        end = tokens if has_tail else min(chunks * state.chunk_size, tokens)
        spare = self._spare_tokens
        if end == tokens and not self._asynchronous:
            spare = max(spare, 1)
        if end == tokens and state.computed == tokens - 1:
            return 0
        return end - spare - state.computed

    def take(self, state: RequestState, offer: PendingLoad) -> None:
        """Note that the engine loads an offer, so that the ranks will end the lease."""
        self._client.dispatched(offer.lease.lease_id)
        state.loaded, state.offer, state.lease_id = offer, None, None
        if self._shared and not offer.layered:
            name, size = state.request.request_id, offer.chunk_size
            keys = state.chain.keys[offer.start // size : -(-offer.end // size)]
            if offer.tail and state.tail is not None:
                keys = [*keys, state.tail]
            self._keys_loading[name] = keys
            self._loading.update(dict.fromkeys(keys, name))

    def drop(self, state: RequestState) -> None:
        """Release the request's lease, unless it was passed to the ranks."""
        if state.lease_id is not None:
            self._client.release([state.lease_id])
        state.lease_id = state.offer = None

    def load_ended(self, request_id: str) -> None:
        """Note that this request's load ended or was aborted: other requests stop waiting for it.

        After an abort the engine's prefix cache does not get the blocks. The lease stays until
        all ranks have acknowledged it.
        """
        for key in self._keys_loading.pop(request_id, ()):
            if self._loading.get(key) == request_id:
                del self._loading[key]

    def about(self, state: RequestState) -> Asking:
        """Return what the service counts: each request once, with its first lookup."""
        if state.told:
            return NOT_COUNTED
        name = printable(state.request.request_id)[:MOST_NAME]
        return Asking(int(state.request.num_tokens), state.computed, name)

    def count(self, state: RequestState) -> None:
        """Tell the service of a request that needs no lookup, once."""
        if not state.told:
            state.told = self._client.count(self.about(state), state.chain.tenant)

    def another_loads(self, state: RequestState, key: ChunkKey, *, last: bool = False) -> bool:
        """Return whether to wait for another request's load, which gives the engine the chunk.

        With `last`, the load must end with that chunk: the engine cannot continue elsewhere.
        """
        owner = self._loading.get(key)
        if last and owner is not None and self._keys_loading[owner][-1] != key:
            owner = None
        if owner is None or owner == state.request.request_id:
            state.waits_since = None
            return False
        now = self._clock()
        if state.waits_since is None:
            state.waits_since = now
        return now - state.waits_since < self._patience_s

    @property
    def may_wait(self) -> bool:
        """Whether time for waiting is left in this step."""
        return self._waited_s < self._budget_s

    def within_budget(self, wait: Callable[[float], T]) -> T:
        """Call `wait` with the seconds that are left for waiting in this step."""
        left = self._budget_s - self._waited_s
        if left <= 0:
            return wait(0.0)
        begin = time.perf_counter()
        answer = wait(left)
        self._waited_s += time.perf_counter() - begin
        return answer

    def _look_up(self, lease_id: int) -> LeasedChunks | Outcome:
        """Look up the answer in the table; wait for it within this step's budget."""
        return self.within_budget(
            lambda left: (
                self._client.wait(lease_id, left) if left > 0 else self._client.look_up(lease_id)
            )
        )
