# SPDX-License-Identifier: Apache-2.0
"""All tiers together: where a chunk can be promoted from, and where it is to be written."""

from collections.abc import Callable, Iterable, Sequence

from kvhaven.catalog.actions import Action, TierName, TierRead
from kvhaven.catalog.entries import Entry, NamespaceState, State, Tenant
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.local_index import LocalTierIndex
from kvhaven.catalog.shared_index import SharedTierIndex
from kvhaven.catalog.tier_spec import StoreOn, TierSpec, TierState
from kvhaven.catalog.work import Work
from kvhaven.catalog.writebehind import WriteBehind
from kvhaven.errors import KVHavenError
from kvhaven.maps import OrderedMap
from kvhaven.types import ChunkKey

MOST_SEEN = 1 << 16
"""Chunks whose first use is remembered, for tiers that store on the second."""


class Tiers:
    """The tiers in the order in which they are asked, the fastest first.

    `let_go` is told of chunks that a write, which was dropped, does not pin any more.
    """

    def __init__(
        self,
        specs: Sequence[TierSpec],
        write_queue_bytes: int,
        actions: list[Action],
        let_go: Callable[[Entry], None],
        work: Work,
        *,
        fill_faster: bool,
    ) -> None:
        self.own = {s.name: LocalTierIndex(s, actions, work) for s in specs if not s.shared}
        self.shared = {s.name: SharedTierIndex(s, actions, work) for s in specs if s.shared}
        self.indexes: dict[TierName, TierState] = {
            s.name: self.shared[s.name] if s.shared else self.own[s.name] for s in specs
        }
        self.writes = {
            name: WriteBehind(index, 0, actions, let_go, work)
            for name, index in self.indexes.items()
        }
        self.limit_queues(write_queue_bytes)
        self._patient = [w for w in self.writes.values() if w.index.spec.store_on is StoreOn.SECOND]
        self._seen = OrderedMap[ChunkKey, None]()
        self._fill_faster = fill_faster
        self._actions = actions

    def limit_queues(self, bytes_: int) -> None:
        """Let so many bytes wait for each tier from now on: no fewer than before."""
        # What waits to be written through is pinned: all of that together is bounded too.
        through = sum(writes.pins for writes in self.writes.values())
        for writes in self.writes.values():
            writes.limit_bytes = bytes_ // (through if writes.pins else 1)

    def index(self, tier: TierName) -> TierState:
        """Return a tier's bookkeeping. Raises KVHavenError for an unknown tier."""
        known = self.indexes.get(tier)
        if known is None:
            raise KVHavenError(f"tier {tier} is unknown; there are: {', '.join(self.indexes)}")
        return known

    def own_index(self, tier: TierName) -> LocalTierIndex:
        """Return the index of a tier of our own. Raises KVHavenError for another one."""
        self.index(tier)
        if tier not in self.own:
            raise KVHavenError(f"tier {tier} is shared: the catalog does not know what it holds")
        return self.own[tier]

    def presence(self, tier: TierName) -> SharedTierIndex:
        """Return what is believed of a shared tier. Raises KVHavenError for another one."""
        self.index(tier)
        if tier not in self.shared:
            raise KVHavenError(f"tier {tier} is not shared: the catalog knows what it holds")
        return self.shared[tier]

    def source(self, key: ChunkKey, namespace: NamespaceState) -> TierState | None:
        """Return the first tier that is online and holds the chunk whole."""
        for index in self.indexes.values():
            if index.online and index.holds(key, namespace):
                return index
        return None

    def is_foreign(self, key: ChunkKey, namespace: NamespaceState) -> bool:
        """Whether a tier of our own has a chunk, but as another namespace's or tenant's."""
        found = [index.stored.get(key) for index in self.own.values()]
        return any(s is not None and s.namespace is not namespace for s in found)

    def quota_changed(self, tenant: Tenant) -> None:
        """Keep a tenant to its quota in each tier of our own from now on."""
        for index in self.own.values():
            index.quota_changed(tenant)

    def writes_of(self, tier: TierName, key: ChunkKey) -> WriteBehind:
        """Return the writes to a tier. Raises KVHavenError unless this chunk's is under way."""
        self.index(tier)
        if key not in self.writes[tier].writing:
            raise KVHavenError(f"no write of {key.hex()} to tier {tier} is under way")
        return self.writes[tier]

    def tick(self, now: float) -> None:
        """Let the answers of tiers grow old."""
        for presence in self.shared.values():
            presence.now = max(presence.now, now)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Note a use of these chunks in every tier, tail to head."""
        if self.own:
            tail_first = list(keys)
            for index in self.own.values():
                index.touch(tail_first)

    def read(self, index: TierState, entry: Entry) -> None:
        """Ask for the read that fills a chunk."""
        index.read_begins(entry.key, entry.extent.length)
        space, tenant = entry.namespace.namespace, entry.namespace.tenant.id
        self._actions.append(TierRead(index.spec.name, space, entry.key, entry.extent, tenant))

    def computed(self, entry: Entry) -> None:
        """Have a chunk that was computed and is resident now written where it is to be."""
        again = bool(self._patient) and self._computed_again(entry)
        for writes in self.writes.values():
            if again or writes.index.spec.store_on is StoreOn.FIRST:
                writes.offer(entry)

    def used(self, entries: Iterable[Entry]) -> None:
        """Have chunks that are used again written to the tiers that waited for that.

        Those that are not resident yet are being promoted: they are not new.
        """
        if not self._patient:
            return
        for entry in [entry for entry in entries if not entry.reused]:
            if entry.state is State.RESIDENT:
                entry.reused = True
                for writes in self._patient:
                    writes.offer(entry)

    def promoted(self, entry: Entry, source: TierName) -> None:
        """Have a chunk that was read written to faster tiers, and to slower ones that lack it.

        Not to slower ones that are shared: they were given it when it was computed.
        """
        entry.reused = True
        faster = True
        for name, writes in self.writes.items():
            if name == source:
                faster = False
            elif self._fill_faster if faster else name in self.own:
                writes.offer(entry)

    def set_online(self, tier: TierName, online: bool) -> None:
        """Use a tier, or leave it alone."""
        self.index(tier).set_online(online)
        if not online:
            self.writes[tier].drop_queue()

    def discard(self, entry: Entry) -> None:
        """Do not keep what is being written of a chunk: its bytes are not to be trusted."""
        for writes in self.writes.values():
            writes.discard(entry)

    def clear(
        self, tiers: Iterable[TierName], scope: Scope, parts: Sequence[NamespaceState]
    ) -> tuple[int, int]:
        """Delete the chunks that a scope names; return how many, and their bytes."""
        chunks = bytes_ = 0
        for name in tiers:
            index = self.index(name)
            self.writes[name].clear(scope)
            more = index.clear(scope, parts)
            chunks, bytes_ = chunks + more[0], bytes_ + more[1]
        return chunks, bytes_

    def _computed_again(self, entry: Entry) -> bool:
        """Whether a chunk was computed before, as far as is remembered; remember it."""
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
