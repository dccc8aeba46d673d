# SPDX-License-Identifier: Apache-2.0
"""What `reset_cache` means: from where keys start, and which of the engine's KV is older."""

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
"""Returns the blocks of group 0 whose KV the engine uses, or may use again for other requests."""

_LATE_STEPS: Final = 64
"""A rank reports a failed load within so many steps of the first one that uses it: more than
an engine has under way."""


class _Load:
    """The last load of a request: since when blocks are written that may depend on it."""

    __slots__ = ("ended", "gone", "since")

    def __init__(self, since: int, *, ended: bool) -> None:
        self.since = since
        self.ended = ended
        self.gone = False


class Epoch:
    """The time since this engine's last reset.

    After a reset nothing cached before is found by this engine any more. When the engine
    could not drop its own KV (requests are running), it goes on handing out old blocks; what
    is computed from them is of the old epoch too and must not be saved in the new one. The same
    holds for one adapter whose content has changed: of requests and blocks it is known which
    adapter they are of, and what is not known counts as any.
    """

    def __init__(self) -> None:
        self.known = True
        """Whether it is known which KV is older: not after a reset or doubt that failed midway."""
        self._salt = b""
        self._old_blocks: set[int] = set()
        self._old_requests: set[str] = set()
        self._adapter_of_request: dict[str, CacheName] = {}
        self._adapter_of_block: dict[int, CacheName | None] = {}
        self._step = 1
        self._written: dict[int, int] = {}  # the step from which on a block was written last
        self._loading: dict[str, _Load] = {}
        self._loaded: deque[tuple[int, int]] = deque()  # when a load was over, and its `since`

    def root(self, namespace: bytes) -> bytes:
        """Return what the key chains of this epoch start from."""
        digest = NamespaceDigest(namespace)
        return epoch_root(digest, self._salt) if self._salt else digest

    def reset(self, running: Iterable[str], held: HeldBlocks | None) -> None:
        """Begin anew. `running` requests go on with old KV, and `held` blocks hold it."""
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
        """Save nothing that the engine holds now: what it was computed from is not known.

        Of one adapter, or of all and of none; of blocks those alone that were written from step
        `since` on. Returns the requests that are concerned. `running` and `held` as in `reset`.
        What is in the cache stays valid.
        """

        def concerned(own: CacheName | None) -> bool:
            return adapter is None or own is None or own == adapter

        requests, blocks = self._adapter_of_request, self._adapter_of_block
        old = {name for name in {*running, *requests} if concerned(requests.get(name))}
        self._old_requests |= old
        if held is not None:
            self._old_blocks.update(
                block
                for block in held()
                if self._written.get(block, since) >= since and concerned(blocks.get(block))
            )
        return old

    def next_step(self) -> None:
        """Note that the engine begins to plan another step."""
        self._step += 1
        while self._loaded and self._loaded[0][0] < self._step - _LATE_STEPS:
            self._loaded.popleft()

    def load_planned(self, request_id: str, *, reported: bool) -> None:
        """Note that a request is to be loaded; `reported`: the ranks will say when it has ended."""
        self._load_over(request_id)
        self._loading[request_id] = _Load(self._step, ended=not reported)

    def load_ended(self, request_id: str) -> None:
        """Note that the ranks said that a request's load has ended, well or not."""
        load = self._loading.get(request_id)
        if load is not None:
            load.ended = True
            if load.gone:
                self._load_over(request_id)

    def distrust_loads(self, running: Iterable[str], held: HeldBlocks | None) -> set[str]:
        """Distrust what may depend on a load that has failed just now, whichever it was; as above.

        Blocks that were written before any such load was planned do not: a system prompt that
        is hit all the time would else never be trusted again.
        """
        loads = [load.since for load in self._loading.values()]
        since = min([*loads, *(since for _, since in self._loaded)], default=0)
        return self.distrust(running, held, since=since)

    def _load_over(self, request_id: str) -> None:
        load = self._loading.pop(request_id, None)
        if load is not None:
            self._loaded.append((self._step, load.since))

    def began(self, request_id: str, adapter: CacheName) -> None:
        """Note a request, and the adapter that it computes with."""
        self._adapter_of_request[request_id] = adapter

    def placed(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note the blocks that a request's KV is in, or will be.

        Those that it shares are of its adapter too: the engine's prefix cache knows them by it.
        """
        adapter = self._adapter_of_request.get(request_id)
        self._adapter_of_block.update(dict.fromkeys(blocks, adapter))

    def doubt(self, running: Iterable[str], held: HeldBlocks | None) -> set[str]:
        """Distrust all that the engine holds, as a step of it may not have been noted; as above.

        Never raises: where `held` does, nothing is known any more.
        """
        self.known = False
        self._adapter_of_block.clear()  # the engine may have given some to others
        try:
            old = self.distrust(running, held)
        except Exception:  # it ends what was begun with another error; requests go uncached
            logger.exception("the engine's blocks cannot be told apart: nothing is cached any more")
            return {*running}
        self.known = True
        return old

    def admitted(self, request_id: str, blocks: Sequence[int], computed_blocks: int) -> bool:
        """Note a request's blocks, `computed_blocks` of them with KV; False: its KV is old."""
        self.placed(request_id, blocks)
        self._load_over(request_id)
        if self._old_blocks or self._old_requests:
            self._old_requests.discard(request_id)
            if not self._old_blocks.isdisjoint(blocks[:computed_blocks]):
                self._old_requests.add(request_id)
        self._writes(request_id, blocks[computed_blocks:])
        return request_id not in self._old_requests

    def extended(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note blocks that a request is about to write."""
        self.placed(request_id, blocks)
        self._writes(request_id, blocks)

    def _writes(self, request_id: str, blocks: Sequence[int]) -> None:
        self._written.update(dict.fromkeys(blocks, self._step))
        if request_id in self._old_requests:
            self._old_blocks.update(blocks)
        elif self._old_blocks:
            self._old_blocks.difference_update(blocks)

    def finished(self, request_id: str) -> None:
        """Forget a request. Its load may still be under way, and its blocks with it."""
        self._adapter_of_request.pop(request_id, None)
        self._old_requests.discard(request_id)
        load = self._loading.get(request_id)
        if load is not None:
            load.gone = True
            if load.ended:
                self._load_over(request_id)
