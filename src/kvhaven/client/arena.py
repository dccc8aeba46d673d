# SPDX-License-Identifier: Apache-2.0
"""A client's mapping of the arena, and its registration with a rank's device."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhaven.arena.growth import next_step
from kvhaven.arena.segment import MappedSegment
from kvhaven.errors import ArenaError
from kvhaven.protocol import SegmentInfo

logger = logging.getLogger(__name__)

_PREFAULT_PIECE = 64 << 20
"""Bytes of page tables filled in one step, so that new memory is registered before the rest."""


_SHARED_POLL_S = 0.01
"""Interval at which a shared arena looks for newly ready memory, while some is not."""


@dataclass(frozen=True)
class HostMemory:
    """A device's registration of host memory, by address and size; by default it does nothing.

    A thread of the arena calls both functions while copies run. `register` may take 0.1 s per GB.
    `unregister` is called with the arguments of an earlier `register`.
    """

    register: Callable[[int, int], None] = lambda _address, _size: None
    unregister: Callable[[int, int], None] = lambda _address, _size: None


@dataclass(eq=False)
class _Prepared:
    """A mapped segment, with the bytes that are allocated, ready for copies, and prefaulted."""

    segment: MappedSegment
    lock_byte: int
    usable: int
    ready: int = 0
    prefaulted: int = 0


class MappedArena:
    """The arena of one service as mapped by a rank; `address_of` turns a place into an address.

    All of it is mapped from the beginning. As the service allocates memory, a thread registers it
    with the device, step by step, and calls `on_ready(segment, lock byte, bytes)` after each step:
    the service uses this rank only in that memory. Then the thread fills page tables, which only
    makes copies faster.
    """

    def __init__(
        self,
        service: str,
        infos: Sequence[SegmentInfo],
        segments: Sequence[MappedSegment],
        memory: HostMemory,
        on_ready: Callable[[int, int, int], None],
    ) -> None:
        self.service = service
        self._memory = memory
        self._on_ready = on_ready
        self._changed = threading.Condition()
        # All below is guarded by `_changed`, except for the fields that only the thread changes.
        self._segments = {
            info.index: _Prepared(segment, info.lock_byte, info.usable)
            for info, segment in zip(infos, segments, strict=True)
        }
        self._registered: list[tuple[int, int]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhaven-arena", daemon=True)
        self._thread.start()

    @property
    def lock_bytes(self) -> tuple[int, ...]:
        """The lock bytes of its segments, which are locked while it is mapped."""
        return tuple(prepared.lock_byte for prepared in self._segments.values())

    def address_of(self, segment: int, offset: int, length: int) -> int:
        """Return the address of a place. Raises `ArenaError` if it lies outside of the segment."""
        prepared = self._segments.get(segment)
        if prepared is None:
            raise ArenaError(f"arena: segment {segment} is not mapped")
        if offset < 0 or offset + length > prepared.usable:
            raise ArenaError(
                f"arena: {offset}+{length} is outside of segment {segment}; expected an end of at "
                f"most {prepared.usable} bytes"
            )
        return prepared.segment.address + offset

    def ready_bytes(self, segment: int) -> int:
        """Return the number of bytes of a segment that this rank has reported as ready."""
        prepared = self._segments.get(segment)
        return prepared.ready if prepared is not None else 0

    @property
    def ready(self) -> bool:
        """Whether this rank has reported all memory that it knows to be allocated as ready."""
        return all(prepared.ready == prepared.usable for prepared in self._segments.values())

    def grown(self, segment: int, usable: int) -> None:
        """Note the allocated bytes of a segment; a value smaller than before is ignored."""
        with self._changed:
            prepared = self._segments[segment]
            prepared.usable = max(usable, prepared.usable)
            self._changed.notify()

    def forked(self) -> None:
        """Renew the lock in a forked child, which has no thread of this arena."""
        self._changed = threading.Condition()

    def close(self) -> threading.Thread:
        """Unregister and unmap in the thread that is returned; no copy may be running."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        return self._thread

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
        for address, size in self._registered:
            try:
                self._memory.unregister(address, size)
            except Exception:  # a driver may raise anything, and the memory must be unmapped
                logger.exception("the arena could not be unregistered from the device")
        close_all([prepared.segment for prepared in self._segments.values()])

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next step; return None when the arena is closed."""
        with self._changed:
            while not self._closing.is_set():
                for index, prepared in self._segments.items():
                    if prepared.ready < prepared.usable:
                        end = next_step(prepared.ready, prepared.usable)
                        return lambda: self._prepare(index, prepared, end)
                for prepared in self._segments.values():
                    if prepared.prefaulted < prepared.ready:
                        return lambda: self._prefault(prepared)
                self._changed.wait()
        return None

    def _prepare(self, index: int, prepared: _Prepared, end: int) -> None:
        """Register a step with the device and report it as ready."""
        address, size = prepared.segment.address + prepared.ready, end - prepared.ready
        try:
            self._memory.register(address, size)
            self._registered.append((address, size))
        except Exception:  # a driver may raise anything, and registering is for speed alone
            logger.exception("the arena could not be registered with the device")
        self._on_ready(index, prepared.lock_byte, end)
        prepared.ready = end

    def _prefault(self, prepared: _Prepared) -> None:
        end = min(prepared.ready, prepared.prefaulted + _PREFAULT_PIECE)
        prepared.segment.prefault(self._closing, prepared.prefaulted, end)
        prepared.prefaulted = end


class SharedArena:
    """An arena that another client of this rank has mapped: places have that client's addresses.

    The client's own mapping only holds its locks, which show the service that this process lives;
    it is not registered with the device, and its pages stay untouched. `mapped` returns the other
    client's arena of the same service, None while there is none. A thread reports what is ready
    there as ready here.
    """

    def __init__(
        self,
        infos: Sequence[SegmentInfo],
        segments: Sequence[MappedSegment],
        mapped: Callable[[], MappedArena | None],
        on_ready: Callable[[int, int, int], None],
    ) -> None:
        self._segments = list(segments)
        self._mapped = mapped
        self._on_ready = on_ready
        self._changed = threading.Condition()
        self._lock_bytes = {info.index: info.lock_byte for info in infos}
        self._usable = {info.index: info.usable for info in infos}
        self._told = dict.fromkeys(self._usable, 0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvhaven-shared-arena", daemon=True)
        self._thread.start()

    @property
    def lock_bytes(self) -> tuple[int, ...]:
        """The lock bytes of its segments."""
        return tuple(self._lock_bytes.values())

    @property
    def ready(self) -> bool:
        """Whether all memory that is known to be allocated is reported as ready."""
        return self._told == self._usable

    def address_of(self, segment: int, offset: int, length: int) -> int:
        """Return the address of a place. Raises `ArenaError` if it is not mapped."""
        arena = self._mapped()
        if arena is None:
            raise ArenaError("arena: the engine's first part has not mapped it")
        return arena.address_of(segment, offset, length)

    def grown(self, segment: int, usable: int) -> None:
        """Note the allocated bytes of a segment; a value smaller than before is ignored."""
        with self._changed:
            self._usable[segment] = max(usable, self._usable[segment])
            self._changed.notify()

    def forked(self) -> None:
        """Renew the lock in a forked child, which has no thread of this arena."""
        self._changed = threading.Condition()

    def close(self) -> threading.Thread:
        """Unmap in the thread that is returned; no copy may be running."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        return self._thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    break
                self._changed.wait(None if self.ready else _SHARED_POLL_S)
                if self._closing:
                    break
                usable = dict(self._usable)
            arena = self._mapped()
            for segment, allocated in usable.items():
                ready = min(allocated, arena.ready_bytes(segment)) if arena is not None else 0
                if ready > self._told[segment]:
                    self._on_ready(segment, self._lock_bytes[segment], ready)
                    self._told[segment] = ready
        close_all(self._segments)


def map_arena(infos: Sequence[SegmentInfo], descriptors: list[int]) -> list[MappedSegment]:
    """Map every segment and close the descriptors, even on failure. Raises `ArenaError`."""
    mapped: list[MappedSegment] = []
    try:
        for info in infos[: len(descriptors)]:
            # `map` takes ownership of its descriptor, even if it fails.
            descriptor = descriptors.pop(0)
            segment = MappedSegment.map(
                info.index, descriptor, info.size, info.lock_byte, info.usable
            )
            mapped.append(segment)
    except ArenaError:
        close_all(mapped)
        raise
    finally:
        close_descriptors(descriptors)
    if len(mapped) < len(infos):
        close_all(mapped)
        raise ArenaError(f"arena: {len(infos)} segments announced, but fewer descriptors received")
    return mapped


def close_all(segments: list[MappedSegment]) -> None:
    """Unmap segments and forget them."""
    for segment in segments:
        segment.close()
    segments.clear()


def close_descriptors(descriptors: list[int]) -> None:
    """Close descriptors that were received over the socket."""
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
