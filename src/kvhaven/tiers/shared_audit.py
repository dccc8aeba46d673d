# SPDX-License-Identifier: Apache-2.0
"""The audit of a shared store: every blob of it is read and checked."""

import mmap
from collections.abc import AsyncIterator

import msgspec

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.shared_store import (
    DamagedError,
    Names,
    SharedStore,
    blob_name,
    manifest_name,
    read_manifest,
)
from kvhaven.types import align_up


class Audited(msgspec.Struct, frozen=True):
    """What was looked at: a name, its size in bytes, and what is wrong with it (empty: nothing).

    `shard` is what should be there; None for what is no shard (and nothing to remove).
    """

    name: str
    size: int
    shard: StoredShard | None = None
    problem: str = ""


async def audit(store: SharedStore) -> AsyncIterator[Audited]:
    """Yield every blob, read and checked, as it goes. Raises `TierError` when the store fails.

    What other services do meanwhile is no problem: a shard that is gone when it is read was
    deleted.
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
                    yield Audited(blob.name, blob.size, problem=f"{blob.name} is no shard")
                elif (problem := await _problem(store, shard)) is not None:
                    yield Audited(blob.name, blob.size, shard, problem)


async def _holds_anything(store: SharedStore, folder: str) -> bool:
    """Return whether a folder is more than what is left of one that was removed."""
    async for page in store.list_blobs(folder):
        if page:
            return True
    return False


async def _problem(store: SharedStore, shard: StoredShard) -> str | None:
    """Return what is wrong with a shard, empty if nothing is; None when it is gone."""
    page = mmap.mmap(-1, align_up(shard.payload_bytes))
    try:
        await store.read(shard, memoryview(page))
    except DamagedError as error:
        return str(error) or f"{blob_name(shard)} is damaged"
    except TierMissError:
        return None  # deleted since it was listed
    return ""
