# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: asks, plans, and never waits for long."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvhaven.client.scheduler import Lease, Outcome, SchedulerClient
from kvhaven.config import Settings
from kvhaven.devices.base import SKIP
from kvhaven.errors import KVHavenError
from kvhaven.integrations.vllm.epoch import Epoch
from kvhaven.integrations.vllm.events import StoredEvents
from kvhaven.integrations.vllm.lookups import Lookups
from kvhaven.integrations.vllm.metadata import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.integrations.vllm.saves import Saves
from kvhaven.integrations.vllm.stats import SchedulerStats
from kvhaven.integrations.vllm.tracker import NOTHING, Offer, Tracker, extras_of, permissions_of
from kvhaven.keys import KeyChain

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Plans loads and saves for one engine's requests.

    `block_sizes` are the tokens per block of each KV group, `world` the number of ranks. Loads
    are asynchronous (between steps) or synchronous (before the forward) as `asynchronous`
    says. `shared` says that the engine has a prefix cache of its own, `events` that KV events
    are wanted, `hears_workers` that the ranks' reports come here. Everything here runs in the
    engine's loop.
    """

    def __init__(
        self,
        settings: Settings,
        client: SchedulerClient,
        *,
        block_sizes: Sequence[int],
        world: int,
        asynchronous: bool,
        shared: bool,
        events: bool,
        lora_fingerprint: Callable[[str], str],
        hears_workers: bool = True,
    ) -> None:
        self._settings = settings
        self._client = client
        self._block_sizes = tuple(block_sizes)
        self._asynchronous = asynchronous
        self._lora_fingerprint = lora_fingerprint
        self._events = StoredEvents(settings.chunk_size) if events else None
        self._lookups = Lookups(settings, client, asynchronous=asynchronous, shared=shared)
        self._saves = Saves(settings, block_sizes, world, self._events, hears_workers=hears_workers)
        self._epoch = Epoch()
        self._trackers: dict[str, Tracker] = {}
        self._loads: list[LoadJob] = []
        self._failed_loads: dict[int, int] = {}
        self._left_alone: set[str] = set()
        self._complaints: set[str] = set()
        self.block_pool: Any = None
        """The engine's block pool, once it is bound."""
        self.stats = SchedulerStats()

    # --- the engine's questions -------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """A request has come: have what it needs promoted while it waits for its turn."""
        tracker = self._track(request)
        if tracker is not None and tracker.permissions.load:
            with self._keying(tracker):
                tracker.extend_keys(request.num_tokens)
                self._client.prefetch(tracker.chain.keys, tracker.chain.tenant)

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` can be loaded, None: ask again.

        Only chunks that are resident, verified and leased count.
        """
        tracker = self._trackers.get(request.request_id) or self._track(request)
        if tracker is None:
            return 0, False
        tracker.computed = computed
        with self._keying(tracker):
            tracker.follow_session(self._lora_fingerprint)
            tracker.extend_keys(request.num_tokens)
        if not tracker.permissions.load:
            self._lookups.drop(tracker)
            return 0, False
        lease = self._lookups.lease(tracker)
        if lease is Outcome.PENDING:
            return None, False
        tokens = 0
        if isinstance(lease, Lease):
            tokens = self._lookups.worth(tracker, tracker.ticket_chunk + len(lease.extents))
        if not tracker.counted:
            tracker.counted = True
            self.stats.looked_up(tracker, request.num_tokens - computed, max(tokens, 0))
        if not isinstance(lease, Lease) or tokens <= 0:
            self._lookups.drop(tracker)
            return 0, False
        tracker.offer = Offer(
            lease, tracker.ticket_chunk, computed, computed + tokens, tracker.chain.chunk_size
        )
        return tokens, self._asynchronous

    def allocated(self, request: "Request", blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine made room; `tokens` of the offer are wanted (0: none).

        Raises `KVHavenError` when tokens are wanted that were never offered; `never_loaded` is
        the way out then.
        """
        tracker = self._trackers.get(request.request_id)
        if tokens == 0:
            # Another connector may write into these blocks at once.
            own = tracker.computed if tracker is not None else 0
            self._saves.note_new(blocks, request.num_computed_tokens or own)
            if tracker is not None:
                self._lookups.drop(tracker)
                tracker.ask_after = 0.0
            return
        offer = tracker.offer if tracker is not None else None
        if tracker is None or offer is None or offer.start + tokens > offer.end:
            raise KVHavenError(
                f"request {request.request_id}: {tokens} tokens are to be loaded, "
                f"{offer.end - offer.start if offer is not None else 'none'} were offered"
            )
        tracker.replace_blocks(blocks)
        self._saves.note_new(blocks, offer.start)
        self._epoch.extended(request.request_id, blocks[0][offer.start // self._block_sizes[0] :])
        self._loads.append(self._plan_load(tracker, offer, offer.start + tokens))
        self._lookups.take(tracker, offer)
        tracker.ask_after = 0.0

    def never_loaded(self, request: "Request", blocks: Sequence[Sequence[int]]) -> None:
        """The engine counts on a load that could not be planned: have it told that it failed."""
        tracker = self._trackers.get(request.request_id)
        if tracker is not None:
            self._lookups.drop(tracker)
        self._saves.note_new(blocks)
        groups = tuple((tuple(ids),) for ids in blocks)
        self._loads.append(LoadJob(request.request_id, 0, "", (), (), groups, self._asynchronous))

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Return what the workers do in the step that was just scheduled."""
        self._lookups.new_step()
        saves: list[SaveJob] = []
        for new in output.scheduled_new_reqs:
            self._admitted(new.req_id, new.block_ids, new.num_computed_tokens)
            saves += self._plan_saves(new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks, computed = cached.new_block_ids[index], cached.num_computed_tokens[index]
            if blocks is not None:
                if request_id in cached.resumed_req_ids:
                    self._admitted(request_id, blocks, computed)
                else:
                    self._extended(request_id, blocks)
            saves += self._plan_saves(request_id, computed, output)
        return self._plan(saves, self._saves.take_fence(saves))

    def plan_in_doubt(self) -> StepPlan:
        """Return a plan when `plan_step` failed: loads as promised, no saves, all fenced.

        Requests whose blocks may not be known rightly any more are not saved.
        """
        for tracker in self._trackers.values():
            tracker.permissions = NOTHING
        return self._plan([], self._saves.fence_all())

    def reported(self, report: StepReport, finished_loads: Iterable[str]) -> None:
        """Take the ranks' report of a step."""
        self._saves.reported(report)
        for request_id in finished_loads:
            self._lookups.load_ended(request_id)
        news = {
            rank: count
            for rank, count in report.failed_loads.items()
            if count > self._failed_loads.get(rank, 0)
        }
        if news:
            # What runs now may have been computed from blocks that hold nothing. Nor is it
            # offered loads again: vLLM keeps a request whose load failed ahead of those whose
            # loads have ended, and a new load of it could wait for their blocks for good.
            self._failed_loads |= news
            self._left_alone.update(self._trackers)
            for tracker in self._trackers.values():
                tracker.permissions = NOTHING

    def finished(self, request: "Request") -> None:
        """The request is over (or was aborted); its blocks are fenced, not kept."""
        tracker = self._trackers.pop(request.request_id, None)
        self._lookups.load_ended(request.request_id)
        self._epoch.finished(request.request_id)
        self._left_alone.discard(request.request_id)
        if tracker is not None:
            self._lookups.drop(tracker)

    def reset(self) -> None:
        """Start a new epoch: nothing cached before is found by this engine any more.

        Running requests are not saved any further: part of their KV is of the old epoch.
        Nobody else's data is touched.
        """
        trackers, self._trackers = self._trackers, {}
        self._epoch.reset(trackers, self.block_pool)
        for request_id, tracker in trackers.items():
            self._lookups.drop(tracker)
            self._lookups.load_ended(request_id)

    def loaded_offer(self, request: "Request") -> Offer | None:
        """Return what was loaded for a request last."""
        tracker = self._trackers.get(request.request_id)
        return tracker.loaded if tracker is not None else None

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """Return chunks that became available since the last call, as vLLM's KV events."""
        return self._events.take() if self._events is not None else ()

    def close(self) -> None:
        """Release every lease and disconnect."""
        self._client.close()

    # --- helpers ----------------------------------------------------------------------------

    def _track(self, request: "Request") -> Tracker | None:
        """Begin to follow a request; None while there is no service."""
        namespace = self._client.namespace
        if not namespace:
            return None
        permissions = permissions_of(request, self._settings)
        if request.request_id in self._left_alone:
            permissions = NOTHING
        root, size = self._epoch.root(namespace), self._settings.chunk_size
        tracker = Tracker(request, permissions, KeyChain(root, size))
        self._trackers[request.request_id] = tracker
        if permissions.load or permissions.save:
            with self._keying(tracker):
                extras = extras_of(request, self._lora_fingerprint)
                tracker.chain = KeyChain(root, size, extras)
        return tracker

    @contextmanager
    def _keying(self, tracker: Tracker) -> Iterator[None]:
        """Let a request go uncached whose tokens or extras cannot be keyed; say why, once."""
        try:
            yield
        except KVHavenError as error:
            tracker.permissions = NOTHING
            reason = type(error).__name__
            if reason not in self._complaints:
                self._complaints.add(reason)
                name = tracker.request.request_id
                logger.warning("request %s is not cached: %s (more are not logged)", name, error)

    def _admitted(self, request_id: str, blocks: Sequence[Sequence[int]], computed: int) -> None:
        """A request starts or resumes, with `computed` tokens of its KV in its blocks."""
        self._saves.note_new(blocks, computed)
        filled = -(-computed // self._block_sizes[0])
        current = self._epoch.admitted(request_id, blocks[0], filled)
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tracker.replace_blocks(blocks)
            if not current:
                tracker.permissions = NOTHING

    def _extended(self, request_id: str, blocks: Sequence[Sequence[int]]) -> None:
        """A running request got further blocks."""
        self._saves.note_new(blocks)
        self._epoch.extended(request_id, blocks[0])
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            tracker.append_blocks(blocks)

    def _plan_saves(
        self, request_id: str, computed: int, output: "SchedulerOutput"
    ) -> list[SaveJob]:
        tracker = self._trackers.get(request_id)
        if tracker is None or not tracker.permissions.save:
            return []
        scheduled = output.num_scheduled_tokens.get(request_id, 0)
        if not self._saves.due(tracker, computed + scheduled):
            return []
        with self._keying(tracker):
            tracker.follow_session(self._lora_fingerprint)
            return self._saves.plan(tracker, computed + scheduled)
        return []

    def _plan(self, saves: list[SaveJob], fence: list[int]) -> StepPlan:
        loads, self._loads = self._loads, []
        # The leases of these loads are the ranks' now; their service is still in use.
        services = self._client.services_in_use | {job.service for job in loads}
        return StepPlan(loads, saves, fence, services, dict(self._failed_loads))

    def _plan_load(self, tracker: Tracker, offer: Offer, end: int) -> LoadJob:
        """Plan the copy of tokens `offer.start` to `end` into the request's blocks.

        Blocks before the start are the engine's own, possibly shared: never written.
        """
        size = tracker.chain.chunk_size
        first, last = offer.start // size, -(-end // size)
        groups = []
        for group, block_size in enumerate(self._block_sizes):
            start_block, end_block = offer.start // block_size, -(-end // block_size)
            per_chunk = size // block_size
            ids = tracker.blocks[group]
            groups.append(
                tuple(
                    tuple(
                        ids[at] if start_block <= at < end_block else SKIP
                        for at in range(chunk * per_chunk, (chunk + 1) * per_chunk)
                    )
                    for chunk in range(first, last)
                )
            )
        skipped = first - offer.first_chunk
        return LoadJob(
            request_id=tracker.request.request_id,
            ticket=offer.lease.ticket,
            service=offer.lease.service,
            places=tuple(offer.lease.extents[skipped : skipped + last - first]),
            shard_offsets=offer.lease.offsets,
            blocks=tuple(groups),
            asynchronous=self._asynchronous,
        )
