# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: batched DMA on streams of our own, ordered by events both ways.

Not proven yet: this was written against CUDA's and torch's documentation and vLLM's own use of
the same calls, on a machine without a GPU. `tests/conformance/test_device.py` runs it where
there is one; until that has passed on hardware, take nothing here as tested.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvhaven.devices.base import CopyJob, MemoryFigures
from kvhaven.devices.plan import Moves, check_copy, checksum_at, plan_moves, shard_places
from kvhaven.errors import IncompatibleEngineError
from kvhaven.layouts import Layout
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)

PIN_BYTES = 64 * 2**30
"""Host memory is registered in pieces of at most this size (larger ones are refused by some)."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_ACCESS_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BATCH_SINCE = 12080  # CUDA 12.8; asking for that version gives its signature on 13 as well


class CudaDevice:
    """A GPU, by torch and CUDA's driver; a `Device` whose copies run beside the compute.

    Stores run on one stream and loads on another, since a GPU has a copy engine for either
    direction. Each submission records an event on the caller's current stream and lets our
    stream wait for it, so that a store reads after the compute that wrote its blocks and a
    load writes after the compute that last used them. A thread per direction waits for the
    copies' own events (asleep, not spinning) and computes the checksums of stores from host
    memory, so that neither the engine's thread nor the GPU does.

    `copy_threads` is how many threads compute checksums. Raises `IncompatibleEngineError` if
    there is no such device.
    """

    name = "cuda"
    collective_backend = "nccl"
    synchronous = False
    kernel_tag = "cuda"

    def __init__(self, copy_threads: int = 1, index: int | None = None) -> None:
        if reason := unavailable():
            raise IncompatibleEngineError(f"no CUDA device: {reason}")
        self._driver = _Driver()
        self._finishers = {
            name: ThreadPoolExecutor(1, f"kvhaven-cuda-{name}") for name in ("store", "load")
        }
        self._hashers = ThreadPoolExecutor(max(1, copy_threads), "kvhaven-hash")
        self._registered: dict[int, int] = {}  # address of a piece: its size
        self.set_current(torch.cuda.current_device() if index is None else index)

    def count(self) -> int:
        """Return the number of GPUs that are visible to this process."""
        return torch.cuda.device_count()

    def current(self) -> int:
        """Return the GPU's index among the visible ones."""
        return self._index

    def set_current(self, index: int) -> None:
        """Use another GPU, with new streams. No copy may be under way."""
        if not 0 <= index < self.count():
            raise IncompatibleEngineError(f"there is no CUDA device {index} of {self.count()}")
        torch.cuda.set_device(index)
        self._index = index
        self._store_stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self._load_stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]

    def memory(self) -> MemoryFigures:
        """Return the GPU's memory."""
        return MemoryFigures(*torch.cuda.mem_get_info(self._index))

    def synchronize(self) -> None:
        """Block until the GPU is idle."""
        torch.cuda.synchronize(self._index)

    def register_host(self, address: int, size: int) -> None:
        """Pin a mapped segment, so that DMA reaches it directly and copies do not block."""
        for start in range(address, address + size, PIN_BYTES):
            length = min(PIN_BYTES, address + size - start)
            with torch.cuda.device(self._index):
                error = int(_runtime().cudaHostRegister(start, length, _PORTABLE))
            if error:
                logger.warning(
                    "cudaHostRegister of %d bytes failed with error %d: copies to and from them "
                    "are slower and block (is there a limit on locked memory, ulimit -l?)",
                    length,
                    error,
                )
            else:
                self._registered[start] = length

    def unregister_host(self, address: int, size: int) -> None:
        """Unpin a segment."""
        for start in [at for at in self._registered if address <= at < address + size]:
            del self._registered[start]
            error = int(_runtime().cudaHostUnregister(start))
            if error:
                logger.warning("cudaHostUnregister failed with error %d", error)

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Submit a copy to the arena on the store stream."""
        check_copy(layout, blocks, targets, may_skip=False)
        places = shard_places(layout, blocks, targets)

        def checksums() -> list[Checksum]:
            return list(self._hashers.map(lambda place: checksum_at(*place), places))

        job = _StreamCopy(checksums)
        self._submit(job, self._store_stream, self._moves(layout, blocks, targets), to_host=True)
        self._finishers["store"].submit(job.finish)
        return job

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Submit a copy from the arena on the load stream."""
        check_copy(layout, blocks, sources, may_skip=True)
        job = _StreamCopy(list)
        self._submit(job, self._load_stream, self._moves(layout, blocks, sources), to_host=False)
        self._finishers["load"].submit(job.finish)
        return job

    def forward_waits(self, job: CopyJob) -> None:
        """Let the current stream wait for the job's event."""
        if isinstance(job, _StreamCopy):
            torch.cuda.current_stream(self._index).wait_event(job.event)

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Let the current stream and the load stream wait for the jobs' events."""
        for job in jobs:
            if isinstance(job, _StreamCopy):
                torch.cuda.current_stream(self._index).wait_event(job.event)
                self._load_stream.wait_event(job.event)

    def close(self) -> None:
        """Wait for our streams, end the threads, unpin everything."""
        self._store_stream.synchronize()
        self._load_stream.synchronize()
        for executor in (*self._finishers.values(), self._hashers):
            executor.shutdown()
        for address, size in list(self._registered.items()):
            self.unregister_host(address, size)

    def _submit(
        self, job: "_StreamCopy", stream: torch.cuda.Stream, moves: Moves, *, to_host: bool
    ) -> None:
        """Put the moves on a stream, behind all that the current stream has to do so far."""
        with torch.cuda.device(self._index):
            before = torch.cuda.Event()  # type: ignore[no-untyped-call]
            before.record(torch.cuda.current_stream(self._index))
            stream.wait_event(before)
            # After a failure, moves before it may still be under way: the job ends with its
            # event like any other.
            job.refused = self._driver.copy(moves, stream.cuda_stream, to_host=to_host)
            job.event.record(stream)

    def _moves(
        self, layout: Layout, blocks: Sequence[Sequence[int]], hosts: Sequence[int]
    ) -> Moves:
        plans = [plan_moves(layout, ids, host) for ids, host in zip(blocks, hosts, strict=True)]
        if not plans:
            return plan_moves(layout, (), 0)
        moves = Moves(*(np.concatenate(parts) for parts in zip(*plans, strict=True)))
        return split_at(moves, self._registered)


class _StreamCopy:
    """The job of a copy on a stream: ended when its event has passed and `results` are in."""

    def __init__(self, results: Callable[[], list[Checksum]]) -> None:
        # "blocking": waiting for it sleeps instead of spinning.
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.refused = ""
        """Why a part of it could not be submitted."""
        self.error = ""
        self.checksums: Sequence[Checksum] = ()
        self._results = results
        self._ended = threading.Event()

    def done(self) -> bool:
        """Return whether the copy has ended and the checksums are there."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended, at most `timeout_s` seconds."""
        return self._ended.wait(timeout_s)

    def finish(self) -> None:
        """Wait for the event and compute the results; on the direction's own thread."""
        try:
            self.event.synchronize()
            self.error = self.refused
            if not self.refused:
                self.checksums = self._results()
        except Exception as error:  # noqa: BLE001 - whatever it was, the job must end
            self.error = f"{type(error).__name__}: {error}"
        if self.error:
            logger.warning("copy failed: %s", self.error)
        self._ended.set()


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of cuda.h; the location hints (type and id) are left empty."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", ctypes.c_uint * 2),
        ("destination_hint", ctypes.c_uint * 2),
        ("flags", ctypes.c_uint),
    )


class _Driver:
    """Raw copies by CUDA's driver library: one batched call, or one call a move before 12.8."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._to_host = library.cuMemcpyDtoHAsync_v2
        self._to_device = library.cuMemcpyHtoDAsync_v2
        for one in (self._to_host, self._to_device):
            one.argtypes = (pointer, pointer, size, pointer)
            one.restype = ctypes.c_int
        self._batch: Callable[..., int] | None = None
        found = pointer()
        try:
            look_up = library.cuGetProcAddress_v2
        except AttributeError:
            look_up = None  # a driver before CUDA 12
        if look_up is not None:
            look_up.argtypes = (
                ctypes.c_char_p,
                ctypes.POINTER(pointer),
                ctypes.c_int,
                ctypes.c_uint64,
                pointer,
            )
            look_up.restype = ctypes.c_int
            look_up(b"cuMemcpyBatchAsync", ctypes.byref(found), _BATCH_SINCE, 0, None)
        if found.value:
            signature = ctypes.CFUNCTYPE(
                ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer,
                pointer,
            )  # fmt: skip
            self._batch = signature(found.value)
        else:
            logger.info("no cuMemcpyBatchAsync (CUDA 12.8): each piece is copied by its own call")

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> str:
        """Submit moves to a stream (its handle); return what failed, or an empty text."""
        targets, sources = (moves.host, moves.device) if to_host else (moves.device, moves.host)
        count = len(moves.size)
        if count == 0:
            return ""
        if self._batch is not None:
            attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
            first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
            error = self._batch(
                targets.ctypes.data,
                sources.ctypes.data,
                moves.size.ctypes.data,
                count,
                ctypes.addressof(attributes),
                ctypes.addressof(first),
                1,
                ctypes.addressof(failed),
                stream,
            )
            if error:
                return f"cuMemcpyBatchAsync: error {error} at piece {failed.value} of {count}"
            return ""
        one, name = (
            (self._to_host, "cuMemcpyDtoHAsync")
            if to_host
            else (self._to_device, "cuMemcpyHtoDAsync")
        )
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), moves.size.tolist(), strict=True
        ):
            error = one(target, source, size, stream)
            if error:
                return f"{name}: error {error}"
        return ""


def unavailable() -> str:
    """Return why there is no CUDA device to use, or an empty text if there is one."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm, which is not served yet"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False (no GPU visible, or no driver)"
    return ""


def _runtime() -> Any:  # torch's bindings have no types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def split_at(moves: Moves, boundaries: Sequence[int] | dict[int, int]) -> Moves:
    """Split moves at host addresses: one copy may not span two registrations."""
    host, device, size = moves
    for boundary in np.array(sorted(boundaries), dtype=np.uint64):
        across = (host < boundary) & (host + size > boundary)
        if not across.any():
            continue
        head = boundary - host[across]
        host = np.concatenate((host, host[across] + head))
        device = np.concatenate((device, device[across] + head))
        tail = size[across] - head
        size = size.copy()
        size[across] = head
        size = np.concatenate((size, tail))
    return Moves(host, device, size)
