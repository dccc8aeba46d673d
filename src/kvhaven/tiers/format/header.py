# SPDX-License-Identifier: Apache-2.0
"""Header of stored shards: the 4096 bytes before the payload.

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
| 128 | 8 | tenant id; zero: no tenant |
| 136 | 4 | codec of the stored payload: 0 none, 1 zstd |
| 140 | 4 | width of its byte planes: 1, 2 or 4; 0 without codec |
| 144 | 8 | length of the stored payload in bytes, without padding; 0 without codec |
| 152 | 3928 | zero |
| 4080 | 16 | xxh3-128 of bytes 0 to 4079 of this header, big-endian |

The payload follows at offset 4096, as the codec encoded it (see `zstd`), padded to a multiple of
4096 with arbitrary bytes. Length and checksum at 104 and 112 are those of the decoded payload.
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
    """Encoding of a stored payload: codec, width of byte planes, length. All 0: uncompressed."""

    codec: int = 0
    width: int = 0
    length: int = 0


PLAIN: Final = Form()


class ShardHeader(msgspec.Struct, frozen=True):
    """Content of a header: the shard's name, the payload's checksum, and its encoding."""

    stored: StoredShard
    checksum: Checksum
    form: Form = PLAIN


def stored_bytes(payload_bytes: int) -> int:
    """Return the stored size of an uncompressed payload in bytes: header, payload and padding.

    It is also the largest stored size, since payloads are compressed only if that saves space.
    """
    return HEADER_BYTES + align_up(payload_bytes)


def may_hold(size: int, payload_bytes: int) -> bool:
    """Return whether `size` is a possible stored size of a payload, compressed or not."""
    whole = size % PAGE_BYTES == 0
    return whole and HEADER_BYTES < size <= stored_bytes(payload_bytes)


def require_length(stored: StoredShard, buffer: memoryview) -> None:
    """Raise `ValueError` unless a buffer has the size that `Tier` requires for a shard."""
    wanted = align_up(stored.payload_bytes)
    if buffer.nbytes != wanted or buffer.itemsize != 1 or not buffer.contiguous:
        raise ValueError(
            f"buffer: wrong size for a shard of {stored.payload_bytes} bytes "
            f"(got {buffer.nbytes}); expected {wanted} contiguous bytes"
        )


def pack_header(stored: StoredShard, checksum: Checksum, form: Form = PLAIN) -> bytes:
    """Return the 4096-byte header of a payload. Raises `ValueError` for invalid fields."""
    shard = stored.shard
    if (len(stored.key), len(stored.namespace), len(checksum)) != (32, 32, 16):
        raise ValueError(
            f"header: wrong length of key, namespace or checksum (got {len(stored.key)}, "
            f"{len(stored.namespace)} and {len(checksum)} bytes); expected 32, 32 and 16"
        )
    if len(stored.tenant) not in {0, TENANT_BYTES} or stored.tenant == _NOBODY:
        raise ValueError(
            f"header: not a tenant id (got {stored.tenant.hex()}); expected {TENANT_BYTES} bytes, "
            f"not all zero"
        )
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
        raise ValueError(f"header: shard {shard} does not fit: {error}") from error
    stored_as = _FORM.pack(form.codec, form.width, form.length)
    body = (fields.ljust(_FORM_AT, b"\0") + stored_as).ljust(_CHECKSUM_AT, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def unpack_header(raw: bytes | memoryview) -> ShardHeader:
    """Parse the header in the first 4096 bytes of `raw`.

    Raises `TierMissError` with the reason if they are not a complete header of this version.
    """
    if len(raw) < HEADER_BYTES:
        raise TierMissError(f"the header is {len(raw)} bytes long instead of {HEADER_BYTES}")
    magic, version, size = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise TierMissError(f"the header starts with {magic!r} instead of {MAGIC!r}")
    if (version, size) != (FORMAT_VERSION, HEADER_BYTES):
        raise TierMissError(
            f"the header has format version {version} and {size} bytes; "
            f"this reader supports version {FORMAT_VERSION} with {HEADER_BYTES}"
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
    """Return the encoding given in a complete header, without any check."""
    return Form(*_FORM.unpack_from(raw, _FORM_AT))


def header_of(raw: bytes | memoryview, wanted: StoredShard) -> ShardHeader:
    """Return the header in `raw`. Raises `TierMissError` unless it belongs to `wanted`."""
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
            "the header belongs to another shard: "
            + ", ".join(
                f"{name} {is_} instead of {want}" for name, is_, want in named if is_ != want
            )
        )
    return header


def require_checksum(header: ShardHeader, payload: memoryview) -> Checksum:
    """Return a header's checksum after verifying `payload` (with or without padding).

    Raises `TierMissError` if the payload is too short or does not match.
    """
    length = header.stored.payload_bytes
    if len(payload) < length:
        raise TierMissError(f"only {len(payload)} of {length} payload bytes are present")
    if xxhash.xxh3_128_digest(payload[:length]) != header.checksum:
        raise TierMissError("the payload does not match its checksum")
    return header.checksum
