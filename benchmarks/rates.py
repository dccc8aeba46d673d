# SPDX-License-Identifier: Apache-2.0
"""Throughput of a tier, compared with the same pieces moved without KVHaven in the same run."""

import asyncio
import contextlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import xxhash

from benchmarks.results import BENCH, Result, at_least
from kvhaven.arena.segment import Segment
from kvhaven.tiers.base import Namespace, StoredShard, Tier
from kvhaven.types import Checksum, ChunkKey, NamespaceDigest, Shard, ShardId, ShardTable

PAYLOAD = 2 << 20
PIECES = 96
NAMES = 512
"""Names in one lookup, as for a prompt of 128k tokens; the first `PIECES` are present."""
REPETITIONS = 7

_SHARD = Shard(ShardId(0, (0, 8), (0, 4)), PAYLOAD)
_NAMESPACE = Namespace(NamespaceDigest(bytes(32)), {}, ShardTable((_SHARD,)))


class Bare(Protocol):
    """The limit: pieces of a shard's stored size, stored under names by a bare client.

    All pieces are requested together; the number in progress is the tier's.
    """

    what: str
    """Description for the results."""

    async def write(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Write a piece from each buffer, under names of this turn."""

    async def read(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Read the pieces of this turn into buffers."""

    async def contains(self, turn: int) -> None:
        """Look up `NAMES` names of this turn."""

    async def remove(self, turn: int) -> None:
        """Remove the pieces of this turn."""


class Memory:
    """Memory as in a service's arena: shared, populated, aligned. `source` is random."""

    def __init__(self) -> None:
        self._segments = [Segment.create(0, PAYLOAD * PIECES) for _ in range(2)]
        for segment in self._segments:
            segment.prefault(threading.Event())
        self._segments[0].memory[:] = os.urandom(PAYLOAD * PIECES)
        self.source, self.target = map(_pieces, self._segments)
        self.checksums = [Checksum(xxhash.xxh3_128_digest(piece)) for piece in self.source]

    def wipe(self) -> None:
        """Overwrite the target with zeros."""
        for piece in self.target:
            piece[:] = bytes(PAYLOAD)

    def require_equal(self) -> None:
        """Raise `AssertionError` unless the target equals the source."""
        for piece, copy in zip(self.source, self.target, strict=True):
            if piece != copy:
                raise AssertionError("the bytes that were read differ from those written")

    def close(self) -> None:
        """Free the memory."""
        for piece in [*self.source, *self.target]:
            piece.release()
        for segment in self._segments:
            segment.close()


@contextlib.contextmanager
def memory() -> Iterator[Memory]:
    """Yield memory for a measurement."""
    held = Memory()
    try:
        yield held
    finally:
        held.close()


@contextlib.contextmanager
def empty_folder(name: str) -> Iterator[Path]:
    """Yield a new folder under `build/bench`, which is removed at the end."""
    folder = BENCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def measure_rates(
    tier: Tier, bare: Bare, held: Memory, part: float, say: Callable[[str], None]
) -> list[Result]:
    """Return `<tier>.write`, `.read` (GB/s) and `.contains` (names per second); close the tier.

    The tier and the limit alternate in being the first. `part` is the target for reads and writes,
    as a fraction of the limit; lookups have no target.
    """
    await tier.start()
    try:
        await tier.add_namespace(_NAMESPACE)
        ours: _Rates = {verb: [] for verb in _AMOUNTS}
        limits: _Rates = {verb: [] for verb in _AMOUNTS}
        sides = [(ours, _OfTier(tier, held.checksums)), (limits, bare)]
        for turn in range(REPETITIONS + 1):
            sides.reverse()
            if turn == 1:  # the first turn was a warm-up
                for rates, _ in sides:
                    for of_verb in rates.values():
                        of_verb.clear()
            await _take_turns(turn, sides, held)
    finally:
        await tier.close(10)
    results = []
    for verb, unit in (("write", "GB/s"), ("read", "GB/s"), ("contains", "/s")):
        wanted = part if unit == "GB/s" else None
        name = f"{tier.name}.{verb}"
        results.append(_result(name, ours[verb], unit, limits[verb], wanted, bare.what))
        spread = f"{min(ours[verb]):.4g} to {max(ours[verb]):.4g} {unit}"
        say(f"{name}: {spread}, limit {min(limits[verb]):.4g} to {max(limits[verb]):.4g}")
    return results


_Rates = dict[str, list[float]]
"""By verb, one rate per turn."""

_AMOUNTS: Final = {
    "write": PIECES * PAYLOAD / 1e9,
    "read": PIECES * PAYLOAD / 1e9,
    "contains": float(NAMES),
}


class _OfTier:
    """A tier as a `Bare`, called as the service calls it."""

    what = ""

    def __init__(self, tier: Tier, checksums: Sequence[Checksum]) -> None:
        self._tier = tier
        self._checksums = checksums

    async def write(self, turn: int, buffers: Sequence[memoryview]) -> None:
        shards = _shards(turn)[: len(buffers)]
        await asyncio.gather(*map(self._tier.write, shards, buffers, self._checksums))

    async def read(self, turn: int, buffers: Sequence[memoryview]) -> None:
        shards = _shards(turn)[: len(buffers)]
        found = await asyncio.gather(*map(self._tier.read, shards, buffers))
        assert found == list(self._checksums)

    async def contains(self, turn: int) -> None:
        found = await self._tier.contains(_shards(turn))
        assert sum(found) == PIECES

    async def remove(self, turn: int) -> None:
        await self._tier.delete(_shards(turn)[:PIECES])


async def _take_turns(turn: int, sides: Sequence[tuple[_Rates, Bare]], held: Memory) -> None:
    """Write, read and look up with both sides."""
    for rates, side in sides:
        with _rate(rates, "write"):
            await side.write(turn, held.source)
    for rates, side in sides:
        held.wipe()
        with _rate(rates, "read"):
            await side.read(turn, held.target)
        held.require_equal()
    for rates, side in sides:
        with _rate(rates, "contains"):
            await side.contains(turn)
    for _, side in sides:
        await side.remove(turn)


@contextlib.contextmanager
def _rate(rates: _Rates, verb: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    rates[verb].append(_AMOUNTS[verb] / (time.perf_counter() - began))


def _result(
    name: str,
    values: Sequence[float],
    unit: str,
    limits: Sequence[float],
    part: float | None,
    what: str,
) -> Result:
    if part is not None:
        return at_least(name, values, unit, limits, part, what)
    value, limit = statistics.median(values), statistics.median(limits)
    return Result(name, value, unit, limit, len(values), what)


def _shards(turn: int) -> list[StoredShard]:
    return [
        StoredShard(
            _NAMESPACE.digest,
            ChunkKey(turn.to_bytes(16) + number.to_bytes(16)),
            _SHARD.id,
            PAYLOAD,
        )
        for number in range(NAMES)
    ]


def _pieces(segment: Segment) -> list[memoryview]:
    return [segment.memory[at : at + PAYLOAD] for at in range(0, segment.size, PAYLOAD)]
