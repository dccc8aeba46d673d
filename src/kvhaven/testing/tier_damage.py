# SPDX-License-Identifier: Apache-2.0
"""Kinds of damage to a stored shard: functions of its bytes and of the original piece."""

import random
import struct
from collections.abc import Callable

import msgspec
import xxhash

from kvhaven.testing.tiers import PAYLOAD, Piece, make_namespace
from kvhaven.tiers.format.header import HEADER_BYTES, PLAIN, Form, form_of, pack_header
from kvhaven.types import ChunkKey, ShardId

Damage = Callable[[bytes, Piece], bytes]


def flip(at: int) -> Damage:
    return lambda raw, _: raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]


def form_in(raw: bytes) -> Form:
    """Return the encoding that a header gives, even if the header is damaged."""
    return form_of(raw) if len(raw) >= HEADER_BYTES else PLAIN


def flip_last(raw: bytes, piece: Piece) -> bytes:
    """Change the last byte before the padding."""
    length = form_in(raw).length or piece.shard.payload_bytes
    return flip(HEADER_BYTES + length - 1)(raw, piece)


def patch_header(at: int, value: bytes) -> Damage:
    """Change a header field and recompute the header's checksum."""

    def change(raw: bytes, _: Piece) -> bytes:
        body = raw[:at] + value + raw[at + len(value) : 4080]
        return body + xxhash.xxh3_128_digest(body) + raw[HEADER_BYTES:]

    return change


def swap_header(field: str, other: Callable[[Piece], object]) -> Damage:
    """Replace the header by a valid header of another shard."""

    def change(raw: bytes, piece: Piece) -> bytes:
        shard = msgspec.structs.replace(piece.shard, **{field: other(piece)})
        return pack_header(shard, piece.checksum, form_in(raw)) + raw[HEADER_BYTES:]

    return change


DAMAGE: dict[str, Damage] = {
    "zero length": lambda _, __: b"",
    "cut in the header": lambda raw, _: raw[:100],
    "header only": lambda raw, _: raw[:HEADER_BYTES],
    "cut in the payload": lambda raw, _: raw[: HEADER_BYTES + 4096],
    "cut in the padding": lambda raw, _: raw[:-1],
    "longer": lambda raw, _: raw + bytes(4096),
    "garbage header": lambda raw, _: random.Random(1).randbytes(HEADER_BYTES) + raw[HEADER_BYTES:],
    "zero header": lambda raw, _: bytes(HEADER_BYTES) + raw[HEADER_BYTES:],
    "all zero": lambda raw, _: bytes(len(raw)),
    "4 KiB overwritten": lambda raw, _: raw[:8192] + bytes(4096) + raw[12288:],
    "bit in the magic": flip(0),
    "bit in the version": flip(8),
    "bit in the key": flip(20),
    "bit in the namespace": flip(50),
    "bit in the shard": flip(84),
    "bit in the length": flip(104),
    "bit in the payload's checksum": flip(112),
    "bit in the header's zeros": flip(2000),
    "bit in the header's checksum": flip(4090),
    "first bit of the payload": flip(HEADER_BYTES),
    "last bit of the payload": flip_last,
    "a newer version": patch_header(8, struct.pack("<I", 2)),
    "another length of what is stored": patch_header(144, struct.pack("<Q", 5000)),
    "another header size": patch_header(12, struct.pack("<I", 8192)),
    "another model's file": swap_header("namespace", lambda _: make_namespace("other").digest),
    "another chunk's file": swap_header("key", lambda piece: ChunkKey(piece.shard.key[::-1])),
    "another shard's file": swap_header("shard", lambda _: ShardId(7, (0, 1), (0, 1))),
    "another length": swap_header("payload_bytes", lambda _: PAYLOAD + 1),
}
"""All kinds of damage, for a shard of `PAYLOAD` bytes; a tier must never serve any of them."""
