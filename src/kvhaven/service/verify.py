# SPDX-License-Identifier: Apache-2.0
"""Checks resident shards against the checksums that came with their commits."""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from kvhaven.catalog import Catalog
from kvhaven.catalog.actions import Acquisition, Leased
from kvhaven.service.arena import Arena
from kvhaven.types import Checksum, ShardTable

logger = logging.getLogger(__name__)

_SAMPLE_EVERY = 16
"""With `verify_memory: sample`, one chunk of every this many leases is checked."""


class Verifier:
    """Reads leased chunks in a thread of low priority; damaged ones are discarded.

    `always` checks every chunk before a lease is answered. `sample` checks behind the
    answers: it finds failing memory, it does not stop the first use of a damaged chunk.
    """

    def __init__(self, catalog: Catalog, arena: Arena, mode: str) -> None:
        self._catalog = catalog
        self._arena = arena
        self._mode = mode
        self._threads = ThreadPoolExecutor(1, "verify", initializer=_be_nice)
        self._leases = 0
        self._running: asyncio.Future[int] | None = None
        self.checked = 0
        self.damaged = 0

    @property
    def blocks_answers(self) -> bool:
        """Whether answers must wait for `verify`."""
        return self._mode == "always"

    def sample(self, acquisition: Acquisition, table: ShardTable) -> None:
        """Check one chunk of a lease now and then, in the background."""
        if self._mode != "sample" or not acquisition.chunks:
            return
        self._leases += 1
        if self._leases % _SAMPLE_EVERY == 0:
            chunk = acquisition.chunks[self._leases // _SAMPLE_EVERY % len(acquisition.chunks)]
            self._running = asyncio.ensure_future(self._check([chunk], table))

    async def verify(self, acquisition: Acquisition, table: ShardTable) -> int:
        """Check all chunks of a lease; return how many of its first are undamaged."""
        return await self._check(acquisition.chunks, table)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _check(self, chunks: Sequence[Leased], table: ShardTable) -> int:
        loop = asyncio.get_running_loop()
        for good, chunk in enumerate(chunks):
            expected = self._catalog.checksums(chunk.key, chunk.extent)
            if expected is None:
                return good
            self.checked += 1
            if not await loop.run_in_executor(
                self._threads, self._is_intact, chunk, table, expected
            ):
                self.damaged += 1
                logger.error("chunk %s was damaged in memory: discarded", chunk.key.hex())
                self._catalog.discard(chunk.key, chunk.extent)
                return good
        return len(chunks)

    def _is_intact(self, chunk: Leased, table: ShardTable, expected: tuple[Checksum, ...]) -> bool:
        memory = self._arena.memory(chunk.extent)
        return all(
            xxhash.xxh3_128_digest(memory[offset : offset + shard.payload_bytes]) == checksum
            for shard, offset, checksum in zip(table.shards, table.offsets, expected, strict=True)
        )


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
