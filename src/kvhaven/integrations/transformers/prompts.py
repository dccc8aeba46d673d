# SPDX-License-Identifier: Apache-2.0
"""Lookups, loads and saves of one model's prompts, through the engine-neutral interface."""

import itertools
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from kvhaven.config import Settings
from kvhaven.engine import (
    EngineIdentity,
    Request,
    ScheduledRequest,
    connect_scheduler,
    connect_worker,
    paged_layout,
)
from kvhaven.integrations.transformers.blocks import BLOCK, Blocks, LayerShape

_PAUSE_S = 0.001


@dataclass(frozen=True)
class Batch:
    """Prompts of one call: a request for each row, and the blocks of their KV."""

    requests: list[Request]
    rows: list[range]
    blocks: Blocks
    loaded: int
    """Number of tokens in each row whose KV was loaded into the blocks."""

    def fill(self, cache: DynamicCache) -> None:
        """Add the loaded KV to an empty cache."""
        if self.loaded:
            self.blocks.fill(cache, self.rows, self.loaded)


class Prompts:
    """Both sides of an engine for one model, for one batch at a time.

    The constructor raises `KVHavenError` as `connect_worker` does. After an error of `fetch` or
    `keep`, the caller must call `drop`.
    """

    def __init__(
        self, settings: Settings, namespace: Mapping[str, str], layers: Sequence[LayerShape]
    ) -> None:
        self._layers = layers
        self._block = BLOCK if settings.chunk_size % BLOCK == 0 else settings.chunk_size
        self._numbers = itertools.count(1)
        identity = EngineIdentity(f"transformers-{os.getpid()}-{uuid.uuid4().hex}", namespace)
        first = Blocks(layers, 2, self._block)
        self.worker = connect_worker(
            settings, identity, first.kv_caches, block_size=self._block, num_blocks=2
        )
        self.scheduler = connect_scheduler(settings, identity, block_size=self._block)

    def fetch(self, ids: torch.Tensor) -> Batch:
        """Load the cached KV of the prompts `[batch, tokens]`, the same length for all rows.

        Returns when the KV is loaded or known to be absent, at the latest after the deadlines
        `lookup_deadline_ms` and `promote_deadline_ms`.
        """
        rows: list[list[int]] = ids.tolist()
        length, per_row = ids.shape[1], -(-ids.shape[1] // self._block)
        blocks = Blocks(self._layers, len(rows) * per_row, self._block)
        self.worker.move(
            paged_layout(
                blocks.kv_caches,
                block_size=self._block,
                num_blocks=len(rows) * per_row,
                device=self.worker.device,
            )
        )
        requests = [Request(f"prompt-{next(self._numbers)}", row, length) for row in rows]
        batch = Batch(
            requests,
            [range(at * per_row, (at + 1) * per_row) for at in range(len(rows))],
            blocks,
            0,
        )
        try:
            loaded = min(self._matched(request) for request in requests)
            for request, row in zip(requests, batch.rows, strict=True):
                self.scheduler.allocated(request, [row], loaded)
            self._step([])
            failed = bool(self.worker.failed_blocks())
        except BaseException:
            self.drop(batch)
            raise
        return Batch(requests, batch.rows, blocks, 0 if failed else loaded)

    def keep(self, batch: Batch, cache: DynamicCache) -> None:
        """Save the full chunks of the prompts that were not loaded; `cache` has their KV.

        Raises `KVHavenError` if the cache has KV of another shape.
        """
        length, start = batch.requests[0].num_prompt_tokens, batch.loaded
        for layer, at in zip(self._layers, cache.layers, strict=True):
            layer.require(at, len(batch.rows), length)
        batch.blocks.take(cache, batch.rows, start, length)
        self._step(
            [
                ScheduledRequest(request.request_id, [row], start, length - start, starts=True)
                for request, row in zip(batch.requests, batch.rows, strict=True)
            ]
        )
        self._finish(batch)

    def drop(self, batch: Batch) -> None:
        """Drop a batch; nothing more of it is saved."""
        self.scheduler.doubt()
        self.worker.doubt()
        self._finish(batch)

    def close(self) -> None:
        """Wait for copies and disconnect."""
        self.scheduler.close()
        self.worker.close()

    def _matched(self, request: Request) -> int:
        """Return the number of loadable tokens of a prompt, once that is known."""
        self.scheduler.on_new_request(request)
        while True:
            tokens, _ = self.scheduler.matched_tokens(request, 0)
            if tokens is not None:
                return tokens
            self._step([])  # the step's budget for waiting is used up; start another
            time.sleep(_PAUSE_S)

    def _step(self, scheduled: list[ScheduledRequest]) -> None:
        with self.worker.step(self.scheduler.plan_step(scheduled)):
            pass
        self.scheduler.reported(self.worker.report(), self.worker.finished_loads())

    def _finish(self, batch: Batch) -> None:
        for request in batch.requests:
            self.scheduler.finished(request)
