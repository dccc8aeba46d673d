# SPDX-License-Identifier: Apache-2.0
"""GPUs of NVIDIA (CUDA) and AMD (ROCm): copies by DMA, directly to and from the arena.

Torch calls both `torch.cuda`. This module holds all differences: the driver's library and its calls
(`_CudaDriver`, `_HipDriver`), the backend's tag, and how the two are told apart.

**Graph capture.** vLLM captures graphs while other threads register the arena or wait for copies.
While any thread captures in CUDA's global mode, which is torch's default, calls that "may be
unsafe" are refused in all threads, and end the capture: `cuMemHostRegister`, allocating pinned
memory, and querying or waiting for events, streams and devices. A thread whose own mode is relaxed
is exempt (CUDA's documentation of `cuThreadExchangeStreamCaptureMode`). So KVHaven's threads are
always relaxed, and other threads during KVHaven's calls. Even a relaxed thread must not query
events that were recorded in the capture; KVHaven never does. Torch's allocators do the same
(`CUDAStreamCaptureModeGuard`). HIP has the same rules; until 2026 it also refused waits for events
in relaxed threads (ROCm/rocm-systems#3169): `StreamDevice` retries them.

**Current device.** Every new thread begins with device 0, and CUDA creates a context on it (some
hundred MB) for any call that needs one. So every thread selects its device before its first call,
even device 0: the driver's calls fail in a thread without a context.

Tested on simulated drivers (`tests/simulators`) and on NVIDIA H100 and H200 with CUDA 13; ROCm is
untested on hardware.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from kvhaven.devices.plan import Chunks, Moves, plan_chunks
from kvhaven.devices.streams import StreamDevice
from kvhaven.errors import DeviceCopyError
from kvhaven.layouts import PagedLayout
from kvhaven.layouts.base import IntArray

logger = logging.getLogger(__name__)

PIN_BYTES = 2**30
"""Host memory is registered in pieces of at most this size.

The driver refuses a piece of 512 GiB or more (NVIDIA's r580, vllm#51080). Registering takes 0.1 s
per GB: one piece is in use while the next is registered, and other threads' driver calls run
between two pieces.
"""
BATCH: Final = 4096
"""Copies in a batch. Larger batches crash or hang some drivers (51,828 on Blackwell,
vllm#49276)."""
PLANNED: Final = 65_536
"""Approximate number of moves planned at a time: the first run while others are planned."""

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable: valid in every context
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
_ACCESS_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BATCH_SINCE = 12080  # CUDA 12.8; requesting this version gives its signature on 13 as well

_POINTER, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint


class _Driver(Protocol):
    """A driver's library. All calls raise `DeviceCopyError` on errors."""

    host: "_HostCalls"

    def select(self, index: int) -> None:
        """Give this thread a device's context, if the driver has contexts and the thread none."""

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Submit moves to a stream (its handle). When it raises, some of them may be running."""


class _Gpu:
    """The `AcceleratorBackend` of NVIDIA's and AMD's GPUs.

    Copies go directly to registered host memory. Unregistered memory is never passed to the driver,
    whose calls would block: its copies go through staging memory, which is pinned.
    """

    stores_end_in_call = False
    submits_in_thread = True
    pins_staging = True
    collective_backend = "nccl"  # RCCL has the same name in torch

    def __init__(self, name: str, driver: _Driver) -> None:
        self.name = self.kernel_tag = name
        self.torch_api: Any = torch.cuda
        self._driver = driver
        self._registered = Registered()
        """Replaced as a whole, so that copies can read it while a segment is registered."""
        self._registering = threading.Lock()
        self._closing = threading.Event()

    def select(self, index: int) -> None:
        """Make a device the thread's current one, for torch and for the driver."""
        torch.cuda.set_device(index)
        self._driver.select(index)

    def prepare_thread(self) -> None:
        """Set this thread's capture mode to relaxed for good (see the module's docstring)."""
        self._driver.host.exchange_capture_mode(_RELAXED)

    def event(self) -> Any:
        """Return an event; a thread that waits for it sleeps instead of spinning."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def reaches(self, layout: PagedLayout, chunks: Chunks) -> bool:
        """Return whether all of the chunks' memory is registered."""
        return self._registered.holds(chunks.hosts, layout.block_bytes * chunks.counts)

    def copy(
        self,
        layout: PagedLayout,
        chunks: Chunks,
        keep: list[object],  # noqa: ARG002 - the contract's; arguments are read within the call
        *,
        to_host: bool,
    ) -> None:
        """Submit batches of DMA copies to the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        for moves in planned(layout, chunks, self._registered.borders):
            self._driver.copy(moves, stream, to_host=to_host)

    def flush(self) -> None:
        """Do nothing: work starts when it is submitted."""

    def register(self, address: int, size: int) -> None:
        """Pin a mapped segment, piece by piece, so that DMA reaches it directly."""
        with self._registering, self._relaxed():
            for start in range(address, address + size, PIN_BYTES):
                if self._closing.is_set():
                    return
                length = min(PIN_BYTES, address + size - start)
                try:
                    self._driver.host.register(start, length)
                except DeviceCopyError as error:
                    logger.warning(
                        "%d of %d bytes of host memory cannot be registered: %s. Copies to and "
                        "from them go through staging memory and are slower. Check the limit on "
                        "locked memory (ulimit -l).",
                        address + size - start,
                        size,
                        error,
                    )
                    return
                self._registered = Registered({**self._registered.pieces, start: length})

    def unregister(self, address: int, size: int) -> None:
        """Unpin a segment."""
        with self._registering, self._relaxed():
            pieces = self._registered.pieces
            gone = [start for start in pieces if address <= start < address + size]
            self._registered = Registered(
                {start: length for start, length in pieces.items() if start not in gone}
            )
            for start in gone:
                try:
                    self._driver.host.unregister(start)
                except DeviceCopyError as error:
                    logger.warning("host memory cannot be unregistered: %s", error)

    def close(self) -> None:
        """Unpin all memory that is still registered, and register no more."""
        self._closing.set()
        for start, length in self._registered.pieces.items():
            self.unregister(start, length)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Relax the capture mode of the calling thread, perhaps the engine's, for some calls."""
        before = self._driver.host.exchange_capture_mode(_RELAXED)
        try:
            yield
        finally:
            self._driver.host.exchange_capture_mode(before)


@dataclass(frozen=True, eq=False)
class Registered:
    """Host memory registered with the driver, in pieces that may touch but do not overlap."""

    pieces: Mapping[int, int] = field(default_factory=dict)
    """Sizes by addresses."""

    @cached_property
    def borders(self) -> IntArray:
        """Start and end addresses of pieces, in order. No copy may span one."""
        ends = [start + size for start, size in self.pieces.items()]
        return np.unique(np.array([*self.pieces, *ends], dtype=np.int64))

    def holds(self, starts: IntArray, sizes: IntArray) -> bool:
        """Return whether each range of memory is registered from its start to its end."""
        areas = self._areas
        index = np.searchsorted(areas[:, 0], starts, side="right") - 1
        if not len(areas) or index.min() < 0:
            return False
        return bool((starts + sizes <= areas[index, 1]).all())

    @cached_property
    def _areas(self) -> IntArray:
        """Start and end of each area without a gap, in order."""
        areas: list[list[int]] = []
        for start in sorted(self.pieces):
            if areas and areas[-1][1] == start:
                areas[-1][1] += self.pieces[start]
            else:
                areas.append([start, start + self.pieces[start]])
        return np.array(areas, dtype=np.int64).reshape(-1, 2)


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of cuda.h; the location hints (type and id) are left empty."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", ctypes.c_uint * 2),
        ("destination_hint", ctypes.c_uint * 2),
        ("flags", ctypes.c_uint),
    )


class _HostCalls:
    """Calls for host memory and threads; only their names differ between the vendors."""

    def __init__(
        self,
        *,
        capture_mode: Callable[..., None],
        register: Callable[..., None],
        unregister: Callable[..., None],
    ) -> None:
        self._capture_mode = capture_mode
        self._register = register
        self._unregister = unregister

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's capture mode; return the previous one."""
        value = _INT(mode)
        self._capture_mode(ctypes.byref(value))
        return value.value

    def register(self, address: int, size: int) -> None:
        """Pin host memory for all devices."""
        self._register(address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Unpin host memory."""
        self._unregister(address)


class _CudaDriver:
    """CUDA's driver library: one call copies a batch; before 12.8, one call per move.

    Host memory is registered by the driver, not by the runtime: a failure of the runtime's call
    stays pending in its thread, and torch would report it for the next kernel (vllm#51081).
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")

        def call(name: str, *arguments: Any) -> Callable[..., None]:
            return _raising(library, name, arguments)

        self._context = call("cuCtxGetCurrent", _POINTER)
        self._set_context = call("cuCtxSetCurrent", _POINTER)
        self._device = call("cuDeviceGet", _POINTER, _INT)
        self._primary_context = call("cuDevicePrimaryCtxRetain", _POINTER, _INT)
        self.host = _HostCalls(
            capture_mode=call("cuThreadExchangeStreamCaptureMode", _POINTER),
            register=call("cuMemHostRegister_v2", _POINTER, _SIZE, _UINT),
            unregister=call("cuMemHostUnregister", _POINTER),
        )
        one = (_POINTER, _POINTER, _SIZE, _POINTER)
        self._to_host = call("cuMemcpyDtoHAsync_v2", *one)
        self._to_device = call("cuMemcpyHtoDAsync_v2", *one)
        self._batch = _batch_call(library)
        if self._batch is None:
            logger.info("no cuMemcpyBatchAsync (CUDA 12.8): one call per copied piece")

    def select(self, index: int) -> None:
        """Give this thread the device's primary context, which is the one that torch uses.

        Torch does that for devices other than 0. The runtime reports device 0 as current in every
        new thread, so torch does nothing for it.
        """
        context, device = _POINTER(), _INT()
        self._context(ctypes.byref(context))
        if not context.value:
            self._device(ctypes.byref(device), index)
            self._primary_context(ctypes.byref(context), device)
            self._set_context(context)

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Submit moves to a stream: a batch per call, or one move per call before CUDA 12.8."""
        if self._batch is None:
            _copy_each(self._to_host if to_host else self._to_device, moves, stream, to_host)
            return
        targets, sources = (moves.host, moves.device) if to_host else (moves.device, moves.host)
        # One set of attributes, valid for all copies from the first on.
        attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
        first, failed = _SIZE(0), _SIZE(0)
        for start in range(0, len(moves.size), BATCH):
            count = min(BATCH, len(moves.size) - start)
            error = self._batch(
                *(part[start:].ctypes.data for part in (targets, sources, moves.size)),
                count,
                ctypes.addressof(attributes),
                ctypes.addressof(first),
                1,
                ctypes.addressof(failed),
                stream,
            )
            _check(f"cuMemcpyBatchAsync (piece {failed.value} of {count})", error)


class _HipDriver:
    """AMD's HIP library: one call per move (batches exist since ROCm 7 only)."""

    def __init__(self) -> None:
        library = loaded_library("libamdhip64.so", ".7", ".6", "")
        self._last_error = library.hipGetLastError

        def call(name: str, *arguments: Any) -> Callable[..., None]:
            return _raising(library, name, arguments, failed=self._last_error)

        self.host = _HostCalls(
            capture_mode=call("hipThreadExchangeStreamCaptureMode", _POINTER),
            register=call("hipHostRegister", _POINTER, _SIZE, _UINT),
            unregister=call("hipHostUnregister", _POINTER),
        )
        one = (_POINTER, _POINTER, _SIZE, _POINTER)
        self._to_host = call("hipMemcpyDtoHAsync", *one)
        self._to_device = call("hipMemcpyHtoDAsync", *one)

    def select(self, index: int) -> None:
        """Do nothing: HIP's calls go to the thread's device."""

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Submit moves to a stream."""
        _copy_each(self._to_host if to_host else self._to_device, moves, stream, to_host)


def open_cuda(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open an NVIDIA GPU. Raises `IncompatibleEngineError` if there is no GPU of that index."""
    return StreamDevice(_Gpu("cuda", _CudaDriver()), copy_threads, index)


def open_rocm(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open an AMD GPU. Raises `IncompatibleEngineError` if there is no GPU of that index."""
    return StreamDevice(_Gpu("rocm", _HipDriver()), copy_threads, index)


def cuda_unavailable() -> str:
    """Return why no NVIDIA GPU can be used, or an empty string if one can."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _no_gpu()


def rocm_unavailable() -> str:
    """Return why no AMD GPU can be used, or an empty string if one can."""
    if torch.version.hip is None:
        return f"torch {torch.__version__} is built without ROCm"
    return _no_gpu()


def _no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    return "torch.cuda.is_available() is False (no GPU visible, or no driver)"


def loaded_library(name: str, *versions: str) -> ctypes.CDLL:
    """Return a library that this process has loaded, or the first available version of it.

    A runtime has its own state: loaded a second time, from another file, it does not know torch's
    streams. Torch's wheels contain it under a name that no search finds.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.partition("/")[2])
        if path.name == name or path.name.startswith(f"{name}."):
            return ctypes.CDLL(f"/{path}")
    for version in versions[:-1]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name + version)
    return ctypes.CDLL(name + versions[-1])


def _batch_call(library: ctypes.CDLL) -> Callable[..., int] | None:
    """Return `cuMemcpyBatchAsync`, or None if the driver is older than CUDA 12.8."""
    try:
        look_up = library.cuGetProcAddress_v2
    except AttributeError:  # older than CUDA 12
        return None
    found = _POINTER()
    look_up.argtypes = (ctypes.c_char_p, _POINTER, _INT, ctypes.c_uint64, _POINTER)
    look_up.restype = _INT
    look_up(b"cuMemcpyBatchAsync", ctypes.byref(found), _BATCH_SINCE, 0, None)
    if not found.value:
        return None
    arrays, attributes = (_POINTER, _POINTER, _POINTER, _SIZE), (_POINTER, _POINTER, _SIZE)
    return ctypes.CFUNCTYPE(_INT, *arrays, *attributes, _POINTER, _POINTER)(found.value)


def _raising(
    library: ctypes.CDLL,
    name: str,
    arguments: Sequence[Any],
    failed: Callable[[], int] = lambda: 0,
) -> Callable[..., None]:
    """Return a library's function that raises `DeviceCopyError`, after a call of `failed`."""
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, _INT

    def call(*values: Any) -> None:
        error = function(*values)
        if error:
            failed()
            _check(name, error)

    return call


def _check(call: str, error: int) -> None:
    if error:
        raise DeviceCopyError(f"{call}: error {error}")


def _copy_each(copy: Callable[..., None], moves: Moves, stream: int, to_host: bool) -> None:
    targets, sources = (moves.host, moves.device) if to_host else (moves.device, moves.host)
    arrays = (targets, sources, moves.size)
    for target, source, size in zip(*(array.tolist() for array in arrays), strict=True):
        copy(target, source, size, stream)


def planned(layout: PagedLayout, chunks: Chunks, borders: IntArray) -> Iterator[Moves]:
    """Yield the moves of all chunks, some thousands at a time, split at `borders`."""
    for group in chunks.groups(PLANNED // len(layout.layers)):
        moves = plan_chunks(layout, group)
        inside = np.searchsorted(borders, group.hosts, side="right") != np.searchsorted(
            borders, group.hosts + layout.block_bytes * group.counts
        )
        yield split_at(moves, borders) if inside.any() else moves


def split_at(moves: Moves, borders: IntArray) -> Moves:
    """Split moves at sorted host addresses: a copy must not span two registrations."""
    host, device, size = moves
    limits = np.append(borders.astype(np.uint64), np.uint64(2**64 - 1))
    while True:
        room = limits[np.searchsorted(limits, host, side="right")] - host
        across = size > room
        if not across.any():
            return Moves(host, device, size)
        head = room[across]
        tails = host[across] + head, device[across] + head, size[across] - head
        size = size.copy()
        size[across] = head
        host, device, size = (
            np.concatenate(pair) for pair in zip((host, device, size), tails, strict=True)
        )
