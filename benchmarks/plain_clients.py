# SPDX-License-Identifier: Apache-2.0
"""Limits for the S3 and Redis tiers: their bare clients, which read into the same memory."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import obstore
from obstore.store import S3Store
from redis.asyncio import Redis

from benchmarks.rates import NAMES, PAYLOAD, PIECES
from kvhaven.tiers.executor import Lane
from kvhaven.tiers.format.header import HEADER_BYTES, stored_bytes
from kvhaven.tiers.redis.tier import READERS, WRITERS
from kvhaven.tiers.s3.tier import HEADS_AT_ONCE
from kvhaven.tiers.shared.remote_store import SLOTS

T = TypeVar("T")

_HEADER: Final = bytes(HEADER_BYTES)


class PlainS3:
    """Objects of a header and a payload by obstore alone, with the tier's concurrency.

    A lookup is a HEAD for each name.
    """

    def __init__(self, bucket: str, url: str) -> None:
        self._store = S3Store(bucket, endpoint=url, client_options={"allow_http": True})
        at_once = f"{SLOTS[Lane.WRITE]} puts, {SLOTS[Lane.READ]} gets or {HEADS_AT_ONCE} heads"
        self.what = f"bare obstore on the same server, {at_once} concurrently"

    async def write(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Put objects."""

        async def put(number: int) -> None:
            body = b"".join((_HEADER, buffers[number]))
            name = f"plain/{turn}/{number}"
            await obstore.put_async(self._store, name, body, use_multipart=False)

        await _at_once(SLOTS[Lane.WRITE], put, len(buffers))

    async def read(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Get objects."""

        async def get(number: int) -> None:
            found = await obstore.get_async(self._store, f"plain/{turn}/{number}")
            buffers[number][:] = memoryview(await found.bytes_async())[HEADER_BYTES:]

        await _at_once(SLOTS[Lane.READ], get, len(buffers))

    async def contains(self, turn: int) -> None:
        """Request the heads of objects."""

        async def ask(number: int) -> None:
            try:
                found = await obstore.head_async(self._store, f"plain/{turn}/{number}")
                size = found["size"]
            except FileNotFoundError:
                size = 0
            assert (size == stored_bytes(PAYLOAD)) == (number < PIECES)

        await _at_once(HEADS_AT_ONCE, ask, NAMES)

    async def remove(self, turn: int) -> None:
        """Delete objects."""
        names = [f"plain/{turn}/{number}" for number in range(PIECES)]
        await obstore.delete_async(self._store, names)


class PlainRedis:
    """Strings of a header and a payload by redis-py alone: pipelines on several connections.

    The number of values and connections in use is the tier's. A lookup is one pipeline.
    """

    def __init__(self, url: str) -> None:
        self._redis: Any = Redis.from_url(url)  # its types are wrong about pipelines
        self._in_flight = {WRITERS: SLOTS[Lane.WRITE], READERS: SLOTS[Lane.READ]}
        self.what = (
            f"bare redis-py pipelines on the same server, {SLOTS[Lane.WRITE]} sets on {WRITERS} "
            f"connections, or {SLOTS[Lane.READ]} gets on {READERS}"
        )

    async def write(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Set strings."""

        async def put(numbers: Sequence[int]) -> None:
            pipeline = self._redis.pipeline(transaction=False)
            for number in numbers:
                pipeline.set(f"plain/{turn}/{number}", b"".join((_HEADER, buffers[number])))
            await pipeline.execute()

        await self._pipelines(WRITERS, put, len(buffers))

    async def read(self, turn: int, buffers: Sequence[memoryview]) -> None:
        """Get strings."""

        async def get(numbers: Sequence[int]) -> None:
            pipeline = self._redis.pipeline(transaction=False)
            for number in numbers:
                pipeline.get(f"plain/{turn}/{number}")
            for number, value in zip(numbers, await pipeline.execute(), strict=True):
                buffers[number][:] = memoryview(value)[HEADER_BYTES:]

        await self._pipelines(READERS, get, len(buffers))

    async def contains(self, turn: int) -> None:
        """Request the lengths of strings."""
        pipeline = self._redis.pipeline(transaction=False)
        for number in range(NAMES):
            pipeline.strlen(f"plain/{turn}/{number}")
        lengths = await pipeline.execute()
        assert sum(length == stored_bytes(PAYLOAD) for length in lengths) == PIECES

    async def remove(self, turn: int) -> None:
        """Unlink strings."""
        await self._redis.unlink(*(f"plain/{turn}/{number}" for number in range(PIECES)))

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def _pipelines(
        self, connections: int, work: Callable[[Sequence[int]], Awaitable[None]], pieces: int
    ) -> None:
        """Process all pieces, in pipelines of a size that keeps the tier's number in flight."""
        size = self._in_flight[connections] // connections
        batches = [range(pieces)[at : at + size] for at in range(0, pieces, size)]
        await _at_once(connections, lambda number: work(batches[number]), len(batches))


async def _at_once(most: int, work: Callable[[int], Awaitable[None]], count: int) -> None:
    """Call `work` for each number, at most `most` concurrently."""
    left = iter(range(count))

    async def run() -> None:
        for number in left:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(most):
            group.create_task(run())
