# SPDX-License-Identifier: Apache-2.0
"""Engine-neutral interface through which an inference engine keeps its KV in KVHaven.

An engine has a scheduler side, which looks up requests and plans copies, and a worker side for
each rank, which copies between the engine's KV tensors and the node service's memory. The
`connect_*` functions create both. `docs/integrating.md` shows a whole engine.
"""

from kvhaven.engine.connect import EngineIdentity, connect_scheduler, connect_worker, paged_layout
from kvhaven.engine.jobs import LoadJob, SaveJob, StepPlan, StepReport
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.requests import (
    EVERYTHING,
    NOTHING,
    EngineRequest,
    ExtrasSource,
    KeptState,
    KnownExtras,
    Permissions,
    Request,
    ScheduledRequest,
)
from kvhaven.engine.save_planner import SaveEvents
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.engine.worker import WorkerSide

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "EngineIdentity",
    "EngineRequest",
    "ExtrasSource",
    "KeptState",
    "KnownExtras",
    "LoadJob",
    "LoadedModel",
    "Permissions",
    "Request",
    "SaveEvents",
    "SaveJob",
    "ScheduledRequest",
    "SchedulerSide",
    "StepPlan",
    "StepReport",
    "WorkerSide",
    "connect_scheduler",
    "connect_worker",
    "paged_layout",
]
