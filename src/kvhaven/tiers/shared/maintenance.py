# SPDX-License-Identifier: Apache-2.0
"""Maintenance of a shared store while services use it: usage, collection, removal, audit."""

import contextlib
import mmap
from collections.abc import AsyncIterator, Sequence

import msgspec

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.filesystem.usage import DirectoryUsage, Limits
from kvhaven.tiers.format.codec import DamagedShardError
from kvhaven.tiers.format.header import may_hold
from kvhaven.tiers.shared.store import (
    Blob,
    Names,
    SharedStore,
    blob_name,
    is_shard_name,
    manifest_name,
    read_manifest,
)
from kvhaven.types import align_up

_BATCH = 1000
"""Names removed in one call."""


class FolderUsage(msgspec.Struct):
    """Usage of a namespace's folder. Times are ages in seconds; None if the store has none."""

    folder: str
    fields: dict[str, str]
    """Fields of the namespace (model, dtype, ...); empty if its manifest is missing or damaged."""
    shards: int = 0
    bytes: int = 0
    foreign: int = 0
    """Blobs that are not shards; KVHaven never touches them."""
    newest_s: float | None = None
    oldest_s: float | None = None


class Removed(msgspec.Struct):
    """Shards and bytes that were removed (or would be), and those that remain."""

    shards: int = 0
    bytes: int = 0
    left_shards: int = 0
    left_bytes: int = 0


async def usage(store: SharedStore) -> list[FolderUsage]:
    """Return the usage of each folder. Raises `TierError` if the store fails."""
    now = await store.now()
    found = []
    for folder in await store.folders():
        try:
            fields = (await read_manifest(store, folder)).fields
        except TierMissError:
            fields = {}
        row = FolderUsage(folder, fields)
        async for page in store.list_blobs(folder):
            for blob in page:
                _count(row, blob, now)
        if row.fields or row.shards or row.foreign:  # otherwise the remains of a removed namespace
            found.append(row)
    return found


async def collect(store: SharedStore, limits: Limits, *, dry_run: bool = False) -> Removed:
    """Remove expired and excess shards, least recently used first, and certain debris.

    This does once what the owner of a shared directory does periodically. It needs no lease,
    since files are immutable and a removed shard is a miss. Debris is a blob of a size that its
    shard cannot have and, in a directory, an abandoned temporary file. Raises `TierError` if the
    store fails, and `ValueError` if the store does not report when data was used.
    """
    survey = DirectoryUsage()
    torn: set[str] = set()
    async for folder, page in _shards(store):
        names = await _names(store, folder)
        torn.update(blob.name for blob in page if _is_torn(blob, names))
        survey.add(folder, [blob for blob in page if blob.name not in torn])
    deletions = survey.deletions(limits, await store.now(), 0)
    done = Removed()
    async for _, page in _shards(store):
        gone = [blob for blob in page if blob.name in torn or deletions.take(blob)]
        if not dry_run:
            await _remove(store, gone)
        done.shards += len(gone)
        done.bytes += sum(blob.size for blob in gone)
        done.left_shards += len(page) - len(gone)
        done.left_bytes += sum(blob.size for blob in page) - sum(blob.size for blob in gone)
    return done


async def empty(store: SharedStore, folders: Sequence[str]) -> Removed:
    """Remove the shards and manifests of these folders. Raises `TierError` if the store fails."""
    done = Removed()
    for folder in folders:
        async for page in store.list_blobs(folder):
            gone = [blob for blob in page if is_shard_name(blob.name)]
            await _remove(store, gone)
            done.shards += len(gone)
            done.bytes += sum(blob.size for blob in gone)
        await store.remove([manifest_name(folder)])
    return done


async def _names(store: SharedStore, folder: str) -> Names | None:
    with contextlib.suppress(TierMissError):
        return Names(await read_manifest(store, folder))
    return None


def _is_torn(blob: Blob, names: Names | None) -> bool:
    shard = names.shard(blob.name) if names else None
    return shard is not None and not may_hold(blob.size, shard.payload_bytes)


async def _shards(store: SharedStore) -> AsyncIterator[tuple[str, list[Blob]]]:
    for folder in await store.folders():
        async for page in store.list_blobs(folder):
            yield folder, [blob for blob in page if is_shard_name(blob.name)]


async def _remove(store: SharedStore, blobs: Sequence[Blob]) -> None:
    for at in range(0, len(blobs), _BATCH):
        await store.remove([blob.name for blob in blobs[at : at + _BATCH]])


def _count(row: FolderUsage, blob: Blob, now: float) -> None:
    if not is_shard_name(blob.name):
        row.foreign += 1
        return
    row.shards += 1
    row.bytes += blob.size
    if blob.used_at is not None:
        age_s = max(0.0, now - blob.used_at)
        row.newest_s = age_s if row.newest_s is None else min(row.newest_s, age_s)
        row.oldest_s = age_s if row.oldest_s is None else max(row.oldest_s, age_s)


class Audited(msgspec.Struct, frozen=True):
    """Audit result of one blob: name, size in bytes, and problem (empty: none).

    `shard` is the shard that the name stands for; None if the blob is not a shard (do not remove).
    """

    name: str
    size: int
    shard: StoredShard | None = None
    problem: str = ""


async def audit(store: SharedStore) -> AsyncIterator[Audited]:
    """Read and check every blob, and yield the results. Raises `TierError` if the store fails.

    Concurrent changes by other services are not problems: a shard that is absent when it is read
    was deleted.
    """
    for folder in await store.folders():
        try:
            names = Names(await read_manifest(store, folder))
        except TierMissError as error:
            if await _holds_anything(store, folder):
                yield Audited(manifest_name(folder), 0, problem=str(error))
            continue
        async for page in store.list_blobs(folder):
            for blob in page:
                shard = names.shard(blob.name)
                if shard is None:
                    yield Audited(blob.name, blob.size, problem=f"{blob.name} is not a shard")
                elif (problem := await _problem(store, shard)) is not None:
                    yield Audited(blob.name, blob.size, shard, problem)


async def _holds_anything(store: SharedStore, folder: str) -> bool:
    """Return whether a folder holds blobs; otherwise it is the remains of a removed one."""
    async for page in store.list_blobs(folder):
        if page:
            return True
    return False


async def _problem(store: SharedStore, shard: StoredShard) -> str | None:
    """Return a shard's problem; empty if it is valid, None if it is absent."""
    page = mmap.mmap(-1, align_up(shard.payload_bytes))
    try:
        await store.read(shard, memoryview(page))
    except DamagedShardError as error:
        return str(error) or f"{blob_name(shard)} is damaged"
    except TierMissError:
        return None  # deleted after it was listed
    return ""
