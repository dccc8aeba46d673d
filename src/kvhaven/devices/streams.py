# SPDX-License-Identifier: Apache-2.0
"""Accelerators with streams: copies beside the compute, ordered by events both ways."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

from kvhaven.devices.base import CopyJob, FinishedCopy, MemoryFigures
from kvhaven.devices.cpu import CpuDevice
from kvhaven.devices.make import Make
from kvhaven.devices.plan import check_copy, checksum_at, shard_places
from kvhaven.devices.staging import Piece, StagingPool, cut, paged_of
from kvhaven.errors import DeviceCopyError, IncompatibleEngineError
from kvhaven.layouts import Layout, PagedLayout
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)


class StreamDevice:
    """An accelerator; a `Device` whose copies run beside the compute.

    Stores run on one stream and loads on another, since most accelerators have a copy engine
    for either direction. Each submission records an event on the caller's current stream and
    lets our stream wait for it, so that a store reads after the compute that wrote its blocks
    and a load writes after the compute that last used them. A thread per direction waits for
    the copies' own events (asleep, not spinning); what is left to do on the host (checksums,
    the way between staging memory and the arena) is done there, so that neither the engine's
    thread nor the accelerator does it.

    Copies in the paged format go straight to the arena where the make can. Others go through
    staging memory: whole blocks are copied between the device and there, and the host's CPU
    brings them into the format and to the arena, or back.

    `copy_threads` is how many threads do the host's part. Raises `IncompatibleEngineError` if
    there is no device `index` (default: the current one).
    """

    synchronous = False

    def __init__(self, make: Make, copy_threads: int = 1, index: int | None = None) -> None:
        self._make = make
        self._api = make.torch_api
        self._host = CpuDevice(max(1, copy_threads))
        self._finishers = {
            name: ThreadPoolExecutor(1, f"kvhaven-{make.name}-{name}") for name in ("store", "load")
        }
        self._submitter = ThreadPoolExecutor(1, f"kvhaven-{make.name}-submit")
        self._hashers = ThreadPoolExecutor(max(1, copy_threads), "kvhaven-hash")
        self._staging = StagingPool(pinned=make.pins_staging)
        self.set_current(self._api.current_device() if index is None else index)

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
        self._api.set_device(index)
        self._index = index
        self._store_stream = self._api.Stream()
        self._load_stream = self._api.Stream()

    def memory(self) -> MemoryFigures:
        """Return the device's memory."""
        return MemoryFigures(*self._api.mem_get_info(self._index))

    def synchronize(self) -> None:
        """Block until the device is idle."""
        with self._current():
            self._make.flush()
            self._api.synchronize()

    def register_host(self, address: int, size: int) -> None:
        """Prepare a mapped segment for direct copies, where the make has them."""
        self._make.register(address, size)

    def unregister_host(self, address: int, size: int) -> None:
        """Undo `register_host`."""
        self._make.unregister(address, size)

    # --- copies -------------------------------------------------------------------------------

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Submit a copy to the arena on the store stream."""
        check_copy(layout, blocks, targets, may_skip=False)
        if not blocks:
            return FinishedCopy()
        job = StreamCopy(self._make.event())
        before = self._mark()
        if not self._is_direct(layout):
            self._store_staged(job, before, layout, blocks, targets)
        else:
            with self._behind(before, self._store_stream, job.event):
                for ids, target in zip(blocks, targets, strict=True):
                    self._copy(job, layout, ids, target, to_host=True)
            places = shard_places(layout, blocks, targets)
            self._finish("store", job, lambda: self._checksums(places))
        if self._make.stores_end_in_call:
            job.wait_ended()
        return job

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Submit a copy from the arena on the load stream."""
        check_copy(layout, blocks, sources, may_skip=True)
        if not blocks:
            return FinishedCopy()
        job = StreamCopy(self._make.event())
        before = self._mark()
        if self._is_direct(layout):
            with self._behind(before, self._load_stream, job.event):
                for ids, source in zip(blocks, sources, strict=True):
                    self._copy(job, layout, ids, source, to_host=False)
            self._finish("load", job, list)
        elif self._make.submits_in_thread:
            job.submitted.clear()
            self._submitter.submit(self._load_staged, job, before, layout, blocks, sources)
        else:
            self._load_staged(job, before, layout, blocks, sources)
        if job.submitted.is_set() and job.refused:
            job.wait_ended()
            raise DeviceCopyError(job.refused)
        return job

    def forward_waits(self, job: CopyJob) -> None:
        """Let the current stream wait for the job's event."""
        if isinstance(job, StreamCopy):
            job.submitted.wait()
            with self._current():
                self._api.current_stream().wait_event(job.event)

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let the current stream wait for the jobs' events; loads wait for the current stream."""
        for job in jobs:
            self.forward_waits(job)

    def close(self) -> None:
        """Wait for our streams, end the threads, give up what was registered."""
        self._submitter.shutdown()
        for stream in (self._store_stream, self._load_stream):
            stream.synchronize()
        for executor in (*self._finishers.values(), self._hashers):
            executor.shutdown()
        self._host.close()
        self._staging.close()

    # --- the host's part ----------------------------------------------------------------------

    def _copy(
        self,
        job: "StreamCopy",
        layout: PagedLayout,
        blocks: Sequence[int],
        host: int,
        *,
        to_host: bool,
    ) -> None:
        """Put a copy on the current stream, unless one before it was refused.

        After that, copies before it may still be under way: the job ends with its event like
        any other.
        """
        if job.refused:
            return
        try:
            job.keep.append(self._make.copy(layout, blocks, host, to_host=to_host))
        except Exception as error:  # noqa: BLE001 - a driver may raise anything; the job must end
            job.refused = f"{type(error).__name__}: {error}"

    def _is_direct(self, layout: Layout) -> TypeGuard[PagedLayout]:
        """Whether copies go straight to the arena: pages can, heads are sorted by the host."""
        return isinstance(layout, PagedLayout) and not self._make.stages

    def _checksums(self, places: Sequence[tuple[int, int]]) -> list[Checksum]:
        return list(self._hashers.map(lambda place: checksum_at(*place), places))

    def _store_staged(
        self,
        job: "StreamCopy",
        before: Any,
        layout: Layout,
        blocks: Sequence[Sequence[int]],
        targets: Sequence[int],
    ) -> None:
        """Copy whole blocks to staging memory; the finisher brings them to the arena."""
        checksums: list[Checksum] = []
        for chunks in cut(layout, blocks):
            piece = Piece(layout, [blocks[chunk] for chunk in chunks], self._staging)
            event = self._make.event()
            with self._behind(before, self._store_stream, event):
                self._copy(job, paged_of(layout), piece.blocks, piece.address, to_host=True)

            def arrive(piece: Piece = piece, chunks: range = chunks) -> list[Checksum]:
                into = [targets[chunk] for chunk in chunks]
                copy = self._host.store(piece.layout, piece.places, into)
                checksums.extend(copy.checksums)
                return checksums

            job.event = event
            self._finish("store", job, arrive, piece, last=chunks.stop == len(blocks))

    def _load_staged(
        self,
        job: "StreamCopy",
        before: Any,
        layout: Layout,
        blocks: Sequence[Sequence[int]],
        sources: Sequence[int],
    ) -> None:
        """Bring blocks from the arena to staging memory, and put their copies on the stream."""
        try:
            for chunks in cut(layout, blocks):
                piece = Piece(layout, [blocks[chunk] for chunk in chunks], self._staging)
                self._host.load(piece.layout, piece.places, [sources[chunk] for chunk in chunks])
                event = self._make.event()
                with self._behind(before, self._load_stream, event):
                    self._copy(job, paged_of(layout), piece.blocks, piece.address, to_host=False)
                job.event = event
                self._finish("load", job, list, piece, last=chunks.stop == len(blocks))
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            job.refused = f"{type(error).__name__}: {error}"
            self._finish("load", job, list)
        finally:
            job.submitted.set()

    # --- streams ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make our device the current one of this thread."""
        if self._api.current_device() != self._index:
            self._api.set_device(self._index)
        yield

    def _mark(self) -> Any:
        """Return an event behind all that the current stream has to do so far."""
        with self._current():
            self._make.flush()
            event = self._make.event()
            event.record(self._api.current_stream())
            return event

    @contextlib.contextmanager
    def _behind(self, before: Any, stream: Any, event: Any) -> Iterator[None]:
        """Make a stream of ours current, behind `before`; record `event` on it at the end."""
        with self._current():
            stream.wait_event(before)
            with self._api.stream(stream):
                yield
                self._make.flush()
                event.record(stream)

    def _finish(
        self,
        direction: str,
        job: "StreamCopy",
        results: Callable[[], Sequence[Checksum]],
        piece: Piece | None = None,
        *,
        last: bool = True,
    ) -> None:
        """Have the direction's thread wait for the job's present event, then do the rest."""
        event = job.event

        def wait() -> None:
            try:
                event.synchronize()
                if not job.refused:
                    job.checksums = results()
            except Exception as error:  # noqa: BLE001 - whatever it was, the job must end
                job.refused = f"{type(error).__name__}: {error}"
            finally:
                if piece is not None:
                    piece.give_back()
                if last:
                    job.end()

        self._finishers[direction].submit(wait)


class StreamCopy:
    """The job of a copy on a stream: ended when its event has passed and the host is done."""

    def __init__(self, event: Any) -> None:
        self.event = event
        """What the forward has to wait for, as soon as it was `submitted`."""
        self.submitted = threading.Event()
        self.submitted.set()
        self.refused = ""
        """Why a part of it could not be submitted, or finished."""
        self.keep: list[object] = []
        """What must not be freed before it has ended."""
        self.error = ""
        self.checksums: Sequence[Checksum] = ()
        self._ended = threading.Event()

    def done(self) -> bool:
        """Return whether the copy has ended and the checksums are there."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended, at most `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def wait_ended(self) -> None:
        """Block until the copy has ended, however long."""
        self._ended.wait()

    def end(self) -> None:
        """Note that all was done; called once, by the direction's thread."""
        self.keep.clear()
        self.error = self.refused
        if self.error:
            self.checksums = ()
            logger.warning("copy failed: %s", self.error)
        self._ended.set()
