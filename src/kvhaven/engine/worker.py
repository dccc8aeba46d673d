# SPDX-License-Identifier: Apache-2.0
"""Worker side of an engine: one rank's copies, in the order of the engine's step."""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvhaven.client.rank import RankClient
from kvhaven.config import Settings
from kvhaven.devices.base import Device
from kvhaven.engine.copies import COPY_DEADLINE_S, CopyWatch
from kvhaven.engine.jobs import LoadJob, StepPlan, StepReport
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.loader import Loader
from kvhaven.engine.saver import Saver
from kvhaven.engine.stats import Stats
from kvhaven.errors import DeviceCopyError, UnreportedLoadError
from kvhaven.layouts import Layout

logger = logging.getLogger(__name__)


class PartCopies(NamedTuple):
    """The connection and the layout of a part of the KV, and the blocks of its stored chunks."""

    client: RankClient
    layout: Layout
    chunk_blocks: int


_abandoned: list["WorkerSide"] = []
"""Sides that were closed while a copy ran: kept with their devices until the process ends."""


class WorkerSide:
    """One rank's copies. The model runner calls the methods in the order below.

    `layout` describes this rank's KV tensors, `rank` is its number in the engine's world, `model`
    the state of this process's model. `heard` says that the scheduler side receives the worker's
    reports, `alone` that nothing but the device's own work, ordered as the forward is, writes to
    the KV tensors. After a method raised, the engine must call `doubt`.

    If the KV has several parts, `client` and `layout` are those of the first, whose chunks have
    `chunk_blocks` blocks (default: those of its tokens), and `more_parts` has the others. A load
    then has a job for each part, and ends with the last one.
    """

    def __init__(
        self,
        settings: Settings,
        client: RankClient,
        device: Device,
        layout: Layout,
        rank: int,
        *,
        model: LoadedModel | None = None,
        heard: bool = True,
        alone: bool = True,
        chunk_blocks: int = 0,
        more_parts: Sequence[PartCopies] = (),
    ) -> None:
        chunk_blocks = chunk_blocks or settings.chunk_size // layout.block_size
        parts = (PartCopies(client, layout, chunk_blocks), *more_parts)
        self._settings = settings
        self._client = client
        self._clients = [part.client for part in parts]
        self.device = device
        self.layouts = [part.layout for part in parts]
        self._rank = rank
        self._model = model or LoadedModel()
        self._weights_before = self._model.weights
        self._plan = StepPlan()
        self._fenced: StepPlan | None = None
        self._loads_due: list[LoadJob] = []
        self._first_steps: list[LoadJob] = []
        self._watch = CopyWatch(synchronous=device.synchronous)
        self.stats = Stats()
        self._loads = [
            Loader(
                part.client,
                device,
                part.layout,
                self._watch,
                rank,
                self.stats,
                self._model,
                settings.chunk_size,
                heard=heard,
                by_request=len(parts) > 1,
                layered=settings.layered_load_ms > 0 and len(parts) == 1,
            )
            for part in parts
        ]
        self._saves = [
            Saver(
                part.client,
                device,
                part.layout,
                self._watch,
                self.stats,
                self._model,
                settings.chunk_size,
                part.chunk_blocks,
                alone=alone,
            )
            for part in parts
        ]
        self._parts_loading: dict[str, int] = {}
        """Jobs of a load that have not ended, of engines with several parts."""
        self._failed_requests: set[str] = set()
        self._model.listen(self._model_changed)
        self._model.listen_for_memory(self.end_copies)
        self._model_changed()

    @property
    def layout(self) -> Layout:
        """The layout of the first part."""
        return self.layouts[0]

    def fence(self, plan: StepPlan) -> None:
        """Protect blocks that a running save reads and that were reallocated to another request.

        It comes first in a step, because some runners (V1) zero new blocks and copy into them
        right after it. For runners that do not call it, `begin` does.
        """
        if plan is self._fenced:
            return
        for saves in self._saves:
            saves.collect()
            saves.fence(plan.fence)
        self._fenced = plan

    def begin(self, plan: StepPlan) -> None:
        """Accept the step's plan before the forward, and reserve space for its saves."""
        self._plan = plan
        # The forward waits for synchronous ones, and copies run in the order of their calls.
        self._loads_due += sorted(plan.loads, key=lambda job: job.asynchronous)
        self._first_steps = plan.first_steps
        for loads in self._loads:
            loads.weights_known = self._weights_known
        if len(self._loads) > 1:
            for job in plan.loads:
                self._parts_loading[job.request_id] = self._parts_loading.get(job.request_id, 0) + 1
        self.fence(plan)
        for part, saves in enumerate(self._saves):
            saves.reserve([job for job in plan.saves if job.part == part])

    def start_loads(self, *, layer_hooks: bool = False) -> None:
        """Start this step's loads; the forward waits for synchronous ones.

        `layer_hooks` says that it will call `wait_for_layer` before it reads each layer's KV.
        """
        while self._loads_due:
            job = self._loads_due[0]
            self._loads[job.part].start(job, layer_hooks=layer_hooks)
            del self._loads_due[0]

    def wait_for_layer(self, layer: str) -> None:
        """Make the forward wait for the loads of a layer's KV; runs in the worker's thread.

        Raises as `Loader.wait_for_layer` does.
        """
        self._loads[0].wait_for_layer(layer)

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Run a whole step's copies around the forward, which is the body of the `with`.

        For engines that need no finer control: `begin` and `start_loads` run before the forward,
        `save` runs after it. An error of KVHaven is logged and does not reach the engine; loads
        that it affects are reported as failed and saves are dropped. An error of the forward
        propagates, and nothing of the step is saved. Raises `UnreportedLoadError` if blocks may
        be read before they are loaded; the engine must end then.
        """
        with self._forgiving():
            self.begin(plan)
            self.start_loads()
        try:
            yield
        except BaseException:
            self.forward_failed()
            raise
        with self._forgiving():
            self.save()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except UnreportedLoadError:
            raise
        except Exception:  # a cache must not end the engine; `doubt` cancels unfinished work
            logger.exception("rank %d: the step's copies failed and are dropped", self._rank)
            self.stats.add("errors")
            self.doubt()

    def end_forward(self) -> None:
        """Find failed loads that this step computed from, before the engine asks for them.

        With speculation, vLLM's V1 runner asks before it has drafted and saves the step's chunks
        after drafting: a failure that is found only by the save comes too late.
        """
        for job in [job for job in self._loads_due if not job.asynchronous]:
            self._loads_due.remove(job)
            self._never_started(job, "the forward ran before it was started")
        self.start_loads()
        first_steps, self._first_steps = self._first_steps, []
        for part, loads in enumerate(self._loads):
            loads.end_step([job for job in first_steps if job.part == part])

    def save(self) -> None:
        """Copy the step's complete chunks into the arena, after all writes to KV."""
        self.end_forward()
        deadline = time.monotonic() + self._settings.save_deadline_ms / 1000
        copies = [copy for loads in self._loads for copy in loads.copies]
        for saves in self._saves:
            saves.start(deadline, trusted=self._trusted, loads=copies)
        if all(s.idle for s in self._saves) and all(loads.idle for loads in self._loads):
            # Parts share the first one's mapping of an arena.
            services = self._plan.services.union(client.service for client in self._clients[1:])
            for client in self._clients:
                client.keep_arenas(services)

    def forward_failed(self) -> None:
        """Note that the step's forward raised, so that its KV is undefined and is not saved."""
        for saves in self._saves:
            saves.give_up()

    def finished_loads(self) -> set[str]:
        """Return the requests whose asynchronous loads have ended since the last call."""
        finished: set[str] = set()
        for loads in self._loads:
            loads.poll()
            ended = loads.take_finished()
            if len(self._loads) == 1:
                return ended
            self._failed_requests |= loads.take_failed_requests()
            for request_id in ended:
                left = self._parts_loading.pop(request_id, 1) - 1
                if left:
                    self._parts_loading[request_id] = left
                else:
                    finished.add(request_id)
        return finished

    def failed_requests(self, finished: Collection[str]) -> set[str]:
        """Return those of the requests that `finished_loads` returned whose load has failed.

        Only engines with several parts ask; others ask for `failed_blocks`.
        """
        failed = self._failed_requests.intersection(finished)
        self._failed_requests -= failed
        return failed

    def failed_blocks(self) -> set[int]:
        """Return blocks that failed loads left undefined since the last call."""
        failed = set().union(*(loads.take_failed_blocks() for loads in self._loads))
        # With several KV groups, vLLM ends if blocks are reported: it gets `failed_requests`.
        return failed if len(self._loads) == 1 else set()

    def report(self) -> StepReport | None:
        """Return the saves that ended since the last call, and counts of failed loads."""
        report = self._saves[0].take_report()
        for saves in self._saves[1:]:
            report = report.aggregate(saves.take_report())
        if not self._trusted:
            report.failed_loads[self._rank] = self._failed
        return None if report.empty else report

    def doubt(self) -> None:
        """Restore a consistent state after one of these methods raised.

        Running saves may lack their fence, so they are dropped. Loads of the step that were not
        started are reported as failed.
        """
        for saves in self._saves:
            saves.spoil()
        due, self._loads_due = self._loads_due, []
        for job in due:
            self._never_started(job, "an error occurred before it was started")

    def _never_started(self, job: LoadJob, reason: str) -> None:
        """End the lease of a load and report the load as failed, unless its copy runs after all."""
        loads = self._loads[job.part]
        if not loads.runs(job):
            self._clients[job.part].loaded([job.lease_id], job.service)
            loads.fail(job, reason)

    def move(self, *layouts: Layout) -> None:
        """Continue with KV tensors at other addresses; each part's layout is otherwise the same.

        Waits for copies from and to the old tensors. The connection, the arena and the state of
        this rank stay. Raises as `end_copies` does.
        """
        self.end_copies()
        self.layouts = list(layouts)
        for loads, saves, layout in zip(self._loads, self._saves, layouts, strict=True):
            loads.use(layout)
            saves.layout = layout

    def end_copies(self) -> None:
        """Wait until no copy touches the KV tensors, before their memory is unmapped.

        Raises `DeviceCopyError` if copies have not ended after `COPY_DEADLINE_S`: they could
        silently corrupt memory that has another owner by then.
        """
        if not self._finish():
            raise DeviceCopyError(
                f"rank {self._rank}: copies have not ended within {COPY_DEADLINE_S:g} s, so the "
                "KV tensors' memory cannot be unmapped. Restart the engine."
            )

    def close(self) -> None:
        """Wait for running copies, report them, disconnect and close the device.

        If a copy does not end in time, it may still touch the arena and staging memory: both
        stay mapped until the process ends.
        """
        if not self._finish():
            logger.warning(
                "rank %d: copies have not ended, so the arena stays mapped until this process ends",
                self._rank,
            )
            _abandoned.append(self)
            for client in self._clients:
                client.abandon()
            return
        self._watch.close()
        self.device.close()
        for client in reversed(self._clients):  # the first one has the mapping
            client.close()

    def _finish(self) -> bool:
        """Start no further saves; return whether all copies ended before the deadline."""
        deadline = time.monotonic() + COPY_DEADLINE_S
        ended = [loads.finish(deadline) for loads in self._loads]
        ended += [saves.finish(deadline) for saves in self._saves]
        return all(ended)

    def _model_changed(self) -> None:
        """Send the model's state to the scheduler side. Runs in the thread that changed it."""
        self._client.model_changed(self._model.state(self._weights_before))

    @property
    def _weights_known(self) -> bool:
        """Whether the plan was made for the current weights."""
        changes = self._model.weights - self._weights_before
        return changes == self._plan.weights.get(self._rank, 0)

    @property
    def _trusted(self) -> bool:
        """Whether computed KV may be saved.

        It may not while the plan does not account for a failed load or a change of weights. KV
        that is computed from a failed load's blocks is wrong, in this step and in all steps that
        were planned before the scheduler side learned of the failure.
        """
        known = self._plan.failed_loads.get(self._rank, 0)
        return self._failed == known and self._weights_known

    @property
    def _failed(self) -> int:
        """Number of failed load jobs."""
        return sum(loads.failed for loads in self._loads)
