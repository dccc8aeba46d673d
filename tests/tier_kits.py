# SPDX-License-Identifier: Apache-2.0
"""Every tier there is, over a store of its own: how to open it, and how to damage what it holds."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvhaven.tiers.base import StoredShard, Tier
from kvhaven.tiers.executor import TierExecutor
from kvhaven.tiers.filesystem import filesystem_tier
from kvhaven.tiers.memory import MemoryStore, memory_tier
from kvhaven.tiers.shared_store import blob_name
from tests.tiers import disk_tier, file_of

Change = Callable[[bytes], bytes]


class Kit(NamedTuple):
    """A store that nobody else uses."""

    open: Callable[[], AbstractAsyncContextManager[Tier]]
    """Opens a tier of `CAPACITY` bytes over the store, again and again; two at once if shared."""
    change: Callable[[StoredShard, Change], None]
    """Changes the bytes that are stored for a shard, behind the tier's back."""
    descriptors: int = 0
    """How many more than before may stay open when the tier is closed (a runtime's own)."""


@contextlib.asynccontextmanager
async def opened(tier: Tier) -> AsyncIterator[Tier]:
    """Start a tier, and close it in the end."""
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close(5)


def change_file(file: Path, change: Change) -> None:
    file.write_bytes(change(file.read_bytes()))


def disk(_: pytest.FixtureRequest, path: Path, **settings: Any) -> Kit:
    folder = path / "tier"
    return Kit(
        lambda: disk_tier(folder, **settings),
        lambda shard, change: change_file(file_of(folder, shard), change),
    )


def disk_buffered(request: pytest.FixtureRequest, path: Path) -> Kit:
    return disk(request, path, direct_io="off")


def memory(_: pytest.FixtureRequest, __: Path) -> Kit:
    store = MemoryStore()

    def change(shard: StoredShard, change: Change) -> None:
        name = blob_name(shard)
        store.blobs[name] = change(store.blobs[name])

    return Kit(lambda: opened(memory_tier(store, retry_s=0.05)), change)


def filesystem(_: pytest.FixtureRequest, path: Path, **settings: Any) -> Kit:
    folder = path / "shared"
    folder.mkdir(exist_ok=True)

    def open_it() -> AbstractAsyncContextManager[Tier]:
        executor = TierExecutor()
        return opened(filesystem_tier(folder, executor=executor, retry_s=0.05, **settings))

    return Kit(open_it, lambda shard, change: change_file(folder / blob_name(shard), change))


def filesystem_buffered(request: pytest.FixtureRequest, path: Path) -> Kit:
    return filesystem(request, path, direct_io="off")


KITS: dict[str, Callable[[pytest.FixtureRequest, Path], Kit]] = {
    "disk": disk,
    "disk-buffered": disk_buffered,
    "memory": memory,
    "fs": filesystem,
    "fs-buffered": filesystem_buffered,
}
