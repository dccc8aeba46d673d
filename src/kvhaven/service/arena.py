# SPDX-License-Identifier: Apache-2.0
"""The service's side of the arena: allocation in the background, and members' mappings."""

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable

from kvhaven.arena.growth import FIRST_BYTES, STEP_BYTES, next_step
from kvhaven.arena.limits import arena_size, format_bytes, room_to_grow
from kvhaven.arena.segment import Segment
from kvhaven.errors import ArenaError
from kvhaven.niceness import lower_thread_priority
from kvhaven.protocol import SegmentInfo
from kvhaven.types import Extent

logger = logging.getLogger(__name__)

SEGMENT = 0
"""Index of the only segment. The wire format allows several: every place names its segment."""

_PIECE = 256 << 20
"""Bytes allocated in one step, about 0.1 s; limits and stop requests are checked in between."""
_PROGRESS_S = 5.0
_PREFAULT_POLL_S = 0.2


class Arena:
    """Owner of the arena's memory, which is one segment, and is allocated gradually.

    The constructor allocates the first `first_bytes`. `grow` starts a thread that allocates the
    rest, in steps of at least `step_bytes`. `usable` and `allocating` change only on the service's
    event loop.

    Memory limits are checked at the start and before each piece. If they do not allow
    `wanted_bytes` at the start, the arena is smaller; with `strict`, `ArenaError` is raised. If
    they do not allow a later piece, the arena keeps its present size and logs a warning, or an
    error with `strict`, because it already serves engines.
    """

    def __init__(
        self,
        wanted_bytes: int,
        *,
        strict: bool,
        first_bytes: int = FIRST_BYTES,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        allowed = arena_size(wanted_bytes, strict=strict)
        if allowed.bytes < wanted_bytes:
            logger.warning("%s", allowed.reason)
        self._segment = Segment.create(SEGMENT, allowed.bytes, min(first_bytes, allowed.bytes))
        self._strict = strict
        self._step_bytes = step_bytes
        self.usable = self._segment.allocated
        """Bytes at the front of the segment that the catalog may allocate."""
        self.allocating = self.usable < self.size
        """Whether the allocation is not finished."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._prefault, "prefault")

    @property
    def size(self) -> int:
        """Planned size of the arena in bytes."""
        return self._segment.size

    @property
    def address(self) -> int:
        """Address of byte 0 in the service."""
        return self._segment.address

    @property
    def descriptors(self) -> list[int]:
        """File descriptors of the segments, in the order of `describe`."""
        return [self._segment.fd]

    def describe(self, lock_byte: int) -> tuple[SegmentInfo, ...]:
        """Return the segments that a member maps; it locks `lock_byte` of each."""
        return (SegmentInfo(SEGMENT, self.size, lock_byte, self.usable),)

    def memory(self, extent: Extent) -> memoryview:
        """Return the service's view of an extent."""
        return self._segment.memory[extent.offset : extent.offset + extent.length]

    def is_mapped(self, lock_byte: int) -> bool:
        """Return whether the member with this lock byte may still access the memory."""
        return self._segment.mapped_by_others(lock_byte)

    def grow(self, on_grown: Callable[[], None]) -> None:
        """Allocate the rest in the background. Call this on the service's event loop.

        `on_grown` is called on that loop after each step, and when the allocation has ended.
        """
        if self.allocating:
            loop = asyncio.get_running_loop()
            self._start(functools.partial(self._allocate, loop, on_grown), "arena")

    def stop_growing(self) -> None:
        """Stop the allocation after the current piece, without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        """Free the memory, except for the parts that other processes still map."""
        self.stop_growing()
        for thread in self._threads:
            thread.join()
        # A tier that hangs may still hold a view: the memory is then freed with the process.
        with contextlib.suppress(BufferError):
            self._segment.close()

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _note(self, usable: int, on_grown: Callable[[], None], *, allocating: bool) -> None:
        self.usable, self.allocating = usable, allocating
        on_grown()

    # --- in threads -------------------------------------------------------------------------

    def _allocate(self, loop: asyncio.AbstractEventLoop, on_grown: Callable[[], None]) -> None:
        """Allocate step by step, and report each step to the event loop."""
        lower_thread_priority()
        segment, began = self._segment, time.monotonic()
        before = step_end = segment.allocated
        next_word = began + _PROGRESS_S
        allocating = True
        while allocating and not self._stop.is_set():
            if segment.allocated == step_end:
                step_end = next_step(step_end, segment.size, self._step_bytes)
            try:
                self._allocate_piece(step_end)
                allocating = segment.allocated < segment.size
            except ArenaError as error:
                allocating = False
                self._complain(error)
            now = time.monotonic()
            if allocating and now >= next_word:
                next_word = now + _PROGRESS_S
                logger.info("arena: %s allocated", self._progress())
            if segment.allocated == step_end or not allocating:
                note = functools.partial(self._note, allocating=allocating)
                loop.call_soon_threadsafe(note, segment.allocated, on_grown)
        took = time.monotonic() - began
        rate = (segment.allocated - before) / 2**30 / max(took, 1e-3)
        logger.info("arena: %s allocated, %.1f GiB/s in %.1f s", self._progress(), rate, took)

    def _allocate_piece(self, end: int) -> None:
        """Allocate the next piece up to `end`. Raises `ArenaError` that names the binding limit."""
        segment = self._segment
        room = room_to_grow(segment.size - segment.allocated)
        if not room.bytes:
            raise ArenaError(
                f"{room.reason}; free memory or raise that limit and restart the service, or "
                "lower max_local_cpu_size"
            )
        segment.extend(min(_PIECE, end - segment.allocated, room.bytes))

    def _complain(self, error: ArenaError) -> None:
        logger.log(
            logging.ERROR if self._strict else logging.WARNING,
            "the arena stays at %s%s: %s",
            self._progress(),
            " despite arena_strict" if self._strict else "",
            error,
        )

    def _progress(self) -> str:
        return f"{format_bytes(self._segment.allocated)} of {format_bytes(self._segment.size)}"

    def _prefault(self) -> None:
        """Fill the service's page tables for the memory that is already allocated."""
        lower_thread_priority()
        segment, done = self._segment, 0
        while done < segment.size and not self._stop.is_set():
            end = segment.allocated
            if end > done:
                segment.prefault(self._stop, done, end)
                done = end
            elif not self.allocating:
                return
            else:
                self._stop.wait(_PREFAULT_POLL_S)
