# SPDX-License-Identifier: Apache-2.0
"""Accelerators with streams: copies beside the compute, ordered by events both ways."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
"""How long a device is asked again when it cannot be waited for; then its copy has no end."""
_ASK_AGAIN_S: Final = 0.1
STORE_S: Final = 60.0
"""How long a store may take that is waited for in the call."""

_lost: Final[list["StreamCopy"]] = []
"""Copies without an end: what they hold is never freed, since the device may use it still."""


class StreamDevice:
    """An accelerator; a `Device` whose copies run beside the compute.

    Stores run on one stream and loads on another, since most accelerators have a copy engine
    for either direction. Each call records an event on the caller's current stream and lets our
    stream wait for it, so that a store reads after the compute that wrote its blocks and a load
    writes after the compute that last used them.

    Each direction has two threads. One plans copies and puts them on the stream, where the make
    allows it, so that the engine's thread is not held. The other waits for the copies' own
    events (asleep, not spinning); what is left to do on the host (checksums, the way between
    staging memory and the arena) is done there, so that neither the engine's thread nor the
    accelerator does it. A job ends in that thread only, behind everything that was put on the
    stream for it.

    Copies in the paged format go straight to the arena where the make reaches it. Others go
    through staging memory: whole blocks are copied between the device and there, and the host's
    CPU brings them into the format and to the arena, or back.

    `copy_threads` is how many threads do the host's part. Raises `IncompatibleEngineError` if
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
        """Those that have not ended, by `id`. Steps on it are atomic under the GIL."""
        self._closing = threading.Event()

    # --- what it is ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The make's name."""
        return self._make.name

    @property
    def collective_backend(self) -> str:
        """The backend of torch.distributed that serves it."""
        return self._make.collective_backend

    @property
    def kernel_tag(self) -> str:
        """What the inside of its pages depends on besides their shape."""
        return self._make.kernel_tag

    def count(self) -> int:
        """Return the number of devices that are visible to this process."""
        return int(self._api.device_count())

    def current(self) -> int:
        """Return the device's index among the visible ones."""
        return self._index

    def set_current(self, index: int) -> None:
        """Use another device, with new streams. No copy may be under way."""
        if not 0 <= index < self.count():
            raise IncompatibleEngineError(
                f"there is no {self.name} device {index}: {self.count()} are visible, from 0 on"
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
        """Prepare a mapped segment for direct copies, where the make has them."""
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
            # The engine goes on, and may overwrite the blocks before the copy reads them.
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
            except Exception as error:  # noqa: BLE001 - whatever it was, this thread can wait itself
                logger.warning("waiting for a copy on the host: %s", error)
            else:
                return
        job.wait_ended()

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let the current stream wait for the jobs' events; loads wait for the current stream."""
        for job in jobs:
            self.forward_waits(job)

    def close(self) -> None:
        """Wait for all copies, end the threads, give up what was registered."""
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
        """Have a copy put on its stream, behind all that the current stream has to do so far.

        From here on, whatever fails is the job's error.
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
        """Put a copy on the lane's stream, in as many parts as go through staging memory."""
        try:
            direct = isinstance(layout, PagedLayout) and self._make.reaches(layout, chunks)
            if not job.failed:
                self._wait_for(lane, before)
            for part in [chunks] if direct else cut(layout, chunks):
                if job.failed:
                    break
                piece = None if direct else Piece(layout, part, self._staging)
                self._submit_part(lane, job, layout, part, piece)
        except Exception as error:  # noqa: BLE001 - whatever it was, the job must end
            job.fail(error)
        finally:
            lane.finishes.put(functools.partial(self._end, job))
            job.submitted.set()

    def _submit_part(
        self, lane: "_Lane", job: "StreamCopy", layout: Layout, part: Chunks, piece: Piece | None
    ) -> None:
        """Put a part of a copy on the lane's stream, and have its end waited for.

        After a failure, too: the stream may have begun with the part, so its memory is in use
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
        """Return an event behind all that the current stream has to do so far."""
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
        """Return an event behind all work of the lane's stream, or None if there can be none.

        A failure is tried again once: without an event, the host has to wait for the whole
        stream. If the work cannot even be flushed, the job is lost.
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
        """Wait until the device is done with a part, and do the host's share of a store."""
        if not self._passed(lane, job, event):
            job.keep.append(piece)  # the device may use it still
            return
        try:
            if lane.to_host and not job.failed:
                job.arrived.extend(self._arrive(layout, part, piece))
        except Exception as error:  # noqa: BLE001 - whatever it was, the job must end
            job.fail(error)
        finally:
            if piece is not None:
                piece.give_back()

    def _passed(self, lane: "_Lane", job: "StreamCopy", event: Any) -> bool:
        """Wait until the lane's stream has passed a part; return False if the device is lost.

        When waiting for the event fails, the job has failed, but its copies may still be under
        way. The stream and the device are waited for then, repeatedly for `LOST_S`: ROCm until
        2026 refuses every kind of waiting while the engine captures a graph.
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

    def _arrive(self, layout: Layout, part: Chunks, piece: Piece | None) -> Sequence[Checksum]:
        """Bring a part that was stored to the arena, if it is not there; return its checksums."""
        if piece is not None:
            copy = self._host.store(piece.layout, piece.places, part.hosts.tolist())
            _raise_error(copy)
            return copy.checksums
        places = shard_places(layout, part.lists(), part.hosts.tolist())
        checksums: list[Checksum] = [Checksum(b"")] * len(places)

        def checksum(index: int) -> None:
            checksums[index] = checksum_at(*places[index])

        self._host.threads.run(checksum, len(places))
        return checksums

    def _end(self, job: "StreamCopy") -> None:
        """End a job behind its last part, unless the device was lost meanwhile."""
        if job.lost.is_set():
            _lost.append(job)
            logger.error(
                "%s: a copy has no end, since the device cannot be waited for (%s); its memory "
                "stays in use until this process ends",
                self.name,
                job.error,
            )
            return
        job.end()
        self._jobs.pop(id(job), None)

    # --- threads ------------------------------------------------------------------------------

    def _select(self) -> None:
        """Make our device the current one of this thread.

        The first call of a thread always tells the make: a runtime may report device 0 as
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
        """Puts copies on the stream; None where only the engine's thread may."""
        self.finishes = finishes
        """Waits for their ends."""

    def close(self) -> None:
        """Wait for all copies and end the threads."""
        if self.submits is not None:
            self.submits.close()
        self.finishes.close()


class StreamCopy:
    """The job of a copy on a stream: ended when its last event has passed and the host is done.

    It is written by the thread that submits it and by the one that ends it.
    """

    def __init__(self) -> None:
        self.event: Any = None
        """What the forward has to wait for, once it was `submitted`. None: for the end."""
        self.submitted = threading.Event()
        self.error = ""
        self.keep: list[object] = []
        """What must not be freed before it has ended."""
        self.arrived: list[Checksum] = []
        """Checksums of the parts that have ended."""
        self.checksums: Sequence[Checksum] = ()
        self.lost = threading.Event()
        """Whether its end cannot be found out any more."""
        self._ended = threading.Event()

    @property
    def failed(self) -> bool:
        """Whether something failed."""
        return bool(self.error)

    def done(self) -> bool:
        """Return whether the copy has ended and the checksums are there."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended, at most `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def wait_ended(self) -> None:
        """Block until the copy has ended. Raises `DeviceCopyError` if that cannot be found out."""
        while not self._ended.wait(_ASK_AGAIN_S):
            if self.lost.is_set():
                raise DeviceCopyError(f"a copy cannot be waited for: {self.error}")

    def fail(self, error: Exception) -> None:
        """Note that something failed; the first reason stays."""
        if not self.error:
            self.error = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Note that nothing is left to do; called once."""
        self.keep.clear()
        if self.error:
            logger.warning("a copy failed: %s", self.error)
        else:
            self.checksums = self.arrived
        self._ended.set()


def _raise_error(copy: CopyJob) -> None:
    """Raise `DeviceCopyError` if the host's part of a copy failed."""
    if copy.error:
        raise DeviceCopyError(copy.error)
