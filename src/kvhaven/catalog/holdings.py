# SPDX-License-Identifier: Apache-2.0
"""What namespaces and tenants have in one place, so that it can be counted and cleared at once.

Each chunk in the arena or in a tier refers to the holding it belongs to. To clear is to put
holdings aside: their chunks are out of sight at that moment, however many they are, and whoever
comes upon one drops it. What comes after belongs to a new holding of the same name.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvhaven.catalog.entries import Holding, NamespaceState, Shelf
from kvhaven.types import NamespaceDigest, TenantId


class Scope(NamedTuple):
    """What a clear is about: a namespace and a tenant, each None for all."""

    namespace: NamespaceDigest | None
    tenant: TenantId | None

    def covers(self, part: NamespaceState) -> bool:
        """Whether a tenant's part of a namespace is cleared."""
        namespace = self.namespace in {None, part.namespace.digest}
        return namespace and self.tenant in {None, part.tenant.id}


def scopes_over(part: NamespaceState) -> tuple[Scope, ...]:
    """Return the scopes that cover a tenant's part of a namespace: there may be many clears."""
    digest, tenant = part.namespace.digest, part.tenant.id
    return (
        Scope(None, None),
        Scope(digest, None),
        Scope(None, tenant),
        Scope(digest, tenant),
    )


class Place:
    """The shelves of the arena, or of a tier; `leftover` counts the cleared entries still there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shelves: dict[NamespaceDigest, Shelf] = {}
        self.leftover = 0

    def find(self, part: NamespaceState) -> Holding | None:
        """Return what a part of a namespace has here, if it has, or had, anything."""
        holding = part.holdings.get(self.name)
        return None if holding is None or holding.cleared else holding

    def holding(self, part: NamespaceState) -> Holding:
        """Return what a part of a namespace has here, perhaps nothing yet."""
        holding = self.find(part)
        if holding is None:
            digest = part.namespace.digest
            shelf = self.shelves.get(digest)
            if shelf is None:
                shelf = self.shelves[digest] = Shelf()
            holding = part.holdings[self.name] = Holding(shelf)
        return holding

    def enter(self, holding: Holding) -> None:
        """Count an entry."""
        holding.entries += 1
        holding.shelf.entries += 1

    def leave(self, holding: Holding) -> None:
        """Count an entry no longer."""
        holding.entries -= 1
        holding.shelf.entries -= 1
        self.leftover -= holding.cleared

    def count(self, holding: Holding, chunks: int, bytes_: int) -> None:
        """Count whole chunks and their bytes, or no longer (negative)."""
        holding.chunks += chunks
        holding.bytes += bytes_
        shelf = holding.shelf
        shelf.chunks += chunks
        shelf.bytes += bytes_

    def clear(self, scope: Scope, parts: Iterable[NamespaceState]) -> tuple[int, int]:
        """Put what a scope names out of sight; return its whole chunks, and their bytes.

        `parts` are those of the tenant, if the scope names one.
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
        return sum(shelf.chunks for shelf in shelves), sum(shelf.bytes for shelf in shelves)

    def _part_off(self, part: NamespaceState) -> Shelf | None:
        """Move a tenant's holding from its namespace's shelf to one of its own."""
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
