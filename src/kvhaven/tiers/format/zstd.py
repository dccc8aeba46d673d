# SPDX-License-Identifier: Apache-2.0
"""Payloads as byte planes, compressed by zstd (`kvhaven[zstd]`).

A payload is cut into blocks of `width * 131072` bytes, the last one shorter. Of each block's
elements of `width` bytes, all first bytes come first, then all second bytes, and so on: of
bf16, signs and exponents end up side by side, which compress well, and apart from mantissas, which
hardly do. What is left of the block (less than an element) follows. Each block is a zstd frame;
frames follow each other without gaps.

The settings of zstd look for few matches, since there are few: its levels 1 and 3 are slower, and
mostly longer too. Turning elements by a bit, so that an exponent is a byte of its own, made the
bf16 KV of the models at hand 2% longer. See docs/performance.md.
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
"""Also the most that one block of zstd's own holds: each plane gets a code of its own."""

_MOST_WIDTH: Final = 4
_MOST_WINDOW: Final = 1 << 20
"""A frame that asks for more memory is none of ours."""
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
    """Compresses and decompresses, in one thread. Its long steps do not hold the interpreter.

    It keeps a buffer as long as the longest payload it has seen.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_SETTINGS)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        self._planes = np.empty(_MOST_WIDTH * PLANE_BYTES, np.uint8)
        self._elements = np.empty(_MOST_WIDTH * PLANE_BYTES, np.uint8)
        self._buffer = memoryview(b"")

    def compress(self, payload: memoryview, width: int, most: int) -> tuple[memoryview, int] | None:
        """Return `payload` compressed, padded to whole pages with zeros, and its length so far.

        What is returned starts on a page, and stays until the next call. None: it would be
        longer than `most` bytes.
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
        """Return a copy of what is to be decompressed. It stays until the next call of this."""
        copy = self._room(len(stored))[: len(stored)]
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(stored, np.uint8))
        return copy

    def decompress(self, stored: memoryview, width: int, into: memoryview) -> None:
        """Fill `into`, exactly, and nothing beyond it. Raises `TierMissError`.

        `stored` and `into` must not overlap.
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
                raise TierMissError(f"there is more than {len(into)} bytes in it")
        except zstandard.ZstdError as error:
            raise TierMissError(f"it cannot be decompressed: {error}") from error

    def _split(self, block: memoryview, width: int) -> memoryview:
        """Return a block's planes."""
        if width == 1:
            return block
        count = len(block) // width
        whole = count * width
        elements = np.frombuffer(block[:whole], f"<u{width}")
        shifted = self._elements[:whole].view(elements.dtype)
        for number, plane in enumerate(self._planes_of(count, width)):
            np.right_shift(elements, 8 * number, out=shifted)
            np.copyto(plane, shifted, casting="unsafe")  # its lowest byte
        planes = self._planes.data[: len(block)]
        planes[whole:] = block[whole:]
        return planes

    def _join(self, block: memoryview, width: int) -> None:
        """Make a block of its planes."""
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
        """Return the buffer, which starts on a page, made as long as need be."""
        if len(self._buffer) < size:
            self._buffer = memoryview(mmap.mmap(-1, align_up(size)))
        return self._buffer


def _blocks(payload: memoryview, width: int) -> list[memoryview]:
    step = width * PLANE_BYTES
    return [payload[at : at + step] for at in range(0, len(payload), step)]
