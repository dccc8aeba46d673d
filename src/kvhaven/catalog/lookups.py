# SPDX-License-Identifier: Apache-2.0
"""Asking shared tiers for what leases want, and who waits for which answer."""

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
    """The questions that are open.

    A lease waits for those that name the chunk behind its last one, whichever tier they were
    put to: the first that has it is the one it is read from. All tiers are asked at the same
    time, so a slow one holds up nobody whose chunks are in another.
    """

    def __init__(self, space: ResidentChunks[S], tiers: Tiers) -> None:
        self._space = space
        self._tiers = tiers

    def ask(self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> None:
        """Have a lease wait for word of its next chunk, the first of `keys`, if there can be any.

        What nobody asked for yet is asked for now, in one batch a tier: these chunks and those
        behind them that are nowhere yet, up to one that is known to be nowhere at all.
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
        """Whether a chunk is here, but another namespace's or another tenant's."""
        entry = self._space.find(key)
        if entry is not None:
            return entry.namespace is not namespace
        return self._tiers.is_foreign(key, namespace)

    def answered(self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None) -> Lookup:
        """Take a tier's answer; return the question, with the leases that can go on."""
        return self._tiers.presence(tier).answered(number, found)

    def offline(self, tier: TierName) -> list[Lookup]:
        """Return the questions to a tier whose answers nobody is to wait for any more."""
        presence = self._tiers.shared.get(tier)
        return [] if presence is None else [q for q in presence.lookups.values() if q.waiting]

    @staticmethod
    def leave(lease: Lease) -> None:
        """Have a lease wait for no answer."""
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
