# SPDX-License-Identifier: Apache-2.0
"""From a payload to the bytes that a tier stores, and back: header, compression, checks."""

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
"""The codec's number in headers."""
WIDTHS: Final = (1, 2, 4)
"""Of byte planes. Which suits is measured: one rule for any type of numbers, also mixed ones."""

_OR_OFF: Final = ", or write without disk_compression and remote_compression (off)"
_SAMPLES: Final = 4
_SAMPLE_BYTES: Final = 1 << 18


class DamagedShardError(TierMissError):
    """What is stored is damaged; `evidence` tells two damages apart."""

    def __init__(self, message: str, evidence: bytes) -> None:
        super().__init__(message)
        self.evidence = evidence


class UnreadableError(TierMissError):
    """What is stored may be right, but cannot be read here: leave it to others."""


class EncodedShard(NamedTuple):
    """What to store: a header, and whole pages, on a page, that stay until the next `pack`."""

    head: bytes
    body: memoryview

    @property
    def size(self) -> int:
        """Bytes to store."""
        return HEADER_BYTES + len(self.body)


class _Tally:
    """One namespace's choice, and what was written of it so far."""

    def __init__(self) -> None:
        self.worth = CompressionPolicy()
        self.payload_bytes = 0
        self.stored_bytes = 0


class ShardCodec:
    """Packs and unpacks the shards of one tier, whose `title` the log shows. Thread-safe.

    With `zstd`, payloads are compressed where that pays (see `CompressionPolicy`); compressed
    ones are read in any case. Raises `ConfigError` when a package for `zstd` is not installed.
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
        """Return what to store for a payload (whole pages). Takes long: not for an event loop."""
        if not self.compresses or shard.payload_bytes <= PAGE_BYTES:  # a page cannot be saved
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
        """Turn what was stored into the payload, in place; return its checksum, verified.

        `size` bytes were read (`may_hold` is true of them): `head`, and the rest at the
        beginning of `into`. Takes long if they are compressed. Raises `DamagedShardError` or
        `UnreadableError`.
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
        """Note how long the tier took to write or read `size` bytes of a namespace."""
        if self.compresses:
            with self._lock:
                if namespace in self._tallies:
                    self._tallies[namespace].worth.moved(lane, size, seconds)

    def status(self) -> list[CompressionStatus]:
        """Return what was chosen for each namespace that was written, and what it stored."""
        with self._lock:
            return [
                CompressionStatus(
                    namespace=digest.hex(),
                    on=tally.worth.on,
                    why=tally.worth.why,
                    payload_bytes=tally.payload_bytes,
                    stored_bytes=tally.stored_bytes,
                )
                for digest, tally in self._tallies.items()
            ]

    def _compress(
        self, shard: StoredShard, payload: memoryview, checksum: Checksum
    ) -> EncodedShard | None:
        """Return a payload compressed; None when that does not save a page, or never pays."""
        with self._lock:
            worth = self._tallies.setdefault(shard.namespace, _Tally()).worth
            turn, width = worth.turn(), worth.width
        if turn is Turn.PLAIN:
            return None
        zstd = self._zstd()
        if turn is Turn.SURVEY or not width:
            width, unpack_s = _suitable(zstd, payload)
            with self._lock:
                worth.suits(width, unpack_s)
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
            self._measured(worth, shard.namespace, plain, stored, seconds)
        return packed

    def _measured(
        self,
        worth: CompressionPolicy,
        namespace: NamespaceDigest,
        payload: int,
        stored: int,
        seconds: float,
    ) -> None:
        with self._lock:
            news = worth.compressed(payload, stored, seconds)
            state, why = "on" if worth.on else "off", worth.why
        if news:
            short = namespace.hex()[:16]
            _log.info("%s: zstd is %s for namespace %s: %s", self._title, state, short, why)

    def _codec_of(self, header: ShardHeader) -> "Zstd | None":
        """Return what decompresses a payload; None when it is stored as it is."""
        form = header.form
        if form == PLAIN:
            return None
        if not form.codec:
            raise TierMissError(f"it is stored without codec, and yet as {form}")
        if form.codec != ZSTD or form.width not in WIDTHS:
            raise UnreadableError(
                f"it is stored by codec {form.codec} with planes of {form.width} bytes, which "
                f"this version does not know"
            )
        try:
            return self._zstd()
        except ConfigError as error:
            raise UnreadableError(str(error)) from error

    def _zstd(self) -> "Zstd":
        """Return this thread's. Raises `ConfigError`."""
        zstd: Zstd | None = getattr(self._local, "zstd", None)
        if zstd is None:
            module = import_optional("format.zstd", "zstd", "reading compressed shards", _OR_OFF)
            zstd = self._local.zstd = module.Zstd()
        return zstd


def compression_of(codec: ShardCodec | None) -> list[CompressionStatus] | None:
    """Return what `TierHealth` tells of a tier's packing."""
    return codec.status() if codec is not None and codec.compresses else None


def _require_size(size: int, length: int) -> None:
    if size != stored_bytes(length):
        raise TierMissError(f"{size} bytes are stored instead of {stored_bytes(length)}")


def _suitable(zstd: "Zstd", payload: memoryview) -> tuple[int, float]:
    """Return the width of planes that suits a payload, and the seconds to decompress a byte."""
    starts = range(0, len(payload), align_up(-(-len(payload) // _SAMPLES)))
    samples = [payload[at : at + _SAMPLE_BYTES] for at in starts]
    scratch = memoryview(bytearray(max(map(len, samples))))
    found: list[tuple[int, int, float]] = []
    for width in WIDTHS:
        length, seconds = 0, 0.0
        for sample in samples:
            packed = zstd.compress(sample, width, 2 * len(sample) + PAGE_BYTES)
            assert packed is not None  # zstd never makes it twice as long
            began = time.perf_counter()
            zstd.decompress(packed[0][: packed[1]], width, scratch[: len(sample)])
            seconds += time.perf_counter() - began
            length += packed[1]
        found.append((length, width, seconds / sum(map(len, samples))))
    _, width, unpack_s = min(found)
    return width, unpack_s
