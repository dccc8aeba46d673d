# SPDX-License-Identifier: Apache-2.0
"""Loans: chunks in the arena that this service itself is sending to another node."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, NamespaceState, State
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.tiers.base import Namespace
from kvhaven.types import Checksum, ChunkKey, Extent

_PART: Final = 2
"""Divisor of the pin limit: the result is the limit of all loans together."""


class Loan(msgspec.Struct, frozen=True):
    """A pinned chunk and the checksums of its shards, in the order of its namespace's table."""

    number: int
    namespace: Namespace
    extent: Extent
    checksums: tuple[Checksum, ...]
    tail: int = 0
    """Stored tokens, if it is a tail; 0 for a full chunk."""


class Loans:
    """Pins of chunks that no session holds. Each is ended by its number.

    The reader is a thread of the service: it returns the loan when it does not read any more.
    `pin_limit` returns the bytes that leases, promotions and loans together may pin.
    """

    def __init__(self, space: ResidentChunks[S], pin_limit: Callable[[], int]) -> None:
        self._space = space
        self._pin_limit = pin_limit
        self._last = 0
        self.open: dict[int, Entry] = {}
        self.lent = 0
        """Chunks lent since start."""

    def has(self, part: NamespaceState, key: ChunkKey) -> bool:
        """Return whether a chunk could be lent, apart from the limit."""
        return self._find(part, key) is not None

    def which(self, part: NamespaceState, keys: Iterable[ChunkKey]) -> Iterator[bool]:
        """Yield for each chunk what `has` says, in less time."""
        find, holding = self._space.find, self._space.place.find(part)
        for key in keys:
            entry = find(key)
            yield (
                entry is not None
                and entry.holding is holding
                and entry.state is State.RESIDENT
                and not entry.corrupt
            )

    def retain_tail(self, part: NamespaceState, key: ChunkKey) -> int:
        """Retain a tail until all of it was lent; see `Catalog.retain_tail`."""
        entry = self._find(part, key)
        if entry is None or not entry.tail:
            return 0
        self._space.retain(entry)
        return entry.tail

    def lend(self, part: NamespaceState, key: ChunkKey) -> Loan | None:
        """Pin a resident chunk; see `Catalog.lend`."""
        space, entry = self._space, self._find(part, key)
        if entry is None or not self._fits(entry):
            return None
        space.lease(entry)
        self._last += 1
        self.open[self._last] = entry
        self.lent += 1
        checksums = tuple(c for c in entry.checksums if c is not None)
        return Loan(self._last, part.namespace, entry.extent, checksums, entry.tail)

    def returned(self, number: int) -> None:
        """End a loan; an unknown number is not an error."""
        entry = self.open.pop(number, None)
        if entry is not None:
            self._space.returned(entry)
            self._space.unlease(entry)

    def _find(self, part: NamespaceState, key: ChunkKey) -> Entry | None:
        entry, holding = self._space.find(key), self._space.place.find(part)
        if entry is None or holding is None or entry.holding is not holding:
            return None
        return entry if entry.state is State.RESIDENT and not entry.corrupt else None

    def _fits(self, entry: Entry) -> bool:
        length, limit, space = entry.extent.length, self._pin_limit(), self._space
        lent = {id(each): each.extent.length for each in (*self.open.values(), entry)}
        pinned = space.leased_bytes + space.promoting_bytes
        within = bool(entry.leases) or pinned + length <= limit
        return within and sum(lent.values()) <= limit // _PART
