# SPDX-License-Identifier: Apache-2.0
"""Epochs of an engine's cache: the root of its keys, and the KV from before the last reset."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvhaven.engine.adapters import CacheName
from kvhaven.keys import epoch_root
from kvhaven.types import NamespaceDigest

logger = logging.getLogger(__name__)

HeldBlocks = Callable[[], Iterable[int]]
"""Returns the blocks, of all KV groups, whose KV the engine uses, or may reuse for other requests.

Where it is None, the engine did not tell: then every block may be one.
"""

_LATE_STEPS: Final = 64
"""Maximum number of steps between the first use of a load and the report of its failure.

It exceeds the number of steps that an engine has in flight."""


class _Load:
    """Last load of a request, and the first step whose written blocks may depend on it."""

    __slots__ = ("ended", "gone", "since")

    def __init__(self, since: int, *, ended: bool) -> None:
        self.since = since
        self.ended = ended
        self.gone = False


class Epoch:
    """Time since this engine's last reset.

    After a reset, this engine no longer finds KV that was cached before. If the engine could not
    drop its own KV (requests are running), it continues to use old blocks; KV computed from them
    belongs to the old epoch and must not be saved in the new one. The same holds for one adapter
    whose content has changed: the adapter of each request and block is recorded, and an unknown
    adapter matches any. `beside_stores` is as in `SchedulerSide`.
    """

    def __init__(self, *, beside_stores: bool = False) -> None:
        self.known = True
        """Whether old KV can be told apart; False after `reset` or `doubt` failed midway."""
        self._salt = b""
        self._old_blocks: set[int] = set()
        self._first_trusted = 0
        """The first step whose written blocks are trusted, but for `_old_blocks`; 0: all are."""
        self._untold = False
        """Whether it was logged that the engine does not tell which blocks it holds."""
        self._trusts_others = not beside_stores
        """Whether KV that other connectors load may be saved."""
        self._old_requests: set[str] = set()
        self._adapter_of_request: dict[str, CacheName] = {}
        self._adapter_of_block: dict[int, CacheName | None] = {}
        self._step = 1
        self._written: dict[int, int] = {}  # the step in which a block was last written
        self._loading: dict[str, _Load] = {}
        self._loaded: deque[tuple[int, int]] = deque()  # the step of a load's end, and its `since`

    def root(self, namespace: bytes) -> bytes:
        """Return the root of the key chains of this epoch."""
        digest = NamespaceDigest(namespace)
        return epoch_root(digest, self._salt) if self._salt else digest

    def reset(self, running: Iterable[str], held: HeldBlocks | None) -> None:
        """Start a new epoch. `running` requests continue with old KV; `held` blocks hold it."""
        self.known = False
        self._salt = os.urandom(16)
        self.distrust(running, held)
        self.known = True

    def distrust(
        self,
        running: Iterable[str],
        held: HeldBlocks | None,
        adapter: CacheName | None = None,
        *,
        since: int = 0,
    ) -> set[str]:
        """Exclude KV that the engine holds now from saves, as its origin is unknown.

        With `adapter`, only KV of this adapter is excluded, otherwise all. Of blocks, only those
        written in step `since` or later are excluded. `running` and `held` are as in `reset`.
        Chunks in the cache stay valid. Returns the affected requests.
        """

        def concerned(own: CacheName | None) -> bool:
            return adapter is None or own is None or own == adapter

        self._trusts_others = False
        requests, blocks = self._adapter_of_request, self._adapter_of_block
        old = {name for name in {*running, *requests} if concerned(requests.get(name))}
        self._old_requests |= old
        if held is None:
            self._trust_no_block()
        else:
            self._old_blocks.update(
                block
                for block in held()
                if self._written.get(block, since) >= since and concerned(blocks.get(block))
            )
        return old

    def distrust_cache(self) -> None:
        """Exclude from saves what later requests find in the engine's prefix cache now.

        This is every block that is not written in this step or later. To note that takes no walk of
        the cache: engines under memory pressure preempt often. Running requests go on; one that is
        preempted and finds its own blocks counts as later.
        """
        self._trusts_others = False
        self._first_trusted = self._step

    def loaded_elsewhere(self, blocks: Iterable[int]) -> None:
        """Note blocks whose KV another of the engine's connectors has loaded.

        It is excluded from saves if any KV ever was: the other connector, which knows nothing of
        that, may have that very KV, from these blocks or from others. Also if it may keep KV, which
        was never verified: vLLM's OffloadingConnector (0.32, issue 46951) stores blocks that loads
        of other connectors have overwritten.
        """
        if not self._trusts_others:
            self.distrust_blocks(blocks)

    def distrust_blocks(self, blocks: Iterable[int]) -> None:
        """Exclude the present KV of these blocks, and KV computed from it, from saves."""
        self._trusts_others = False
        self._old_blocks.update(blocks)

    def next_step(self) -> None:
        """Note that the engine starts to plan another step."""
        self._step += 1
        while self._loaded and self._loaded[0][0] < self._step - _LATE_STEPS:
            self._loaded.popleft()

    def load_planned(self, request_id: str, *, reported: bool) -> None:
        """Note a planned load of a request; `reported` says that the ranks will report its end."""
        self._load_over(request_id)
        self._loading[request_id] = _Load(self._step, ended=not reported)

    def load_ended(self, request_id: str) -> None:
        """Note that the ranks reported the end of a request's load, successful or failed."""
        load = self._loading.get(request_id)
        if load is not None:
            load.ended = True
            if load.gone:
                self._load_over(request_id)

    def distrust_loads(self, running: Iterable[str], held: HeldBlocks | None) -> set[str]:
        """Distrust KV that may depend on a load that has just failed; see `distrust`.

        The failed load is not identified, so all recent loads count. Blocks that were written
        before any of these was planned stay trusted; otherwise a system prompt with constant
        hits would never be trusted again.
        """
        loads = [load.since for load in self._loading.values()]
        since = min([*loads, *(since for _, since in self._loaded)], default=0)
        return self.distrust(running, held, since=since)

    def _load_over(self, request_id: str) -> None:
        load = self._loading.pop(request_id, None)
        if load is not None:
            self._loaded.append((self._step, load.since))

    def began(self, request_id: str, adapter: CacheName) -> None:
        """Note a new request and its adapter."""
        self._adapter_of_request[request_id] = adapter

    def placed(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note the blocks that hold a request's KV or will hold it.

        Shared blocks have the same adapter, since the engine's prefix cache distinguishes them
        by it.
        """
        adapter = self._adapter_of_request.get(request_id)
        self._adapter_of_block.update(dict.fromkeys(blocks, adapter))

    def doubt(self, running: Iterable[str], held: HeldBlocks | None) -> set[str]:
        """Distrust all KV that the engine holds, as a step may not have been noted; see `distrust`.

        Never raises. If `held` raises, `known` stays False.
        """
        self.known = False
        self._adapter_of_block.clear()  # the engine may have reallocated some
        try:
            old = self.distrust(running, held)
        except Exception:  # this handles another error already; requests go uncached
            logger.exception("the engine's held blocks are unknown: nothing is cached any more")
            return {*running}
        self.known = True
        return old

    def admitted(
        self,
        request_id: str,
        blocks: Sequence[int],
        computed_blocks: int,
        doubtful: Sequence[int] | None = None,
    ) -> bool:
        """Note a request's blocks, of which the first `computed_blocks` have KV.

        Returns False if that KV is old. `doubtful` are blocks whose content may not be that of the
        request's tokens: these and all that it computes from now on count as old; None means that
        there is no such doubt.
        """
        self.placed(request_id, blocks)
        self._load_over(request_id)
        if doubtful is not None:
            self._trusts_others = False
            self._old_requests.add(request_id)
            self._writes(request_id, [*doubtful, *blocks[computed_blocks:]])
            return False
        if self._old_blocks or self._old_requests or self._first_trusted:
            self._old_requests.discard(request_id)
            if self._any_old(blocks[:computed_blocks]):
                self._old_requests.add(request_id)
        self._writes(request_id, blocks[computed_blocks:])
        return request_id not in self._old_requests

    def extended(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note additional blocks that a request is about to write."""
        self.placed(request_id, blocks)
        self._writes(request_id, blocks)

    def _writes(self, request_id: str, blocks: Sequence[int]) -> None:
        self._written.update(dict.fromkeys(blocks, self._step))
        if request_id in self._old_requests:
            self._old_blocks.update(blocks)
        elif self._old_blocks:
            self._old_blocks.difference_update(blocks)

    def _any_old(self, blocks: Sequence[int]) -> bool:
        if not self._old_blocks.isdisjoint(blocks):
            return True
        first, written = self._first_trusted, self._written
        return first > 0 and any(written.get(block, 0) < first for block in blocks)

    def _trust_no_block(self) -> None:
        """Distrust each block until it is written anew: the engine does not tell what it holds."""
        if not self._untold:
            self._untold = True
            logger.warning(
                "the engine does not tell which blocks its prefix cache holds: requests that find "
                "KV there are only saved if it was computed or loaded after the last error or reset"
            )
        self.next_step()  # what was written until now is of an earlier one
        self._first_trusted = self._step

    def finished(self, request_id: str) -> None:
        """Forget a request. Its load may still be running and write its blocks."""
        self._adapter_of_request.pop(request_id, None)
        self._old_requests.discard(request_id)
        load = self._loading.get(request_id)
        if load is not None:
            load.gone = True
            if load.ended:
                self._load_over(request_id)
