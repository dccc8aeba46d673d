# SPDX-License-Identifier: Apache-2.0
"""One rank's loads: from the arena into the engine's blocks."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvhaven.client.rank import MappedArena, RankClient
from kvhaven.devices.base import SKIP, CopyJob, Device
from kvhaven.errors import ArenaError, KVHavenError, UnreportedLoadError
from kvhaven.integrations.vllm.copies import COPY_DEADLINE_S, CopyWatch, settled
from kvhaven.integrations.vllm.metadata import LoadJob
from kvhaven.integrations.vllm.stats import KVHavenStats
from kvhaven.layouts import Layout

logger = logging.getLogger(__name__)

_MAPPING_S = 10.0
"""How long a load waits for the arena of a service that this rank is just attaching to."""
_POLL_S = 0.001


@dataclass
class _Load:
    """A load whose copy runs."""

    job: LoadJob
    copy: CopyJob
    begun: float


class RankLoads:
    """Starts loads, says which have ended, and acknowledges each so that its lease ends.

    Called from the worker's thread; acknowledgements go out when a copy has ended, also
    while the engine is idle. `failed` counts the loads that failed. Where the engine does not
    hear of failures (not `heard`), any method may raise `UnreportedLoadError`.
    """

    def __init__(
        self,
        client: RankClient,
        device: Device,
        layout: Layout,
        watch: CopyWatch,
        rank: int,
        stats: KVHavenStats,
        *,
        heard: bool = True,
    ) -> None:
        self._client = client
        self._device = device
        self._layout = layout
        self._watch = watch
        self._rank = rank
        self._stats = stats
        self._heard = heard
        self._running: list[_Load] = []
        self._unmapped: list[tuple[LoadJob, float]] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self.failed = 0

    @property
    def idle(self) -> bool:
        """Whether no load runs or waits."""
        return not (self._running or self._unmapped)

    @property
    def copies(self) -> list[CopyJob]:
        """The copies under way."""
        return [load.copy for load in self._running]

    def start(self, jobs: Iterable[LoadJob]) -> None:
        """Start loads. The forward that follows waits for those that are not asynchronous."""
        for job in jobs:
            arena = self._client.arena(job.service)
            if arena is not None or not job.places:
                self._start(job, arena)
            elif job.asynchronous:
                self._unmapped.append((job, time.monotonic() + _MAPPING_S))
            else:
                self._start(job, self._await_arena(job.service))

    def poll(self) -> None:
        """Note which loads have ended, and start those whose arena has been mapped."""
        waiting, self._unmapped = self._unmapped, []
        for job, deadline in waiting:
            arena = self._client.arena(job.service)
            if arena is None and time.monotonic() < deadline:
                self._unmapped.append((job, deadline))
            else:
                self._start(job, arena)
        ended = [load for load in self._running if load.copy.done()]
        self._running = [load for load in self._running if load not in ended]
        for load in ended:
            self._end(load)

    def take_finished(self) -> set[str]:
        """Return the requests whose asynchronous loads have ended, well or not."""
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that failed loads left undefined."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Wait for the copies under way."""
        for load in self._running:
            load.copy.wait(COPY_DEADLINE_S)
        self.poll()

    def _await_arena(self, service: str) -> MappedArena | None:
        """Wait for an arena. It is only missing while this rank attaches to a new service."""
        end = time.monotonic() + _MAPPING_S
        while (arena := self._client.arena(service)) is None and time.monotonic() < end:
            time.sleep(_POLL_S)
        return arena

    def _start(self, job: LoadJob, arena: MappedArena | None) -> None:
        begun = time.perf_counter()
        try:
            sources = self._sources(job, arena)
            copy = self._device.load(self._layout, job.blocks[0], sources)
        except Exception as error:  # noqa: BLE001 - an unreported load would hang its request
            if isinstance(error, KVHavenError) or settled(self._device):
                self._client.loaded([job.ticket], job.service)
            self._fail(job, repr(error))
            return
        if not job.asynchronous:
            self._device.forward_waits(copy)
        self._running.append(_Load(job, copy, begun))
        self._watch.watch(copy, lambda: self._client.loaded([job.ticket], job.service))
        if self._device.synchronous:
            self.poll()

    def _sources(self, job: LoadJob, arena: MappedArena | None) -> list[int]:
        """Return the host address of this rank's first shard of each chunk.

        Raises `KVHavenError`.
        """
        if not job.places:
            raise KVHavenError("it could not be planned; the reason was logged before")
        if arena is None:
            raise ArenaError(f"the arena of service {job.service[:8]} is not mapped")
        offset = job.shard_offsets[self._rank]
        span = self._client.span_bytes
        return [arena.address_of(segment, at + offset, span) for segment, at in job.places]

    def _end(self, load: _Load) -> None:
        if load.copy.error:
            self._fail(load.job, load.copy.error)
            return
        if load.job.asynchronous:
            self._finished.add(load.job.request_id)
        blocks = sum(block != SKIP for chunk in load.job.blocks[0] for block in chunk)
        self._stats.add("loaded_bytes", self._layout.shard_bytes(blocks) * self._layout.shards)
        self._stats.add("loaded_seconds", time.perf_counter() - load.begun)

    def _fail(self, job: LoadJob, reason: str) -> None:
        """Tell the engine that these blocks hold nothing. By design it never comes to this.

        An asynchronous load that failed has finished too: the engine waits for both.
        """
        if not self._heard:
            raise UnreportedLoadError(
                f"request {job.request_id}: a load failed ({reason}), and on this platform vLLM "
                "cannot be told; it would go on with KV that was never computed"
            )
        logger.error("request %s: a load failed: %s", job.request_id, reason)
        self._stats.add("failed_loads")
        self.failed += 1
        if job.asynchronous:
            self._finished.add(job.request_id)
        self._failed_blocks.update(
            block for chunk in job.blocks[0] for block in chunk if block != SKIP
        )
