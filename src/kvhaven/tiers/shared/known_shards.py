# SPDX-License-Identifier: Apache-2.0
"""What a shared tier remembers of its store, so that asking again costs no request."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvhaven.tiers.base import StoredShard

MOST: Final = 100_000
"""Shards remembered; about 40 MB."""


class KnownShards:
    """Which shards were there, and which were not, a short while ago.

    What was there is believed for `present_s` seconds, what was not for `absent_s`: others may
    delete and write at any time, and who waits for another node's KV polls. At most `most`
    shards are remembered; the oldest go first. `clock` returns seconds that never go back.
    Used on the event loop only.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        present_s: float = 60.0,
        absent_s: float = 2.0,
        most: int = MOST,
    ) -> None:
        self._clock = clock
        self._ages = {True: present_s, False: absent_s}
        self._most = most
        self._known: OrderedDict[StoredShard, tuple[bool, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, shard: StoredShard, *, there: bool) -> None:
        """Remember what the store just said."""
        self._known[shard] = there, self._clock() + self._ages[there]
        self._known.move_to_end(shard)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def recall(self, shard: StoredShard) -> bool | None:
        """Return whether the shard is there; None when that is not known (any more)."""
        there, until = self._known.get(shard, (None, 0.0))
        if there is None or self._clock() < until:
            return there
        del self._known[shard]
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
