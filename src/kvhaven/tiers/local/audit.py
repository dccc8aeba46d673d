# SPDX-License-Identifier: Apache-2.0
"""Audit of a disk tier: comparison of its index with its files, and check of every byte."""

import functools
import mmap
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvhaven.errors import TierMissError
from kvhaven.tiers.base import Namespace, StoredShard, TierAudit
from kvhaven.tiers.local.files import Listed, ShardFiles, shard_path
from kvhaven.tiers.local.index import Index
from kvhaven.types import align_up

T = TypeVar("T")


class Runner(Protocol):
    """Function that runs blocking work in a thread of the tier."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of `work`."""


async def audit(files: ShardFiles, index: Index, run: Runner) -> TierAudit:
    """Return the valid shards and the problems. Raises `TierError` if the store fails."""
    problems: list[str] = []
    shards = used_bytes = 0
    known = {namespace.digest: namespace for namespace in index.namespaces()}
    for folder in await run(files.folders):
        try:
            namespace = await run(functools.partial(files.manifest, folder))
        except TierMissError as error:
            problems.append(str(error))
            continue
        if known.pop(namespace.digest, None) is None:
            problems.append(f"{folder} belongs to a namespace that is not registered")
            continue
        right = await _audit_namespace(files, index, namespace, run, problems)
        shards += len(right)
        used_bytes += sum(right.values())
    for namespace in known.values():
        lost = list(index.shards(namespace.digest))
        problems += [f"{shard_path(shard)} is in the index but has no file" for shard in lost]
    problems += [f"{path} is an unfinished file" for path in await run(files.unfinished)]
    if used_bytes != index.used_bytes and not problems:
        problems.append(f"files have {used_bytes} bytes, but the index has {index.used_bytes}")
    return TierAudit(shards, used_bytes, tuple(problems))


async def _audit_namespace(
    files: ShardFiles, index: Index, namespace: Namespace, run: Runner, problems: list[str]
) -> dict[StoredShard, int]:
    """Return a namespace's valid shards with their sizes; add others to `problems`."""
    believed = set(index.shards(namespace.digest))
    right = {}
    listings = files.list_shards(namespace)
    while True:
        listed: Listed | None = await run(functools.partial(next, listings, None))
        if listed is None:
            break
        problems += [f"{shard_path(shard)} has a wrong size" for shard, _ in listed.misfits]
        problems += [f"{path} is not a shard" for path in listed.debris]
        for shard, size in listed.found.items():
            if shard not in believed:
                problems.append(f"{shard_path(shard)} is not in the index")
            try:
                await run(functools.partial(_verify, files, shard))
            except TierMissError as error:
                problems.append(str(error))
            else:
                right[shard] = size
        believed.difference_update(listed.found)
    problems += [f"{shard_path(shard)} is in the index but has no file" for shard in believed]
    return right


def _verify(files: ShardFiles, shard: StoredShard) -> None:
    files.read(shard, memoryview(mmap.mmap(-1, align_up(shard.payload_bytes))))
