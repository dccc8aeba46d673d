# SPDX-License-Identifier: Apache-2.0
"""Blocks in vLLM's prefix cache with wrong KV by vLLM's own fault, seen from its scheduler alone.

With priority scheduling, vLLM may preempt a request that it has scheduled in the same step, and
leaves the blocks of the tokens that it then does not compute in its prefix cache. The simulation
must not take the wrong answers that follow for ours, but wrong KV that we save for them is ours.
All KV groups count: a window's block may stay in the cache when the full group's is gone.
"""

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_GROUP_BYTES = 4
"""The end of a block's key in the cache: its KV group."""


class UncomputedBlocks:
    """Follows one scheduler; call `before` and `after` around each `schedule`."""

    def __init__(self, scheduler: Any, block_size: int) -> None:
        self._scheduler = scheduler
        self._block_size = block_size
        self._pool = scheduler.kv_cache_manager.block_pool
        self._ends: dict[str, int] = {}
        self._cached: dict[int, bytes] = {}
        self._bad: dict[int, bytes] = {}
        self._starts: dict[str, int] = {}
        """The first block, by its number in the request, that a misled request computes."""
        self.misled: set[str] = set()
        """Requests that compute from such blocks now."""
        self.ever_misled: set[str] = set()
        """Requests that did so at any time: their output may be wrong."""

    def before(self) -> None:
        """Note how far each request is computed, counting the steps under way, and the cache."""
        self._ends = {one.request_id: one.num_computed_tokens for one in self._scheduler.running}
        self._cached = self._hashes()

    def after(self, output: "SchedulerOutput") -> None:
        """Note the requests that start on bad blocks, and the blocks that became bad."""
        cached = self._hashes()
        self._bad = {block: key for block, key in self._bad.items() if cached.get(block) == key}
        news = output.scheduled_cached_reqs
        started = {
            new.req_id: (new.block_ids, new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        }
        for index, name in enumerate(news.req_ids):
            blocks = news.new_block_ids[index]
            if name in news.resumed_req_ids:
                started[name] = blocks, news.num_computed_tokens[index]
            elif blocks is not None:
                self._written(*blocks)
        for name, (blocks, computed) in started.items():
            hits = -(-computed // self._block_size)
            self._written(*(ids[hits:] for ids in blocks))
            self.misled.discard(name)
            if any(not self._bad.keys().isdisjoint(ids[:hits]) for ids in blocks):
                self.misled.add(name)
                self._starts[name] = computed // self._block_size
        self.ever_misled |= self.misled
        left = {
            key
            for name in output.preempted_req_ids or ()
            if name in self._scheduler.requests
            for key in self._scheduler.requests[name].block_hashes[
                self._ends.get(name, 0) // self._block_size :
            ]
        }
        manager, live = self._scheduler.kv_cache_manager, self._scheduler.requests
        computed_now = {
            block
            for name in output.num_scheduled_tokens
            for ids in manager.get_block_ids(name)
            for block in ids
        }
        for block, key in cached.items():
            fresh = self._cached.get(block) != key and block not in computed_now
            if fresh and key[:-_GROUP_BYTES] in left:
                self._bad[block] = key
        for name in self.misled & live.keys():
            written = [ids[self._starts[name] :] for ids in manager.get_block_ids(name)]
            self._bad |= {one: cached[one] for ids in written for one in ids if one in cached}

    @property
    def count(self) -> int:
        """Number of bad blocks that a request may find now."""
        return len(self._bad)

    def _written(self, *tables: Any) -> None:
        for block in itertools.chain.from_iterable(tables):
            self._bad.pop(block, None)

    def _hashes(self) -> dict[int, bytes]:
        blocks = self._pool.blocks
        return {one.block_id: one.block_hash for one in blocks if one.block_hash is not None}
