# SPDX-License-Identifier: Apache-2.0
"""Cache of a shared tier's lookup results, which saves requests."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvhaven.tiers.base import StoredShard

MOST: Final = 100_000
"""Largest number of cached shards; about 40 MB."""


class KnownShards:
    """Cache of recent presences and absences of shards. Used on the event loop only.

    A presence is valid for `present_s` seconds and an absence for `absent_s`: other services may
    delete and write at any time, and a decode node polls for the chunks that another node is
    writing (every 0.25 s at the latest, `service.stored_chains`). The cache holds at most `most`
    shards; the oldest entries are dropped first. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        present_s: float = 60.0,
        absent_s: float = 0.2,
        most: int = MOST,
    ) -> None:
        self._clock = clock
        self._ages = {True: present_s, False: absent_s}
        self._most = most
        self._known: OrderedDict[StoredShard, tuple[bool, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, shard: StoredShard, *, there: bool) -> None:
        """Record a lookup result of the store."""
        self._known[shard] = there, self._clock() + self._ages[there]
        self._known.move_to_end(shard)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def recall(self, shard: StoredShard) -> bool | None:
        """Return whether the shard is present; None if that is unknown or expired."""
        there, until = self._known.get(shard, (None, 0.0))
        if there is None or self._clock() < until:
            return there
        del self._known[shard]
        return None

    def clear(self) -> None:
        """Drop all entries."""
        self._known.clear()
