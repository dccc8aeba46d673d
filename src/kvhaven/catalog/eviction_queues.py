# SPDX-License-Identifier: Apache-2.0
"""Eviction order of all chunks of each size, and of the chunks of each tenant with a quota."""

from collections.abc import Iterator, Sequence

from kvhaven.catalog.entries import Entry, Listed
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.types import ChunkKey


class EvictionQueues:
    """Eviction policies by `Entry.order`: of all chunks, and of each tenant's with a quota.

    The tails of a size class have an order of their own: they are evicted before its full chunks.

    A chunk of a tenant with a quota is in both. So quotas do not change the order of tenants
    without one, and the search for the next victim costs the same for any number of tenants. If a
    tenant gets its first quota late, its chunks enter its own order at their next use, or by
    `join`.
    """

    def __init__(self, pattern: EvictionPolicy) -> None:
        self.classes: dict[int, EvictionPolicy] = {}  # by `Entry.order`
        self._pattern = pattern

    def of(self, order: int) -> EvictionPolicy:
        """Return the policy of an order (`Entry.order`)."""
        return self._policy(self.classes, order)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield all chunks in eviction order, in parts, one size after another.

        Chunks may be added and removed meanwhile. Chunks that are used during the walk may be
        missed.
        """
        for policy in tuple(self.classes.values()):
            yield from policy.walk()

    def added(self, entry: Entry) -> None:
        """Add a chunk that can be evicted from now on."""
        self.of(entry.order).added(entry.key)
        entry.listed = Listed.CLASS
        self.join(entry)

    def join(self, entry: Entry) -> None:
        """Add a chunk that is in its class's order to its tenant's order too, if there is one."""
        orders = entry.namespace.tenant.orders
        if orders is not None and entry.listed is Listed.CLASS:
            self._policy(orders, entry.order).added(entry.key)
            entry.listed = Listed.TENANT

    def touched(self, entries: Sequence[Entry]) -> None:
        """Record one use of chunks of one order and tenant, given from tail to head."""
        keys = [entry.key for entry in entries]
        self.of(entries[0].order).touched(keys)
        own = self._own(entries)
        if own is not None:
            own.touched(keys)

    def arranged(self, entries: Sequence[Entry]) -> None:
        """Put chunks of one order and tenant in order, from tail to head; this is not a use."""
        keys = [entry.key for entry in entries]
        self.of(entries[0].order).arranged(keys)
        own = self._own(entries)
        if own is not None:
            own.arranged(keys)

    def evicted(self, entry: Entry) -> None:
        """Remove a chunk because space was needed."""
        for policy in self._leave(entry):
            policy.evicted(entry.key)

    def removed(self, entry: Entry) -> None:
        """Remove a chunk for another reason."""
        for policy in self._leave(entry):
            policy.removed(entry.key)

    def _own(self, entries: Sequence[Entry]) -> EvictionPolicy | None:
        """Return the policy of these chunks' tenant, if it has one, after adding all of them."""
        orders = entries[0].namespace.tenant.orders
        if orders is None:
            return None
        for entry in entries:
            self.join(entry)
        return self._policy(orders, entries[0].order)

    def _leave(self, entry: Entry) -> tuple[EvictionPolicy, ...]:
        """Mark a chunk as not evictable; return the policies that contain it."""
        order, listed = entry.order, entry.listed
        entry.listed = Listed.NOT
        orders = entry.namespace.tenant.orders
        if listed is Listed.TENANT and orders is not None:
            return self.of(order), self._policy(orders, order)
        return (self.of(order),)

    def _policy(self, orders: dict[int, EvictionPolicy], order: int) -> EvictionPolicy:
        policy = orders.get(order)
        if policy is None:
            policy = orders[order] = self._pattern.fresh()
        return policy
