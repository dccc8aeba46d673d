# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: asks, plans, and never waits for long."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvhaven.client.scheduler import Lease, Outcome, SchedulerClient
from kvhaven.config import Settings
from kvhaven.devices.base import SKIP
from kvhaven.errors import KVHavenError
from kvhaven.integrations.vllm.metadata import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.integrations.vllm.stats import SchedulerStats
from kvhaven.integrations.vllm.tracker import Offer, Tracker, extras_of, permissions_of
from kvhaven.keys import KeyChain, epoch_root
from kvhaven.types import ChunkKey, NamespaceDigest

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Plans loads and saves for one engine's requests.

    `block_sizes` are the tokens per block of each KV group. Loads are asynchronous (between
    steps) or synchronous (before the forward) as `asynchronous` says. Everything here runs
    in the engine's loop.
    """

    def __init__(
        self,
        settings: Settings,
        client: SchedulerClient,
        *,
        block_sizes: Sequence[int],
        world: int,
        asynchronous: bool,
        lora_fingerprint: Callable[[str], str],
    ) -> None:
        self._settings = settings
        self._client = client
        self._block_sizes = tuple(block_sizes)
        self._world = world
        self._asynchronous = asynchronous
        self._lora_fingerprint = lora_fingerprint
        self._trackers: dict[str, Tracker] = {}
        self._loads: list[LoadJob] = []
        self._epoch = b""
        self._job_ids = itertools.count(1)
        self._saving: dict[ChunkKey, int] = {}
        self._saving_blocks: dict[tuple[int, int], int] = {}
        self._save_jobs: dict[int, SaveJob] = {}
        self._reported: dict[int, int] = {}
        self._new_blocks: set[tuple[int, int]] = set()
        self._loading: set[ChunkKey] = set()
        self._step_waited = 0.0
        self._events: list[KVCacheEvent] = []
        self.stats = SchedulerStats()

    # --- the engine's questions -------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """A request has come: have what it needs promoted while it waits for its turn."""
        tracker = self._track(request)
        if tracker is not None and tracker.permissions.load:
            tracker.extend_keys(request.num_tokens)
            self._client.prefetch(tracker.chain.keys)

    def matched_tokens(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` can be loaded, None: ask again.

        Only chunks that are resident, verified and leased count.
        """
        tracker = self._trackers.get(request.request_id) or self._track(request)
        if tracker is None or not tracker.permissions.load:
            return 0, False
        tracker.extend_keys(request.num_tokens)
        lease = self._lease(tracker, computed)
        if lease is Outcome.PENDING:
            return None, False
        tokens = 0
        if isinstance(lease, Lease):
            tokens = self._worth(tracker, tracker.ticket_chunk + len(lease.extents), computed)
        if tracker.offer is None:
            self.stats.looked_up(tracker, request.num_tokens - computed, max(tokens, 0))
        if not isinstance(lease, Lease) or tokens <= 0:
            self._drop_lease(tracker)
            return 0, False
        tracker.offer = Offer(
            lease, tracker.ticket_chunk, computed, computed + tokens, tracker.chain.chunk_size
        )
        self._client.pledge(lease.ticket)
        return tokens, self._asynchronous

    def allocated(self, request: "Request", blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine made room; `tokens` of the offer are wanted (0: none)."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return
        if tokens == 0:
            self._drop_lease(tracker)
            return
        offer = tracker.offer
        if offer is None:
            raise KVHavenError(
                f"request {request.request_id}: {tokens} tokens are to be loaded, none were offered"
            )
        tracker.replace_blocks(blocks)
        self._note_new(blocks)
        self._loads.append(self._plan_load(tracker, offer, offer.start + tokens))
        self._client.dispatched(offer.lease.ticket)
        size = tracker.chain.chunk_size
        tracker.loaded, tracker.offer, tracker.ticket = offer, None, None
        if self._asynchronous:
            self._loading.update(tracker.chain.keys[offer.start // size : -(-offer.end // size)])

    def plan_step(self, output: "SchedulerOutput") -> StepPlan:
        """Return what the workers do in the step that was just scheduled."""
        self._step_waited = 0.0
        saves: list[SaveJob] = []
        for new in output.scheduled_new_reqs:
            tracker = self._trackers.get(new.req_id)
            if tracker is None:
                continue
            tracker.replace_blocks(new.block_ids)
            self._note_new(new.block_ids)
            self._follow_session(tracker)
            self._plan_save(tracker, new.num_computed_tokens, output, saves)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            tracker = self._trackers.get(request_id)
            if tracker is None:
                continue
            blocks = cached.new_block_ids[index]
            if blocks is not None:
                if request_id in cached.resumed_req_ids:
                    tracker.replace_blocks(blocks)
                else:
                    tracker.append_blocks(blocks)
                self._note_new(blocks)
            self._plan_save(tracker, cached.num_computed_tokens[index], output, saves)
        plan = StepPlan(
            loads=self._loads,
            saves=saves,
            fence=self._take_fence(saves),
            services=self._client.services_in_use,
        )
        self._loads = []
        return plan

    def reported(self, report: StepReport, finished_loads: Iterable[str]) -> None:
        """Take the ranks' report of a step."""
        for job_id, ranks in report.saved.items():
            self._reported[job_id] = self._reported.get(job_id, 0) + ranks
            if self._reported[job_id] >= self._world:
                self._end_save(job_id)
        for request_id in finished_loads:
            self.load_ended(request_id)

    def load_ended(self, request_id: str) -> None:
        """An asynchronous load has ended: equal prefixes need not wait for it any more."""
        tracker = self._trackers.get(request_id)
        if tracker is not None and tracker.loaded is not None:
            self._loading.difference_update(tracker.chain.keys)

    def finished(self, request: "Request") -> None:
        """The request is over (or was aborted); its blocks are fenced, not kept."""
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is not None:
            self._drop_lease(tracker)
            if tracker.loaded is not None:
                self._loading.difference_update(tracker.chain.keys)

    def reset(self) -> None:
        """Start a new epoch: nothing cached before is found by this engine any more.

        Running requests are not saved any further: part of their KV is of the old epoch.
        Nobody else's data is touched.
        """
        self._epoch = os.urandom(16)
        for request_id, tracker in tuple(self._trackers.items()):
            self._drop_lease(tracker)
            del self._trackers[request_id]

    def loaded_offer(self, request: "Request") -> Offer | None:
        """Return what was loaded for a request last."""
        tracker = self._trackers.get(request.request_id)
        return tracker.loaded if tracker is not None else None

    def take_events(self) -> Iterable["KVCacheEvent"]:
        """Return chunks that became available since the last call, as vLLM's KV events."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Release every lease and disconnect."""
        self._client.close()

    # --- loads ------------------------------------------------------------------------------

    def _track(self, request: "Request") -> Tracker | None:
        permissions = permissions_of(request, self._settings)
        if not (permissions.load or permissions.save) or not self._client.namespace:
            return None
        namespace = NamespaceDigest(self._client.namespace)
        root = epoch_root(namespace, self._epoch) if self._epoch else namespace
        extras = extras_of(request, self._lora_fingerprint)
        chain = KeyChain(root, self._settings.chunk_size, extras)
        tracker = Tracker(request, permissions, chain)
        self._trackers[request.request_id] = tracker
        return tracker

    def _lease(self, tracker: Tracker, computed: int) -> Lease | Outcome:
        """Return the lease on what follows the computed tokens; ask for one if there is none."""
        keys, first = tracker.chain.keys, computed // tracker.chain.chunk_size
        if self._worth(tracker, len(keys), computed) <= 0:
            return Outcome.MISS
        if keys[first] in self._loading:
            # Another request is loading this very chunk; the engine's own cache has it soon.
            return Outcome.PENDING
        if tracker.ticket is not None and tracker.ticket_chunk > first:
            self._drop_lease(tracker)
        if tracker.ticket is None:
            tracker.ticket, tracker.ticket_chunk = self._client.ask(keys[first:]), first
        return Outcome.MISS if tracker.ticket is None else self._look_up(tracker.ticket)

    def _worth(self, tracker: Tracker, chunks: int, computed: int) -> int:
        """Return the tokens that `chunks` chunks bring beyond those computed.

        A synchronous load leaves the last token to be computed: the engine needs its logits.
        """
        tokens = int(tracker.request.num_tokens)
        end = min(chunks * tracker.chain.chunk_size, tokens)
        if end == tokens and not self._asynchronous:
            end -= 1
        return end - computed

    def _look_up(self, ticket: int) -> Lease | Outcome:
        """Look at the table; wait for the answer as far as this step's budget goes."""
        left = self._settings.step_budget_ms / 1000 - self._step_waited
        if left <= 0:
            return self._client.look_up(ticket)
        begin = time.perf_counter()
        answer = self._client.wait(ticket, left)
        self._step_waited += time.perf_counter() - begin
        return answer

    def _drop_lease(self, tracker: Tracker) -> None:
        if tracker.ticket is not None:
            self._client.release([tracker.ticket])
        tracker.ticket = tracker.offer = None

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

    # --- saves ------------------------------------------------------------------------------

    def _plan_save(
        self, tracker: Tracker, computed: int, output: "SchedulerOutput", saves: list[SaveJob]
    ) -> None:
        """Plan the save of the chunks that are complete at this step's end."""
        if not tracker.permissions.save:
            return
        request = tracker.request
        decode = self._settings.save_decode_cache
        known = request.num_tokens if decode else request.num_prompt_tokens
        scheduled = output.num_scheduled_tokens.get(request.request_id, 0)
        # Tokens beyond `num_tokens` are speculative or not sampled yet.
        end = min(computed + scheduled, known, request.num_tokens)
        complete = end // tracker.chain.chunk_size
        if complete <= tracker.planned_chunks:
            return
        tracker.extend_keys(end)
        for first, last in self._unplanned_runs(tracker, complete):
            keys = tuple(tracker.chain.keys[first:last])
            chunks = [tracker.chunk_blocks(at, self._block_sizes) for at in range(first, last)]
            job = SaveJob(
                id=next(self._job_ids),
                parent=tracker.chain.keys[first - 1] if first else None,
                keys=keys,
                blocks=tuple(zip(*chunks, strict=True)),
            )
            saves.append(job)
            self._save_jobs[job.id] = job
            self._saving.update(dict.fromkeys(keys, job.id))
        tracker.planned_chunks = complete

    def _unplanned_runs(self, tracker: Tracker, complete: int) -> list[tuple[int, int]]:
        """Return runs of chunks to save: not just loaded, and in no job that is under way."""
        loaded = tracker.loaded
        runs: list[tuple[int, int]] = []
        for chunk in range(tracker.planned_chunks, complete):
            if tracker.chain.keys[chunk] in self._saving:
                continue
            if loaded is not None and (
                loaded.first_chunk <= chunk < loaded.first_chunk + len(loaded.lease.extents)
            ):
                continue
            if runs and runs[-1][1] == chunk:
                runs[-1] = (runs[-1][0], chunk + 1)
            else:
                runs.append((chunk, chunk + 1))
        return runs

    def _note_new(self, blocks: Sequence[Sequence[int]]) -> None:
        if self._saving_blocks:
            for group, ids in enumerate(blocks):
                self._new_blocks.update((group, block) for block in ids)

    def _take_fence(self, saves: list[SaveJob]) -> list[int]:
        """Return jobs of earlier steps whose source blocks were given away since."""
        fence = {
            self._saving_blocks[block] for block in self._new_blocks if block in self._saving_blocks
        }
        self._new_blocks.clear()
        for job in saves:
            for group, chunks in enumerate(job.blocks):
                for block in itertools.chain.from_iterable(chunks):
                    self._saving_blocks[group, block] = job.id
        return sorted(fence)

    def _end_save(self, job_id: int) -> None:
        job = self._save_jobs.pop(job_id, None)
        self._reported.pop(job_id, None)
        if job is None:
            return
        for key in job.keys:
            self._saving.pop(key, None)
        for group, chunks in enumerate(job.blocks):
            for block in itertools.chain.from_iterable(chunks):
                if self._saving_blocks.get((group, block)) == job_id:
                    del self._saving_blocks[group, block]

    def _follow_session(self, tracker: Tracker) -> None:
        """A streaming session may have dropped tokens and brought media: hash it anew."""
        if getattr(tracker.request, "resumable", False):
            extras = extras_of(tracker.request, self._lora_fingerprint)
            tracker.chain = KeyChain(tracker.chain.root, tracker.chain.chunk_size, extras)
            tracker.planned_chunks = 0
