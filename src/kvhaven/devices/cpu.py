# SPDX-License-Identifier: Apache-2.0
"""The host's CPU as a device: one pass over the bytes, on the cores that it may use."""

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvhaven.devices.base import CopyJob, FinishedCopy, MemoryFigures
from kvhaven.devices.plan import bytes_at, check_copy, kept_ranges, plan_moves
from kvhaven.errors import IncompatibleEngineError
from kvhaven.layouts import PagedLayout
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)

HASH_BYTES = 2**20
"""Copied bytes are hashed in pieces of about this size, while they are in the core's cache."""


class CpuDevice:
    """Copies with `memmove`; a `Device` whose copies end within the call.

    The CPU has no streams: the forward pass ends before the engine calls us, and copies end
    before we return, so that every order the contract asks for holds by itself.

    `copy_threads` is the number of threads that copy, the caller's included. The others run
    on `cores` (default: those of this process, or of its parent where these are more: vLLM
    pins its CPU workers to one core each, and threads inherit that).
    """

    name = "cpu"
    collective_backend = "gloo"
    synchronous = True

    def __init__(self, copy_threads: int = 1, cores: Iterable[int] | None = None) -> None:
        self._copy_threads = max(1, copy_threads)
        self._cores = frozenset(cores) if cores is not None else usable_cores()
        self._pool: ThreadPoolExecutor | None = None
        self._copiers: WeakKeyDictionary[PagedLayout, _RowCopier | _MoveCopier] = (
            WeakKeyDictionary()
        )

    @property
    def kernel_tag(self) -> str:
        """The instruction sets by which vLLM's CPU attention chooses the inside of a page."""
        sets = [platform.machine(), torch.backends.cpu.get_cpu_capability().lower()]
        if torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - what vLLM's CPU backend asks
            sets.append("amx")
        return "cpu-" + "+".join(sets)

    def count(self) -> int:
        """Return 1."""
        return 1

    def current(self) -> int:
        """Return 0."""
        return 0

    def set_current(self, index: int) -> None:
        """Accept 0 only."""
        if index != 0:
            raise IncompatibleEngineError(f"there is no CPU device {index}, only 0")

    def memory(self) -> MemoryFigures:
        """Return the host's memory; limits of cgroups are the arena's matter."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryFigures(
            free=os.sysconf("SC_AVPHYS_PAGES") * page, total=os.sysconf("SC_PHYS_PAGES") * page
        )

    def synchronize(self) -> None:
        """Return at once: nothing is ever under way."""

    def register_host(self, address: int, size: int) -> None:
        """Do nothing: all host memory is the CPU's own."""

    def unregister_host(self, address: int, size: int) -> None:
        """Do nothing."""

    def store(
        self, layout: PagedLayout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Copy chunks into the arena, each hashed by the thread that copied it."""
        check_copy(layout, blocks, targets, may_skip=False)
        copier = self._copier(layout)
        checksums = [Checksum(b"")] * len(blocks)

        def copy(chunk: int) -> None:
            checksums[chunk] = copier.store(blocks[chunk], targets[chunk])

        self._run(copy, len(blocks))
        return FinishedCopy(checksums)

    def load(
        self, layout: PagedLayout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Copy chunks into the KV tensors."""
        check_copy(layout, blocks, sources, may_skip=True)
        copier = self._copier(layout)

        def copy(chunk: int) -> None:
            copier.load(blocks[chunk], sources[chunk])

        self._run(copy, len(blocks))
        return FinishedCopy()

    def forward_waits(self, job: CopyJob) -> None:
        """Return at once: the job has ended."""

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Return at once: the jobs have ended."""

    def close(self) -> None:
        """End the copy threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _copier(self, layout: PagedLayout) -> "_RowCopier | _MoveCopier":
        copier = self._copiers.get(layout)
        if copier is None:
            copier = _RowCopier(layout) if _RowCopier.fits(layout) else _MoveCopier(layout)
            self._copiers[layout] = copier
        return copier

    def _run(self, copy: Callable[[int], None], chunks: int) -> None:
        """Call `copy` for each chunk, on up to `copy_threads` threads, and wait for all.

        Threads take the next chunk when they are free, since cores are not equally fast (the
        engine's own threads run on some).
        """
        left: Iterator[int] = iter(range(chunks))

        def work() -> None:
            for chunk in left:  # `next` on a range iterator is one step under the GIL
                copy(chunk)

        helpers = min(self._copy_threads, chunks) - 1
        if helpers > 0 and self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._copy_threads - 1, "kvhaven-copy", initializer=_run_on, initargs=(self._cores,)
            )
        futures = [self._pool.submit(work) for _ in range(helpers)] if self._pool else []
        try:
            work()
        finally:
            for future in futures:
                future.result()


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may use: its own, or its parent's if these are more."""
    own = os.sched_getaffinity(0)
    try:
        parents = os.sched_getaffinity(os.getppid())
    except OSError:
        return frozenset(own)
    return frozenset(parents) if own < parents else frozenset(own)


def _run_on(cores: frozenset[int]) -> None:
    """Let this thread run on `cores`, as far as the kernel allows it."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning(
            "copy thread %s stays on its cores: %s", threading.current_thread().name, error
        )


class _RowCopier:
    """Copies of pages that are rows of one piece of memory, as vLLM 0.29 and newer has them.

    Numpy gathers and scatters whole rows with one call for all layers and blocks, without the
    GIL. One `memmove` a page through ctypes costs half a microsecond each, and two threads of
    them fight for the GIL: measured at 16 KiB pages with two threads, 8 GB/s against 13.
    """

    def __init__(self, layout: PagedLayout) -> None:
        self._page = page = layout.layers[0].page_bytes
        base = min(run.pointer for run in layout.layers)
        end = max(
            run.pointer + run.block_stride_bytes * (layout.num_blocks - 1) + page
            for run in layout.layers
        )
        self._rows_rp = bytes_at(base, end - base).reshape(-1, page)
        self._first_row_l1 = np.array(
            [[(run.pointer - base) // page] for run in layout.layers], dtype=np.intp
        )
        self._rows_per_block_l1 = np.array(
            [[run.block_stride_bytes // page] for run in layout.layers], dtype=np.intp
        )

    @staticmethod
    def fits(layout: PagedLayout) -> bool:
        """Return whether all pages are rows of the same storage."""
        page, base = layout.layers[0].page_bytes, layout.layers[0].pointer
        storages = {tensor.untyped_storage().data_ptr() for tensor in layout.tensors}
        return len(storages) == 1 and all(
            run.page_bytes == page
            and run.block_stride_bytes % page == 0
            and (run.pointer - base) % page == 0
            for run in layout.layers
        )

    def store(self, blocks: Sequence[int], target: int) -> Checksum:
        """Copy one chunk to host memory and return the checksum of what landed there."""
        rows_lb, payload_lbp = self._plan(blocks, target)
        digest = xxhash.xxh3_128()
        step = max(1, HASH_BYTES // max(1, len(blocks) * self._page))
        for layer in range(0, len(rows_lb), step):
            part = payload_lbp[layer : layer + step]
            # "clip" because "raise" copies through a buffer; the ids were checked.
            np.take(self._rows_rp, rows_lb[layer : layer + step], axis=0, out=part, mode="clip")
            digest.update(part.data)
        return Checksum(digest.digest())

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks, but those to skip, to the KV tensors."""
        rows_lb, payload_lbp = self._plan(blocks, source)
        for first, end in kept_ranges(blocks):
            self._rows_rp[rows_lb[:, first:end]] = payload_lbp[:, first:end]

    def _plan(
        self, blocks: Sequence[int], host: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
        """Return the row of each layer and block, and the payload as an array."""
        rows_lb = self._first_row_l1 + self._rows_per_block_l1 * np.array(blocks, dtype=np.intp)
        payload = bytes_at(host, rows_lb.size * self._page)
        return rows_lb, payload.reshape(*rows_lb.shape, self._page)


class _MoveCopier:
    """Copies of any other pages: one `memmove` for each piece."""

    def __init__(self, layout: PagedLayout) -> None:
        # The device keeps copiers by layout, weakly: a strong reference would keep both.
        self._layout = replace(layout)

    def store(self, blocks: Sequence[int], target: int) -> Checksum:
        """Copy one chunk to host memory and return the checksum of what landed there."""
        payload = bytes_at(target, self._layout.payload_bytes(len(blocks)))
        digest = xxhash.xxh3_128()
        hashed = copied = 0
        for host, device, size in self._moves(blocks, target):
            ctypes.memmove(host, device, size)
            copied += size
            if copied - hashed >= HASH_BYTES:
                digest.update(payload[hashed:copied].data)
                hashed = copied
        digest.update(payload[hashed:].data)
        return Checksum(digest.digest())

    def load(self, blocks: Sequence[int], source: int) -> None:
        """Copy one chunk's blocks, but those to skip, to the KV tensors."""
        for host, device, size in self._moves(blocks, source):
            ctypes.memmove(device, host, size)

    def _moves(self, blocks: Sequence[int], host: int) -> Iterator[tuple[int, int, int]]:
        plan = plan_moves(self._layout, blocks, host)
        return zip(plan.host.tolist(), plan.device.tolist(), plan.size.tolist(), strict=True)
