# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of an engine: lookups of requests, plans of loads and saves, bounded waits."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec

from kvhaven.client.scheduler import LeasedChunks, Outcome, SchedulerClient
from kvhaven.config import NEXT_REQUEST, Settings
from kvhaven.engine.adapters import Adapters, CacheName
from kvhaven.engine.epoch import Epoch, HeldBlocks
from kvhaven.engine.jobs import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.engine.load_planner import LoadPlanner
from kvhaven.engine.lookups import Lookups
from kvhaven.engine.part_lookups import PartLookups
from kvhaven.engine.parts import KvPart, one_part
from kvhaven.engine.prefill_estimate import PrefillEstimate, StepShape, StepTimes
from kvhaven.engine.request_state import NO_TURN, NULL_BLOCK, PendingLoad, RequestState
from kvhaven.engine.requests import (
    EVERYTHING,
    NOTHING,
    EngineRequest,
    ExtrasSource,
    KeptState,
    NoExtras,
    Permissions,
    ScheduledRequest,
    permitted,
    printable,
)
from kvhaven.engine.save_planner import SaveEvents, SavePlanner
from kvhaven.engine.session_turns import SessionTurns
from kvhaven.engine.stats import SchedulerStats
from kvhaven.errors import KVHavenError
from kvhaven.protocol import EngineSettings, ModelState

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Plans loads and saves for one engine's requests.

    `block_sizes` are the tokens per block of each KV group, `world_size` the number of ranks. Loads
    are asynchronous (between steps) or synchronous (before the forward), by `asynchronous`.
    `shared` says that the engine has its own prefix cache, `hears_workers` that the ranks' reports
    arrive here, `drops_last_block` that the engine recomputes the last block of a hit,
    `counts_dropped` that it may count KV of dropped tokens when a session goes on, `beside_stores`
    that other connectors of the engine keep KV, whose loads are then not saved. `role` is the
    permissions of the engine's role. `events` receives saved chunks, `extras` creates the source
    of requests' extras.

    `client` is the connection of the first of the KV's `parts`, `more_clients` are those of the
    others. By default there is one part with all groups. With several, loads are asynchronous, and
    tails are neither loaded nor saved.

    Loads of at most `layered_tokens` tokens in a step are offered as synchronous, and run while the
    forward computes. Engines with several KV groups must not ask for that.

    All methods run in the engine's loop. After a method raised, the engine must call `doubt`.
    """

    def __init__(
        self,
        settings: Settings,
        client: SchedulerClient,
        *,
        block_sizes: Sequence[int],
        world_size: int,
        asynchronous: bool,
        shared: bool,
        events: SaveEvents | None = None,
        extras: Callable[[Adapters], ExtrasSource] | None = None,
        role: Permissions = EVERYTHING,
        hears_workers: bool = True,
        drops_last_block: bool = False,
        counts_dropped: bool = False,
        beside_stores: bool = False,
        parts: Sequence[KvPart] = (),
        more_clients: Sequence[SchedulerClient] = (),
        layered_tokens: int = 0,
    ) -> None:
        self._settings = self._own_settings = settings
        self._changed: EngineSettings | None = None
        self._client = client
        self._clients = (client, *more_clients)
        self._parts = tuple(parts) or one_part(block_sizes)
        self._block_sizes = tuple(block_sizes)
        self._asynchronous = asynchronous
        if len(self._parts) != len(self._clients) or (more_clients and not asynchronous):
            raise KVHavenError(
                f"scheduler side: {len(self._parts)} parts of KV with {len(self._clients)} "
                f"connections, asynchronous={asynchronous}; expected a connection for each part, "
                "and asynchronous loads if there are several"
            )
        self._role = role
        self._events = events
        self._prefill = PrefillEstimate()
        self._steps = StepTimes(self._prefill)
        lookups = Lookups(
            settings,
            client,
            asynchronous=asynchronous,
            shared=shared,
            spare_tokens=block_sizes[0] if drops_last_block else 0,
            estimate=self._prefill,
        )
        self._lookups: Lookups | PartLookups = lookups
        if more_clients:
            self._lookups = PartLookups(settings, self._parts, self._clients, lookups)
        self._planner = LoadPlanner(self._parts, block_sizes, asynchronous=asynchronous)
        self._saves = SavePlanner(
            settings,
            block_sizes,
            world_size,
            events,
            parts=self._parts,
            hears_workers=hears_workers,
        )
        self._epoch = Epoch(beside_stores=beside_stores)
        adapters = Adapters(world_size, lambda: client.models, self._distrust)
        self._extras = extras(adapters) if extras is not None else NoExtras()
        self._requests: dict[str, EngineRequest] = {}
        self._states: dict[str, RequestState] = {}
        self._loads: list[LoadJob] = []
        self._first_steps: list[LoadJob] = []
        self._layered_tokens = layered_tokens
        self._layered_left = layered_tokens
        self._offered_layered: set[str] = set()
        """Requests whose last offer was layered, whatever became of it."""
        self._found: dict[str, int] = {}
        """Tokens that the engine's prefix cache had of requests that it asked for in this step, and
        of which this side loads none."""
        self._elsewhere: dict[str, Sequence[int]] = {}
        """Blocks that another of the engine's connectors may be loading, of requests that have
        blocks and do not run yet."""
        self._loading: set[str] = set()
        """Requests whose asynchronous load has not ended."""
        self._failed_loads: dict[int, int] = {}
        self._to_ask_again: set[str] = set()
        """Requests whose load may have failed, until the engine asks for them."""
        self._weights: dict[int, int] = {}
        self._models: Mapping[int, ModelState] = {}
        self._left_alone: set[str] = set()
        self._complaints: set[str] = set()
        self._turns = SessionTurns(self._parts, block_sizes, counts_dropped=counts_dropped)
        self._in_doubt = False
        self.held_blocks: HeldBlocks | None = None if shared else tuple
        """Set by engines that keep KV of finished requests (a prefix cache, `shared`)."""
        self.drop_cached: Callable[[], None] = lambda: None
        """Function by which the engine's prefix cache forgets all blocks. Set by engines that have
        one and find blocks in it whose synchronous load is in progress: if that load fails, what
        they and others computed from its blocks must not be found any more."""
        self.stats = SchedulerStats()

    # --- calls of the engine ----------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Note a new request, and prefetch its chunks from the tiers while it is queued."""
        self._follow_settings()
        state = self._track(request)
        if state is not None and state.permissions.load:
            with self._keying(state):
                state.extend_keys(request.num_tokens)
                # The node that prefilled a request is asked before its chunks are looked up.
                if not (request.transfer.awaited and request.transfer.source):
                    self._prefetch(state)
        if state is not None:
            self._announce(state)

    def matched_tokens(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """Return the number of loadable tokens after the first `computed`; None means ask again.

        Also returns whether the load would be asynchronous. Only chunks that are resident,
        verified and leased count.
        """
        self._follow_weights()
        self._found[request.request_id] = computed
        self._offered_layered.discard(request.request_id)
        failed = self._may_have_failed(request.request_id)
        state = self._states.get(request.request_id) or self._track(request)
        if failed or state is None:
            return (None if failed else 0), False
        state.computed = computed
        with self._keying(state):
            self._follow(state)
            if state.permissions.load:
                state.extend_keys(request.num_tokens)
                # Only prompts have tails, so it is not looked up for a request with output.
                prompt = request.num_tokens == request.num_prompt_tokens
                wanted = state.asks_tail and prompt
                state.tail = state.tail_key(request.num_tokens) if wanted else None
        self._announce(state)
        if not state.permissions.load:
            self._lookups.drop(state)
            return (None if self._waits_for_media(state) else 0), False
        lease = self._lookups.lease(state)
        if lease is Outcome.PENDING:
            return None, False
        tokens = 0
        if isinstance(lease, LeasedChunks):
            end = state.lease_start + len(lease.extents)
            tokens = self._lookups.gained_tokens(state, end, has_tail=lease.tail)
        if not state.counted:
            state.counted = True
            self.stats.looked_up(state, request.num_tokens - computed, max(tokens, 0))
            if isinstance(lease, LeasedChunks) and lease.tail and tokens > 0:
                self.stats.add("tail_hits")
            most = state.permissions.load_tokens
            if most is not None and request.num_tokens - computed > most:
                self.stats.add("skipped_limit_tokens", request.num_tokens - computed - most)
        if not isinstance(lease, LeasedChunks) or tokens <= 0:
            self._lookups.drop(state)
            return 0, False
        state.offer = PendingLoad(
            lease,
            state.lease_start,
            computed,
            computed + tokens,
            state.chunk_size,
            request.num_tokens % state.chunk_size if lease.tail else 0,
            state.search.others if state.search is not None else (),
            layered=not lease.tail and self._offers_layered(request, computed + tokens, tokens),
        )
        return tokens, self._waits(request)

    def allocated(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], tokens: int
    ) -> None:
        """Note that the engine allocated blocks and takes `tokens` tokens of the offer, or none.

        Raises `KVHavenError` if it takes tokens that were not offered; call `never_loaded` then.
        """
        state = self._states.get(request.request_id)
        self._epoch.placed(request.request_id, self._ids_of(blocks))
        if tokens == 0:
            # Another connector may write into these blocks immediately.
            own = state.computed if state is not None else 0
            self._saves.note_new(blocks, request.num_computed_tokens or own)
            if request.request_id in self._found:
                found = self._found[request.request_id]
                self._elsewhere[request.request_id] = self._ids_of(blocks, found)
            if state is not None:
                self._lookups.drop(state)
                state.ask_after = 0.0
            return
        self._found.pop(request.request_id, None)
        self._elsewhere.pop(request.request_id, None)
        offer = state.offer if state is not None else None
        several = len(self._parts) > 1
        end = offer.start + tokens if offer is not None else 0
        if state is None or offer is None or end > offer.end or (several and end < offer.end):
            raise KVHavenError(
                f"request {request.request_id}: {tokens} tokens are to be loaded, but "
                f"{offer.end - offer.start if offer is not None else 'none'} were offered"
            )
        state.replace_blocks(blocks)
        self._saves.note_new(blocks, offer.start)
        self._epoch.extended(request.request_id, self._ids_of(blocks, offer.start))
        jobs = self._planner.plan(state, offer, end)
        asynchronous = self._waits(request)
        self._epoch.load_planned(request.request_id, reported=asynchronous)
        state.ask_after = 0.0
        # These come last and together: from here on the ranks end the lease.
        self._lookups.take(state, offer)
        self._loads += jobs
        if asynchronous:
            self._loading.add(request.request_id)
        elif offer.layered:
            self._layered_left -= tokens
        if asynchronous and state.adapter is not None:
            state.unproven = jobs[0]

    def never_loaded(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], tokens: int
    ) -> None:
        """Report to the engine that a load of `tokens` tokens, which it relies on, failed.

        Only the blocks of these tokens are reported: earlier blocks may be shared with other
        requests, which would fail too.
        """
        state = self._states.get(request.request_id)
        computed = request.num_computed_tokens
        if state is not None:
            computed = state.computed
            self._lookups.drop(state)
        self._saves.note_new(blocks)
        groups = tuple(
            (tuple(ids[computed // size : -(-(computed + tokens) // size)]),)
            for ids, size in zip(blocks, self._block_sizes, strict=True)
        )
        asynchronous = self._waits(request)
        self._epoch.load_planned(request.request_id, reported=asynchronous)
        if asynchronous:
            self._loading.add(request.request_id)
        self._loads.append(LoadJob(request.request_id, 0, "", (), (), groups, asynchronous))

    def plan_step(
        self, scheduled: Sequence[ScheduledRequest], *, cache_in_doubt: bool = False
    ) -> StepPlan:
        """Return the workers' plan for the step that was just scheduled.

        `cache_in_doubt`: the engine's prefix cache may now hold blocks that were never computed.
        Requests that find any block of it are then not saved, until that block is written anew.
        """
        self._lookups.new_step()
        self._epoch.next_step()
        if cache_in_doubt:
            self._epoch.distrust_cache()
        self._follow_weights()
        self._note(scheduled)
        saves: list[SaveJob] = []
        tails: list[SaveJob] = []
        self._measure(scheduled)
        for request_id, blocks, computed, count, starts, states in scheduled:
            self._saves.note_step(request_id)
            if blocks is not None:
                if starts:
                    self._admitted(request_id, blocks, computed)
                else:
                    self._extended(request_id, blocks)
            self._turns.planned(self._requests.get(request_id))
            for job in self._plan_saves(request_id, computed, computed + count, states):
                (tails if job.tail else saves).append(job)
        if self._in_doubt:
            return self.plan_in_doubt()
        runs = {one.request_id for one in scheduled}
        self._loads = [  # the blocks of other requests may be written by this step
            replace(job, layered=False) if job.layered and job.request_id not in runs else job
            for job in self._loads
        ]
        # Tails come first, because the next step of their requests waits for their copies.
        saves = tails + saves
        return self._plan(saves, self._saves.take_fence(saves))

    def plan_in_doubt(self) -> StepPlan:
        """Return a plan after an error: promised loads, no saves, all running saves fenced."""
        self.doubt()
        self._in_doubt = False
        self._loads = [replace(job, layered=False) for job in self._loads]
        return self._plan([], self._saves.fence_all())

    def doubt(self) -> None:
        """Restore a consistent state after one of these methods raised.

        Requests whose recorded blocks or keys may be wrong are neither loaded nor saved, nor are
        the blocks in the engine's prefix cache. The next step waits for all running saves.
        """
        self._in_doubt = True
        self._leave_alone(self._epoch.doubt(self._states, self.held_blocks))

    def reported(self, report: StepReport | None, finished_loads: Iterable[str]) -> None:
        """Process the aggregated reports of a step, and the loads that ended on all ranks."""
        report = report or StepReport()
        finished_loads, loading = list(finished_loads), self._loading.copy()
        empty = not finished_loads and report == StepReport()
        self._steps.reported(time.perf_counter(), empty=empty)
        self._saves.reported(report)
        for request_id in finished_loads:
            self._epoch.loaded_elsewhere(self._elsewhere.pop(request_id, ()))
            self._lookups.load_ended(request_id)
            self._loading.discard(request_id)
        news = {
            rank: count
            for rank, count in report.failed_loads.items()
            if count > self._failed_loads.get(rank, 0)
        }
        if news:
            # Running requests may have computed from undefined blocks, and earlier requests may
            # have left such blocks in the engine's cache; vLLM drops only those of running
            # requests. Loads are not offered again either: vLLM schedules a request whose load
            # failed before those whose loads have ended, and its new load could wait forever for
            # their blocks.
            if not self._asynchronous or self._layered_tokens:
                self.drop_cached()
            self._failed_loads |= news
            self._to_ask_again |= loading & self._requests.keys()
            self._leave_alone(self._epoch.distrust_loads(self._states, self.held_blocks))
        for request_id in finished_loads:
            self._epoch.load_ended(request_id)

    @property
    def service(self) -> str:
        """The name of the node service, by which other nodes know it; empty before the first."""
        return self._client.service

    def finished(self, request: EngineRequest) -> None:
        """Note that a request ended or was aborted; its blocks are fenced, not retained."""
        state = self._states.pop(request.request_id, None)
        if state is not None:
            self._leave(request.request_id, state)
        self._lookups.load_ended(request.request_id)
        self._saves.finished(request.request_id)
        self._epoch.finished(request.request_id)
        self._extras.finished(request.request_id)
        self._requests.pop(request.request_id, None)
        self._left_alone.discard(request.request_id)
        self._offered_layered.discard(request.request_id)
        self._to_ask_again.discard(request.request_id)
        self._elsewhere.pop(request.request_id, None)
        self._turns.finished(request.request_id)
        if not self._requests:
            self._steps.idle()

    def reset(self) -> None:
        """Start a new epoch: this engine no longer finds KV that was cached before.

        Running requests are not saved any further, since part of their KV belongs to the old
        epoch. Data of other engines is not affected.
        """
        trackers, self._states = self._states, {}
        for request_id, state in trackers.items():
            self._leave(request_id, state)
            self._lookups.load_ended(request_id)
        self._epoch.reset(trackers, self.held_blocks)

    def encodings_dropped(self) -> None:
        """Note that the engine dropped its encodings of media, usually after weights changed."""
        self._follow_weights()
        self._extras.encodings_dropped()

    def loaded_offer(self, request: EngineRequest) -> PendingLoad | None:
        """Return the last load of a request."""
        state = self._states.get(request.request_id)
        return state.loaded if state is not None else None

    def take_events(self) -> Iterable[Any]:
        """Return the events that `events` has collected since the last call."""
        return self._events.take() if self._events is not None else ()

    def close(self) -> None:
        """Release all leases and disconnect."""
        self._extras.close()
        for client in self._clients:
            client.close()

    # --- helpers ----------------------------------------------------------------------------

    def _may_have_failed(self, request_id: str) -> bool:
        """Return whether a load of the request may have failed since the last call.

        vLLM schedules requests that hold blocks before all others. One whose load failed gave its
        blocks back, and is still the first of them: if its prompt does not fit beside those behind
        it, none of them would ever run. Without an answer for it, vLLM puts it with the others.
        """
        asked = request_id in self._to_ask_again
        self._to_ask_again.discard(request_id)
        return asked

    def _offers_layered(self, request: EngineRequest, end: int, tokens: int) -> bool:
        """Return whether a load of `tokens` tokens up to token `end` may be layered, and note it.

        It must be short, with all others of the step, and no other load may be before it on the
        way to the device: the step waits for it. The engine computes the last token, and the step
        may not write into its blocks.
        """
        short = tokens <= self._layered_left and not self._loading
        if not short or end >= request.num_tokens or end % self._block_sizes[0]:
            return False
        self._offered_layered.add(request.request_id)
        return True

    def _waits(self, request: EngineRequest) -> bool:
        """Return whether a request's load is asynchronous, as it was offered."""
        return self._asynchronous and request.request_id not in self._offered_layered

    def _track(self, request: EngineRequest) -> RequestState | None:
        """Start to track a request; return None while no service is connected.

        `_follow` grants its permissions once its extras are known. If an error occurs before,
        nothing is permitted.
        """
        self._requests[request.request_id] = request
        self._epoch.began(request.request_id, request.adapter_name)
        self._follow_weights()
        namespace = self._client.namespace
        if not namespace or not self._epoch.known:
            self._extras.note(request)
            return None
        more = [client.namespace for client in self._clients[1:]]
        if not all(more):
            self._extras.note(request)
            return None
        roots = [self._epoch.root(other) for other in more]
        chunk_size = self._settings.chunk_size
        state = RequestState(request, self._epoch.root(namespace), chunk_size, roots)
        transfer = request.transfer
        state.decode_node = transfer.to
        if not more:
            state.saves_tail = self._settings.pd_tail or bool(transfer.to) or transfer.handed
            state.asks_tail = state.saves_tail or transfer.awaited
        self._states[request.request_id] = state
        with self._keying(state):
            self._follow(state)
        return state

    def _prefetch(self, state: RequestState) -> None:
        """Promote a request's chunks; of further parts, those that its last full chunk needs."""
        self._client.prefetch(state.chain.keys, state.chain.tenant)
        most = (state.request.num_tokens - 1) // state.chunk_size
        for part, client, chain in zip(
            self._parts[1:], self._clients[1:], state.chains[1:], strict=True
        ):
            needed = part.chunks(most, 0, state.chunk_size)
            client.prefetch(chain.keys[needed.start : needed.stop], chain.tenant)

    def _ids_of(self, blocks: Sequence[Sequence[int]], tokens: int = 0) -> Sequence[int]:
        """Return the blocks of all groups behind the first `tokens` tokens."""
        if len(blocks) == 1:
            return blocks[0][tokens // self._block_sizes[0] :] if tokens else blocks[0]
        return [
            block
            for ids, size in zip(blocks, self._block_sizes, strict=True)
            for block in ids[tokens // size :]
            if block != NULL_BLOCK
        ]

    def _filled(self, blocks: Sequence[Sequence[int]], computed: int) -> tuple[int, Sequence[int]]:
        """Return the blocks of all groups, those with `computed` tokens first, and their number."""
        if len(blocks) == 1:
            return -(-computed // self._block_sizes[0]), blocks[0]
        sizes = self._block_sizes
        filled = [ids[: -(-computed // size)] for ids, size in zip(blocks, sizes, strict=True)]
        rest = [ids[len(head) :] for ids, head in zip(blocks, filled, strict=True)]
        before = [block for ids in filled for block in ids if block != NULL_BLOCK]
        return len(before), before + [block for ids in rest for block in ids if block != NULL_BLOCK]

    def _leave(self, request_id: str, state: RequestState) -> None:
        """End what a request has begun, after which nothing is loaded or saved for it."""
        state.forbid()
        self._lookups.drop(state)
        if state.announced:
            self._client.end_chain(_chain_name(request_id))

    def _measure(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Note a step, whose duration tells how long a prefill takes."""
        shape, decoding = StepShape(), 0
        for request_id, _, computed, count, *_ in scheduled:
            request = self._requests.get(request_id) if count > 1 else None
            if request is not None and computed < request.num_prompt_tokens:
                shape = shape.plus(computed, count)
            else:
                decoding += 1
        loads = any(not job.asynchronous for job in self._loads)
        self._steps.planned(
            shape._replace(decoding=decoding),
            time.perf_counter(),
            forward=bool(scheduled),
            measured=not loads,
        )
        slow, late = self._client.take_skipped()
        if slow or late:
            self.stats.add("skipped_slow_tokens", slow * self._settings.chunk_size)
            self.stats.add("skipped_late_tokens", late * self._settings.chunk_size)

    def _note(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Note the requests that a step starts or resumes, before its saves are planned.

        This includes uncached requests, and sessions with new input, which are not looked up.

        KV that another of the engine's connectors loads in the same step is not saved: if that load
        fails, only the step's output tells.
        """
        for one in scheduled:
            if not one.starts:
                continue
            request = self._requests.get(one.request_id)
            if request is not None:
                self._extras.note(request, runs=True)
            self._elsewhere.pop(one.request_id, None)
            found = self._found.get(one.request_id, one.computed)
            if found < one.computed and one.blocks is not None:
                self._epoch.distrust_blocks(self._ids_of(one.blocks, found))

    def _follow(self, state: RequestState) -> None:
        """Start a request's key chain once its extras are known, and again after new input.

        Raises `KeyInputError` if the request cannot be hashed, or any error of its extras.
        """
        request = state.request
        turn = request.turn
        if state.turn != turn and (state.turn is NO_TURN or request.resumable):
            state.forbid()
            state.turn = turn
            self._extras.note(request)
            if request.request_id in self._left_alone:
                return
            wanted = permitted(request, self._settings, self._role)
            if wanted.load or wanted.save:
                state.pending, state.wanted = self._extras.begin(request), wanted
        if state.pending is not None:
            known = state.pending.poll()
            if known is not None:
                state.key(known)
        elif state.media is not None and state.permissions != NOTHING:
            state.media.check()

    def _announce(self, state: RequestState) -> None:
        """Announce a request's chunks to the node that decodes it, once its keys are known."""
        if state.announced or not (state.decode_node and state.permissions.save):
            return
        if len(self._parts) > 1:
            return  # the other node looks the chunks up; chains have no windows yet
        with self._keying(state):
            tokens = state.request.num_prompt_tokens
            state.extend_keys(tokens)
            keys = state.chain.keys[: tokens // state.chunk_size]
            tail = None if state.request.resumable else state.tail_key(tokens)
            name = _chain_name(state.request.request_id)
            self._client.offer_chain(name, state.decode_node, keys, state.chain.tenant, tail)
            state.announced = True

    def _waits_for_media(self, state: RequestState) -> bool:
        """Return whether to ask again because media are being hashed, up to a deadline."""
        if state.pending is None or not (state.wanted.load and state.pending.hashing):
            return False
        now = time.monotonic()
        if state.pending_since is None:
            state.pending_since = now
        return now - state.pending_since < self._settings.lookup_deadline_ms / 1000

    def _keying(self, state: RequestState) -> "_Keying":
        """Leave a request uncached if its keys fail; log the first error of each type."""
        return _Keying(state, self._complaints)

    def _follow_settings(self) -> None:
        """Apply the settings that the service has changed, from this request on."""
        changed = self._client.changed
        if changed is self._changed:
            return
        self._changed = changed
        values = {} if changed is None else msgspec.json.decode(changed.values)
        known = {name: value for name, value in values.items() if name in NEXT_REQUEST}
        self._settings = settings = msgspec.structs.replace(self._own_settings, **known)
        self._lookups.configure(settings)
        self._saves.decode_too = settings.save_decode_cache
        for client in self._clients:
            client.configure(
                settings.lookup_deadline_ms / 1000, settings.promote_deadline_ms / 1000
            )
        logger.info("settings changed in the service apply from now on: %s", known)
        if changed is not None:
            self._client.settings_taken(changed.generation)

    def _follow_weights(self) -> None:
        """Start a new epoch if a rank's weights changed: cached KV is of the old weights."""
        models = self._client.models
        if models is self._models:
            return
        self._models = models
        weights = {rank: model.weights for rank, model in models.items() if model.weights}
        if weights != self._weights:
            logger.warning(
                "the model's weights were changed while it runs: this engine no longer finds KV "
                "that was cached before"
            )
            self.reset()
            self._extras.weights_changed()
            self._weights = weights
            # Promised loads that were not sent yet are of the old weights, so they must fail.
            self._loads = [replace(job, places=()) for job in self._loads]

    def _distrust(self, adapter: CacheName) -> None:
        """Exclude KV of an adapter that the engine holds from saves: its content changed."""
        self._extras.adapter_changed()
        self._leave_alone(self._epoch.distrust(self._states, self.held_blocks, adapter))

    def _leave_alone(self, requests: Iterable[str]) -> None:
        """Stop loads and saves of requests until they end."""
        for request_id in requests:
            self._left_alone.add(request_id)
            state = self._states.get(request_id)
            if state is not None:
                state.forbid()
                self._lookups.drop(state)

    def _admitted(self, request_id: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        """Note that a request starts or resumes with `computed` tokens of KV in its blocks."""
        self._saves.note_new(blocks, computed)
        filled, ids = self._filled(blocks, computed)
        doubtful = self._turns.doubtful(self._requests.get(request_id), blocks, computed)
        current = self._epoch.admitted(request_id, ids, filled, doubtful)
        state = self._states.get(request_id)
        if state is not None:
            state.replace_blocks(blocks)
            if not current:
                state.forbid()
            if state.unproven is not None:
                self._first_steps.append(state.unproven)
                state.unproven = None

    def _extended(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """Note additional blocks of a running request."""
        self._saves.note_new(blocks)
        self._epoch.extended(request_id, self._ids_of(blocks))
        state = self._states.get(request_id)
        if state is not None:
            state.append_blocks(blocks)

    def _plan_saves(
        self, request_id: str, begin: int, end: int, states: Sequence[KeptState]
    ) -> list[SaveJob]:
        state = self._states.get(request_id)
        if state is not None:
            state.step_begin = begin
        if state is None or not (state.permissions.save or state.wanted.save):
            return []
        if not (states or self._saves.due(state, end) or self._saves.tail_due(state, end)):
            return []
        with self._keying(state):
            self._follow(state)
            # Its blocks may be shared with a request that has other media under the same
            # identifiers, so nothing is saved until that is ruled out.
            if state.permissions.save and (state.media is None or state.media.settled):
                return self._saves.plan_tail(state, end) + self._saves.plan(state, end, states)
        return []

    def _plan(self, saves: list[SaveJob], fence: list[int]) -> StepPlan:
        loads, self._loads = self._loads, []
        self._found.clear()
        self._layered_left = self._layered_tokens
        first_steps, self._first_steps = self._first_steps, []
        # The ranks own the leases of these loads now, so their service is still in use.
        services = self._client.services_in_use | {job.service for job in loads}
        for client in self._clients[1:]:
            services |= client.services_in_use
        failed, weights = dict(self._failed_loads), dict(self._weights)
        return StepPlan(loads, saves, fence, services, failed, weights, first_steps)


def _chain_name(request_id: str) -> str:
    """Return the name of a request's chain, whose length is limited."""
    return sha256(request_id.encode(errors="surrogatepass")).hexdigest()


class _Keying:
    """Context in which any error leaves a request uncached.

    It is entered for every waiting request in each step, which `contextmanager` is too slow for.
    """

    __slots__ = ("_complaints", "_state")

    def __init__(self, state: RequestState, complaints: set[str]) -> None:
        self._state = state
        self._complaints = complaints

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        """Log the first error of each type, and end it."""
        if not isinstance(error, Exception):
            return False
        self._state.forbid()
        reason = type(error).__name__
        if reason not in self._complaints:
            self._complaints.add(reason)
            name = printable(self._state.request.request_id)
            logger.warning("request %s is not cached: %s (more are not logged)", name, error)
        return True
