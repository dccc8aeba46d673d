# SPDX-License-Identifier: Apache-2.0
"""Lookups in shared tiers on behalf of leases, and the leases that wait for each of them."""

from collections.abc import Mapping, Sequence

from kvhaven.catalog.actions import TierName
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import NamespaceState
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Lease, Lookup
from kvhaven.catalog.shared_index import LOOKUP_SHARDS, SharedTierIndex
from kvhaven.catalog.tiering import Tiers
from kvhaven.types import ChunkKey


class TierLookups:
    """Pending lookups in shared tiers.

    A lease waits for the lookups of the chunk behind its last one in all tiers; the chunk is read
    from the first tier that has it. All tiers are asked concurrently, so a slow tier does not delay
    leases whose chunks are in another.
    """

    def __init__(self, space: ResidentChunks[S], tiers: Tiers) -> None:
        self._space = space
        self._tiers = tiers

    def ask(self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> None:
        """Look up the next chunk of a lease, the first of `keys`, and have the lease wait.

        Chunks without a pending lookup are looked up now, in one batch per tier: the first chunk
        and those behind it that are in no known place, up to the first that is known to be absent
        everywhere.
        """
        online = [tier for tier in self._tiers.shared.values() if tier.online]
        asking: dict[TierName, list[ChunkKey]] = {tier.spec.name: [] for tier in online}
        for key in keys[: max(1, LOOKUP_SHARDS // namespace.shards)]:
            if key in self._space.entries or self._tiers.source(key, namespace) is not None:
                continue
            open_ = [tier for tier in online if not tier.decided(key, namespace)]
            if not open_:
                break
            for tier in open_:
                asking[tier.spec.name].append(key)
        for tier in online:
            tier.ask(namespace, asking[tier.spec.name])
            self._wait(lease, namespace, tier, keys[0])

    def is_foreign(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether a chunk is present, but in another namespace or of another tenant."""
        entry = self._space.find(key)
        if entry is not None:
            return entry.namespace is not namespace
        return self._tiers.is_foreign(key, namespace)

    def wait(self, lease: Lease, namespace: NamespaceState, key: ChunkKey) -> None:
        """Have a lease wait for the pending lookups of a chunk, if there are any."""
        for tier in self._tiers.shared.values():
            if tier.online:
                self._wait(lease, namespace, tier, key)

    def answered(
        self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None, tail: int
    ) -> Lookup:
        """Process a tier's answer; return the lookup, with the leases that can continue."""
        return self._tiers.presence(tier).answered(number, found, tail)

    def offline(self, tier: TierName) -> list[Lookup]:
        """Return the lookups of a tier that leases must not wait for any longer."""
        presence = self._tiers.shared.get(tier)
        return [] if presence is None else [q for q in presence.lookups.values() if q.waiting]

    @staticmethod
    def leave(lease: Lease) -> None:
        """Stop a lease from waiting for lookups."""
        for lookup in lease.lookups:
            del lookup.waiting[lease]
        lease.lookups.clear()

    @staticmethod
    def _wait(
        lease: Lease, namespace: NamespaceState, tier: SharedTierIndex, key: ChunkKey
    ) -> None:
        lookup = tier.pending.get(key)
        if (
            lookup is not None
            and lookup.namespace is namespace
            and not tier.decided(key, namespace)
        ):
            lookup.waiting[lease] = None
            lease.lookups[lookup] = None
