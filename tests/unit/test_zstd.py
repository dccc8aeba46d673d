# SPDX-License-Identifier: Apache-2.0
"""Byte planes and zstd: what goes in comes out, and damage is noticed or harmless."""

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhaven.errors import TierMissError

zstandard = pytest.importorskip("zstandard", reason="pip install 'kvhaven[zstd]'")
np = pytest.importorskip("numpy", reason="pip install 'kvhaven[zstd]'")

from kvhaven.tiers.format.zstd import PLANE_BYTES, Zstd  # noqa: E402 - needs both

ZSTD = Zstd()
WIDTHS = (1, 2, 4)
AROUND = 64
"""Bytes around a buffer that nobody may touch."""


def numbers(kind: str, size: int, seed: int) -> bytes:
    """Return `size` bytes of normally distributed numbers, or of none."""
    chosen = np.random.default_rng(seed)
    normal = chosen.normal(size=size // 2 + 1).astype("<f4")
    found: bytes = {
        "bf16": (normal.view("<u4") >> 16).astype("<u2").tobytes(),
        "f32": normal.tobytes(),
        "zeros": bytes(size),
        "noise": chosen.bytes(size),
    }[kind]
    return found[:size]


def compressed(payload: bytes, width: int) -> bytes:
    found = ZSTD.compress(memoryview(payload), width, 2 * len(payload) + 4096)
    assert found is not None
    body, length = found
    assert len(body) % 4096 == 0
    assert not any(body[length:])
    return bytes(body[:length])


def decompressed(stored: bytes, width: int, size: int) -> bytes:
    """Decompress between guards. Raises `TierMissError`."""
    whole = bytearray(b"\xa5" * (size + 2 * AROUND))
    with memoryview(whole)[AROUND : AROUND + size] as into:
        try:
            ZSTD.decompress(ZSTD.set_aside(memoryview(stored)), width, into)
        finally:
            assert whole[:AROUND] == whole[-AROUND:] == b"\xa5" * AROUND
    return bytes(whole[AROUND:-AROUND])


sizes = st.one_of(
    st.integers(1, 5000),
    st.builds(
        lambda blocks, width, off: max(1, blocks * width * PLANE_BYTES + off),
        st.integers(0, 2),
        st.sampled_from(WIDTHS),
        st.integers(-5, 5),
    ),
)
kinds = st.sampled_from(["bf16", "f32", "zeros", "noise"])


@given(kinds, sizes, st.sampled_from(WIDTHS), st.integers(0, 3))
@settings(deadline=None)
def test_what_was_compressed_comes_back(kind: str, size: int, width: int, seed: int) -> None:
    payload = numbers(kind, size, seed)
    assert decompressed(compressed(payload, width), width, size) == payload


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_are_the_documented_ones(width: int) -> None:
    payload = bytes(range(251)) * 3 + b"rest"
    count = len(payload) // width
    planes = b"".join(payload[at : count * width : width] for at in range(width))
    planes += payload[count * width :]
    assert zstandard.ZstdDecompressor().decompress(compressed(payload, width)) == planes


def test_bf16_and_f32_are_shorter_in_planes_of_their_own_width() -> None:
    for kind, own in (("bf16", 2), ("f32", 4)):
        payload = numbers(kind, 1 << 20, 0)
        lengths = {width: len(compressed(payload, width)) for width in WIDTHS}
        assert lengths[own] < lengths[1] * 0.95
        assert lengths[own] < len(payload) * 0.9


def test_what_would_be_too_long_is_given_up() -> None:
    noise = numbers("noise", 300_000, 0)
    assert ZSTD.compress(memoryview(noise), 2, len(noise) - 4096) is None


@given(st.data(), st.sampled_from(WIDTHS))
@settings(deadline=None, max_examples=300)
def test_damage_is_a_miss_or_harmless(data: st.DataObject, width: int) -> None:
    size = data.draw(st.integers(1, 3000))
    payload = numbers("bf16", size, 1)
    stored = compressed(payload, width)
    at = data.draw(st.integers(0, len(stored) - 1))
    damaged = bytearray(stored)
    match data.draw(st.sampled_from(["flip", "cut", "longer", "noise"])):
        case "flip":
            damaged[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del damaged[at:]
        case "longer":
            damaged += stored
        case _:
            damaged[at:] = random.Random(at).randbytes(len(stored) - at)
    if not damaged:
        return
    with contextlib.suppress(TierMissError):  # else the checksum in the header tells
        decompressed(bytes(damaged), width, size)


def test_what_holds_more_than_it_should_is_a_miss_and_takes_no_memory() -> None:
    small = zstandard.ZstdCompressionParameters.from_level(1, window_log=17)
    bomb = zstandard.ZstdCompressor(compression_params=small).compress(bytes(1 << 28))
    assert len(bomb) < 1 << 17
    for width in WIDTHS:
        with pytest.raises(TierMissError, match="more than"):
            decompressed(bomb, width, 10_000)


def test_a_frame_that_wants_a_huge_window_is_a_miss() -> None:
    huge = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    writer = zstandard.ZstdCompressor(compression_params=huge).compressobj()
    stored = writer.compress(b"kv" * 5000) + writer.flush()  # its length is not in the frame
    with pytest.raises(TierMissError, match="cannot be decompressed"):
        decompressed(stored, 1, 10_000)


@pytest.mark.parametrize("stored", [b"", b"\0" * 4096, struct.pack("<I", 0x184D2A50)])
def test_what_is_no_frame_is_a_miss(stored: bytes) -> None:
    with pytest.raises(TierMissError):
        decompressed(stored, 2, 100)
