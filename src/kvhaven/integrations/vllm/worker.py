# SPDX-License-Identifier: Apache-2.0
"""The connector's worker side: copies between the device and the arena, and reports."""

import logging
import queue
import threading
import time
from dataclasses import dataclass

from kvhaven.client.rank import Grant, RankClient, Reservation
from kvhaven.config import Settings
from kvhaven.devices.base import SKIP, CopyJob, Device
from kvhaven.errors import ArenaError, KVHavenError
from kvhaven.integrations.vllm.metadata import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.integrations.vllm.stats import KVHavenStats
from kvhaven.layouts import PagedLayout

logger = logging.getLogger(__name__)

_COPY_DEADLINE_S = 60.0


@dataclass
class _Save:
    """A save whose copy runs; `job_id` is reported when it has ended."""

    job_id: int
    copy: CopyJob
    grants: list[Grant]
    begun: float


@dataclass
class _Load:
    """An asynchronous load whose copy runs."""

    job: LoadJob
    copy: CopyJob
    begun: float


class WorkerSide:
    """One rank's copies. Called by the model runner, in the order of `vllm-facts`.

    `layout` describes this rank's KV tensors, `rank` its place in the engine's world.
    """

    def __init__(
        self,
        settings: Settings,
        client: RankClient,
        device: Device,
        layout: PagedLayout,
        rank: int,
    ) -> None:
        self._settings = settings
        self._client = client
        self._device = device
        self._layout = layout
        self._rank = rank
        self._plan: StepPlan | None = None
        self._reservations: list[tuple[SaveJob, Reservation | None]] = []
        self._saves: dict[int, _Save] = {}
        self._loads: list[_Load] = []
        self._ended_saves: queue.SimpleQueue[_Save] = queue.SimpleQueue()
        self._report = StepReport()
        self._failed_blocks: set[int] = set()
        self.stats = KVHavenStats()
        self._finisher: threading.Thread | None = None
        self._to_finish: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        if not device.synchronous:
            # Nothing steps when the engine is idle: commits go out from this thread.
            self._finisher = threading.Thread(
                target=self._finish_saves, name="kvhaven-saves", daemon=True
            )
            self._finisher.start()

    # --- in the order of a step -------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Take the step's plan, before the forward: fence, and ask for the saves' space.

        The fence comes first: blocks whose save still reads them were given away.
        """
        self._plan = plan
        self._collect_ended()
        fenced = [self._saves[job].copy for job in plan.fence if job in self._saves]
        if fenced:
            self._device.fence(fenced)
        self._reservations = [
            (job, self._client.reserve(job.parent, job.keys)) for job in plan.saves
        ]

    def start_loads(self) -> None:
        """Start this step's loads; synchronous ones are waited for by the forward."""
        plan = self._plan
        if plan is None or not plan.loads:
            return
        loads, plan.loads = plan.loads, []
        for job in loads:
            self._start_load(job)

    def save(self) -> None:
        """Copy the step's complete chunks into the arena, after the forward."""
        plan = self._plan
        if plan is None:
            return
        reservations, self._reservations = self._reservations, []
        deadline = time.monotonic() + self._settings.save_deadline_ms / 1000
        for job, reservation in reservations:
            self._start_save(job, reservation, deadline)
        if not self._loads and not self._saves:
            self._client.keep_arenas(plan.services)

    def finished_loads(self) -> set[str]:
        """Return the requests whose asynchronous loads have ended since the last call."""
        ended = [load for load in self._loads if load.copy.done()]
        if ended:
            self._loads = [load for load in self._loads if not load.copy.done()]
        for load in ended:
            self._end_load(load.job, load.copy, load.begun)
        return {load.job.request_id for load in ended}

    def failed_blocks(self) -> set[int]:
        """Return blocks that a failed load left undefined, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> StepReport | None:
        """Return which saves have ended since the last call."""
        self._collect_ended()
        if not self._report.saved:
            return None
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Wait for running copies, report them, and let the service and the device go."""
        for load in self._loads:
            load.copy.wait(_COPY_DEADLINE_S)
        self.finished_loads()
        for save in tuple(self._saves.values()):
            save.copy.wait(_COPY_DEADLINE_S)
        if self._finisher is not None:
            self._to_finish.put(None)
            self._finisher.join(timeout=5.0)
        self._device.close()
        self._client.close()

    # --- loads ------------------------------------------------------------------------------

    def _start_load(self, job: LoadJob) -> None:
        begun = time.perf_counter()
        try:
            arena = self._client.arena(job.service)
            if arena is None:
                raise ArenaError(f"the arena of service {job.service[:8]} is not mapped")
            offset = job.shard_offsets[self._rank]
            chunk_bytes = self._layout.payload_bytes(len(job.blocks[0][0]))
            sources = [
                arena.address_of(segment, at + offset, chunk_bytes) for segment, at in job.places
            ]
            copy = self._device.load(self._layout, job.blocks[0], sources)
        except KVHavenError as error:
            self._fail_load(job, str(error))
            self._client.loaded([job.ticket], job.service)
            return
        if job.asynchronous:
            self._loads.append(_Load(job, copy, begun))
        else:
            self._device.forward_waits(copy)
            if not copy.wait(_COPY_DEADLINE_S):
                self._fail_load(job, "the copy did not end")
                return
            self._end_load(job, copy, begun)

    def _end_load(self, job: LoadJob, copy: CopyJob, begun: float) -> None:
        self._client.loaded([job.ticket], job.service)
        if copy.error:
            self._fail_load(job, copy.error)
            return
        blocks = sum(block != SKIP for chunk in job.blocks[0] for block in chunk)
        self.stats.add("loaded_bytes", self._layout.payload_bytes(blocks))
        self.stats.add("loaded_seconds", time.perf_counter() - begun)

    def _fail_load(self, job: LoadJob, reason: str) -> None:
        """Tell the engine that these blocks hold nothing. It never comes to this by design."""
        logger.error("request %s: a load failed: %s", job.request_id, reason)
        self.stats.add("failed_loads")
        self._failed_blocks.update(
            block for chunk in job.blocks[0] for block in chunk if block != SKIP
        )

    # --- saves ------------------------------------------------------------------------------

    def _start_save(self, job: SaveJob, reservation: Reservation | None, deadline: float) -> None:
        granted: list[Grant | None] = [None] * len(job.keys)
        if reservation is not None:
            granted = self._client.grants(reservation, deadline)
        wanted = [
            (grant, blocks)
            for grant, blocks in zip(granted, job.blocks[0], strict=True)
            if grant is not None
        ]
        if reservation is None:
            self.stats.add("skipped_saves", len(job.keys))
        if not wanted:
            self._count_ended(job.id)
            return
        grants = [grant for grant, _ in wanted]
        begun = time.perf_counter()
        try:
            copy = self._device.store(
                self._layout,
                [blocks for _, blocks in wanted],
                [grant.address for grant in grants],
            )
        except KVHavenError as error:
            logger.warning("a save failed: %s", error)
            self._client.abort(grants)
            self._count_ended(job.id)
            return
        save = _Save(job.id, copy, grants, begun)
        if copy.done():
            self._commit(save)
            self._count_ended(job.id)
        else:
            self._saves[job.id] = save
            self._to_finish.put(save)

    def _finish_saves(self) -> None:
        while (save := self._to_finish.get()) is not None:
            while not save.copy.wait(_COPY_DEADLINE_S):
                logger.warning("a save's copy has run for over %d s", _COPY_DEADLINE_S)
            self._commit(save)
            self._ended_saves.put(save)

    def _commit(self, save: _Save) -> None:
        if save.copy.error:
            logger.error("a save failed: %s", save.copy.error)
            self._client.abort(save.grants)
            return
        self._client.commit(list(zip(save.grants, save.copy.checksums, strict=True)))
        blocks = self._settings.chunk_size // self._layout.block_size
        self.stats.add("saved_bytes", self._layout.payload_bytes(blocks) * len(save.grants))
        self.stats.add("saved_seconds", time.perf_counter() - save.begun)
        self.stats.add("saved_chunks", len(save.grants))

    def _collect_ended(self) -> None:
        while not self._ended_saves.empty():
            save = self._ended_saves.get()
            self._saves.pop(save.job_id, None)
            self._count_ended(save.job_id)

    def _count_ended(self, job_id: int) -> None:
        self._report.saved[job_id] = self._report.saved.get(job_id, 0) + 1
