# SPDX-License-Identifier: Apache-2.0
"""What `reset_cache` means: from where keys start, and which of the engine's KV is older."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from kvhaven.keys import epoch_root
from kvhaven.types import NamespaceDigest


class Epoch:
    """The time since this engine's last reset.

    After a reset nothing cached before is found by this engine any more. When the engine
    could not drop its own KV (requests are running), it goes on handing out old blocks; what
    is computed from them is of the old epoch too and must not be saved in the new one.
    """

    def __init__(self) -> None:
        self._salt = b""
        self._old_blocks: set[int] = set()
        self._old_requests: set[str] = set()

    def root(self, namespace: bytes) -> bytes:
        """Return what the key chains of this epoch start from."""
        digest = NamespaceDigest(namespace)
        return epoch_root(digest, self._salt) if self._salt else digest

    def reset(self, running: Iterable[str], pool: Any) -> None:
        """Begin anew. `running` requests go on with old KV; `pool` is the engine's, or None."""
        self._salt = os.urandom(16)
        self._old_requests.update(running)
        if pool is not None:
            self._old_blocks = {
                block.block_id
                for block in pool.blocks
                if block.ref_cnt > 0 or block.block_hash is not None
            }

    def admitted(self, request_id: str, blocks: Sequence[int], computed_blocks: int) -> bool:
        """Note a request's blocks, `computed_blocks` of them with KV; False: its KV is old."""
        if not (self._old_blocks or self._old_requests):
            return True
        self._old_requests.discard(request_id)
        if not self._old_blocks.isdisjoint(blocks[:computed_blocks]):
            self._old_requests.add(request_id)
        self.extended(request_id, blocks[computed_blocks:])
        return request_id not in self._old_requests

    def extended(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note blocks that a request is about to write."""
        if request_id in self._old_requests:
            self._old_blocks.update(blocks)
        elif self._old_blocks:
            self._old_blocks.difference_update(blocks)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._old_requests.discard(request_id)
