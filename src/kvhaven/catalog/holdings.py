# SPDX-License-Identifier: Apache-2.0
"""Usage of one place by namespaces and tenants, which can be counted and cleared in one step.

Each chunk in the arena or in a tier refers to a holding. A clear detaches holdings: their chunks
become invisible immediately, however many they are, and each is dropped when the catalog next comes
across it. Later chunks belong to a new holding of the same name.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvhaven.catalog.entries import Holding, NamespaceState, Shelf
from kvhaven.types import NamespaceDigest, TenantId


class Scope(NamedTuple):
    """Scope of a clear: a namespace and a tenant, each None for all."""

    namespace: NamespaceDigest | None
    tenant: TenantId | None

    def covers(self, part: NamespaceState) -> bool:
        """Return whether the scope includes a tenant's part of a namespace."""
        namespace = self.namespace in {None, part.namespace.digest}
        return namespace and self.tenant in {None, part.tenant.id}


def scopes_over(part: NamespaceState) -> tuple[Scope, ...]:
    """Return all scopes that cover a tenant's part of a namespace, as there may be many clears."""
    digest, tenant = part.namespace.digest, part.tenant.id
    return (
        Scope(None, None),
        Scope(digest, None),
        Scope(None, tenant),
        Scope(digest, tenant),
    )


class Place:
    """Shelves of the arena or of a tier; `leftover` counts cleared entries that still exist.

    `chunks` and `bytes` are the totals of complete chunks that are not cleared.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.shelves: dict[NamespaceDigest, Shelf] = {}
        self.chunks = 0
        self.bytes = 0
        self.leftover = 0

    def find(self, part: NamespaceState) -> Holding | None:
        """Return the current holding of a part of a namespace; None if it has none."""
        holding = part.holdings.get(self.name)
        return None if holding is None or holding.cleared else holding

    def holding(self, part: NamespaceState) -> Holding:
        """Return the holding of a part of a namespace; create an empty one if needed."""
        holding = self.find(part)
        if holding is None:
            digest = part.namespace.digest
            shelf = self.shelves.get(digest)
            if shelf is None:
                shelf = self.shelves[digest] = Shelf()
            holding = part.holdings[self.name] = Holding(shelf)
        return holding

    def enter(self, holding: Holding) -> None:
        """Count an additional entry."""
        holding.entries += 1
        holding.shelf.entries += 1

    def leave(self, holding: Holding) -> None:
        """Count one entry less."""
        holding.entries -= 1
        holding.shelf.entries -= 1
        self.leftover -= holding.cleared

    def count(self, holding: Holding, chunks: int, bytes_: int) -> None:
        """Add to the number of complete chunks and to their bytes (negative: subtract)."""
        holding.chunks += chunks
        holding.bytes += bytes_
        shelf = holding.shelf
        shelf.chunks += chunks
        shelf.bytes += bytes_
        if not shelf.cleared:
            self.chunks += chunks
            self.bytes += bytes_

    def usage(self, scope: Scope, parts: Iterable[NamespaceState]) -> tuple[int, int]:
        """Return the complete chunks in a scope, and their bytes: the result of a `clear` now."""
        if scope.tenant is not None:
            holdings = [holding for part in parts if (holding := self.find(part)) is not None]
            return sum(h.chunks for h in holdings), sum(h.bytes for h in holdings)
        if scope.namespace is None:
            return self.chunks, self.bytes
        shelf = self.shelves.get(scope.namespace)
        return (0, 0) if shelf is None else (shelf.chunks, shelf.bytes)

    def clear(self, scope: Scope, parts: Iterable[NamespaceState]) -> tuple[int, int]:
        """Make the chunks in a scope invisible; return the complete chunks, and their bytes.

        `parts` are the tenant's parts of namespaces if the scope names a tenant.
        """
        if scope.tenant is not None:
            shelves = [shelf for part in parts if (shelf := self._part_off(part))]
        elif scope.namespace is not None:
            only = self.shelves.pop(scope.namespace, None)
            shelves = [] if only is None else [only]
        else:
            shelves, self.shelves = list(self.shelves.values()), {}
        for shelf in shelves:
            shelf.cleared = True
            self.leftover += shelf.entries
        chunks, bytes_ = sum(shelf.chunks for shelf in shelves), sum(s.bytes for s in shelves)
        self.chunks -= chunks
        self.bytes -= bytes_
        return chunks, bytes_

    def _part_off(self, part: NamespaceState) -> Shelf | None:
        """Move a tenant's holding from its namespace's shelf to a separate one."""
        holding = self.find(part)
        if holding is None:
            return None
        old, own = holding.shelf, Shelf()
        for shelf, sign in ((old, -1), (own, 1)):
            shelf.chunks += sign * holding.chunks
            shelf.bytes += sign * holding.bytes
            shelf.entries += sign * holding.entries
        holding.shelf = own
        return own
