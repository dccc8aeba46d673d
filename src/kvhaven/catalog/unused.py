# SPDX-License-Identifier: Apache-2.0
"""Chunks that have not been used for some time: counted, or dropped, piece by piece."""

from collections.abc import Generator, Iterable, Sequence

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, State
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.local_index import LocalTierIndex, Stored
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.types import ChunkKey

Counting = Generator[None, None, tuple[int, int]]
"""Job that returns a number of chunks and their bytes."""


def drop(
    space: ResidentChunks[S],
    indexes: Sequence[LocalTierIndex],
    scope: Scope,
    until: float,
    *,
    resident: bool,
    dry_run: bool,
) -> Counting:
    """Drop the chunks of a scope that were not used after the time `until`, in seconds.

    `space` is the arena; its own chunks are dropped if `resident`. Chunks that are in use stay,
    also in tiers if they are used in the arena, and those of tiers that are offline. With
    `dry_run`, count them only.
    """
    chunks = bytes_ = 0
    last = space.stamp_at(until)
    if resident:
        chunks, bytes_ = yield from _drop_resident(space, scope, last, dry_run)
    for index in indexes:
        pages = index.unused_since(until)
        more = yield from _drop_stored(space, index, pages, scope, dry_run)
        chunks, bytes_ = chunks + more[0], bytes_ + more[1]
    return chunks, bytes_


def _drop_resident(space: ResidentChunks[S], scope: Scope, last: int, dry_run: bool) -> Counting:
    chunks = bytes_ = 0

    def unused(entry: Entry) -> bool:
        nonlocal chunks, bytes_
        if (
            entry.stamp > last
            or entry.state is not State.RESIDENT
            or entry.pinned
            or entry.holding.cleared
            or not scope.covers(entry.namespace)
        ):
            return False
        chunks += 1
        bytes_ += entry.extent.length
        space.cleared += not dry_run
        return not dry_run

    yield from space.retire_all(unused)
    return chunks, bytes_


def _drop_stored(
    space: ResidentChunks[S],
    index: LocalTierIndex,
    pages: Iterable[Sequence[tuple[ChunkKey, Stored]]],
    scope: Scope,
    dry_run: bool,
) -> Counting:
    chunks = bytes_ = looked = dropped = 0
    for page in pages:
        if not index.online:
            break
        for key, stored in page:
            if key in index.reads or stored.holding.cleared or not scope.covers(stored.namespace):
                continue
            entry = space.entries.get(key)
            if entry is not None and entry.pinned:
                continue
            chunks += 1
            bytes_ += stored.bytes
            if not dry_run:
                index.delete(key, stored.namespace)
                dropped += 1
        looked += len(page)
        if looked >= index.pace.light or dropped >= index.pace.heavy:
            yield
            looked = dropped = 0
    return chunks, bytes_
