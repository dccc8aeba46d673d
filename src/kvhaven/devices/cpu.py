# SPDX-License-Identifier: Apache-2.0
"""The host's CPU as a device: copy and checksum in one pass, on the cores that it may use."""

import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch

from kvhaven.devices.base import CopyJob, FinishedCopy, MemoryFigures
from kvhaven.devices.cpu_copies import Copier, copier_of
from kvhaven.devices.plan import check_copy
from kvhaven.devices.threads import HostThreads
from kvhaven.errors import IncompatibleEngineError
from kvhaven.layouts import Layout
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)


class CpuDevice:
    """The host's own memory; a `Device` whose copies end within the call.

    The CPU has no streams: the forward pass ends before the engine calls the device, and copies end
    before the call returns, so every order that the contract guarantees holds by itself.

    `copy_threads` is the number of threads that copy, including the caller's. The others run on
    `cores` (default: the cores of this process, or of its parent if the parent may use more: vLLM
    pins its CPU workers to one core each, and threads inherit that).
    """

    name = "cpu"
    collective_backend = "gloo"
    synchronous = True

    def __init__(self, copy_threads: int = 1, cores: Iterable[int] | None = None) -> None:
        self.threads = HostThreads(
            max(1, copy_threads), frozenset(cores) if cores is not None else usable_cores()
        )
        self._copiers: WeakKeyDictionary[Layout, Copier] = WeakKeyDictionary()

    @property
    def kernel_tag(self) -> str:
        """The instruction sets by which vLLM's CPU attention chooses the layout within a page."""
        sets = [platform.machine(), torch.backends.cpu.get_cpu_capability().lower()]
        if torch.cpu._is_amx_tile_supported():  # noqa: SLF001 - vLLM's CPU backend calls it, too
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
            raise IncompatibleEngineError(f"device: no CPU device {index}; expected 0")

    def memory(self) -> MemoryFigures:
        """Return the host's memory; `kvhaven.arena` accounts for cgroup limits."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryFigures(
            free=os.sysconf("SC_AVPHYS_PAGES") * page, total=os.sysconf("SC_PHYS_PAGES") * page
        )

    def synchronize(self) -> None:
        """Return immediately: no copy outlives its call."""

    def register_host(self, address: int, size: int) -> None:
        """Do nothing: the CPU reaches all host memory directly."""

    def unregister_host(self, address: int, size: int) -> None:
        """Do nothing."""

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Copy chunks into the arena, each hashed by the thread that copied it."""
        check_copy(layout, blocks, targets, may_skip=False)
        copier = self._copier(layout)
        checksums: list[list[Checksum]] = [[]] * len(blocks)

        def copy(chunk: int) -> None:
            checksums[chunk] = copier.store(blocks[chunk], targets[chunk])

        error = self._run(copy, len(blocks))
        if error:
            return FinishedCopy(error=error)
        return FinishedCopy([checksum for shards in checksums for checksum in shards])

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Copy chunks into the KV tensors."""
        check_copy(layout, blocks, sources, may_skip=True)
        copier = self._copier(layout)

        def copy(chunk: int) -> None:
            copier.load(blocks[chunk], sources[chunk])

        return FinishedCopy(error=self._run(copy, len(blocks)))

    def forward_waits(self, job: CopyJob) -> None:
        """Return immediately: the job has ended."""

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Return immediately: the jobs have ended."""

    def close(self) -> None:
        """End the copy threads."""
        self.threads.close()

    def _copier(self, layout: Layout) -> Copier:
        copier = self._copiers.get(layout)
        if copier is None:  # if two threads both create one, either can be kept
            copier = self._copiers[layout] = copier_of(layout)
        return copier

    def _run(self, copy: Callable[[int], None], chunks: int) -> str:
        """Copy all chunks; return the reason of a failure, or an empty string."""
        try:
            self.threads.run(copy, chunks)
        except Exception as error:
            logger.exception("a copy failed")
            return f"{type(error).__name__}: {error}"
        return ""


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may use: its own, or its parent's if these are more."""
    own = os.sched_getaffinity(0)
    try:
        parents = os.sched_getaffinity(os.getppid())
    except OSError:
        return frozenset(own)
    return frozenset(parents) if own < parents else frozenset(own)
