# SPDX-License-Identifier: Apache-2.0
"""The 4096 bytes before every stored payload."""

import random
import struct

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.format.header import (
    HEADER_BYTES,
    PLAIN,
    Form,
    header_of,
    may_hold,
    pack_header,
    require_checksum,
    stored_bytes,
    unpack_header,
)
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, ShardId, TenantId

STORED = StoredShard(
    NamespaceDigest(bytes(range(32))),
    ChunkKey(bytes(range(32, 64))),
    ShardId(1, (2, 3), (4, 5), 6),
    7,
)
PAYLOAD = b"payload"
CHECKSUM = Checksum(xxhash.xxh3_128_digest(PAYLOAD))

u32 = st.integers(0, 2**32 - 1)
stored_shards = st.builds(
    StoredShard,
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.builds(ShardId, u32, st.tuples(u32, u32), st.tuples(u32, u32), u32),
    st.integers(0, 2**64 - 1),
    st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
)


def reseal(raw: bytes) -> bytes:
    """Give a changed header a checksum of its own that is right."""
    return raw[:4080] + xxhash.xxh3_128_digest(raw[:4080])


@given(
    stored_shards,
    st.binary(min_size=16, max_size=16),
    st.builds(Form, u32, u32, st.integers(0, 2**64 - 1)),
)
def test_what_was_packed_is_unpacked(stored: StoredShard, checksum: bytes, form: Form) -> None:
    raw = pack_header(stored, Checksum(checksum), form)
    assert len(raw) == HEADER_BYTES
    header = unpack_header(raw)
    assert (header.stored, header.checksum, header.form) == (stored, checksum, form)


def test_how_a_payload_is_stored_has_its_place_and_is_zero_without_codec() -> None:
    assert unpack_header(pack_header(STORED, CHECKSUM)).form == PLAIN
    raw = pack_header(STORED, CHECKSUM, Form(1, 2, 3))
    assert struct.unpack_from("<IIQ", raw, 136) == (1, 2, 3)
    assert not any(raw[128:136] + raw[152:4080])


def test_a_tenants_name_lies_at_128_and_is_compared() -> None:
    owned = msgspec.structs.replace(STORED, tenant=TenantId(b"tenant-8"))
    raw = pack_header(owned, CHECKSUM)
    assert raw[128:136] == b"tenant-8"
    assert not any(raw[136:4080])
    assert not any(pack_header(STORED, CHECKSUM)[128:4080])
    assert header_of(raw, owned).stored == owned
    with pytest.raises(TierMissError, match=f"tenant {b'tenant-8'.hex()} instead of none"):
        header_of(raw, STORED)
    with pytest.raises(TierMissError, match=f"tenant none instead of {b'tenant-8'.hex()}"):
        header_of(pack_header(STORED, CHECKSUM), owned)


@pytest.mark.parametrize("tenant", [b"short", bytes(8), b"much too long"])
def test_what_names_no_tenant_is_not_packed(tenant: bytes) -> None:
    with pytest.raises(ValueError, match="not a tenant id"):
        pack_header(msgspec.structs.replace(STORED, tenant=TenantId(tenant)), CHECKSUM)


def test_the_layout_is_the_documented_one() -> None:
    raw = pack_header(STORED, CHECKSUM)
    assert raw[:8] == b"KVHAVEN\0"
    assert struct.unpack_from("<II", raw, 8) == (1, 4096)
    assert raw[16:48] == bytes(range(32, 64))
    assert raw[48:80] == bytes(range(32))
    assert struct.unpack_from("<6I", raw, 80) == (1, 2, 3, 4, 5, 6)
    assert struct.unpack_from("<Q", raw, 104) == (7,)
    assert raw[112:128] == CHECKSUM == xxhash.xxh3_128(PAYLOAD).intdigest().to_bytes(16, "big")
    assert not any(raw[128:4080])
    assert raw[4080:] == xxhash.xxh3_128_digest(raw[:4080])


def test_version_1_stays_readable() -> None:
    """These numbers were written down once; a change of them is a new version."""
    assert xxhash.xxh3_64_hexdigest(pack_header(STORED, CHECKSUM)) == "e2b4bf087379a317"


@given(st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_a_miss(at: int, change: int) -> None:
    raw = bytearray(pack_header(STORED, CHECKSUM))
    raw[at] ^= change
    with pytest.raises(TierMissError):
        unpack_header(bytes(raw))


@given(st.integers(0, HEADER_BYTES - 1))
def test_a_short_header_is_a_miss(length: int) -> None:
    with pytest.raises(TierMissError, match="instead of 4096"):
        unpack_header(pack_header(STORED, CHECKSUM)[:length])


@given(st.binary(max_size=64), st.integers())
def test_garbage_is_a_miss(start: bytes, seed: int) -> None:
    with pytest.raises(TierMissError):
        unpack_header(start + random.Random(seed).randbytes(HEADER_BYTES - len(start)))


@pytest.mark.parametrize("raw", [bytes(HEADER_BYTES), b"\xff" * HEADER_BYTES])
def test_constant_bytes_are_a_miss(raw: bytes) -> None:
    with pytest.raises(TierMissError, match="starts with"):
        unpack_header(raw)


@pytest.mark.parametrize(("at", "value"), [(8, 2), (12, 8192)])
def test_another_version_or_size_is_named(at: int, value: int) -> None:
    raw = bytearray(pack_header(STORED, CHECKSUM))
    struct.pack_into("<I", raw, at, value)
    with pytest.raises(TierMissError, match=str(value)):
        unpack_header(reseal(bytes(raw)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"namespace": bytes(32)}, "namespace 0001"),
        ({"key": bytes(32)}, "key 2021"),
        ({"shard": ShardId(0, (0, 1), (0, 1))}, "shard g1-l2.3-h4.5-r6 instead of g0-l0.1-h0.1-r0"),
        ({"payload_bytes": 8}, "length 7 instead of 8"),
    ],
)
def test_another_shards_header_is_named(change: dict[str, object], named: str) -> None:
    wanted = msgspec.structs.replace(STORED, **change)
    with pytest.raises(TierMissError, match=named):
        header_of(pack_header(STORED, CHECKSUM), wanted)


def test_the_payload_is_verified_and_its_padding_is_not() -> None:
    header = header_of(pack_header(STORED, CHECKSUM), STORED)
    assert require_checksum(header, memoryview(PAYLOAD + b"anything")) == CHECKSUM
    with pytest.raises(TierMissError, match="checksum"):
        require_checksum(header, memoryview(b"Payload"))
    with pytest.raises(TierMissError, match="6 of 7"):
        require_checksum(header, memoryview(PAYLOAD[:6]))


@pytest.mark.parametrize(
    ("stored", "checksum"),
    [
        (msgspec.structs.replace(STORED, key=ChunkKey(b"short")), CHECKSUM),
        (STORED, Checksum(b"short")),
        (msgspec.structs.replace(STORED, shard=ShardId(-1, (0, 1), (0, 1))), CHECKSUM),
        (msgspec.structs.replace(STORED, payload_bytes=2**64), CHECKSUM),
    ],
)
def test_what_does_not_fit_is_refused(stored: StoredShard, checksum: Checksum) -> None:
    with pytest.raises(ValueError, match=r"does not fit|wrong length"):
        pack_header(stored, checksum)


def test_stored_bytes_count_header_and_padding() -> None:
    assert [stored_bytes(n) for n in (1, 4096, 4097)] == [8192, 8192, 12288]


def test_a_stored_payload_is_whole_pages_and_never_longer_than_uncompressed() -> None:
    fits = [size for size in range(20_000) if may_hold(size, 4097)]
    assert fits == [8192, 12288]
