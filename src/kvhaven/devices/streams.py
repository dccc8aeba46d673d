# SPDX-License-Identifier: Apache-2.0
"""Accelerators with streams: copies concurrent with the compute, ordered by events both ways."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from kvhaven.devices.accelerator import AcceleratorBackend
from kvhaven.devices.base import CopyJob, FinishedCopy, MemoryFigures
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.plan import Chunks, check_copy, checksum_at, shard_places
from kvhaven.devices.staging import Piece, StagingPool, cut, paged_of
from kvhaven.devices.threads import SerialThread
from kvhaven.errors import DeviceCopyError, IncompatibleEngineError
from kvhaven.layouts import Layout, PagedLayout
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)

LOST_S: Final = 60.0
"""Seconds for which a failed wait for the device is repeated; then the device counts as lost."""
PART_BYTES: Final = 32 * 2**20
"""A direct store is submitted in parts of about this size: the host computes the checksums of one
while the device copies the next."""
_ASK_AGAIN_S: Final = 0.1
STORE_S: Final = 60.0
"""Timeout in seconds for stores that must end within the call."""

_lost: Final[list["StreamCopy"]] = []
"""Copies whose end is unknown: their memory is never freed, because the device may still use it."""


class StreamDevice:
    """An accelerator; a `Device` whose copies run concurrently with the compute.

    Stores run on one stream and loads on another, because most accelerators have a copy engine for
    each direction. Each call records an event on the caller's current stream and lets the copy
    stream wait for it, so that a store reads after the compute that wrote its blocks and a load
    writes after the compute that last used them.

    Each direction has two threads. One plans copies and submits them to the stream, if the backend
    allows it, so that the engine's thread is not held up. The other waits for the copies' events
    (asleep, not spinning) and does the host's part (checksums, copies between staging memory and
    the arena), so that neither the engine's thread nor the accelerator does it. A job ends in that
    thread only, after all work that was submitted to the stream for it.

    Copies in the paged format go directly to the arena if the backend reaches it. Others go through
    staging memory: whole blocks are copied between the device and staging memory, and the host's
    CPU converts them to the format and copies them to the arena, or back.

    `copy_threads` is the number of threads for the host's part. Raises `IncompatibleEngineError` if
    there is no device `index` (default: the current one).
    """

    synchronous = False

    def __init__(
        self, make: AcceleratorBackend, copy_threads: int = 1, index: int | None = None
    ) -> None:
        self._make = make
        self._api = make.torch_api
        self._selected = threading.local()
        self.set_current(self._api.current_device() if index is None else index)
        self._host = CpuDevice(max(1, copy_threads))
        self._staging = StagingPool(pinned=make.pins_staging)
        self._stores = self._lane("store")
        self._loads = self._lane("load")
        self._jobs: dict[int, StreamCopy] = {}
        """Jobs that have not ended, by `id`. Operations on it are atomic under the GIL."""
        self._closing = threading.Event()

    # --- properties ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._make.name

    @property
    def collective_backend(self) -> str:
        """The torch.distributed backend for this device."""
        return self._make.collective_backend

    @property
    def kernel_tag(self) -> str:
        """Tag that distinguishes page layouts of equal shape."""
        return self._make.kernel_tag

    def count(self) -> int:
        """Return the number of devices that are visible to this process."""
        return int(self._api.device_count())

    def current(self) -> int:
        """Return the device's index among the visible ones."""
        return self._index

    def set_current(self, index: int) -> None:
        """Use another device, with new streams. No copy may be running."""
        if not 0 <= index < self.count():
            raise IncompatibleEngineError(
                f"device: no {self.name} device {index}; {self.count()} are visible, from 0 on"
            )
        self._index = index
        self._select()
        self._streams = {name: self._api.Stream() for name in ("store", "load")}

    def memory(self) -> MemoryFigures:
        """Return the device's memory."""
        return MemoryFigures(*self._api.mem_get_info(self._index))

    def synchronize(self) -> None:
        """Block until the device is idle and all copies have ended."""
        self._select()
        self._make.flush()
        for job in list(self._jobs.values()):
            job.wait_ended()
        self._api.synchronize()

    def register_host(self, address: int, size: int) -> None:
        """Prepare a mapped segment for direct copies, if the backend supports them."""
        self._select()
        self._make.register(address, size)

    def unregister_host(self, address: int, size: int) -> None:
        """Undo `register_host`."""
        self._select()
        self._make.unregister(address, size)

    # --- copies -------------------------------------------------------------------------------

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Submit a copy to the arena on the store stream."""
        chunks = check_copy(layout, blocks, targets, may_skip=False)
        if not len(chunks):
            return FinishedCopy()
        job = self._begin(self._stores, layout, chunks)
        if self._make.stores_end_in_call and not job.wait(STORE_S):
            # The engine continues, and may overwrite the blocks before the copy reads them.
            job.fail(DeviceCopyError(f"a store did not end within {STORE_S:.0f} s"))
        return job

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Submit a copy from the arena on the load stream."""
        chunks = check_copy(layout, blocks, sources, may_skip=True)
        if not len(chunks):
            return FinishedCopy()
        return self._begin(self._loads, layout, chunks)

    def forward_waits(self, job: CopyJob) -> None:
        """Let the current stream wait for the job's last event."""
        if not isinstance(job, StreamCopy):
            return
        job.submitted.wait()
        if job.event is not None:
            try:
                self._select()
                self._api.current_stream().wait_event(job.event)
            except Exception as error:  # noqa: BLE001 - after any error this thread can wait itself
                logger.warning("the stream cannot wait for a copy, so the host waits: %s", error)
            else:
                return
        job.wait_ended()

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let the current stream wait for the jobs' events; loads wait for the current stream."""
        for job in jobs:
            self.forward_waits(job)

    def close(self) -> None:
        """Wait for all copies, end the threads and unregister all host memory."""
        self._closing.set()
        for lane in (self._stores, self._loads):
            lane.close()
        self._host.close()
        self._staging.close()
        self._select()
        self._make.close()

    # --- putting copies on streams ------------------------------------------------------------

    def _lane(self, name: str) -> "_Lane":
        def thread(work: str) -> SerialThread:
            return SerialThread(f"kvhaven-{self.name}-{name}{work}", self._prepare_thread)

        submits = thread("-submit") if self._make.submits_in_thread else None
        return _Lane(name, submits, thread(""))

    def _begin(self, lane: "_Lane", layout: Layout, chunks: Chunks) -> "StreamCopy":
        """Submit a copy to its stream, behind all work of the current stream so far.

        From here on, every failure is the job's error.
        """
        job = StreamCopy()
        if self._closing.is_set():
            job.fail(DeviceCopyError(f"{self.name}: the device is closed"))
            job.submitted.set()
            job.end()
            return job
        self._jobs[id(job)] = job
        before = None
        try:
            before = self._mark()
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            job.fail(error)
        submit = functools.partial(self._submit, lane, job, before, layout, chunks)
        if lane.submits is not None:
            lane.submits.put(submit)
        else:
            submit()
        return job

    def _submit(
        self, lane: "_Lane", job: "StreamCopy", before: Any, layout: Layout, chunks: Chunks
    ) -> None:
        """Put a copy on the lane's stream, in several parts if the host has work with each."""
        try:
            direct = isinstance(layout, PagedLayout) and self._make.reaches(layout, chunks)
            if not job.failed:
                self._wait_for(lane, before)
            for part in _direct_parts(lane, layout, chunks) if direct else cut(layout, chunks):
                if job.failed:
                    break
                piece = None if direct else Piece(layout, part, self._staging)
                self._submit_part(lane, job, layout, part, piece)
        except Exception as error:  # noqa: BLE001 - the job must end after any error
            job.fail(error)
        finally:
            lane.finishes.put(functools.partial(self._end, job))
            job.submitted.set()

    def _submit_part(
        self, lane: "_Lane", job: "StreamCopy", layout: Layout, part: Chunks, piece: Piece | None
    ) -> None:
        """Put a part of a copy on the lane's stream, and queue the wait for its end.

        A failed part is waited for, too: the stream may have begun it, so its memory is in use
        until the stream has passed.
        """
        chunks = part if piece is None else piece.chunks
        try:
            if piece is not None and not lane.to_host:
                arrive = self._host.load(piece.layout, piece.places, part.hosts.tolist())
                _raise_error(arrive)
            if len(chunks.ids):
                with self._on_stream(lane):
                    self._make.copy(paged_of(layout), chunks, job.keep, to_host=lane.to_host)
        except Exception as error:  # noqa: BLE001 - a driver may raise anything
            job.fail(error)
        job.event = event = self._record(lane, job)
        lane.finishes.put(
            functools.partial(self._finish_part, lane, job, event, layout, part, piece)
        )

    def _mark(self) -> Any:
        """Return an event behind all work of the current stream so far."""
        self._select()
        self._make.flush()
        event = self._make.event()
        event.record(self._api.current_stream())
        return event

    def _wait_for(self, lane: "_Lane", event: Any) -> None:
        """Let the lane's stream wait for an event."""
        self._select()
        self._streams[lane.name].wait_event(event)

    def _record(self, lane: "_Lane", job: "StreamCopy") -> Any:
        """Return an event behind all work of the lane's stream, or None if none can be recorded.

        A failure is retried once: without an event, the host has to wait for the whole stream. If
        the work cannot even be flushed, the job is lost.
        """
        flushed = False
        for _ in range(2):
            try:
                with self._on_stream(lane):
                    self._make.flush()
                    flushed = True
                    event = self._make.event()
                    event.record(self._streams[lane.name])
                    return event
            except Exception as error:  # noqa: BLE001 - a driver may raise anything
                job.fail(error)
        if not flushed:
            job.lost.set()
        return None

    @contextlib.contextmanager
    def _on_stream(self, lane: "_Lane") -> Iterator[None]:
        """Make the lane's stream the current one of this thread."""
        self._select()
        with self._api.stream(self._streams[lane.name]):
            yield

    # --- the end of copies, in the lanes' threads -----------------------------------------------

    def _finish_part(
        self,
        lane: "_Lane",
        job: "StreamCopy",
        event: Any,
        layout: Layout,
        part: Chunks,
        piece: Piece | None,
    ) -> None:
        """Wait until the device has finished a part, and do the host's part of a store."""
        if not self._passed(lane, job, event):
            job.keep.append(piece)  # the device may still use it
            return
        try:
            if lane.to_host and not job.failed:
                job.arriving.append(self._arrive(layout, part, piece))
        except Exception as error:  # noqa: BLE001 - the job must end after any error
            job.fail(error)
        finally:
            if piece is not None:
                piece.give_back()

    def _passed(self, lane: "_Lane", job: "StreamCopy", event: Any) -> bool:
        """Wait until the lane's stream has passed a part; return False if the device is lost.

        If waiting for the event fails, the job has failed, but its copies may still be running.
        Then the thread waits for the stream and the device instead, and repeats that for `LOST_S`:
        ROCm until 2026 refuses every kind of wait while the engine captures a graph.
        """
        waits: list[Callable[[], None]] = [
            self._streams[lane.name].synchronize,
            self._api.synchronize,
        ]
        if event is not None:
            waits.insert(0, event.synchronize)
        deadline = time.monotonic() + LOST_S
        while not job.lost.is_set():
            for wait in waits:
                try:
                    self._select()
                    wait()
                except Exception as error:  # noqa: BLE001 - a driver may raise anything
                    job.fail(error)
                else:
                    return True
            if self._closing.wait(_ASK_AGAIN_S) or time.monotonic() > deadline:
                job.lost.set()
        return False

    def _arrive(
        self, layout: Layout, part: Chunks, piece: Piece | None
    ) -> Callable[[], Sequence[Checksum]]:
        """Copy a stored part from staging memory to the arena if needed.

        Returns a function that waits for its checksums, which other threads compute meanwhile.
        """
        if piece is not None:
            copy = self._host.store(piece.layout, piece.places, part.hosts.tolist())
            _raise_error(copy)
            return lambda: copy.checksums
        places = shard_places(layout, part.lists(), part.hosts.tolist())
        checksums: list[Checksum] = [Checksum(b"")] * len(places)

        def checksum(index: int) -> None:
            checksums[index] = checksum_at(*places[index])

        finish = self._host.threads.begin(checksum, len(places))

        def finished() -> Sequence[Checksum]:
            finish()
            return checksums

        return finished

    def _end(self, job: "StreamCopy") -> None:
        """End a job after its last part, unless the device was lost meanwhile."""
        if job.lost.is_set():
            _lost.append(job)
            logger.error(
                "%s: the end of a copy is unknown, because the device cannot be waited for (%s); "
                "its memory stays in use until this process ends",
                self.name,
                job.error,
            )
            return
        for arrive in job.arriving:
            try:
                job.arrived.extend(arrive())
            except Exception as error:  # noqa: BLE001 - the job must end after any error
                job.fail(error)
        job.end()
        self._jobs.pop(id(job), None)

    # --- threads ------------------------------------------------------------------------------

    def _select(self) -> None:
        """Make this object's device the current one of this thread.

        A thread's first call always selects it in the backend: a runtime may report device 0 as
        current although the thread has no context there.
        """
        known = getattr(self._selected, "index", None) == self._index
        if not known or self._api.current_device() != self._index:
            self._make.select(self._index)
            self._selected.index = self._index

    def _prepare_thread(self) -> None:
        self._select()
        self._make.prepare_thread()


class _Lane:
    """One direction of copies, and its threads."""

    def __init__(self, name: str, submits: SerialThread | None, finishes: SerialThread) -> None:
        self.name = name
        self.to_host = name == "store"
        self.submits = submits
        """Puts copies on the stream; None if only the engine's thread may do that."""
        self.finishes = finishes
        """Waits for the end of copies."""

    def close(self) -> None:
        """Wait for all copies and end the threads."""
        if self.submits is not None:
            self.submits.close()
        self.finishes.close()


class StreamCopy:
    """The job of a copy on a stream; it ends after its last event and the host's part.

    Two threads write to it: the one that submits it and the one that ends it.
    """

    def __init__(self) -> None:
        self.event: Any = None
        """Event that the forward pass waits for, set once `submitted`. None: wait for the job's
        end."""
        self.submitted = threading.Event()
        self.error = ""
        self.keep: list[object] = []
        """Objects that must not be freed before the job has ended."""
        self.arriving: list[Callable[[], Sequence[Checksum]]] = []
        """For each part that the device has finished: waits for its checksums."""
        self.arrived: list[Checksum] = []
        """Checksums of the parts that have ended."""
        self.checksums: Sequence[Checksum] = ()
        self.lost = threading.Event()
        """Set once the end of the copy cannot be determined any more."""
        self._ended = threading.Event()

    @property
    def failed(self) -> bool:
        """Whether an error was noted."""
        return bool(self.error)

    def done(self) -> bool:
        """Return whether the copy has ended and the checksums are there."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended, at most `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def wait_ended(self) -> None:
        """Block until the copy has ended. Raises `DeviceCopyError` if that cannot be determined."""
        while not self._ended.wait(_ASK_AGAIN_S):
            if self.lost.is_set():
                raise DeviceCopyError(f"a copy cannot be waited for: {self.error}")

    def fail(self, error: Exception) -> None:
        """Note an error; the first one is kept."""
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Mark the job as ended; called once."""
        self.keep.clear()
        self.arriving.clear()
        if self.error:
            logger.warning("a copy failed: %s", self.error)
        else:
            self.checksums = self.arrived
        self._ended.set()


def _direct_parts(lane: "_Lane", layout: Layout, chunks: Chunks) -> Iterable[Chunks]:
    """Return the parts of a copy without staging memory: several for a store, to be hashed."""
    if not lane.to_host:
        return [chunks]
    return chunks.groups(PART_BYTES // paged_of(layout).block_bytes)


def _raise_error(copy: CopyJob) -> None:
    """Raise `DeviceCopyError` if the host's part of a copy failed."""
    if copy.error:
        raise DeviceCopyError(copy.error)
