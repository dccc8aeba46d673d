# SPDX-License-Identifier: Apache-2.0
"""Announcements: which full chunks are in the arena, as digests, for nodes that follow them."""

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvhaven.catalog.entries import Entry, State
from kvhaven.keys import announced_digest
from kvhaven.maps import StripedDict
from kvhaven.types import NO_TENANT, ChunkKey

MOST_CHANGES: Final = 1 << 16
"""Number of changes that are remembered. A follower that missed more gets a new snapshot."""


class Cursor(NamedTuple):
    """Place of a follower: the changes it has heard, and the next part of its snapshot."""

    seq: int
    part: int


class Batch(NamedTuple):
    """What a follower has to hear next. Apply `added`, then `removed`; no digest is in both.

    `fresh`: first forget all that was heard. After `cursor` is `whole`, all was heard until then.
    """

    cursor: Cursor
    whole: bool
    fresh: bool
    added: Sequence[int]
    removed: Sequence[int]


START: Final = Cursor(-1, 0)
"""Place of a follower that has heard nothing."""


class Announcer:
    """Log of the full chunks that became resident, or ceased to be. Followers are not known to it.

    A follower first gets a snapshot, part by part, then the changes since the snapshot began. So
    chunks that change while the parts are read end up right. Without `tenants`, chunks of tenants
    are left out. `most` is the number of remembered changes.
    """

    def __init__(self, *, tenants: bool = True, most: int = MOST_CHANGES) -> None:
        self.seq = 0
        """Number of changes since start."""
        self._tenants = tenants
        self._most = most
        self._digests = array("Q", bytes(8 * most))
        self._added = bytearray(most)

    def note(self, entry: Entry, *, added: bool) -> None:
        """Log that a chunk became resident, or ceased to be; tails are not announced."""
        if entry.tail or not self._is_shared(entry):
            return
        at = self.seq % self._most
        self._digests[at] = _digest(entry)
        self._added[at] = added
        self.seq += 1

    def next(self, entries: StripedDict[ChunkKey, Entry], cursor: Cursor, most: int) -> Batch:
        """Return what comes after `cursor`: about `most` digests of the snapshot, or changes."""
        parts = entries.parts()
        fresh = not self.seq - self._most <= cursor.seq <= self.seq or cursor.seq < 0
        if fresh:
            cursor = Cursor(self.seq, 0)
        if cursor.part < len(parts):
            found: list[int] = []
            part = cursor.part
            while part < len(parts) and len(found) < most:
                found += [_digest(entry) for entry in parts[part].values() if self._shows(entry)]
                part += 1
            # Whether the mapping is split may change; it is whole only while it is small.
            part = max(part, _ALL) if part == len(parts) else part
            return Batch(Cursor(cursor.seq, part), False, fresh, found, ())
        end = min(self.seq, cursor.seq + most)
        last = {
            self._digests[at % self._most]: self._added[at % self._most]
            for at in range(cursor.seq, end)
        }
        added = [digest for digest, is_added in last.items() if is_added]
        removed = [digest for digest, is_added in last.items() if not is_added]
        return Batch(Cursor(end, cursor.part), end == self.seq, fresh, added, removed)

    def _shows(self, entry: Entry) -> bool:
        there = entry.state is State.RESIDENT and not entry.tail and not entry.holding.cleared
        return there and self._is_shared(entry)

    def _is_shared(self, entry: Entry) -> bool:
        return self._tenants or entry.namespace.tenant.id == NO_TENANT


_ALL: Final = 1 << 16
"""Part of a follower that has the whole snapshot, however many parts there are."""


def _digest(entry: Entry) -> int:
    part = entry.namespace
    return announced_digest(part.namespace.digest, entry.key, part.tenant.id)
