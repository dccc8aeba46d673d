# SPDX-License-Identifier: Apache-2.0
"""Payloads as byte planes, compressed by zstd (`kvhaven[zstd]`).

A payload is divided into blocks of `width * 131072` bytes; the last one may be shorter. A block
holds elements of `width` bytes: all first bytes are stored first, then all second bytes, and so on.
For bf16 this groups signs and exponents, which compress well, apart from mantissas, which hardly
compress. The block's remainder (less than one element) follows. Each block is one zstd frame;
frames follow each other without gaps.

The zstd parameters search for few matches because the data contains few: levels 1 and 3 are slower
and mostly produce longer output. Rotating elements by one bit, so that the exponent fills a byte,
made the bf16 KV of the tested models 2% longer. See docs/performance.md.
"""

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvhaven.errors import TierMissError
from kvhaven.types import align_up

PLANE_BYTES: Final = 1 << 17
"""Largest block inside a zstd frame, so each plane gets its own entropy code."""

_MOST_WIDTH: Final = 4
_MOST_WINDOW: Final = 1 << 20
"""Frames that request a larger window were not written by KVHaven and are rejected."""
_SETTINGS: Final = zstandard.ZstdCompressionParameters(
    window_log=18,
    hash_log=10,
    chain_log=10,
    search_log=1,
    min_match=7,
    strategy=zstandard.STRATEGY_FAST,
    write_checksum=False,
)


class Zstd:
    """Compressor and decompressor for one thread. Long steps release the interpreter lock.

    The instance keeps a buffer of the size of the longest payload so far.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_SETTINGS)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        self._planes = np.empty(_MOST_WIDTH * PLANE_BYTES, np.uint8)
        self._elements = np.empty(_MOST_WIDTH * PLANE_BYTES, np.uint8)
        self._buffer = memoryview(b"")

    def compress(self, payload: memoryview, width: int, most: int) -> tuple[memoryview, int] | None:
        """Compress `payload`; return it zero-padded to whole pages, and its length unpadded.

        The returned buffer starts on a page and is valid until the next call. Returns None if
        the result is longer than `most` bytes.
        """
        buffer = self._room(most)
        at = 0
        for block in _blocks(payload, width):
            frame = self._compressor.compress(self._split(block, width))
            end = at + len(frame)
            if end > most:
                return None
            buffer[at:end] = frame
            at = end
        end = align_up(at)
        buffer[at:end] = bytes(end - at)
        return buffer[:end], at

    def set_aside(self, stored: memoryview) -> memoryview:
        """Return a copy of compressed bytes, valid until the next `set_aside` or `compress`."""
        copy = self._room(len(stored))[: len(stored)]
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(stored, np.uint8))
        return copy

    def decompress(self, stored: memoryview, width: int, into: memoryview) -> None:
        """Decompress `stored` into `into`, which it must fill exactly; nothing else is written.

        `stored` and `into` must not overlap. Raises `TierMissError` if the frames are invalid,
        too short or too long.
        """
        reader = self._decompressor.stream_reader(stored, read_across_frames=True)
        try:
            for block in _blocks(into, width):
                planes = block if width == 1 else self._planes.data[: len(block)]
                if (got := reader.readinto(planes)) != len(block):
                    raise TierMissError(f"a block of {len(block)} bytes ends after {got}")
                if width > 1:
                    self._join(block, width)
            if reader.read(1):
                raise TierMissError(f"the compressed payload holds more than {len(into)} bytes")
        except zstandard.ZstdError as error:
            raise TierMissError(f"the payload cannot be decompressed: {error}") from error

    def _split(self, block: memoryview, width: int) -> memoryview:
        """Split a block into byte planes; return them."""
        if width == 1:
            return block
        count = len(block) // width
        whole = count * width
        elements = np.frombuffer(block[:whole], f"<u{width}")
        shifted = self._elements[:whole].view(elements.dtype)
        for number, plane in enumerate(self._planes_of(count, width)):
            np.right_shift(elements, 8 * number, out=shifted)
            np.copyto(plane, shifted, casting="unsafe")  # the lowest byte
        planes = self._planes.data[: len(block)]
        planes[whole:] = block[whole:]
        return planes

    def _join(self, block: memoryview, width: int) -> None:
        """Join byte planes into a block."""
        count = len(block) // width
        whole = count * width
        elements = self._elements[:whole].view(f"<u{width}")
        into = np.frombuffer(block[:whole], elements.dtype)
        first, *others, last = reversed(self._planes_of(count, width))
        np.copyto(elements, first)
        for plane in others:
            np.left_shift(elements, 8, out=elements)
            np.bitwise_or(elements, plane, out=elements)
        np.left_shift(elements, 8, out=elements)
        np.bitwise_or(elements, last, out=into)
        block[whole:] = self._planes.data[whole : len(block)]

    def _planes_of(self, count: int, width: int) -> Sequence[npt.NDArray[np.uint8]]:
        return [self._planes[count * number : count * (number + 1)] for number in range(width)]

    def _room(self, size: int) -> memoryview:
        """Return the page-aligned buffer, enlarged to at least `size` bytes."""
        if len(self._buffer) < size:
            self._buffer = memoryview(mmap.mmap(-1, align_up(size)))
        return self._buffer


def _blocks(payload: memoryview, width: int) -> list[memoryview]:
    step = width * PLANE_BYTES
    return [payload[at : at + step] for at in range(0, len(payload), step)]
