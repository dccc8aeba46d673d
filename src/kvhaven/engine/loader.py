# SPDX-License-Identifier: Apache-2.0
"""Loads of one rank: copies from the arena into the engine's blocks."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvhaven.client.rank import RankClient
from kvhaven.devices.base import CopyJob, Device, FinishedCopy
from kvhaven.engine.copies import (
    COPY_DEADLINE_S,
    LOST_S,
    CopyWatch,
    JoinedCopy,
    all_ended,
    parts_of,
)
from kvhaven.engine.jobs import LoadJob
from kvhaven.engine.layered import LayerGroups
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.parts import block_lists
from kvhaven.engine.stats import Stats
from kvhaven.errors import ArenaError, KVHavenError, UnreportedLoadError
from kvhaven.layouts import Layout, PagedLayout

logger = logging.getLogger(__name__)


@dataclass
class _Load:
    """Load whose copy is running."""

    job: LoadJob
    copy: CopyJob
    begun: float
    unread: set[str] = field(default_factory=set)
    """Layers of a layered load whose part of the copy the forward does not wait for yet."""


class Loader:
    """Starts loads, reports which have ended, and acknowledges each, which ends its lease.

    The engine relies on every load that it was promised. Each load therefore ends in one of
    three ways, whatever error occurs: its bytes are in place before anything reads them, it is
    reported as failed in the step that would read them, or `UnreportedLoadError` ends the engine.
    The error is raised if the engine does not receive failures (not `heard`), if a copy can neither
    be ordered nor waited for, and if the engine receives failures only of requests that wait for
    their load (`by_request`) and this one does not.

    If they may be `layered`, short loads are copied in groups of layers, and the forward waits for
    each group where it reads the first of its layers. It tells so by `wait_for_layer`, a hook that
    not all forwards and layers call. A load is layered only after all layers have called it once,
    and fails if one did not after all; then none is layered any more.

    Called from the worker's thread. Acknowledgements are sent when a copy has ended, also while
    the engine is idle. `failed` counts the loads that failed.
    """

    def __init__(
        self,
        client: RankClient,
        device: Device,
        layout: Layout,
        watch: CopyWatch,
        rank: int,
        stats: Stats,
        model: LoadedModel,
        chunk_size: int,
        *,
        heard: bool = True,
        by_request: bool = False,
        layered: bool = False,
    ) -> None:
        self._client = client
        self._device = device
        self._layered = layered and not device.synchronous
        self.use(layout)
        self._watch = watch
        self._rank = rank
        self._stats = stats
        self._model = model
        self._chunk_size = chunk_size
        self._heard = heard
        self._by_request = by_request
        self._running: list[_Load] = []
        self._lost: list[CopyJob] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self.failed = 0
        self.weights_known = True
        """Whether the scheduler side planned for the model's current weights."""

    def use(self, layout: Layout) -> None:
        """Copy to the KV tensors of this layout from now on."""
        self.layout = layout
        self._groups: LayerGroups | None = None
        self._silent: set[str] = set()
        """Layers that have not called `wait_for_layer` yet."""
        if self._layered and isinstance(layout, PagedLayout):
            self._groups = LayerGroups(layout)
            self._silent = set(self._groups.of_layer)

    @property
    def idle(self) -> bool:
        """Whether no load is running. A lost copy may run forever."""
        return not (self._running or self._lost)

    @property
    def copies(self) -> list[CopyJob]:
        """The running copies."""
        return [load.copy for load in self._running]

    def runs(self, job: LoadJob) -> bool:
        """Return whether a load's copy is running."""
        return any(load.job is job for load in self._running)

    def start(self, job: LoadJob, *, layer_hooks: bool = False) -> None:
        """Start a load, or fail it. The forward waits for synchronous loads.

        `layer_hooks` says that it will call `wait_for_layer` for each layer.
        """
        begun = time.perf_counter()
        groups = self._groups if layer_hooks and job.layered and not self._silent else None
        try:
            copy = self._copy(job, self._sources(job), groups)
        except Exception as error:  # noqa: BLE001 - a promised load is done, or reported
            self._client.loaded([job.lease_id], job.service)  # no copy was started
            self.fail(job, repr(error))
            return
        load = _Load(job, copy, begun, set(groups.of_layer) if groups is not None else set())
        self._running.append(load)
        self._watch.watch(copy, lambda: self._client.loaded([job.lease_id], job.service))
        if not job.asynchronous and not load.unread:
            self._order(load, parts_of(copy))
        if self._device.synchronous:
            self.poll()

    def wait_for_layer(self, layer: str) -> None:
        """Make the forward wait for the KV of a layer, before it reads that.

        Raises `UnreportedLoadError` if it can neither be ordered nor waited for.
        """
        if self._groups is None:
            return
        self._silent.discard(layer)
        group = self._groups.of_layer.get(layer)
        for load in self._running:
            if load.unread:
                parts = parts_of(load.copy)  # a layer that is unknown may read any other's KV
                self._order(load, parts if group is None else parts[group : group + 1])
                load.unread.discard(layer)

    def fail(self, job: LoadJob, reason: str) -> None:
        """Report a load as failed: its blocks are undefined, and no copy into them is running.

        A failed asynchronous load is also reported as finished, since the engine waits for that.
        Raises `UnreportedLoadError` if the engine does not receive failures.
        """
        if not self._heard:
            raise UnreportedLoadError(
                f"request {job.request_id}: a load failed ({reason}), and this engine does not "
                "receive load failures; it would continue with KV that was never computed"
            )
        if self._by_request and not job.asynchronous:
            raise UnreportedLoadError(
                f"request {job.request_id}: a load failed ({reason}) after its request had "
                "continued, and this engine has several KV groups: it cannot be told"
            )
        logger.error("request %s: a load failed: %s", job.request_id, reason)
        self._stats.add("failed_loads")
        self.failed += 1
        if job.asynchronous:
            self._finished.add(job.request_id)
        self._failed_blocks |= job.written
        if self._by_request:
            self._failed_requests.add(job.request_id)

    def poll(self) -> None:
        """Process the loads whose copies have ended."""
        for load in tuple(self._running):
            if load.copy.done():
                self._running.remove(load)
                self._end(load)
            elif load.copy.error and time.perf_counter() - load.begun > LOST_S:
                self._running.remove(load)  # keeps its lease: the device may still read there
                self._lost.append(load.copy)
                self.fail(load.job, load.copy.error)

    def end_step(self, first_steps: Iterable[LoadJob]) -> None:
        """Fail loads whose undefined KV this step used; later reports would come too late.

        Waits for synchronous loads of this step: if their failure became known in a later step,
        the engine would have sampled from undefined KV. `first_steps` are loads of earlier steps
        whose requests computed in this one; they fail if their adapter has changed.
        """
        for load in tuple(self._running):
            if not load.job.asynchronous:
                self._await_copy(load)
        self.poll()
        for job in first_steps:
            if not self._is_current(job):
                ended = replace(job, asynchronous=False)  # its end was reported before
                self.fail(ended, "its adapter was reloaded with other content")

    def take_finished(self) -> set[str]:
        """Return the requests whose asynchronous loads have succeeded or failed."""
        finished, self._finished = self._finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that failed loads left undefined."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return the requests whose loads have failed."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def finish(self, deadline: float) -> bool:
        """Wait for copies until `deadline` (`time.monotonic`); return whether all have ended."""
        ended = all_ended(self.copies, deadline)
        self.poll()
        return ended and all(copy.done() for copy in self._lost)

    def _copy(self, job: LoadJob, sources: Sequence[int], groups: LayerGroups | None) -> CopyJob:
        """Submit a load's copies: of its full chunks, and of its tail, or of groups of layers.

        Raises if none was begun.
        """
        blocks = block_lists(job.blocks)
        parts: list[tuple[Layout, Sequence[Sequence[int]], Sequence[int]]]
        if groups is not None:
            parts = [
                (
                    group.layout,
                    blocks,
                    [
                        source + group.before * len(ids)
                        for source, ids in zip(sources, blocks, strict=True)
                    ],
                )
                for group in groups.groups
            ]
        elif job.tail:
            of_tail = self.layout.of_tail(job.tail, self._chunk_size)
            parts = [(self.layout, blocks[:-1], sources[:-1]), (of_tail, blocks[-1:], sources[-1:])]
        else:
            return self._device.load(self.layout, blocks, sources)
        copies: list[CopyJob] = []
        for layout, chunks, places in parts:
            if not places:
                continue
            try:
                copies.append(self._device.load(layout, chunks, places))
            except Exception as error:
                if not copies:
                    raise
                copies.append(FinishedCopy(error=repr(error)))
        return JoinedCopy(copies)

    def _order(self, load: _Load, parts: Iterable[CopyJob]) -> None:
        """Make the forward wait for parts of a load's copy; if the device cannot, wait here."""
        try:
            for part in parts:
                self._device.forward_waits(part)
        except Exception:  # a driver may raise anything; the forward must not start first
            logger.exception(
                "request %s: the forward cannot wait for its load, so the worker waits",
                load.job.request_id,
            )
            self._await_copy(load)

    @staticmethod
    def _await_copy(load: _Load) -> None:
        if not load.copy.wait(COPY_DEADLINE_S):
            raise UnreportedLoadError(
                f"request {load.job.request_id}: its load has not ended within "
                f"{COPY_DEADLINE_S:g} s, and the step may have computed from its blocks"
            )

    def _is_current(self, job: LoadJob) -> bool:
        """Return whether the adapter of a load's KV is still the loaded one."""
        use = job.adapter
        return use is None or self._model.holds(use.adapter, use.generation)

    def _sources(self, job: LoadJob) -> list[int]:
        """Return the host address of this rank's first shard of each chunk.

        The service leases only chunks in arena memory that this rank reported as ready, so they
        are mapped. The arena of an earlier service stays mapped while a plan names it. Raises
        `KVHavenError` if the job was not planned, if weights or adapter changed since, or if the
        arena is not mapped.
        """
        if not job.places:
            raise KVHavenError("it could not be planned; an earlier log line has the reason")
        if not self.weights_known:
            raise KVHavenError("the model's weights were changed after it was planned")
        if not self._is_current(job):
            raise KVHavenError("its adapter was reloaded with other content")
        arena = self._client.arena(job.service)
        if arena is None:
            raise ArenaError(f"the arena of service {job.service[:8]} is not mapped")
        offset = job.shard_offsets[self._rank]
        span = self._client.span_bytes
        return [arena.address_of(segment, at + offset, span) for segment, at in job.places]

    def _end(self, load: _Load) -> None:
        if load.copy.error:
            self.fail(load.job, load.copy.error)
            return
        if load.unread:
            self._groups = None
            self.fail(
                load.job,
                f"the forward did not wait for {len(load.unread)} layers, such as "
                f"{min(load.unread)}; loads are not layered any more",
            )
            return
        if load.job.asynchronous:
            self._finished.add(load.job.request_id)
        self._stats.add(
            "loaded_bytes",
            self.layout.shard_bytes(len(load.job.written)) * self.layout.shards,
        )
        self._stats.add("loaded_seconds", time.perf_counter() - load.begun)
