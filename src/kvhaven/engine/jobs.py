# SPDX-License-Identifier: Apache-2.0
"""Messages between the two sides of an engine: the plan of a step, and the ranks' reports."""

from dataclasses import dataclass, field

from kvhaven.devices.base import SKIP
from kvhaven.engine.adapters import AdapterUse
from kvhaven.types import NO_TENANT, ChunkKey, TenantId


@dataclass(frozen=True)
class LoadJob:
    """Chunks to copy from the arena into a request's blocks.

    `blocks[group][i]` are the block ids of chunk `i`; `devices.SKIP` marks blocks that are
    not to be written. `places[i]` is the `(segment, offset)` of chunk `i`'s extent in the
    arena of `service`, `shard_offsets[rank]` where the first shard of a rank starts in it; the
    rank's others follow. The KV is of `adapter`, if of any. A job without places could not be
    planned: its blocks are reported as failed, so that the engine does not use them.
    """

    request_id: str
    lease_id: int
    service: str
    places: tuple[tuple[int, int], ...]
    shard_offsets: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    asynchronous: bool
    adapter: AdapterUse | None = None

    @property
    def written(self) -> set[int]:
        """The blocks of group 0 that the load writes."""
        return {block for chunk in self.blocks[0] for block in chunk if block != SKIP}


@dataclass(frozen=True)
class SaveJob:
    """Consecutive complete chunks to copy from a request's blocks into the arena.

    `id` is used once by an engine: all shards of a chunk come from one job. `parent` is the key
    before `keys[0]`; `blocks[group][i]` are the block ids of chunk `i`. They are `tenant`'s, and
    were computed with `adapter`, if with any.
    """

    id: int
    parent: ChunkKey | None
    keys: tuple[ChunkKey, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    tenant: TenantId = NO_TENANT
    adapter: AdapterUse | None = None


@dataclass
class StepPlan:
    """The plan of one step. Workers must not change it: ranks of one process share it.

    `fence` lists save jobs whose source blocks were given to somebody else: nothing may
    write to these blocks before the copies ended. `services` are those in whose arenas a
    present or later load may lie; arenas of others can be unmapped. `failed_loads` is how many
    failed loads of each rank the scheduler knows of (see `StepReport`), `weights` how many
    changes of each rank's weights. `first_steps` are loads that ended in earlier steps, of
    requests that compute for the first time since: their adapter must still be the loaded one.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    fence: list[int] = field(default_factory=list)
    services: frozenset[str] = frozenset()
    failed_loads: dict[int, int] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    first_steps: list[LoadJob] = field(default_factory=list)


@dataclass
class StepReport:
    """Save jobs that ended, and by how many ranks each was reported.

    `unwritten` names the chunks of a job, by their index, that some rank did not write: no
    space, here already, or a copy that failed. `failed_loads` counts a rank's failed loads
    since it started. What was computed on their blocks is wrong, so the rank saves nothing
    until a plan shows that the scheduler knows of them.
    """

    saved: dict[int, int] = field(default_factory=dict)
    unwritten: dict[int, set[int]] = field(default_factory=dict)
    failed_loads: dict[int, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.saved or self.failed_loads)

    def aggregate(self, other: "StepReport") -> "StepReport":
        """Return the sum of the reports of two ranks."""
        total = StepReport(dict(self.saved), dict(self.unwritten), dict(self.failed_loads))
        for job, ranks in other.saved.items():
            total.saved[job] = total.saved.get(job, 0) + ranks
        for job, chunks in other.unwritten.items():
            total.unwritten[job] = total.unwritten.get(job, set()) | chunks
        for rank, count in other.failed_loads.items():
            total.failed_loads[rank] = max(total.failed_loads.get(rank, 0), count)
        return total
