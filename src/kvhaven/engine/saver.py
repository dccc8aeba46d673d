# SPDX-License-Identifier: Apache-2.0
"""Saves of one rank: copies from the engine's blocks into the arena."""

import itertools
import logging
import queue
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvhaven.client.rank import RankClient, RankGrant, Reservation
from kvhaven.devices.base import CopyJob, Device, FinishedCopy
from kvhaven.engine.copies import COPY_DEADLINE_S, CopyWatch, all_ended
from kvhaven.engine.jobs import SaveJob, StepReport
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.parts import block_lists
from kvhaven.engine.stats import Stats
from kvhaven.errors import DeviceCopyError
from kvhaven.layouts import Layout

logger = logging.getLogger(__name__)

_LATE = "a load that its step waited for has not ended yet"


@dataclass
class _Save:
    """Save whose copy is running.

    `chunks` are the indices, in the job, of the chunks that this rank holds grants for; `grants`
    are these grants. The copy covers those that the rank writes. `loads` are the loads that the
    preceding forward waited for. `spoiled` says that its blocks may have been overwritten.
    """

    job: SaveJob
    copy: CopyJob
    grants: list[RankGrant]
    chunks: list[int]
    loads: Sequence[CopyJob]
    begun: float
    spoiled: bool = False
    written: bool = False
    ended: float = field(default=0.0)

    @property
    def copied(self) -> int:
        """Number of copied chunks."""
        return sum(grant.writes for grant in self.grants)


class Saver:
    """Reserves space, starts saves after the forward, and commits written chunks.

    Called from the worker's thread. The watch's thread sends commits when a copy has ended, also
    while the engine is idle; of this object it touches only the queue of ended saves.
    `chunk_blocks` is the number of blocks of a whole chunk. `alone` is as in `WorkerSide`.
    """

    def __init__(
        self,
        client: RankClient,
        device: Device,
        layout: Layout,
        watch: CopyWatch,
        stats: Stats,
        model: LoadedModel,
        chunk_size: int,
        chunk_blocks: int,
        *,
        alone: bool = True,
    ) -> None:
        self._client = client
        self._device = device
        self.layout = layout
        self._watch = watch
        self._stats = stats
        self._model = model
        self._chunk_size = chunk_size
        self._alone = alone
        self._chunk_bytes = layout.shard_bytes(chunk_blocks) * layout.shards
        self._reserved: list[tuple[SaveJob, Reservation | None]] = []
        self._running: dict[int, _Save] = {}
        self._ended: queue.SimpleQueue[_Save] = queue.SimpleQueue()
        self._report = StepReport()

    @property
    def idle(self) -> bool:
        """Whether no save is running or reserved."""
        return not (self._running or self._reserved)

    def fence(self, jobs: Iterable[int]) -> None:
        """Make all later work on the device wait for these saves' copies.

        Their blocks were reallocated to other requests. If the device cannot ensure the order,
        the saves are dropped. If others write to the KV tensors, too, their writes may be no work
        of the device (transfers over a network), so this waits until the copies have ended.
        """
        running = [self._running[job] for job in jobs if job in self._running]
        saves = [save for save in running if save.copied]
        if not saves:
            return
        copies = [save.copy for save in saves]
        try:
            if self._alone:
                self._device.fence(copies)
            else:
                _await(copies)
        except Exception:  # a driver may raise anything; saves without a fence are invalid
            self.spoil(saves)
            logger.exception("%d saves are dropped: the device could not fence them", len(saves))

    def spoil(self, saves: Iterable[_Save] | None = None) -> None:
        """Drop running saves (default: all), as their blocks may have been overwritten."""
        for save in tuple(self._running.values()) if saves is None else saves:
            save.spoiled = True

    def reserve(self, jobs: Sequence[SaveJob]) -> None:
        """Request space for this step's saves. Answers arrive while the forward is launched.

        Jobs of an earlier step that `start` was not called for are dropped.
        """
        self.give_up()
        self._reserved = [
            (
                job,
                self._client.reserve(
                    job.parent,
                    job.keys,
                    job.id,
                    job.tenant,
                    self.layout.tail_tokens(job.tail) if job.tail else 0,
                ),
            )
            for job in jobs
        ]

    def start(self, deadline: float, *, trusted: bool, loads: Sequence[CopyJob]) -> None:
        """Copy the step's complete chunks, after its forward, which waited for `loads`.

        Chunks whose space is not granted by `deadline` (`time.monotonic`) are skipped. If the
        step is not `trusted`, nothing is copied. Other ranks may commit their parts, computed from
        the same wrong KV; without this rank's part the save stays incomplete, and no other save
        completes its chunks.
        """
        while self._reserved:
            job, reservation = self._reserved.pop(0)
            granted: list[RankGrant | None] = [None] * len(job.keys)
            if reservation is None:
                self._stats.add("skipped_saves", len(job.keys))
            else:
                granted = self._client.grants(reservation, deadline)
            if trusted and self._is_current(job):
                self._start(job, granted, loads)
            else:
                self._client.abort([grant for grant in granted if grant is not None])
                self._count_ended(job, range(len(job.keys)))

    def give_up(self) -> None:
        """Release the space that was reserved for saves that will not be started."""
        while self._reserved:
            job, reservation = self._reserved.pop(0)
            self._count_ended(job, range(len(job.keys)))
            if reservation is not None:
                # If an answer arrives later, the client releases its grants then.
                granted = self._client.grants(reservation, time.monotonic())
                self._client.abort([grant for grant in granted if grant is not None])

    def collect(self) -> None:
        """Count the saves that have ended since the last call."""
        while not self._ended.empty():
            save = self._ended.get()
            self._running.pop(save.job.id, None)
            chunks = save.chunks if save.written else ()
            self._count_ended(save.job, set(range(len(save.job.keys))).difference(chunks))
            if save.written:
                stored = (
                    self.layout.tail_tokens(save.job.tail) if save.job.tail else self._chunk_size
                )
                saved = self._chunk_bytes * save.copied * stored // self._chunk_size
                self._stats.add("saved_bytes", saved)
                self._stats.add("saved_seconds", save.ended - save.begun)
                self._stats.add("saved_chunks", save.copied)

    def take_report(self) -> StepReport:
        """Return which saves have ended since the last call."""
        self.collect()
        report, self._report = self._report, StepReport()
        return report

    def finish(self, deadline: float) -> bool:
        """Drop saves that were not started, and wait for copies as `Loader.finish` does."""
        self.give_up()
        return all_ended([save.copy for save in self._running.values()], deadline)

    def _start(
        self, job: SaveJob, granted: Sequence[RankGrant | None], loads: Sequence[CopyJob]
    ) -> None:
        chunks = [index for index, grant in enumerate(granted) if grant is not None]
        grants = [grant for grant in granted if grant is not None]
        if not chunks:
            self._count_ended(job, range(len(job.keys)))
            return
        begun = time.perf_counter()
        # Chunks whose shards another rank writes are committed with the others, after the loads
        # before them have ended. If there is no copy, the order of the watch ensures that.
        copy: CopyJob = FinishedCopy()
        pairs = [(i, grant) for i, grant in zip(chunks, grants, strict=True) if grant.writes]
        try:
            if pairs:
                layout, blocks = self.layout, block_lists(job.blocks)
                copy = self._device.store(
                    layout.of_tail(job.tail, self._chunk_size) if job.tail else layout,
                    [blocks[index] for index, _ in pairs],
                    [grant.address for _, grant in pairs],
                )
        except Exception as error:  # noqa: BLE001 - reservations must be released
            logger.warning("a save failed: %r", error)
            self._count_ended(job, range(len(job.keys)))
            self._client.abort(grants)  # no copy was started
            return
        save = _Save(job, copy, grants, chunks, loads, begun)
        self._running[job.id] = save
        self._watch.watch(copy, lambda: self._finish(save))
        if self._device.synchronous:
            self.collect()

    def _finish(self, save: _Save) -> None:
        """Commit the written chunks. Runs in the watch's thread."""
        try:
            # The watch skips loads that take too long; KV computed from them may be wrong.
            loads = (load.error or ("" if load.done() else _LATE) for load in save.loads)
            error = save.copy.error or next(filter(None, loads), "")
            shards = len(self._client.shard_offsets)
            checksums = save.copy.checksums
            if not error and len(checksums) != shards * save.copied:
                error = f"{len(checksums)} checksums for {save.copied} chunks of {shards} shards"
            if error or save.spoiled:
                logger.error("a save is dropped: %s", error or "its blocks were overwritten")
                self._client.abort(save.grants)
                return
            left = iter(checksums)
            parts = [list(itertools.islice(left, shards * g.writes)) for g in save.grants]
            self._client.commit(list(zip(save.grants, parts, strict=True)))
            save.written = True
        finally:
            save.ended = time.perf_counter()
            self._ended.put(save)

    def _is_current(self, job: SaveJob) -> bool:
        """Return whether the job's whole KV was computed with the adapter in its keys."""
        use = job.adapter
        return use is None or self._model.holds(use.adapter, use.generation)

    def _count_ended(self, job: SaveJob, unwritten: Iterable[int]) -> None:
        self._report.saved[job.id] = 1
        missing = set(unwritten)
        if missing:
            self._report.unwritten[job.id] = missing


def _await(copies: Sequence[CopyJob]) -> None:
    if not all_ended(copies, time.monotonic() + COPY_DEADLINE_S):
        raise DeviceCopyError(f"copies have not ended within {COPY_DEADLINE_S:g} s")
