# SPDX-License-Identifier: Apache-2.0
"""Codec between payloads and stored bytes: header, compression, checks."""

import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvhaven.errors import ConfigError, TierMissError
from kvhaven.tiers.base import CompressionStatus, StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.compression_policy import CompressionPolicy, Turn
from kvhaven.tiers.format.header import (
    HEADER_BYTES,
    PLAIN,
    Form,
    ShardHeader,
    header_of,
    pack_header,
    require_checksum,
    stored_bytes,
)
from kvhaven.tiers.optional import import_optional
from kvhaven.types import PAGE_BYTES, Checksum, NamespaceDigest, align_up

if TYPE_CHECKING:
    from kvhaven.tiers.format.zstd import Zstd

_log = logging.getLogger(__name__)

ZSTD: Final = 1
"""Number of the codec in headers."""
WIDTHS: Final = (1, 2, 4)
"""Widths of byte planes. The best one is measured, so any data type works, also mixed ones."""

_OR_OFF: Final = ", or write without disk_compression and remote_compression (off)"
_SAMPLES: Final = 4
_SAMPLE_BYTES: Final = 1 << 18


class DamagedShardError(TierMissError):
    """Stored bytes are damaged; equal `evidence` means equal damage."""

    def __init__(self, message: str, evidence: bytes) -> None:
        super().__init__(message)
        self.evidence = evidence


class UnreadableError(TierMissError):
    """Stored bytes may be valid, but this service cannot decode them: keep them for others."""


class EncodedShard(NamedTuple):
    """Bytes to store: a header, and page-aligned whole pages, valid until the next `pack`."""

    head: bytes
    body: memoryview

    @property
    def size(self) -> int:
        """Bytes to store."""
        return HEADER_BYTES + len(self.body)


class _Tally:
    """Compression policy of one namespace, and its bytes written so far."""

    def __init__(self) -> None:
        self.policy = CompressionPolicy()
        self.payload_bytes = 0
        self.stored_bytes = 0


class ShardCodec:
    """Encoder and decoder of the shards of one tier, named `title` in the log. Thread-safe.

    With `zstd`, payloads are compressed if that pays off (see `CompressionPolicy`). Compressed
    shards can be read in either case. Raises `ConfigError` if `zstd` is set and its package is
    not installed.
    """

    def __init__(self, title: str, *, zstd: bool = False) -> None:
        self._title = title
        self.compresses = zstd
        self._local = threading.local()
        self._lock = threading.Lock()
        self._tallies: dict[NamespaceDigest, _Tally] = {}  # under the lock
        if zstd:
            import_optional("format.zstd", "zstd", f"{title}: compression", _OR_OFF)

    def pack(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> EncodedShard:
        """Encode a payload (whole pages). Takes long: do not call on an event loop."""
        if not self.compresses or shard.payload_bytes <= PAGE_BYTES:  # no page can be saved
            return EncodedShard(pack_header(shard, checksum), payload)
        packed = self._compress(shard, payload[: shard.payload_bytes], checksum)
        if packed is None:
            packed = EncodedShard(pack_header(shard, checksum), payload)
        with self._lock:
            tally = self._tallies[shard.namespace]
            tally.payload_bytes += stored_bytes(shard.payload_bytes)
            tally.stored_bytes += packed.size
        return packed

    def unpack(
        self, head: bytes | memoryview, into: memoryview, size: int, shard: StoredShard
    ) -> Checksum:
        """Decode stored bytes into the payload, in place; return its verified checksum.

        `size` bytes were read (`may_hold` is true for that size): `head`, and the remaining bytes
        at the start of `into`. Takes long if they are compressed. Raises `DamagedShardError` if a
        check fails, `UnreadableError` if this version or installation cannot decode the bytes.
        """
        stored = into[: size - HEADER_BYTES]
        try:
            header = header_of(head, shard)
            length = shard.payload_bytes if header.form == PLAIN else header.form.length
            zstd = self._codec_of(header)
            _require_size(size, length)
            if zstd is not None:
                stored = zstd.set_aside(stored)
                payload = into[: shard.payload_bytes]
                zstd.decompress(stored[:length], header.form.width, payload)
            return require_checksum(header, into)
        except UnreadableError:
            raise
        except TierMissError as error:
            evidence = xxhash.xxh3_128(head)
            evidence.update(stored)
            raise DamagedShardError(str(error), evidence.digest()) from error

    def moved(self, lane: Lane, namespace: NamespaceDigest, size: int, seconds: float) -> None:
        """Record that the tier took `seconds` to write or read `size` bytes of a namespace."""
        if self.compresses:
            with self._lock:
                if namespace in self._tallies:
                    self._tallies[namespace].policy.moved(lane, size, seconds)

    def status(self) -> list[CompressionStatus]:
        """Return the decision and the bytes written for each namespace that was written."""
        with self._lock:
            return [
                CompressionStatus(
                    namespace=digest.hex(),
                    on=tally.policy.on,
                    why=tally.policy.why,
                    payload_bytes=tally.payload_bytes,
                    stored_bytes=tally.stored_bytes,
                )
                for digest, tally in self._tallies.items()
            ]

    def _compress(
        self, shard: StoredShard, payload: memoryview, checksum: Checksum
    ) -> EncodedShard | None:
        """Compress a payload; return None if that saves no page, or if compression is off."""
        with self._lock:
            policy = self._tallies.setdefault(shard.namespace, _Tally()).policy
            turn, width = policy.turn(), policy.width
        if turn is Turn.PLAIN:
            return None
        zstd = self._zstd()
        if turn is Turn.SURVEY or not width:
            width, unpack_s = _suitable(zstd, payload)
            with self._lock:
                policy.suits(width, unpack_s)
        began = time.perf_counter()
        found = zstd.compress(payload, width, align_up(len(payload)) - PAGE_BYTES)
        seconds = time.perf_counter() - began
        packed = None
        if found is not None:
            body, length = found
            packed = EncodedShard(pack_header(shard, checksum, Form(ZSTD, width, length)), body)
        if turn is not Turn.COMPRESS:
            plain = align_up(len(payload))
            stored = len(packed.body) if packed else plain
            self._measured(policy, shard.namespace, plain, stored, seconds)
        return packed

    def _measured(
        self,
        policy: CompressionPolicy,
        namespace: NamespaceDigest,
        payload: int,
        stored: int,
        seconds: float,
    ) -> None:
        with self._lock:
            news = policy.compressed(payload, stored, seconds)
            state, why = "on" if policy.on else "off", policy.why
        if news:
            short = namespace.hex()[:16]
            _log.info("%s: zstd is %s for namespace %s: %s", self._title, state, short, why)

    def _codec_of(self, header: ShardHeader) -> "Zstd | None":
        """Return the decompressor for a payload; None if it is stored uncompressed."""
        form = header.form
        if form == PLAIN:
            return None
        if not form.codec:
            raise TierMissError(f"the header is contradictory: no codec, but form {form}")
        if form.codec != ZSTD or form.width not in WIDTHS:
            raise UnreadableError(
                f"stored with codec {form.codec} and byte planes of width {form.width}, which "
                f"this version does not support; update KVHaven to read it"
            )
        try:
            return self._zstd()
        except ConfigError as error:
            raise UnreadableError(str(error)) from error

    def _zstd(self) -> "Zstd":
        """Return this thread's compressor. Raises `ConfigError` if zstandard is not installed."""
        zstd: Zstd | None = getattr(self._local, "zstd", None)
        if zstd is None:
            module = import_optional("format.zstd", "zstd", "reading compressed shards", _OR_OFF)
            zstd = self._local.zstd = module.Zstd()
        return zstd


def compression_of(codec: ShardCodec | None) -> list[CompressionStatus] | None:
    """Return the value of `TierHealth.compression` for a tier's codec."""
    return codec.status() if codec is not None and codec.compresses else None


def _require_size(size: int, length: int) -> None:
    if size != stored_bytes(length):
        raise TierMissError(f"{size} bytes are stored instead of {stored_bytes(length)}")


def _suitable(zstd: "Zstd", payload: memoryview) -> tuple[int, float]:
    """Return the best plane width for a payload, and the seconds to decompress a byte with it."""
    starts = range(0, len(payload), align_up(-(-len(payload) // _SAMPLES)))
    samples = [payload[at : at + _SAMPLE_BYTES] for at in starts]
    scratch = memoryview(bytearray(max(map(len, samples))))
    found: list[tuple[int, int, float]] = []
    for width in WIDTHS:
        length, seconds = 0, 0.0
        for sample in samples:
            packed = zstd.compress(sample, width, 2 * len(sample) + PAGE_BYTES)
            assert packed is not None  # zstd output is never twice as long
            began = time.perf_counter()
            zstd.decompress(packed[0][: packed[1]], width, scratch[: len(sample)])
            seconds += time.perf_counter() - began
            length += packed[1]
        found.append((length, width, seconds / sum(map(len, samples))))
    _, width, unpack_s = min(found)
    return width, unpack_s
