# SPDX-License-Identifier: Apache-2.0
"""Leases: which chunks a ticket may load, what it waits for, and when nobody loads any more."""

import enum
from collections.abc import Collection, Mapping, Sequence

from kvhaven.catalog.actions import (
    Acquisition,
    Action,
    SessionId,
    Source,
    Ticket,
    TierName,
    Update,
)
from kvhaven.catalog.allocation import S
from kvhaven.catalog.entries import Entry, NamespaceState, State
from kvhaven.catalog.lookups import Lookups
from kvhaven.catalog.sessions import Lease, Member, Session, Sessions
from kvhaven.catalog.space import Space
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.tierspec import TierState
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey, Extent

_Slot = tuple[ChunkKey, Entry | None, TierState | None]
"""A chunk behind the resident prefix: in the arena, or in a tier that holds it."""


class _End(enum.Enum):
    """Why a plan ends where it does."""

    NOWHERE = enum.auto()
    """The next chunk is not known to be anywhere."""
    LIMIT = enum.auto()
    """Too much is being read from its tier."""
    OTHER = enum.auto()
    """Nothing is left, or the next chunk cannot be had now."""


MOST_PREFETCHES = 1024
"""Prefetches that may wait for tiers' answers; beyond, one takes what is known at once."""


class Leases:
    """Leases and the promotions they wait for.

    A promotion is for whoever waits when it ends. Nobody who waits holds up anyone: the
    space for all promotions of an acquire is reserved before the first is asked for, and
    leased and promoting bytes together stay within `pin_limit`. Promotions from shared tiers
    stay within half of that, however many there are: when one hangs, so do its reads, and what
    is resident or on our own disk must still find room. A longer prompt goes on when its first
    chunks have come.
    """

    def __init__(
        self,
        space: Space[S],
        tiers: Tiers,
        sessions: Sessions,
        pin_limit: int,
        actions: list[Action],
    ) -> None:
        self.pin_limit = pin_limit
        self.shared_limit = pin_limit // 2 // max(1, len(tiers.shared))  # for each of them
        self.waiters: dict[ChunkKey, list[Lease]] = {}
        self.prefetches: set[Lease] = set()  # nobody's leases, which wait for lookups
        self.hits = 0
        self.misses = 0
        self.promoted = 0
        self.failed_promotions = 0
        self.foreign = 0
        self._space = space
        self._tiers = tiers
        self._sessions = sessions
        self._actions = actions
        self._lookups = Lookups(space, tiers)

    def acquire(
        self,
        session: SessionId,
        ticket: Ticket,
        namespace: NamespaceState,
        keys: Sequence[ChunkKey],
    ) -> Acquisition:
        """Lease and promote; see `Catalog.acquire`."""
        home = self._sessions.session(session)
        lease = home.leases.get(ticket)
        if lease is None:
            lease = Lease(session, ticket)
            self._begin(lease, namespace, keys)
            self._tiers.used(lease.slots)
            self._count(lease, len(keys))
            if lease.slots or lease.lookups:
                home.leases[ticket] = lease
            if lease.final:
                lease.keys = ()
        return lease.answer()

    def prefetch(self, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> int:
        """Promote what can be, for nobody; return how many promotions began."""
        lease = Lease(SessionId(""), Ticket(0))
        begun = self._begin(lease, namespace, keys)
        if lease.lookups and len(self.prefetches) < MOST_PREFETCHES:
            self.prefetches.add(lease)
            self._let_go(lease, 0)
        else:
            self._cut(lease, 0)
        return begun

    def looked_up(self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None) -> None:
        """Take a tier's answer; see `Catalog.tier_looked_up`."""
        for lease in self._lookups.answered(tier, number, found):
            self._go_on(lease)

    def tier_offline(self, tier: TierName) -> None:
        """Have nobody wait for what a tier was asked."""
        for lease in self._lookups.offline(tier):
            self._go_on(lease)

    def settle(self, session: SessionId, ticket: Ticket) -> Acquisition:
        """End the waiting of a ticket; see `Catalog.settle`."""
        home = self._sessions.sessions.get(session)
        lease = home.leases.get(ticket) if home is not None else None
        if home is None or lease is None:
            return Acquisition(ticket, (), 0)
        self._settle(home, lease)
        return lease.answer()

    def release(self, session: SessionId, ticket: Ticket) -> None:
        """End a lease that was not handed to the ranks, or give up waiting for it."""
        home = self._sessions.sessions.get(session)
        if home is not None and ticket in home.leases:
            self._end(home, home.leases[ticket])

    def loaded(self, session: SessionId, ticket: Ticket, member: Member) -> None:
        """Note that a rank's copy from a lease has ended. Raises KVHavenError for a stranger."""
        if member.session != session or member.rank is None:
            raise KVHavenError(
                f"member {member.id} is no rank of session {session}; it has no part in its leases"
            )
        home = self._sessions.session(session)
        lease = home.leases.get(ticket)
        if lease is not None:
            lease.acked |= 1 << member.rank
            if home.ended(lease):
                self._end(home, lease)

    def gone(self, home: Session, member: Member) -> None:
        """End the leases that only waited for a member that is proven gone."""
        for lease in tuple(home.leases.values()):
            if member.rank is None:
                lease.orphaned = True
                self._settle(home, lease)
            if not home.members or home.ended(lease):
                self._end(home, lease)

    def read_done(
        self, tier: TierName, key: ChunkKey, extent: Extent, checksums: tuple[Checksum, ...] | None
    ) -> Entry | None:
        """End a promotion; return the entry if it is resident now."""
        space = self._space
        index = self._tiers.index(tier)
        entry = space.held.get(extent.generation)
        if entry is None or entry.key != key or not entry.reading or key not in index.reads:
            raise KVHavenError(
                f"no read of {key.hex()} from tier {tier} into {extent} is under way"
            )
        if checksums is not None and len(checksums) != entry.namespace.shards:
            checksums = None
        if checksums is None:
            self.failed_promotions += 1
            index.forget(key)
        index.read_ended(key, extent.length)
        if entry.state is State.DOOMED:
            space.read_ended(entry)
            return None
        if checksums is None:
            waiting = self.waiters.pop(key, ())
            for lease in waiting:
                self._cut(lease, lease.waiting[key])
            space.doom(entry)
            space.read_ended(entry)
            # Another tier may have it; this one is believed to have it not.
            for lease in waiting:
                self._go_on(lease)
            return None
        self.promoted += 1
        entry.checksums = list(checksums)
        entry.bitmap = entry.namespace.complete
        space.read_ended(entry)
        space.show(entry)
        self._hand_over(entry)
        return entry

    def clear(self, parts: Collection[NamespaceState]) -> tuple[int, int]:
        """Drop the chunks of parts of namespaces from memory; return how many, and bytes."""
        chunks = bytes_ = 0
        for entry in tuple(self._space.entries.values()):
            if entry.namespace not in parts:
                continue
            if entry.state is State.RESIDENT:
                chunks += 1
                bytes_ += entry.extent.length
            elif entry.state is State.PROMOTING:
                self._stop_waiting(entry.key)
            self._space.doom(entry)
        return chunks, bytes_

    def _stop_waiting(self, key: ChunkKey) -> None:
        """Cut every ticket that waits for a chunk before it: it will not come."""
        for lease in self.waiters.pop(key, ()):
            self._cut(lease, lease.waiting[key])
            self._tell_if_final(lease)

    def _go_on(self, lease: Lease) -> None:
        """Extend a lease whose next chunk may be known by now."""
        if lease.namespace is None:
            return
        self._lookups.leave(lease)
        self._extend(lease, lease.namespace, lease.keys)
        if lease in self.prefetches:
            self._let_go(lease, 0)
            if not lease.lookups:
                self.prefetches.remove(lease)
        else:
            self._tell_if_final(lease)

    def _begin(self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> int:
        """Fill a new lease: what is resident, then what is being or can be promoted."""
        space = self._space
        size = namespace.extent_bytes
        room = before = self.pin_limit - space.leased_bytes - space.promoting_bytes
        entries, slots = space.entries, lease.slots
        resident = State.RESIDENT
        for key in keys:
            entry = entries.get(key)
            if entry is None or entry.state is not resident or entry.namespace is not namespace:
                break
            if not entry.leases:
                if room < size:
                    break
                room -= size
            entry.leases += 1
            slots.append(entry)
        space.leased_bytes += before - room
        memory = Source.MEMORY
        lease.sources = [entry.take_source() if entry.fresh else memory for entry in slots]
        space.touch(slots)
        self._tiers.touch(reversed(keys))
        if len(slots) == len(keys):
            return 0
        lease.namespace, lease.keys = namespace, keys
        return self._extend(lease, namespace, keys)

    def _extend(self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> int:
        """Go on behind the chunks that it has; return how many promotions began."""
        space = self._space
        first = len(lease.slots)
        plan, end = self._plan(lease, namespace, keys[first:])
        lease.limited = end is _End.LIMIT
        # What is in the arena is pinned before anything is evicted for the rest.
        for _, entry, _ in plan:
            if entry is not None and entry.state is State.RESIDENT:
                space.lease(entry)
        wanted = sum(entry is None for _, entry, _ in plan)
        extents = space.allocate(namespace, wanted) if wanted else []
        begun = 0
        touched: list[Entry] = []
        for index, (key, found, tier) in enumerate(plan, first):
            entry = found
            if entry is None and begun == len(extents):
                self._give_back(plan[index - first :])
                break
            if entry is None and tier is not None:
                parent = keys[index - 1] if index else None
                entry = space.insert(namespace, key, parent, extents[begun], State.PROMOTING)
                self._tiers.read(tier, entry)
                begun += 1
            if entry is None:
                break
            if entry.state is State.PROMOTING:
                lease.waiting[key] = index
                self.waiters.setdefault(key, []).append(lease)
                lease.sources.append(Source.TIER)
            else:
                lease.sources.append(entry.take_source())
                touched.append(entry)
            lease.slots.append(entry)
        if touched:
            space.touch(touched)
            extended = [entry for entry in lease.slots[:first] if entry.listed]
            space.arrange(extended[::-1])
        if end is _End.NOWHERE and len(lease.slots) == first + len(plan) and self._tiers.shared:
            self._lookups.ask(lease, namespace, keys[len(lease.slots) :])
        return begun

    def _plan(
        self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]
    ) -> tuple[list[_Slot], "_End"]:
        """Return the chunks that are in the arena or can be promoted, and why it is not more."""
        plan: list[_Slot] = []
        seen: set[ChunkKey] = set(lease.waiting)
        size = namespace.extent_bytes
        room = self.pin_limit - self._space.leased_bytes - self._space.promoting_bytes
        shared = {n: self.shared_limit - t.reading_bytes for n, t in self._tiers.shared.items()}
        for key in keys:
            entry = self._space.entries.get(key)
            tier = self._tiers.source(key, namespace) if entry is None else None
            if entry is None:
                usable = tier is not None
            else:
                usable = entry.namespace is namespace and entry.state is not State.RESERVED
            if not usable or key in seen:
                self.foreign += self._lookups.is_foreign(key, namespace)
                return plan, _End.NOWHERE if entry is None and key not in seen else _End.OTHER
            if entry is None or (entry.state is State.RESIDENT and not entry.leases):
                room -= size
            if entry is None and tier is not None and tier.spec.name in shared:
                shared[tier.spec.name] -= size
                if shared[tier.spec.name] < 0:
                    return plan, _End.LIMIT
            if room < 0:
                break
            seen.add(key)
            plan.append((key, entry, tier))
        return plan, _End.OTHER

    def _give_back(self, plan: Sequence[_Slot]) -> None:
        for _, entry, _ in plan:
            if entry is not None and entry.state is State.RESIDENT:
                self._space.unlease(entry)

    def _hand_over(self, entry: Entry) -> None:
        """Lease a chunk that was promoted to everybody who waits for it."""
        waiters = self.waiters.pop(entry.key, ())
        entry.fresh = not waiters
        for lease in waiters:
            del lease.waiting[entry.key]
            self._space.lease(entry)
            if lease.limited:
                self._go_on(lease)
            else:
                self._tell_if_final(lease)

    def _tell_if_final(self, lease: Lease) -> None:
        self._count(lease, len(lease.keys))
        if not lease.final:
            return
        lease.keys = ()
        self._actions.append(Update(lease.session, lease.answer()))
        if not lease.slots:
            home = self._sessions.sessions[lease.session]
            del home.leases[lease.ticket]

    def _settle(self, home: Session, lease: Lease) -> None:
        if not lease.final:
            self._cut(lease, min(lease.waiting.values(), default=len(lease.slots)))
            self._count(lease, len(lease.keys))
            lease.keys = ()
            if not lease.slots:
                del home.leases[lease.ticket]

    def _count(self, lease: Lease, asked: int) -> None:
        """Count each chunk that was asked for once: when it is found, or known to be nowhere."""
        new = len(lease.slots) - lease.counted
        if new > 0:
            awaited = sum(index >= lease.counted for index in lease.waiting.values())
            self.hits += new - awaited
            lease.counted = len(lease.slots)
        more = lease.lookups or (lease.limited and lease.waiting)
        if not more and lease.counted < asked:
            self.misses += asked - lease.counted
            lease.counted = asked

    def _end(self, home: Session, lease: Lease) -> None:
        if home.leases.pop(lease.ticket, None) is not None:
            self._cut(lease, 0)

    def _cut(self, lease: Lease, index: int) -> None:
        """Let go of every chunk from `index` on, and do not wait to hear of others."""
        self._lookups.leave(lease)
        self._let_go(lease, index)

    def _let_go(self, lease: Lease, index: int) -> None:
        for entry in lease.slots[index:]:
            if entry.key in lease.waiting:
                del lease.waiting[entry.key]
                others = self.waiters.get(entry.key)
                if others is not None:  # None: the promotion has just ended
                    others.remove(lease)
                    if not others:
                        del self.waiters[entry.key]
            else:
                self._space.unlease(entry)
        del lease.slots[index:]
        del lease.sources[index:]
