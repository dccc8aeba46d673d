# SPDX-License-Identifier: Apache-2.0
"""The 4096 bytes before the payload of every stored shard.

Little-endian; version 1:

| offset | bytes | field |
| ---: | ---: | --- |
| 0 | 8 | magic `KVHAVEN` and a zero byte |
| 8 | 4 | format version (1) |
| 12 | 4 | size of this header (4096) |
| 16 | 32 | chunk key |
| 48 | 32 | namespace digest |
| 80 | 4 | shard: KV group |
| 84 | 8 | shard: first layer, end of layers |
| 92 | 8 | shard: first head, end of heads |
| 100 | 4 | shard: replica |
| 104 | 8 | payload length in bytes, without padding |
| 112 | 16 | xxh3-128 of the payload, big-endian (its canonical form) |
| 128 | 8 | the tenant's name, zero if it is nobody's |
| 136 | 4 | codec of what follows: 0 none, 1 zstd |
| 140 | 4 | width of its byte planes: 1, 2 or 4; 0 without codec |
| 144 | 8 | length of what follows in bytes, without padding; 0 without codec |
| 152 | 3928 | zero |
| 4080 | 16 | xxh3-128 of bytes 0 to 4079 of this header, big-endian |

The payload follows at 4096, as the codec made it (see `zstd`), padded to a multiple of 4096 with
bytes that mean nothing. Length and checksum at 104 and 112 are of the payload itself.
"""

import struct
from typing import Final

import msgspec
import xxhash

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.types import (
    NO_TENANT,
    PAGE_BYTES,
    TENANT_BYTES,
    Checksum,
    ChunkKey,
    NamespaceDigest,
    ShardId,
    TenantId,
    align_up,
)

HEADER_BYTES: Final = 4096
MAGIC: Final = b"KVHAVEN\0"
FORMAT_VERSION: Final = 1

_FIELDS: Final = struct.Struct("<8sII32s32sIIIIIIQ16s8s")
_PREFIX: Final = struct.Struct("<8sII")
_FORM: Final = struct.Struct("<IIQ")
_FORM_AT: Final = 136
_NOBODY: Final = bytes(TENANT_BYTES)
_CHECKSUM_AT: Final = HEADER_BYTES - 16


class Form(msgspec.Struct, frozen=True):
    """How a payload is stored: codec, width of its byte planes, length. All 0: as it is."""

    codec: int = 0
    width: int = 0
    length: int = 0


PLAIN: Final = Form()


class ShardHeader(msgspec.Struct, frozen=True):
    """What a header says: whose payload follows, its checksum, and how it is stored."""

    stored: StoredShard
    checksum: Checksum
    form: Form = PLAIN


def stored_bytes(payload_bytes: int) -> int:
    """Return what a payload takes in a store: header, payload and padding, in bytes.

    That is also the most that it takes: compressed only if that makes it shorter.
    """
    return HEADER_BYTES + align_up(payload_bytes)


def may_hold(size: int, payload_bytes: int) -> bool:
    """Return whether `size` bytes in a store may be a payload's, compressed or not."""
    whole = size % PAGE_BYTES == 0
    return whole and HEADER_BYTES < size <= stored_bytes(payload_bytes)


def require_length(stored: StoredShard, buffer: memoryview) -> None:
    """Raise `ValueError` unless a buffer is as long as `Tier` wants it for this shard."""
    wanted = align_up(stored.payload_bytes)
    if buffer.nbytes != wanted or buffer.itemsize != 1 or not buffer.contiguous:
        raise ValueError(
            f"a buffer of {buffer.nbytes} bytes was given for a shard of {stored.payload_bytes}; "
            f"{wanted} contiguous bytes are needed"
        )


def pack_header(stored: StoredShard, checksum: Checksum, form: Form = PLAIN) -> bytes:
    """Return the 4096 bytes to write before a payload. Raises `ValueError` for bad fields."""
    shard = stored.shard
    if (len(stored.key), len(stored.namespace), len(checksum)) != (32, 32, 16):
        raise ValueError(
            f"key, namespace and checksum are {len(stored.key)}, {len(stored.namespace)} and "
            f"{len(checksum)} bytes long; 32, 32 and 16 are needed"
        )
    if len(stored.tenant) not in {0, TENANT_BYTES} or stored.tenant == _NOBODY:
        raise ValueError(f"{stored.tenant.hex()} names no tenant; {TENANT_BYTES} bytes do")
    try:
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            stored.key,
            stored.namespace,
            shard.group,
            *shard.layers,
            *shard.heads,
            shard.replica,
            stored.payload_bytes,
            checksum,
            stored.tenant,
        )
    except struct.error as error:
        raise ValueError(f"shard {shard} does not fit into a header: {error}") from error
    stored_as = _FORM.pack(form.codec, form.width, form.length)
    body = (fields.ljust(_FORM_AT, b"\0") + stored_as).ljust(_CHECKSUM_AT, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def unpack_header(raw: bytes | memoryview) -> ShardHeader:
    """Return what the first 4096 bytes of `raw` say.

    Raises `TierMissError` with the reason when they are no whole header of this version.
    """
    if len(raw) < HEADER_BYTES:
        raise TierMissError(f"the header is {len(raw)} bytes long instead of {HEADER_BYTES}")
    magic, version, size = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise TierMissError(f"the header starts with {magic!r} instead of {MAGIC!r}")
    if (version, size) != (FORMAT_VERSION, HEADER_BYTES):
        raise TierMissError(
            f"the header is of format version {version} with {size} bytes; "
            f"this reader knows version {FORMAT_VERSION} with {HEADER_BYTES}"
        )
    if xxhash.xxh3_128_digest(raw[:_CHECKSUM_AT]) != raw[_CHECKSUM_AT:HEADER_BYTES]:
        raise TierMissError("the header does not match its own checksum")
    _, _, _, key, namespace, *rest = _FIELDS.unpack_from(raw)
    group, l0, l1, h0, h1, replica, length, checksum, owner = rest
    shard = ShardId(group, (l0, l1), (h0, h1), replica)
    tenant = NO_TENANT if owner == _NOBODY else TenantId(owner)
    stored = StoredShard(NamespaceDigest(namespace), ChunkKey(key), shard, length, tenant)
    return ShardHeader(stored, Checksum(checksum), form_of(raw))


def form_of(raw: bytes | memoryview) -> Form:
    """Return what a whole header says of how its payload is stored. Nothing is checked."""
    return Form(*_FORM.unpack_from(raw, _FORM_AT))


def header_of(raw: bytes | memoryview, wanted: StoredShard) -> ShardHeader:
    """Return the header in `raw`. Raises `TierMissError` unless it is that of `wanted`."""
    header = unpack_header(raw)
    found = header.stored
    if found != wanted:
        named = (
            ("namespace", found.namespace.hex(), wanted.namespace.hex()),
            ("key", found.key.hex(), wanted.key.hex()),
            ("shard", str(found.shard), str(wanted.shard)),
            ("length", str(found.payload_bytes), str(wanted.payload_bytes)),
            ("tenant", found.tenant.hex() or "none", wanted.tenant.hex() or "none"),
        )
        raise TierMissError(
            "the header is another shard's: "
            + ", ".join(
                f"{name} {is_} instead of {want}" for name, is_, want in named if is_ != want
            )
        )
    return header


def require_checksum(header: ShardHeader, payload: memoryview) -> Checksum:
    """Return the checksum of a header, which `payload` (perhaps with padding) matches.

    Raises `TierMissError` when it does not.
    """
    length = header.stored.payload_bytes
    if len(payload) < length:
        raise TierMissError(f"{len(payload)} of {length} payload bytes are there")
    if xxhash.xxh3_128_digest(payload[:length]) != header.checksum:
        raise TierMissError("the payload does not match its checksum")
    return header.checksum
