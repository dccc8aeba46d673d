# SPDX-License-Identifier: Apache-2.0
"""Messages between the two sides of an engine: the plan of a step, and the ranks' reports."""

from dataclasses import dataclass, field

from kvhaven.devices.base import SKIP
from kvhaven.engine.adapters import AdapterUse
from kvhaven.types import NO_TENANT, ChunkKey, TenantId


@dataclass(frozen=True)
class LoadJob:
    """Chunks to copy from the arena into a request's blocks.

    `blocks[group][i]` are the block ids of chunk `i`; `devices.SKIP` marks blocks that must not
    be written. `places[i]` is the `(segment, offset)` of chunk `i`'s extent in the arena of
    `service`. `shard_offsets[rank]` is the offset of a rank's first shard in the extent; its
    other shards follow. The KV was computed with `adapter`, if any. A job without places could
    not be planned: its blocks are reported as failed, so that the engine does not use them.

    With `tail`, the last chunk is a tail of so many tokens, with as many blocks as these need.
    `part` is the number of the part of the engine's KV whose groups these are. A `layered` load is
    synchronous, and the step writes into none of its blocks: the forward may run meanwhile.
    """

    request_id: str
    lease_id: int
    service: str
    places: tuple[tuple[int, int], ...]
    shard_offsets: tuple[int, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    asynchronous: bool
    adapter: AdapterUse | None = None
    tail: int = 0
    part: int = 0
    layered: bool = False

    @property
    def written(self) -> set[int]:
        """The blocks that the load writes; an id names a block of one group."""
        return {
            block for group in self.blocks for chunk in group for block in chunk if block != SKIP
        }


@dataclass(frozen=True)
class SaveJob:
    """Consecutive complete chunks to copy from a request's blocks into the arena.

    An engine uses each `id` once: all shards of a chunk come from one job. `parent` is the key
    before `keys[0]`; `blocks[group][i]` are the block ids of chunk `i`. The chunks belong to
    `tenant` and were computed with `adapter`, if any. With `tail`, the only chunk is a tail of so
    many tokens. `part` is as in `LoadJob`.
    """

    id: int
    parent: ChunkKey | None
    keys: tuple[ChunkKey, ...]
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    tenant: TenantId = NO_TENANT
    adapter: AdapterUse | None = None
    tail: int = 0
    part: int = 0


@dataclass
class StepPlan:
    """Plan of one step. Workers must not change it: ranks of one process share it.

    `fence` lists save jobs whose source blocks were reallocated to other requests: these blocks
    must not be written before the copies end. `services` are those whose arenas the present or
    later loads may read; arenas of other services can be unmapped. `failed_loads` is the number
    of failed loads of each rank that the scheduler side knows (see `StepReport`), `weights` the
    number of changes of each rank's weights. `first_steps` are loads that ended in earlier steps,
    of requests that now compute for the first time since: their adapter must still be loaded.
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
    """Save jobs that ended, with the number of ranks that reported each (`saved`).

    `unwritten` has, for each job, the indices of chunks that a rank did not write: no space,
    already present, or a failed copy. `failed_loads` counts a rank's failed loads since it
    started. KV that was computed from their blocks is wrong, so the rank saves nothing until a
    plan shows that the scheduler side knows of them.
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
