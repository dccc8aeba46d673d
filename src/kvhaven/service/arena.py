# SPDX-License-Identifier: Apache-2.0
"""The service's side of the arena: its segments, who maps them, and when nobody does."""

import contextlib
import logging
import threading
from collections.abc import Sequence

from kvhaven.arena.limits import arena_size
from kvhaven.arena.segment import Segment
from kvhaven.protocol import SegmentInfo
from kvhaven.types import Extent

logger = logging.getLogger(__name__)


class Arena:
    """Owns the segments. One is enough for now; places already name theirs."""

    def __init__(self, wanted_bytes: int, *, strict: bool) -> None:
        allowed = arena_size(wanted_bytes, strict=strict)
        if allowed.bytes < wanted_bytes:
            logger.warning("%s", allowed.reason)
        self.segments: Sequence[Segment] = (Segment.create(0, allowed.bytes),)
        self._stop = threading.Event()
        self._prefault = threading.Thread(target=self._populate, name="prefault", daemon=True)
        self._prefault.start()

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each segment, by its index."""
        return {segment.index: segment.size for segment in self.segments}

    @property
    def descriptors(self) -> list[int]:
        """The segments' descriptors, in the order of `describe`."""
        return [segment.fd for segment in self.segments]

    def describe(self, lock_byte: int) -> tuple[SegmentInfo, ...]:
        """Return what a member must know to map the arena."""
        return tuple(
            SegmentInfo(segment.index, segment.size, lock_byte) for segment in self.segments
        )

    def memory(self, extent: Extent) -> memoryview:
        """Return the service's own view of an extent."""
        segment = self.segments[extent.segment]
        return segment.memory[extent.offset : extent.offset + extent.length]

    def is_mapped(self, lock_byte: int) -> bool:
        """Whether the member with this lock byte may still touch any segment."""
        return any(segment.mapped_by_others(lock_byte) for segment in self.segments)

    def close(self) -> None:
        """Give the memory back, as far as nobody else maps it."""
        self._stop.set()
        self._prefault.join()
        for segment in self.segments:
            # A tier that hangs may still hold a view: then the memory goes with the process.
            with contextlib.suppress(BufferError):
                segment.close()

    def _populate(self) -> None:
        for segment in self.segments:
            segment.prefault(self._stop)
