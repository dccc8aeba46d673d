# SPDX-License-Identifier: Apache-2.0
"""In which order chunks go: of all of a size, and of each tenant with a quota among its own."""

from collections.abc import Iterator, Sequence

from kvhaven.catalog.entries import Entry, Listed
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.types import ChunkKey


class EvictionQueues:
    """The eviction policies: one a size class, and one a size class and tenant with a quota.

    A chunk of such a tenant is in two. So who has no quota is ordered as if there were none, and
    finding what goes next costs the same however many tenants there are. Where a tenant gets its
    first quota late, its chunks are in its own order from their next use on, or from `join`.
    """

    def __init__(self, pattern: EvictionPolicy) -> None:
        self.classes: dict[int, EvictionPolicy] = {}  # by extent length
        self._pattern = pattern

    def of(self, length: int) -> EvictionPolicy:
        """Return the policy of a size class."""
        return self._policy(self.classes, length)

    def walk(self) -> Iterator[Sequence[ChunkKey]]:
        """Yield all chunks that age, in parts, each size's in order, while they come and go.

        What is used meanwhile may be missing.
        """
        for policy in tuple(self.classes.values()):
            yield from policy.walk()

    def added(self, entry: Entry) -> None:
        """Take in a chunk that can be evicted from now on."""
        self.of(entry.extent.length).added(entry.key)
        entry.listed = Listed.CLASS
        self.join(entry)

    def join(self, entry: Entry) -> None:
        """Take a chunk that ages into its tenant's own order too, if there is one."""
        orders = entry.namespace.tenant.orders
        if orders is not None and entry.listed is Listed.CLASS:
            self._policy(orders, entry.extent.length).added(entry.key)
            entry.listed = Listed.TENANT

    def touched(self, entries: Sequence[Entry]) -> None:
        """Note one use of chunks of one namespace and tenant, given from the tail to the head."""
        keys = [entry.key for entry in entries]
        self.of(entries[0].extent.length).touched(keys)
        own = self._own(entries)
        if own is not None:
            own.touched(keys)

    def arranged(self, entries: Sequence[Entry]) -> None:
        """Put chunks of one namespace and tenant in order, from the tail to the head: no use."""
        keys = [entry.key for entry in entries]
        self.of(entries[0].extent.length).arranged(keys)
        own = self._own(entries)
        if own is not None:
            own.arranged(keys)

    def evicted(self, entry: Entry) -> None:
        """Forget a chunk because space was needed."""
        for policy in self._leave(entry):
            policy.evicted(entry.key)

    def removed(self, entry: Entry) -> None:
        """Forget a chunk that went for another reason."""
        for policy in self._leave(entry):
            policy.removed(entry.key)

    def _own(self, entries: Sequence[Entry]) -> EvictionPolicy | None:
        """Return the order of the tenant of these chunks, if there is one, with all of them."""
        orders = entries[0].namespace.tenant.orders
        if orders is None:
            return None
        for entry in entries:
            self.join(entry)
        return self._policy(orders, entries[0].extent.length)

    def _leave(self, entry: Entry) -> tuple[EvictionPolicy, ...]:
        """Note that a chunk is not aging any more; return the policies that know it."""
        length, listed = entry.extent.length, entry.listed
        entry.listed = Listed.NOT
        orders = entry.namespace.tenant.orders
        if listed is Listed.TENANT and orders is not None:
            return self.of(length), self._policy(orders, length)
        return (self.of(length),)

    def _policy(self, orders: dict[int, EvictionPolicy], length: int) -> EvictionPolicy:
        policy = orders.get(length)
        if policy is None:
            policy = orders[length] = self._pattern.fresh()
        return policy
