# SPDX-License-Identifier: Apache-2.0
"""The audit of a shared store: every blob of it is read and checked."""

import mmap

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import StoredShard, TierAudit
from kvhaven.tiers.header import stored_bytes
from kvhaven.tiers.shared_store import Names, SharedStore, read_manifest
from kvhaven.types import align_up


async def audit(store: SharedStore) -> TierAudit:
    """Return what is right and what is not. Raises `TierError` when the store fails.

    What other services do meanwhile is no problem: a shard that is gone when it is read was
    deleted.
    """
    problems: list[str] = []
    shards = used_bytes = 0
    for folder in await store.folders():
        try:
            names = Names(await read_manifest(store, folder))
        except TierMissError as error:
            problems.append(str(error))
            continue
        async for page in store.list_blobs(folder):
            for name, size in page:
                shard = names.shard(name)
                problem = await _problem(store, name, size, shard)
                if problem:
                    problems.append(problem)
                elif shard is not None:
                    shards += 1
                    used_bytes += size
    return TierAudit(shards, used_bytes, tuple(problems))


async def _problem(
    store: SharedStore, name: str, size: int, shard: StoredShard | None
) -> str | None:
    """Return what is wrong with a blob, if anything is."""
    if shard is None:
        return f"{name} is no shard"
    wanted = stored_bytes(shard.payload_bytes)
    if size != wanted:
        return f"{name} has {size} bytes instead of {wanted}"
    page = mmap.mmap(-1, align_up(shard.payload_bytes))
    try:
        await store.read(shard, memoryview(page))
    except TierMissError as error:
        (there,) = await store.contains([shard])
        return str(error) if there else None
    return None
