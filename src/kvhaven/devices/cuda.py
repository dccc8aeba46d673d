# SPDX-License-Identifier: Apache-2.0
"""GPUs of NVIDIA (CUDA) and AMD (ROCm): copies by DMA, straight to and from the arena.

Torch calls both `torch.cuda`. What differs is named here: the driver's library and its calls
(`_CudaDriver`, `_HipDriver`), the backend's tag, and how they are told apart.

Not proven yet: this was written against CUDA's, HIP's and torch's documentation and vLLM's own
use of the same calls, on a machine without a GPU. `tests/conformance/test_device.py` runs it
where there is one; until that has passed on hardware, take nothing here as tested.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvhaven.devices.plan import Moves, plan_moves
from kvhaven.devices.streams import StreamDevice
from kvhaven.errors import DeviceCopyError
from kvhaven.layouts import PagedLayout

logger = logging.getLogger(__name__)

PIN_BYTES = 64 * 2**30
"""Host memory is registered in pieces of at most this size (larger ones are refused by some)."""

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process
_ACCESS_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BATCH_SINCE = 12080  # CUDA 12.8; asking for that version gives its signature on 13 as well


class _Driver(Protocol):
    """A driver's raw copies."""

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Put moves on a stream (its handle). Raises `DeviceCopyError`; some may be under way."""


class _Gpu:
    """What `StreamDevice` has to know of GPUs of NVIDIA and AMD."""

    stages = False
    stores_end_in_call = False
    submits_in_thread = True
    pins_staging = True
    collective_backend = "nccl"  # RCCL has the same name in torch

    def __init__(self, name: str, driver: _Driver) -> None:
        self.name = self.kernel_tag = name
        self.torch_api: Any = torch.cuda
        self._driver = driver
        self._registered: dict[int, int] = {}  # address of a piece: its size

    def event(self) -> Any:
        """Return an event for which a thread waits asleep instead of spinning."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(
        self, layout: PagedLayout, blocks: Sequence[int], host: int, *, to_host: bool
    ) -> object:
        """Put one batch of DMA on the current stream."""
        moves = split_at(plan_moves(layout, blocks, host), self._registered)
        if len(moves.size):
            stream = torch.cuda.current_stream().cuda_stream
            self._driver.copy(moves, stream, to_host=to_host)
        return moves

    def flush(self) -> None:
        """Do nothing: work starts when it is submitted."""

    def register(self, address: int, size: int) -> None:
        """Pin a mapped segment, so that DMA reaches it directly and copies do not block."""
        for start in range(address, address + size, PIN_BYTES):
            length = min(PIN_BYTES, address + size - start)
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

    def unregister(self, address: int, size: int) -> None:
        """Unpin a segment."""
        for start in [at for at in self._registered if address <= at < address + size]:
            del self._registered[start]
            error = int(_runtime().cudaHostUnregister(start))
            if error:
                logger.warning("cudaHostUnregister failed with error %d", error)


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of cuda.h; the location hints (type and id) are left empty."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", ctypes.c_uint * 2),
        ("destination_hint", ctypes.c_uint * 2),
        ("flags", ctypes.c_uint),
    )


class _CudaDriver:
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

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Put moves on a stream: in one call, or one call a move before CUDA 12.8."""
        targets, sources = (moves.host, moves.device) if to_host else (moves.device, moves.host)
        count = len(moves.size)
        if self._batch is None:
            name = "cuMemcpyDtoHAsync" if to_host else "cuMemcpyHtoDAsync"
            one = self._to_host if to_host else self._to_device
            for target, source, size in _listed(targets, sources, moves.size):
                _check(name, one(target, source, size, stream))
            return
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
        _check(f"cuMemcpyBatchAsync (piece {failed.value} of {count})", error)


class _HipDriver:
    """Raw copies by AMD's HIP library: one call a move (batches came with ROCm 7 only)."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libamdhip64.so")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._to_host = library.hipMemcpyDtoHAsync
        self._to_device = library.hipMemcpyHtoDAsync
        for one in (self._to_host, self._to_device):
            one.argtypes = (pointer, pointer, size, pointer)
            one.restype = ctypes.c_int

    def copy(self, moves: Moves, stream: int, *, to_host: bool) -> None:
        """Put moves on a stream."""
        targets, sources = (moves.host, moves.device) if to_host else (moves.device, moves.host)
        name = "hipMemcpyDtoHAsync" if to_host else "hipMemcpyHtoDAsync"
        one = self._to_host if to_host else self._to_device
        for target, source, size in _listed(targets, sources, moves.size):
            _check(name, one(target, source, size, stream))


def open_cuda(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open an NVIDIA GPU. Raises `IncompatibleEngineError` if there is none of that index."""
    return StreamDevice(_Gpu("cuda", _CudaDriver()), copy_threads, index)


def open_rocm(copy_threads: int = 1, index: int | None = None) -> StreamDevice:
    """Open an AMD GPU. Raises `IncompatibleEngineError` if there is none of that index."""
    return StreamDevice(_Gpu("rocm", _HipDriver()), copy_threads, index)


def cuda_unavailable() -> str:
    """Return why there is no NVIDIA GPU to use, or an empty text if there is one."""
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _no_gpu()


def rocm_unavailable() -> str:
    """Return why there is no AMD GPU to use, or an empty text if there is one."""
    if torch.version.hip is None:
        return f"torch {torch.__version__} is built without ROCm"
    return _no_gpu()


def _no_gpu() -> str:
    if torch.cuda.is_available():
        return ""
    return "torch.cuda.is_available() is False (no GPU visible, or no driver)"


def _check(call: str, error: int) -> None:
    if error:
        raise DeviceCopyError(f"{call}: error {error}")


def _listed(*arrays: npt.NDArray[np.uint64]) -> Iterator[tuple[int, ...]]:
    return zip(*(array.tolist() for array in arrays), strict=True)


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
