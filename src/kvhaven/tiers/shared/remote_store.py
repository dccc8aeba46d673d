# SPDX-License-Identifier: Apache-2.0
"""Adapter that runs the client of a network store in its own thread, within deadlines."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.shared.loop_thread import LoopThread
from kvhaven.tiers.shared.store import (
    Blob,
    SharedStore,
)
from kvhaven.types import Checksum

T = TypeVar("T")

SLOTS: Final = {Lane.READ: 16, Lane.WRITE: 6, Lane.BACKGROUND: 2}
"""More reads than writes, since requests wait for reads."""


class RemoteStore:
    """`SharedStore` over `client`, whose coroutines must not block for long.

    The client is used in one thread only; its operations end within `deadline_s`. The client may
    access a caller's buffer only between two `await`s, so a cancelled call has finished with the
    buffer immediately. The exception: while a codec thread uses the buffer, a cancelled call
    waits for that thread.
    """

    def __init__(self, client: SharedStore, deadline_s: float) -> None:
        self.name = client.name
        self.title = client.title
        self._client = client
        self._deadline_s = deadline_s
        self._thread = LoopThread(f"tier-{client.name}", SLOTS)

    async def open(self) -> None:
        """Open the client's store."""
        await self._run(Lane.BACKGROUND, self._client.open)

    async def still_open(self) -> bool:
        """Ask the client whether its store is still the one that was opened."""
        return await self._run(Lane.BACKGROUND, self._client.still_open)

    async def close(self, deadline_s: float) -> None:
        """Finish running calls, close the client, end the thread."""
        await self._thread.close(deadline_s, functools.partial(self._client.close, deadline_s))

    async def read(self, shard: StoredShard, into: memoryview) -> Checksum:
        """Read and verify."""
        return await self._run(Lane.READ, functools.partial(self._client.read, shard, into))

    async def write(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> int:
        """Write."""
        work = functools.partial(self._client.write, shard, payload, checksum)
        return await self._run(Lane.WRITE, work)

    async def contains(self, shards: Sequence[StoredShard]) -> Sequence[bool]:
        """Look up the batch in one call."""
        return await self._run(Lane.READ, functools.partial(self._client.contains, shards))

    async def remove(self, names: Sequence[str]) -> None:
        """Remove."""
        await self._run(Lane.WRITE, functools.partial(self._client.remove, names))

    async def load_manifest(self, folder: str) -> bytes | None:
        """Read a manifest."""
        return await self._run(Lane.WRITE, functools.partial(self._client.load_manifest, folder))

    async def save_manifest(self, folder: str, content: bytes) -> None:
        """Write a manifest."""
        work = functools.partial(self._client.save_manifest, folder, content)
        await self._run(Lane.WRITE, work)

    async def folders(self) -> Sequence[str]:
        """List the namespaces' folders."""
        return await self._run(Lane.BACKGROUND, self._client.folders)

    async def list_blobs(self, folder: str) -> AsyncIterator[Sequence[Blob]]:
        """List a folder; the deadline applies to each page."""
        listing = self._client.list_blobs(folder)

        async def following() -> Sequence[Blob] | None:
            return await anext(listing, None)

        while (page := await self._run(Lane.BACKGROUND, following)) is not None:
            yield page

    async def now(self) -> float:
        """Return the time of the client's store."""
        return await self._run(Lane.BACKGROUND, self._client.now)

    async def probe(self, lane: Lane) -> None:
        """Probe the client's store."""
        await self._run(Lane.BACKGROUND, functools.partial(self._client.probe, lane))

    def queued(self, lane: Lane) -> int:
        """Return the number of queued calls."""
        return self._thread.queued(lane)

    def longest_running_s(self) -> float:
        """Return 0: every call ends by its deadline."""
        return 0.0

    async def _run(self, lane: Lane, work: Callable[[], Awaitable[T]]) -> T:
        return await self._thread.run(lane, work, self._deadline_s)
