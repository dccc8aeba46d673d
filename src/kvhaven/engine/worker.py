# SPDX-License-Identifier: Apache-2.0
"""Worker side of an engine: one rank's copies, in the order of the engine's step."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

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

_abandoned: list["WorkerSide"] = []
"""Those that were closed while a copy ran: kept with their devices until the process ends."""


class WorkerSide:
    """One rank's copies. Called by the model runner, in the order of the methods below.

    `layout` describes this rank's KV tensors, `rank` its place in the engine's world, `model`
    what this process's model holds. `heard` says that the scheduler's side gets what the worker
    reports. A method that raised leaves things in doubt: `doubt` must follow.
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
    ) -> None:
        self._settings = settings
        self._client = client
        self.device = device
        self.layout = layout
        self._rank = rank
        self._model = model or LoadedModel()
        self._weights_before = self._model.weights
        self._plan = StepPlan()
        self._fenced: StepPlan | None = None
        self._loads_due: list[LoadJob] = []
        self._first_steps: list[LoadJob] = []
        self._watch = CopyWatch(synchronous=device.synchronous)
        self.stats = Stats()
        self._loads = Loader(
            client, device, layout, self._watch, rank, self.stats, self._model, heard=heard
        )
        self._saves = Saver(
            client, device, layout, self._watch, self.stats, self._model, settings.chunk_size
        )
        self._model.listen(self._model_changed)
        self._model.listen_for_memory(self.end_copies)
        self._model_changed()

    def fence(self, plan: StepPlan) -> None:
        """Protect blocks that a save still reads and that were given away.

        It is the first thing in a step: on some runners (V1) new blocks are zeroed and copied
        to right after it. Runners that do not call it get it with `begin`.
        """
        if plan is self._fenced:
            return
        self._saves.collect()
        self._saves.fence(plan.fence)
        self._fenced = plan

    def begin(self, plan: StepPlan) -> None:
        """Take the step's plan, before the forward, and ask for the saves' space."""
        self._plan = plan
        self._loads_due += plan.loads
        self._first_steps = plan.first_steps
        self._loads.weights_known = self._weights_known
        self.fence(plan)
        self._saves.reserve(plan.saves, trusted=self._trusted)

    def start_loads(self) -> None:
        """Start this step's loads; the forward waits for synchronous ones."""
        while self._loads_due:
            self._loads.start(self._loads_due[0])
            del self._loads_due[0]

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Do a whole step's copies around the forward, which is the body of the `with`.

        For engines that need no finer control: `begin` and `start_loads` before it, `save` after
        it. An error of KVHaven is logged, and what it left is reported as failed or dropped; it
        does not reach the engine. One of the forward does, and then nothing of the step is saved.
        Raises `UnreportedLoadError` if blocks may be read before they are loaded: end the engine.
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
        except Exception:  # a cache must not end the engine; `doubt` gives up what was half done
            logger.exception("rank %d: the step's copies are given up", self._rank)
            self.stats.add("errors")
            self.doubt()

    def end_forward(self) -> None:
        """Note which loads the step computed from in vain, before the engine asks for them.

        With speculation vLLM's V1 runner asks before it has drafted, and has the step's chunks
        saved after that: a failure that comes to light then is too late.
        """
        self.start_loads()
        first_steps, self._first_steps = self._first_steps, []
        self._loads.end_step(first_steps)

    def save(self) -> None:
        """Copy the step's complete chunks into the arena, after all that writes KV."""
        self.end_forward()
        deadline = time.monotonic() + self._settings.save_deadline_ms / 1000
        self._saves.start(deadline, trusted=self._trusted, loads=self._loads.copies)
        if self._loads.idle and self._saves.idle:
            self._client.keep_arenas(self._plan.services)

    def forward_failed(self) -> None:
        """Note that the step's forward raised: nothing that it should have computed is there."""
        self._saves.give_up()

    def finished_loads(self) -> set[str]:
        """Return the requests whose asynchronous loads have ended since the last call."""
        self._loads.poll()
        return self._loads.take_finished()

    def failed_blocks(self) -> set[int]:
        """Return blocks that a failed load left undefined, since the last call."""
        return self._loads.take_failed_blocks()

    def report(self) -> StepReport | None:
        """Return which saves have ended since the last call, and what went wrong."""
        report = self._saves.take_report()
        if not self._trusted:
            report.failed_loads[self._rank] = self._loads.failed
        return None if report.empty else report

    def doubt(self) -> None:
        """Leave nothing half done after one of these methods raised.

        Running saves may lack their fence, so they are dropped. Loads of the step that were not
        started are reported as failed.
        """
        self._saves.spoil()
        due, self._loads_due = self._loads_due, []
        for job in due:
            if not self._loads.runs(job):
                self._client.loaded([job.lease_id], job.service)
                self._loads.fail(job, "an error before it was started")

    def move(self, layout: Layout) -> None:
        """Go on with KV tensors that lie elsewhere now, of the same layout but for their places.

        Copies from and to the old ones are waited for. The connection, the arena and all that is
        known of this rank stay. Raises as `end_copies` does.
        """
        self.end_copies()
        self.layout = self._loads.layout = self._saves.layout = layout

    def end_copies(self) -> None:
        """Wait until no copy touches the KV tensors any more: their memory is about to go.

        Raises `DeviceCopyError` when that cannot be had: what the device does with memory that
        is somebody else's by then would be wrong silently.
        """
        if not self._finish():
            raise DeviceCopyError(
                f"rank {self._rank}: copies have not ended within {COPY_DEADLINE_S:g} s, so the "
                "KV tensors' memory cannot be given back. Start the engine anew."
            )

    def close(self) -> None:
        """Wait for running copies, report them, and let the service and the device go.

        A copy that has no end may still touch the arena and staging memory: then both stay as
        they are until the process ends.
        """
        if not self._finish():
            logger.warning(
                "rank %d: copies have not ended, so the arena stays mapped until this process ends",
                self._rank,
            )
            _abandoned.append(self)
            self._client.abandon()
            return
        self._watch.close()
        self.device.close()
        self._client.close()

    def _finish(self) -> bool:
        """Start no save any more, and return whether all copies have ended in time."""
        deadline = time.monotonic() + COPY_DEADLINE_S
        loads = self._loads.finish(deadline)
        return self._saves.finish(deadline) and loads

    def _model_changed(self) -> None:
        """Tell the scheduler what the model holds. Runs in whichever thread changed it."""
        self._client.model_changed(self._model.state(self._weights_before))

    @property
    def _weights_known(self) -> bool:
        """Whether the plan was made for the weights that the model has now."""
        changes = self._model.weights - self._weights_before
        return changes == self._plan.weights.get(self._rank, 0)

    @property
    def _trusted(self) -> bool:
        """Whether what is computed may be saved: not while a failed load or weights are news.

        What follows from a failed load's blocks in this step, and in those that were planned
        before the scheduler heard of it, is wrong.
        """
        known = self._plan.failed_loads.get(self._rank, 0)
        return self._loads.failed == known and self._weights_known
