# SPDX-License-Identifier: Apache-2.0
"""Example device: KV tensors in host memory, copied one page at a time.

It serves the paged format only, and is slow. It shows what a device must do; a device for an
accelerator with streams is shorter, since `kvhaven.devices.streams` does most of it.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence

import xxhash

from kvhaven.devices.base import SKIP, CopyJob, FinishedCopy, MemoryFigures
from kvhaven.devices.detect import Kind
from kvhaven.devices.plan import check_copy
from kvhaven.errors import IncompatibleEngineError, LayoutError
from kvhaven.layouts import Layout, PagedLayout
from kvhaven.types import Checksum


class PlainDevice:
    """A `Device` whose copies end within the call, so that all of them are in order."""

    name = "plain"
    collective_backend = "gloo"
    synchronous = True
    kernel_tag = "plain"

    def __init__(self, copy_threads: int = 1) -> None:
        del copy_threads  # it copies in the caller's thread

    def count(self) -> int:
        """Return 1."""
        return 1

    def current(self) -> int:
        """Return 0."""
        return 0

    def set_current(self, index: int) -> None:
        """Accept 0 only."""
        if index != 0:
            raise IncompatibleEngineError(f"device: no plain device {index}; expected 0")

    def memory(self) -> MemoryFigures:
        """Return the host's memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
        return MemoryFigures(free * page, total * page)

    def synchronize(self) -> None:
        """Return immediately: no copy outlives its call."""

    def register_host(self, address: int, size: int) -> None:
        """Do nothing: all host memory is within reach."""

    def unregister_host(self, address: int, size: int) -> None:
        """Do nothing."""

    def store(
        self, layout: Layout, blocks: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> CopyJob:
        """Copy chunks to host memory, layer by layer, each a page of every block."""
        check_copy(layout, blocks, targets, may_skip=False)
        checksums = []
        for chunk, target in zip(blocks, targets, strict=True):
            for page, at, size in _pages(layout, chunk):
                ctypes.memmove(target + at, page, size)
            payload = (ctypes.c_char * layout.payload_bytes(len(chunk))).from_address(target)
            checksums.append(Checksum(xxhash.xxh3_128_digest(payload)))
        return FinishedCopy(checksums)

    def load(
        self, layout: Layout, blocks: Sequence[Sequence[int]], sources: Sequence[int]
    ) -> CopyJob:
        """Copy chunks from host memory into their blocks."""
        check_copy(layout, blocks, sources, may_skip=True)
        for chunk, source in zip(blocks, sources, strict=True):
            for page, at, size in _pages(layout, chunk):
                ctypes.memmove(page, source + at, size)
        return FinishedCopy()

    def forward_waits(self, job: CopyJob) -> None:
        """Return immediately: the job has ended."""

    def fence(self, jobs: Sequence[CopyJob]) -> None:
        """Return immediately: the jobs have ended."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


def _pages(layout: Layout, chunk: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the address of each page of a chunk, its place in the payload, and its size."""
    if not isinstance(layout, PagedLayout):
        raise LayoutError("format: the plain device cannot copy it; expected paged")
    at = 0
    for run in layout.layers:
        for block in chunk:
            if block != SKIP:
                yield run.pointer + block * run.block_stride_bytes, at, run.page_bytes
            at += run.page_bytes


PLAIN = Kind("cpu", lambda: "", PlainDevice)
"""What the entry point loads to."""
