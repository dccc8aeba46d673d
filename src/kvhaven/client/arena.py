# SPDX-License-Identifier: Apache-2.0
"""A client's mapping of the arena."""

import os
from collections.abc import Sequence

from kvhaven.arena.segment import MappedSegment
from kvhaven.errors import ArenaError
from kvhaven.protocol import SegmentInfo


def map_arena(segments: Sequence[SegmentInfo], descriptors: list[int]) -> list[MappedSegment]:
    """Map every segment and close the descriptors, also on failure. Raises `ArenaError`."""
    mapped: list[MappedSegment] = []
    try:
        for info in segments[: len(descriptors)]:
            # `map` takes its descriptor over, also when it fails.
            segment = MappedSegment.map(info.index, descriptors.pop(0), info.size, info.lock_byte)
            mapped.append(segment)
    except ArenaError:
        close_all(mapped)
        raise
    finally:
        close_descriptors(descriptors)
    if len(mapped) < len(segments):
        close_all(mapped)
        raise ArenaError(f"{len(segments)} segments were announced, fewer descriptors came")
    return mapped


def close_all(segments: list[MappedSegment]) -> None:
    """Unmap segments and forget them."""
    for segment in segments:
        segment.close()
    segments.clear()


def close_descriptors(descriptors: list[int]) -> None:
    """Close descriptors that came over the socket."""
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
