# SPDX-License-Identifier: Apache-2.0
"""In which order chunks go: of all of a size, and of each tenant with a quota among its own."""

from collections.abc import Iterable, Sequence

from kvhaven.catalog.entries import Entry, Tenant
from kvhaven.catalog.policy import EvictionPolicy


class Orders:
    """The eviction policies: one a size class, and one a size class and tenant with a quota.

    A chunk of such a tenant is in two. So who has no quota is ordered as if there were none, and
    finding what goes next costs the same however many tenants there are.
    """

    def __init__(self, pattern: EvictionPolicy) -> None:
        self.classes: dict[int, EvictionPolicy] = {}  # by extent length
        self._pattern = pattern

    def of(self, length: int) -> EvictionPolicy:
        """Return the policy of a size class."""
        policy = self.classes.get(length)
        if policy is None:
            policy = self.classes[length] = self._pattern.fresh()
        return policy

    def added(self, entry: Entry) -> None:
        """Take in a chunk that can be evicted from now on."""
        length, orders = entry.extent.length, entry.namespace.tenant.orders
        self.of(length).added(entry.key)
        if orders is not None:
            self._own(orders, length).added(entry.key)

    def touched(self, entries: Sequence[Entry]) -> None:
        """Note one use of chunks of one namespace and tenant, given from the tail to the head."""
        keys = [entry.key for entry in entries]
        length, orders = entries[0].extent.length, entries[0].namespace.tenant.orders
        self.of(length).touched(keys)
        if orders is not None:
            self._own(orders, length).touched(keys)

    def arranged(self, entries: Sequence[Entry]) -> None:
        """Put chunks of one namespace and tenant in order, from the tail to the head: no use."""
        keys = [entry.key for entry in entries]
        length, orders = entries[0].extent.length, entries[0].namespace.tenant.orders
        self.of(length).arranged(keys)
        if orders is not None:
            self._own(orders, length).arranged(keys)

    def evicted(self, entry: Entry) -> None:
        """Forget a chunk because space was needed."""
        length, orders = entry.extent.length, entry.namespace.tenant.orders
        self.of(length).evicted(entry.key)
        if orders is not None:
            self._own(orders, length).evicted(entry.key)

    def removed(self, entry: Entry) -> None:
        """Forget a chunk that went for another reason."""
        length, orders = entry.extent.length, entry.namespace.tenant.orders
        self.of(length).removed(entry.key)
        if orders is not None:
            self._own(orders, length).removed(entry.key)

    def begin(self, tenant: Tenant, entries: Iterable[Entry]) -> None:
        """Order a tenant's chunks among themselves from now on; `entries` are all in sight."""
        tenant.orders = {}
        own = {e.key for e in entries if e.listed and e.namespace.tenant is tenant}
        for length, policy in self.classes.items():
            for key in policy.candidates():
                if key in own:
                    self._own(tenant.orders, length).added(key)

    def _own(self, orders: dict[int, EvictionPolicy], length: int) -> EvictionPolicy:
        policy = orders.get(length)
        if policy is None:
            policy = orders[length] = self._pattern.fresh()
        return policy
