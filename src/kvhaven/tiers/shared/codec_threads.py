# SPDX-License-Identifier: Apache-2.0
"""Packing for clients that run in an event loop: what takes long is done in threads."""

from collections.abc import Callable
from typing import TypeVar

from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.executor import Lane, TierExecutor
from kvhaven.tiers.format.codec import ShardCodec
from kvhaven.tiers.format.header import PLAIN, form_of
from kvhaven.tiers.shared.store import unpack
from kvhaven.types import Checksum

T = TypeVar("T")


class CodecThreads:
    """A tier's `codec` for the coroutines of one event loop. Its threads start when needed.

    A call that is cancelled ends when its thread is done with the buffer: in milliseconds.
    """

    def __init__(self, codec: ShardCodec) -> None:
        self.codec = codec
        self._executor: TierExecutor | None = None

    async def pack(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> bytes:
        """Return all that is to be stored of a payload, in a copy."""

        def work() -> bytes:
            return b"".join(self.codec.pack(shard, payload, checksum))

        return await self._run(Lane.WRITE, work) if self.codec.compresses else work()

    async def unpack(
        self, head: memoryview, into: memoryview, size: int, shard: StoredShard, where: str
    ) -> Checksum:
        """Do what `shared_store.unpack` does."""

        def work() -> Checksum:
            return unpack(self.codec, head, into, size, shard, where)

        return work() if form_of(head) == PLAIN else await self._run(Lane.READ, work)

    async def close(self, deadline_s: float) -> None:
        """End the threads."""
        if self._executor is not None:
            await self._executor.close(deadline_s)

    async def _run(self, lane: Lane, work: Callable[[], T]) -> T:
        if self._executor is None:
            self._executor = TierExecutor()
        return await self._executor.run(lane, work)
