# SPDX-License-Identifier: Apache-2.0
"""Limit for the tiers of files: the same pieces by plain system calls."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rates import NAMES, PAYLOAD, PIECES
from kvhaven.arena.segment import Segment
from kvhaven.niceness import lower_thread_priority
from kvhaven.tiers.format.header import HEADER_BYTES, stored_bytes


class PlainFiles:
    """Files of a header and a payload, each by one `open`, `pwritev` or `preadv`, and `close`.

    The number and the niceness of the threads are the tier's. Direct I/O is used if the file system
    supports it. A lookup is `os.stat`.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        folder.mkdir()
        self._folder = folder
        direct = _takes_direct_io(folder)
        self._flags = os.O_DIRECT if direct else 0
        self._pages = [Segment.create(0, HEADER_BYTES) for _ in range(threads)]
        how = "direct I/O" if direct else "I/O through the page cache (direct I/O is not supported)"
        self.what = f"{how} of the same pieces, and os.stat, with {threads} threads"

    async def write(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Write new files."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags

        def write(number: int, page: memoryview) -> None:
            file = os.open(self._path(turn, number), flags, 0o600)
            written = os.pwritev(file, [page, buffers[number]], 0)
            os.close(file)
            assert written == stored_bytes(PAYLOAD)

        await self._run(write, len(buffers))

    async def read(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Read files."""

        def read(number: int, page: memoryview) -> None:
            file = os.open(self._path(turn, number), os.O_RDONLY | self._flags)
            got = os.preadv(file, [page, buffers[number]], 0)
            os.close(file)
            assert got == stored_bytes(PAYLOAD)

        await self._run(read, len(buffers))

    async def contains(self, turn: int) -> None:
        """Request the sizes of files."""

        def ask(number: int, _: memoryview) -> None:
            try:
                size = os.stat(self._path(turn, number)).st_size  # noqa: PTH116 - the limit
            except FileNotFoundError:
                size = 0
            assert (size == stored_bytes(PAYLOAD)) == (number < PIECES)

        await self._run(ask, NAMES)

    async def remove(self, turn: int) -> None:
        """Remove files."""

        def remove(number: int, _: memoryview) -> None:
            Path(self._path(turn, number)).unlink()

        await self._run(remove, PIECES)

    def _path(self, turn: int, number: int) -> str:
        return f"{self._folder}/{turn}-{number}"

    async def _run(self, work: Callable[[int, memoryview], None], pieces: int) -> None:
        left: Iterator[int] = iter(range(pieces))

        def run(page: memoryview) -> None:
            lower_thread_priority()
            for number in left:
                work(number, page)

        def join() -> None:
            for thread in threads:
                thread.join()

        threads = [threading.Thread(target=run, args=(page.memory,)) for page in self._pages]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(join)


def _takes_direct_io(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
