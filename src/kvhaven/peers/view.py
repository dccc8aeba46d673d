# SPDX-License-Identifier: Apache-2.0
"""View of a peer's memory: the digests of the chunks that it has announced."""

from collections.abc import Iterable
from typing import Final

from kvhaven.catalog.announcer import START, Batch, Cursor

_STRIPES: Final = 256
"""Python copies a whole set when it grows; a stripe of a quarter of a million digests is small."""
_FREED: Final = 8
"""Stripes that are freed before others may use the event loop."""
MOST_DIGESTS: Final = 1 << 18
"""Digests of a peer that are kept, in 18 MB; a peer with more chunks is asked instead."""


class PeerView:
    """Digests of one peer's chunks. `synced`: all that it had announced at its last message.

    While it is synced, `has` answers for the peer. The answer may be stale by one message: a chunk
    that is gone costs a read that misses, and one that is new is not found yet.
    """

    def __init__(self, most: int = MOST_DIGESTS) -> None:
        self.source = ""
        """Name of the node that it is of."""
        self.cursor: Cursor = START
        self.synced = False
        self.overflowed = False
        """Whether the peer has more chunks than are kept."""
        self.digests = 0
        self._most = most
        self._stripes: list[set[int]] = [set() for _ in range(_STRIPES)]
        self._dropped: list[set[int]] = []
        """Stripes from before a reset, which are still to be freed."""

    def has(self, digest: int) -> bool:
        """Return whether the peer announced a chunk, and did not take that back."""
        return digest in self._stripes[digest % _STRIPES]

    def apply(self, source: str, batch: Batch) -> None:
        """Apply what the node `source` announced for the present `cursor`."""
        if batch.fresh or source != self.source:
            self.reset()
        if not batch.fresh and self.cursor == START:
            return  # it continues what was heard of another node
        self.source, self.cursor = source, batch.cursor
        self._add(batch.added)
        for digest in batch.removed:
            self.forget(digest)
        if self.digests > self._most:
            self.reset()
            self.overflowed = True
        else:
            self.synced = self.synced or batch.whole

    def forget(self, digest: int) -> None:
        """Note that the peer does not have a chunk any more."""
        stripe = self._stripes[digest % _STRIPES]
        if digest in stripe:
            stripe.remove(digest)
            self.digests -= 1

    def reset(self) -> None:
        """Forget everything: the next message is the beginning of a snapshot."""
        self.cursor, self.source = START, ""
        self.synced = self.overflowed = False
        self.digests = 0
        self._dropped += filter(None, self._stripes)
        self._stripes = [set() for _ in range(_STRIPES)]

    def free_some(self) -> bool:
        """Free some of what was forgotten; return whether more is left: all takes 10 ms."""
        del self._dropped[-_FREED:]
        return bool(self._dropped)

    def _add(self, digests: Iterable[int]) -> None:
        for digest in digests:
            stripe = self._stripes[digest % _STRIPES]
            if digest not in stripe:
                stripe.add(digest)
                self.digests += 1
