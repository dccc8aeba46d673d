# SPDX-License-Identifier: Apache-2.0
"""Codec for clients that run in an event loop: long steps run in threads."""

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
    """Asynchronous interface of a tier's `codec` for one event loop; threads start on demand.

    A cancelled call ends when its thread has finished with the buffer, within milliseconds.
    """

    def __init__(self, codec: ShardCodec) -> None:
        self.codec = codec
        self._executor: TierExecutor | None = None

    async def pack(self, shard: StoredShard, payload: memoryview, checksum: Checksum) -> bytes:
        """Return a copy of all bytes to store for a payload."""

        def work() -> bytes:
            return b"".join(self.codec.pack(shard, payload, checksum))

        return await self._run(Lane.WRITE, work) if self.codec.compresses else work()

    async def unpack(
        self, head: memoryview, into: memoryview, size: int, shard: StoredShard, where: str
    ) -> Checksum:
        """Decode as `store.unpack` does, with the same errors."""

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
