# SPDX-License-Identifier: Apache-2.0
"""Plans of saves on the scheduler side, and the fences that protect their source blocks."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvhaven.config import Settings
from kvhaven.engine.jobs import SaveJob, StepReport
from kvhaven.engine.parts import KvPart, one_part
from kvhaven.engine.request_state import NULL_BLOCK, RequestState
from kvhaven.engine.requests import KeptState
from kvhaven.types import ChunkKey

_REPORT_S = 120.0
"""Duration after which a job without a final report is forgotten."""

_NONE: frozenset[int] = frozenset()


class SaveEvents(Protocol):
    """Listener for chunks of this engine that become available to other engines."""

    def planned(self, job: SaveJob, request: Any, first_chunk: int) -> None:
        """Note a planned job; its chunks begin at the request's chunk `first_chunk`."""

    def saved(self, job: SaveJob, unwritten: set[int]) -> None:
        """Note that all ranks have written a job's chunks, except those in `unwritten`."""

    def forget(self, job: SaveJob) -> None:
        """Note that a job will not be reported any more."""

    def take(self) -> list[Any]:
        """Return the events since the last call, in the engine's own form."""


class SavePlanner:
    """Plans saves, and tracks them until all `world_size` ranks have reported them.

    A block that a save reads may be reallocated to another request before the copy has ended,
    after a finish, an abort or a preemption. `note_new` receives every block that is about to be
    written, and `take_fence` returns the saves that must end first. Blocks are identified by their
    ids alone: an engine's KV groups share one pool, so a block may return in another group.

    If the ranks' reports do not arrive here (not `hears_workers`), saves end within their step
    (`AcceleratorBackend.stores_end_in_call`): each has ended when the next step is planned.
    """

    def __init__(
        self,
        settings: Settings,
        block_sizes: Sequence[int],
        world_size: int,
        events: SaveEvents | None = None,
        *,
        parts: Sequence[KvPart] = (),
        hears_workers: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decode_too = settings.save_decode_cache
        """Whether generated tokens are saved, too."""
        self._block_sizes = tuple(block_sizes)
        self._first, *self._more_parts = parts or one_part(block_sizes)
        self._first_sizes = [block_sizes[group] for group in self._first.groups]
        self._window_every = settings.window_every
        self._world = world_size
        self._events = events
        self._hears_workers = hears_workers
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[int, tuple[SaveJob, float]] = {}  # job, time of its plan
        self._reports: dict[int, StepReport] = {}
        self._saving: dict[ChunkKey, int] = {}
        self._reading: dict[int, set[int]] = {}  # saves by the block that they read
        self._new_blocks: set[int] = set()
        self._continued: dict[str, list[int]] = {}  # last blocks of tails being saved

    def due(self, state: RequestState, end: int) -> bool:
        """Return whether `plan` may return jobs; fast, as every step asks for all requests."""
        request = state.request
        wanted = (state.planned_chunks + 1) * state.chunk_size
        if end < wanted and not request.resumable:
            return False
        return self.decode_too or request.num_prompt_tokens >= wanted or request.resumable

    def plan(
        self, state: RequestState, end: int, states: Sequence[KeptState] = ()
    ) -> list[SaveJob]:
        """Plan the save of the chunks that are complete at the end of this step.

        `end` is the number of tokens computed by then, some of them perhaps speculative; `states`
        are the recurrent states that the engine keeps. Raises `KVHavenError` if the request's
        tokens cannot be hashed or its blocks are unknown.
        """
        request = state.request
        # Tokens beyond `num_tokens` are speculative or not sampled yet.
        known = request.num_tokens if self.decode_too else request.num_prompt_tokens
        end = min(end, known, request.num_tokens)
        complete = end // state.chunk_size
        if complete <= state.planned_chunks and not states:
            return []
        state.extend_keys(end)
        runs, jobs = self._runs(state, complete), list[SaveJob]()
        for first, last in runs:
            keys = tuple(state.chain.keys[first:last])
            chunks = [self._first_blocks(state, at) for at in range(first, last)]
            parent = state.chain.keys[first - 1] if first else None
            blocks = tuple(zip(*chunks, strict=True))
            tenant = state.chain.tenant
            jobs.append(SaveJob(next(self._ids), parent, keys, blocks, tenant, state.adapter))
        for number, part in enumerate(self._more_parts, 1):
            if part.is_state:
                jobs += self._plan_states(state, part, number, end, states)
            else:
                jobs += self._plan_part(state, part, number, complete)
        # After an error above, no job is tracked: no rank would report it.
        for job in jobs:
            self._track(job)
        if self._events is not None:
            for job, (first, _) in zip(jobs, runs, strict=False):  # those of the first part
                self._events.planned(job, request, first)
        state.planned_chunks = max(state.planned_chunks, complete)
        return jobs

    def _track(self, job: SaveJob) -> None:
        self._jobs[job.id] = job, self._clock()
        self._saving.update(dict.fromkeys(job.keys, job.id))

    def tail_due(self, state: RequestState, end: int) -> bool:
        """Return whether `plan_tail` may return a job; as fast as `due`."""
        request = state.request
        return state.saves_tail and not state.planned_tail and end >= request.num_prompt_tokens

    def plan_tail(self, state: RequestState, end: int) -> list[SaveJob]:
        """Plan the save of the prompt's tail if the prompt is computed at the end of this step.

        Only once for each prompt, and not while a session may get more input: its prompt is not
        complete. Raises as `plan` does.
        """
        if not self.tail_due(state, end):
            return []
        state.planned_tail = True
        request, size = state.request, state.chunk_size
        full, tail = divmod(request.num_prompt_tokens, size)
        key = None if request.resumable else state.tail_key(request.num_prompt_tokens)
        loaded = state.loaded is not None and state.loaded.tail
        if key is None or loaded or key in self._saving:
            return []
        blocks = state.chunk_blocks(full, self._block_sizes, tail)
        job = SaveJob(
            id=next(self._ids),
            parent=state.chain.keys[full - 1] if full else None,
            keys=(key,),
            blocks=tuple((ids,) for ids in blocks),
            tenant=state.chain.tenant,
            adapter=state.adapter,
            tail=tail,
        )
        self._track(job)
        self._continued[request.request_id] = [ids[-1] for ids in blocks]
        return [job]

    def note_step(self, request_id: str) -> None:
        """Note that a request computes further: it may write behind its tail in the same block."""
        if self._continued:
            self._new_blocks.update(self._continued.pop(request_id, ()))

    def finished(self, request_id: str) -> None:
        """Note that a request ended: nothing is written behind its tail any more."""
        self._continued.pop(request_id, None)

    def note_new(self, blocks: Sequence[Sequence[int]], tokens: int = 0) -> None:
        """Note the blocks of the tokens after the first `tokens`, which are about to be written."""
        if self._reading:
            for ids, size in zip(blocks, self._block_sizes, strict=False):
                self._new_blocks.update(ids[tokens // size :])

    def take_fence(self, jobs: Sequence[SaveJob]) -> list[int]:
        """Return the earlier saves whose blocks were reallocated; start to track `jobs`."""
        if not self._hears_workers:
            self._end_all(jobs)
        fence: set[int] = set()
        for block in self._new_blocks:
            fence |= self._reading.get(block, _NONE)
        self._new_blocks.clear()
        self._forget_blocks(fence)
        for job in jobs:
            for block in _blocks_of(job):
                self._reading.setdefault(block, set()).add(job.id)
        self._forget_old()
        return sorted(fence)

    def fence_all(self) -> list[int]:
        """Return all running saves, for steps in which the new blocks are unknown."""
        fence = set().union(*self._reading.values())
        self._new_blocks.clear()
        self._reading.clear()
        return sorted(fence)

    def reported(self, report: StepReport) -> None:
        """Process the ranks' report of a step."""
        for job_id, ranks in report.saved.items():
            if job_id not in self._jobs:
                continue
            missing = report.unwritten.get(job_id, set())
            add = StepReport({job_id: ranks}, {job_id: missing} if missing else {})
            total = add.aggregate(self._reports.get(job_id, StepReport()))
            self._reports[job_id] = total
            if total.saved[job_id] >= self._world:
                job, _ = self._jobs[job_id]
                if self._events is not None and not (job.tail or job.part):
                    self._events.saved(job, total.unwritten.get(job_id, set()))
                self._forget_blocks({job_id})
                self._forget(job)

    def _first_blocks(self, state: RequestState, chunk: int) -> list[tuple[int, ...]]:
        if not self._more_parts:
            return state.chunk_blocks(chunk, self._block_sizes)
        return state.chunk_blocks(chunk, self._first_sizes, groups=self._first.groups)

    def _plan_part(
        self, state: RequestState, part: KvPart, number: int, complete: int
    ) -> list[SaveJob]:
        """Plan the save of a further part's chunks that a later request may continue after."""
        jobs: list[SaveJob] = []
        keys, loaded = state.chains[number].keys, state.loaded
        others = loaded.others if loaded is not None else ()
        skipped = next((other.chunks for other in others if other.part == number), range(0))
        run: list[tuple[ChunkKey, list[tuple[int, ...]]]] = []
        for chunk in range(state.planned_chunks, complete + 1):
            blocks = None
            known = chunk == complete or chunk in skipped or keys[chunk] in self._saving
            if not known and self._is_wanted(state, part, chunk):
                blocks = state.part_blocks(part, chunk)
            if blocks is not None:
                run.append((keys[chunk], blocks))
                continue
            if run:
                jobs.append(self._job_of(state, number, run))
                run = []
        return jobs

    def _plan_states(
        self,
        state: RequestState,
        part: KvPart,
        number: int,
        end: int,
        states: Sequence[KeptState],
    ) -> list[SaveJob]:
        """Plan the save of recurrent states at the ends of chunks that this step computes.

        Only the engine knows which block has which state: it computes in place, and moves and frees
        blocks, so a block's position in the request says nothing. States that this step does not
        compute were loaded, or belong to an earlier step, whose blocks may be others' by now.
        """
        size = state.chunk_size
        found: dict[int, dict[int, int]] = {}
        for kept in states:
            computed_now = state.step_begin < kept.tokens <= end
            if computed_now and kept.tokens % size == 0 and kept.block != NULL_BLOCK:
                found.setdefault(kept.tokens // size - 1, {})[kept.group] = kept.block
        jobs: list[SaveJob] = []
        for chunk, blocks in sorted(found.items()):
            key = state.chains[number].keys[chunk]
            if key not in self._saving and all(group in blocks for group in part.groups):
                ids: list[tuple[int, ...]] = [(blocks[group],) for group in part.groups]
                jobs.append(self._job_of(state, number, [(key, ids)]))
        return jobs

    def _job_of(
        self,
        state: RequestState,
        number: int,
        run: Sequence[tuple[ChunkKey, list[tuple[int, ...]]]],
    ) -> SaveJob:
        """Return a job. Chunks before its first one may be absent, so it has no parent."""
        keys = tuple(key for key, _ in run)
        blocks = tuple(zip(*(ids for _, ids in run), strict=True))
        tenant = state.chain.tenant
        return SaveJob(next(self._ids), None, keys, blocks, tenant, state.adapter, part=number)

    def _is_wanted(self, state: RequestState, part: KvPart, chunk: int) -> bool:
        """Return whether a later request may continue at a token for which it needs this chunk.

        These are the last full chunks of the prompt (a repeated prompt computes its last token),
        multiples of `window_every`, the chunks that other prompts have in common with this one, and
        each chunk's end in the output: a conversation continues behind it.
        """
        size, prompt = state.chunk_size, state.request.num_prompt_tokens
        ends = part.ends(chunk, size)
        if prompt // size in ends or (prompt - 1) // size in ends or state.junction in ends:
            return True
        if self.decode_too and ends[-1] > prompt // size:
            return True
        if not self._window_every:
            return False
        every = max(1, self._window_every // size)
        return ends[-1] // every * every >= ends[0]

    @property
    def under_way(self) -> int:
        """Number of saves that were planned and not yet reported by all ranks."""
        return len(self._jobs)

    def _runs(self, state: RequestState, complete: int) -> list[tuple[int, int]]:
        """Return runs of chunks to save: neither just loaded nor part of a running job."""
        loaded = state.loaded
        skipped = range(loaded.first_chunk, loaded.end_chunk) if loaded is not None else ()
        runs: list[tuple[int, int]] = []
        for chunk in range(state.planned_chunks, complete):
            if chunk in skipped or state.chain.keys[chunk] in self._saving:
                continue
            if runs and runs[-1][1] == chunk:
                runs[-1] = (runs[-1][0], chunk + 1)
            else:
                runs.append((chunk, chunk + 1))
        return runs

    def _forget_blocks(self, jobs: set[int]) -> None:
        """Forget the source blocks of these saves: their copies have ended or are fenced."""
        for job_id in jobs:
            known = self._jobs.get(job_id)
            for block in list(_blocks_of(known[0]) if known else self._reading):
                readers = self._reading.get(block, set())
                readers.discard(job_id)
                if not readers:
                    self._reading.pop(block, None)

    def _end_all(self, but: Sequence[SaveJob]) -> None:
        """Treat all saves of earlier steps as written, as the ranks end them within their step."""
        planned = {job.id for job in but}
        for job_id in [known for known in self._jobs if known not in planned]:
            self.reported(StepReport({job_id: self._world}))

    def _forget_old(self) -> None:
        """Forget saves that no rank reports. Their blocks are never removed from the fence."""
        before = self._clock() - _REPORT_S
        while self._jobs:
            job, planned = next(iter(self._jobs.values()))
            if planned > before:
                return
            self._forget(job)

    def _forget(self, job: SaveJob) -> None:
        del self._jobs[job.id]
        self._reports.pop(job.id, None)
        for key in job.keys:
            if self._saving.get(key) == job.id:
                del self._saving[key]
        if self._events is not None and not (job.tail or job.part):
            self._events.forget(job)


def _blocks_of(job: SaveJob) -> Iterator[int]:
    for chunks in job.blocks:
        yield from itertools.chain.from_iterable(chunks)
