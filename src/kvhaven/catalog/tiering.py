# SPDX-License-Identifier: Apache-2.0
"""All tiers together: the source of a promotion, and the destinations of writes."""

from collections.abc import Callable, Iterable, Sequence

from kvhaven.catalog.actions import Action, TierName, TierRead
from kvhaven.catalog.entries import Entry, NamespaceState, State, Tenant
from kvhaven.catalog.ghosts import Ghosts
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.local_index import LocalTierIndex
from kvhaven.catalog.shared_index import SharedTierIndex
from kvhaven.catalog.tier_spec import StoreOn, TierSpec, TierState, WriteMode
from kvhaven.catalog.work import Work
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.errors import KVHavenError
from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

MOST_SEEN = 1 << 16
"""Number of chunks whose first use is remembered, for tiers that store on the second."""


class Tiers:
    """Tiers in the order of lookups, fastest first.

    `let_go` is called with each chunk whose pin ended because its write was dropped.
    """

    def __init__(
        self,
        specs: Sequence[TierSpec],
        write_queue_bytes: int,
        actions: list[Action],
        let_go: Callable[[Entry], None],
        work: Work,
        ghosts: Ghosts,
        *,
        fill_faster: bool,
    ) -> None:
        self.own = {s.name: LocalTierIndex(s, actions, work, ghosts) for s in specs if not s.shared}
        self.shared = {s.name: SharedTierIndex(s, actions, work) for s in specs if s.shared}
        self.indexes: dict[TierName, TierState] = {
            s.name: self.shared[s.name] if s.shared else self.own[s.name] for s in specs
        }
        for number, index in enumerate(self.indexes.values(), 1):
            index.number = number
        self._numbered = tuple(self.indexes.values())
        self.writes = {
            name: WriteBehind(index, 0, actions, let_go, work, ghosts)
            for name, index in self.indexes.items()
        }
        self._now = 0.0
        self._patient: list[WriteBehind] = []
        self.fill_faster = fill_faster
        self._queue_bytes = write_queue_bytes
        self._settle()
        self._seen = OrderedMap[ChunkKey, None]()
        self._actions = actions

    def limit_queues(self, bytes_: int) -> None:
        """Set the limit of waiting bytes per tier; writes above a lower one are dropped."""
        self._queue_bytes = bytes_
        self._settle()

    def switch(
        self, tier: TierName, mode: WriteMode | None = None, store_on: StoreOn | None = None
    ) -> None:
        """Set how a tier is written from now on; None: unchanged.

        Raises `KVHavenError` for an unknown tier.
        """
        self.index(tier)
        writes = self.writes[tier]
        if store_on is not None:
            writes.store_on = store_on
        if mode is not None and mode is not writes.mode:
            writes.switch(mode)
        self._settle()

    def _settle(self) -> None:
        """Apply the modes and the limit of the queues."""
        self._patient = [w for w in self.writes.values() if w.store_on is StoreOn.SECOND]
        # Chunks in write-through queues are pinned, so these queues share one limit.
        through = sum(writes.pins for writes in self.writes.values())
        for writes in self.writes.values():
            writes.limit(self._queue_bytes // (through if writes.pins else 1))

    def index(self, tier: TierName) -> TierState:
        """Return the index of a tier. Raises `KVHavenError` for an unknown tier."""
        known = self.indexes.get(tier)
        if known is None:
            raise KVHavenError(
                f"tier {tier} is unknown; expected one of: {', '.join(self.indexes)}"
            )
        return known

    def own_index(self, tier: TierName) -> LocalTierIndex:
        """Return the index of a local tier. Raises `KVHavenError` for an unknown or shared tier."""
        self.index(tier)
        if tier not in self.own:
            raise KVHavenError(f"tier {tier} is shared: the catalog does not know its content")
        return self.own[tier]

    def presence(self, tier: TierName) -> SharedTierIndex:
        """Return the index of a shared tier. Raises `KVHavenError` for an unknown or local tier."""
        self.index(tier)
        if tier not in self.shared:
            raise KVHavenError(f"tier {tier} is not shared: the catalog knows its content")
        return self.shared[tier]

    def numbered(self, number: int) -> TierState:
        """Return the tier at a position, from 1 on (see `TierState.number`)."""
        return self._numbered[number - 1]

    def source(self, key: ChunkKey, namespace: NamespaceState) -> TierState | None:
        """Return the first online tier that holds the complete chunk."""
        for index in self.indexes.values():
            if index.online and index.holds(key, namespace):
                return index
        return None

    def is_foreign(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Return whether a local tier has the chunk in another namespace or of another tenant."""
        found = [index.stored.get(key) for index in self.own.values()]
        return any(s is not None and s.namespace is not namespace for s in found)

    def quota_changed(self, tenant: Tenant) -> None:
        """Apply a changed quota of a tenant in each local tier."""
        for index in self.own.values():
            index.quota_changed(tenant)

    def writes_of(self, tier: TierName, key: ChunkKey) -> WriteBehind:
        """Return the writes to a tier. Raises `KVHavenError` if it is not writing this chunk."""
        self.index(tier)
        if key not in self.writes[tier].writing:
            raise KVHavenError(f"tier {tier}: no write of chunk {key.hex()} is under way")
        return self.writes[tier]

    def tick(self, now: float) -> None:
        """Set the time by which lookup results expire."""
        self._now = max(self._now, now)
        for presence in self.shared.values():
            presence.now = max(presence.now, now)
        for index in self.own.values():
            index.tick(self._now)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Record a use of these chunks, given from tail to head, in every tier."""
        if self.own:
            tail_first = list(keys)
            for index in self.own.values():
                index.touch(tail_first)

    def read(self, index: TierState, entry: Entry) -> None:
        """Request the read that fills a chunk."""
        if not index.reads:
            index.progress = self._now
        index.read_begins(entry.key, entry.extent.length)
        entry.origin = index.number
        space, tenant = entry.namespace.namespace, entry.namespace.tenant.id
        self._actions.append(
            TierRead(index.spec.name, space, entry.key, entry.extent, tenant, entry.tail)
        )

    def computed(self, entry: Entry) -> None:
        """Queue writes of a computed, resident chunk to the tiers that store it at this use."""
        again = bool(self._patient) and self._computed_again(entry)
        for writes in self.writes.values():
            if again or writes.store_on is StoreOn.FIRST:
                writes.offer(entry)

    def used(self, entries: Iterable[Entry]) -> None:
        """Queue writes of chunks that are used again to the tiers that store on the second use.

        Chunks that are not resident yet are being promoted, so they are in a tier already.
        """
        if not self._patient:
            return
        for entry in [entry for entry in entries if not (entry.reused or entry.tail)]:
            if entry.state is State.RESIDENT:
                entry.reused = True
                for writes in self._patient:
                    writes.offer(entry)

    def promoted(self, entry: Entry, source: TierName) -> None:
        """Queue writes of a promoted chunk to faster tiers, and to slower local ones without it.

        Slower shared tiers are left out: they got the chunk when it was computed.
        """
        entry.reused = True
        faster = True
        for name, writes in self.writes.items():
            if name == source:
                faster = False
            elif self.fill_faster if faster else name in self.own:
                writes.offer(entry)

    def set_online(self, tier: TierName, online: bool) -> None:
        """Set whether a tier is in use."""
        self.index(tier).set_online(online)
        if not online:
            self.writes[tier].drop_queue()

    def discard(self, entry: Entry) -> None:
        """Cancel the writes of a chunk whose bytes failed verification."""
        for writes in self.writes.values():
            writes.discard(entry)

    def clear(
        self, tiers: Iterable[TierName], scope: Scope, parts: Sequence[NamespaceState]
    ) -> tuple[int, int]:
        """Delete the chunks in a scope; return their number and bytes."""
        chunks = bytes_ = 0
        for name in tiers:
            index = self.index(name)
            self.writes[name].clear(scope)
            more = index.clear(scope, parts)
            chunks, bytes_ = chunks + more[0], bytes_ + more[1]
        return chunks, bytes_

    def _computed_again(self, entry: Entry) -> bool:
        """Return whether a chunk was computed before, as far as is remembered; remember it."""
        seen = self._seen
        again = entry.key in seen
        if again:
            entry.reused = True
            seen.to_end((entry.key,))
            return True
        seen.append(entry.key, None)
        if len(seen) > MOST_SEEN:
            seen.pop(next(iter(seen)))
        return False
