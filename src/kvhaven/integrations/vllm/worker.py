# SPDX-License-Identifier: Apache-2.0
"""The connector's worker side: one rank's copies, in the order of the engine's step."""

import time

from kvhaven.client.rank import RankClient
from kvhaven.config import Settings
from kvhaven.devices.base import Device
from kvhaven.integrations.vllm.copies import CopyWatch
from kvhaven.integrations.vllm.metadata import StepPlan, StepReport
from kvhaven.integrations.vllm.stats import KVHavenStats
from kvhaven.integrations.vllm.worker_loads import RankLoads
from kvhaven.integrations.vllm.worker_saves import RankSaves
from kvhaven.layouts import Layout


class WorkerSide:
    """One rank's copies. Called by the model runner, in the order of the methods below.

    `layout` describes this rank's KV tensors, `rank` its place in the engine's world. `heard`
    says that the scheduler's side gets what the worker reports.
    """

    def __init__(
        self,
        settings: Settings,
        client: RankClient,
        device: Device,
        layout: Layout,
        rank: int,
        *,
        heard: bool = True,
    ) -> None:
        self._settings = settings
        self._client = client
        self._device = device
        self._rank = rank
        self._plan = StepPlan()
        self._fenced: StepPlan | None = None
        self._loads_due = False
        self._watch = CopyWatch(synchronous=device.synchronous)
        self.stats = KVHavenStats()
        self._loads = RankLoads(client, device, layout, self._watch, rank, self.stats, heard=heard)
        self._saves = RankSaves(
            client, device, layout, self._watch, self.stats, settings.chunk_size
        )

    def fence(self, plan: StepPlan) -> None:
        """Protect blocks that a save still reads and that were given away.

        It is the first thing in a step: on some runners (V1) new blocks are zeroed and copied
        to right after it. Runners that do not call it get it with `begin`.
        """
        if plan is self._fenced:
            return
        self._fenced = plan
        self._saves.collect()
        self._saves.fence(plan.fence)

    def begin(self, plan: StepPlan) -> None:
        """Take the step's plan, before the forward, and ask for the saves' space."""
        self._plan = plan
        self._loads_due = True
        self.fence(plan)
        self._saves.reserve(plan.saves, trusted=self._trusted)

    def start_loads(self) -> None:
        """Start this step's loads; the forward waits for synchronous ones."""
        if self._loads_due:
            self._loads_due = False
            self._loads.start(self._plan.loads)

    def save(self) -> None:
        """Copy the step's complete chunks into the arena, after the forward."""
        self.start_loads()
        self._loads.poll()
        deadline = time.monotonic() + self._settings.save_deadline_ms / 1000
        self._saves.start(deadline, trusted=self._trusted, loads=self._loads.copies)
        if self._loads.idle and self._saves.idle:
            self._client.keep_arenas(self._plan.services)

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

    def close(self) -> None:
        """Wait for running copies, report them, and let the service and the device go."""
        self._loads.close()
        self._saves.close()
        self._watch.close()
        self._device.close()
        self._client.close()

    @property
    def _trusted(self) -> bool:
        """Whether what is computed may be saved: not while a failed load is news.

        What follows from its blocks in this step, and in those that were planned before the
        scheduler heard of it, is wrong.
        """
        return self._loads.failed == self._plan.failed_loads.get(self._rank, 0)
