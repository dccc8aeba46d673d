# SPDX-License-Identifier: Apache-2.0
"""Verification of resident shards against the checksums of their commits."""

import asyncio
import logging
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvhaven.catalog.actions import Acquisition, Leased
from kvhaven.niceness import lower_thread_priority
from kvhaven.service.arena import Arena
from kvhaven.service.driver import Driver
from kvhaven.tiers.base import Namespace
from kvhaven.types import Checksum

logger = logging.getLogger(__name__)

_SAMPLE_EVERY = 16
"""With `verify_memory: sample`, one chunk in this many leases is checked, on average."""


class Verifier:
    """Checker of resident chunks, in a thread of low priority; damaged chunks are discarded.

    The mode `always` checks every chunk of a lease before it is answered. `sample` checks after the
    answer: it detects failing memory, but does not prevent the first use of a damaged chunk.
    """

    def __init__(self, driver: Driver, arena: Arena, mode: str) -> None:
        self._driver = driver
        self._arena = arena
        self._mode = mode
        self._threads = ThreadPoolExecutor(1, "verify", initializer=lower_thread_priority)
        # Of their own, so that no answer waits for the long chains of operators.
        self._audits = ThreadPoolExecutor(1, "audit", initializer=lower_thread_priority)
        # Random, because a fixed period could skip the same chunks forever.
        self._chance = random.Random()  # noqa: S311 - predicting it has no use
        self._running: asyncio.Task[int] | None = None
        self.checked = 0
        self.damaged = 0

    @property
    def blocks_answers(self) -> bool:
        """Whether answers must wait for `verify`."""
        return self._mode == "always"

    def sample(self, acquisition: Acquisition, namespace: Namespace) -> None:
        """Check one chunk of some leases in the background, one at a time."""
        if self._mode != "sample" or not acquisition.chunks or self._running is not None:
            return
        if self._chance.randrange(_SAMPLE_EVERY) == 0:
            chunk = self._chance.choice(acquisition.chunks)
            self._running = asyncio.create_task(self._check([chunk], namespace, self._threads))
            self._running.add_done_callback(self._sampled)

    async def verify(self, acquisition: Acquisition, namespace: Namespace) -> int:
        """Check the chunks of a lease; return the length of the undamaged prefix."""
        return await self._check(acquisition.chunks, namespace, self._threads)

    async def audit(self, acquisition: Acquisition, namespace: Namespace) -> int:
        """Check as `verify` does, for an operator: no answer waits for it."""
        return await self._check(acquisition.chunks, namespace, self._audits)

    def switch(self, mode: str) -> None:
        """Set when chunks are verified from now on: off, sample or always."""
        self._mode = mode

    def close(self) -> None:
        """End the threads."""
        if self._running is not None:
            self._running.cancel()
        for threads in (self._threads, self._audits):
            threads.shutdown(wait=True, cancel_futures=True)

    def _sampled(self, task: asyncio.Task[int]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("verification of a chunk in memory failed", exc_info=task.exception())

    async def _check(
        self, chunks: Sequence[Leased], namespace: Namespace, threads: ThreadPoolExecutor
    ) -> int:
        loop = asyncio.get_running_loop()
        for good, chunk in enumerate(chunks):
            expected = self._driver.catalog.checksums(chunk.key, chunk.extent)
            if expected is None:
                return good
            intact = await loop.run_in_executor(
                threads, self._is_intact, chunk, namespace, expected
            )
            self.checked += 1
            # The lease may have ended meanwhile and its memory been reused: then the mismatch
            # proves nothing.
            if not intact and self._driver.catalog.checksums(chunk.key, chunk.extent) is not None:
                self.damaged += 1
                logger.error("chunk %s was damaged in memory: discarded", chunk.key.hex())
                with self._driver.event() as catalog:
                    catalog.discard(chunk.key, chunk.extent)
            if not intact:
                return good
        return len(chunks)

    def _is_intact(
        self, chunk: Leased, namespace: Namespace, expected: tuple[Checksum, ...]
    ) -> bool:
        table = namespace.table
        sizes = [shard.payload_bytes for shard in table.shards]
        lengths = [namespace.shard_bytes(size, chunk.tail) for size in sizes]
        with self._arena.memory(chunk.extent) as memory:
            return all(
                _is_right(memory, offset, length, checksum)
                for offset, length, checksum in zip(table.offsets, lengths, expected, strict=True)
            )


def _is_right(memory: memoryview, offset: int, length: int | None, checksum: Checksum) -> bool:
    if length is None:
        return False
    with memory[offset : offset + length] as payload:
        return xxhash.xxh3_128_digest(payload) == checksum
