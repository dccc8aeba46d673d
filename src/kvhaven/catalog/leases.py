# SPDX-License-Identifier: Apache-2.0
"""Leases: pinned chunks for loading, the promotions and lookups they wait for, and their end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvhaven.catalog.actions import (
    Acquisition,
    Action,
    LeaseId,
    Prefix,
    SessionId,
    TierName,
    Update,
)
from kvhaven.catalog.allocation import S, within
from kvhaven.catalog.entries import Entry, NamespaceState, State
from kvhaven.catalog.ghosts import Reason
from kvhaven.catalog.holdings import Scope
from kvhaven.catalog.loans import Loans
from kvhaven.catalog.lookups import TierLookups
from kvhaven.catalog.promotion_budget import End, PromotionBudget
from kvhaven.catalog.resident import ResidentChunks
from kvhaven.catalog.sessions import Lease, Lookup, Member, Session, Sessions
from kvhaven.catalog.shared_index import LOOKUP_SHARDS
from kvhaven.catalog.tier_choice import TierChoice
from kvhaven.catalog.tier_spec import TierState
from kvhaven.catalog.tiering import Tiers
from kvhaven.catalog.work import Job, Work, consume
from kvhaven.catalog.worth import Price
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey, Extent

_Slot = tuple[ChunkKey, Entry | None, TierState | None]
"""Chunk behind the resident prefix: in the arena, or in a tier that holds it."""


MOST_PREFETCHED = 1 << 17
"""Maximum number of chunks named by a session's unfinished prefetches, each counted as
`_LEAST_PREFETCHED` at least; beyond, a prefetch gets only what its first piece of work finds."""
_LEAST_PREFETCHED = 128
MOST_PROMOTIONS = 1 << 13
"""Maximum number of concurrent promotions; beyond, a lease continues when some have ended."""
MOST_LEASES = 1 << 14
"""Maximum number of leases of a session; beyond, it gets no chunks."""


class Reading(NamedTuple):
    """Chunks of a lease from the first that was not in memory to the end.

    `more` says that further ones may be found, `measured` that they were predicted to be worth it.
    """

    first: int
    end: int
    more: bool
    measured: bool


class Unpinning:
    """Chunks of a lease that has ended; those from index `done` on are still pinned."""

    def __init__(self, entries: list[Entry], done: int) -> None:
        self.entries = entries
        self.done = done


def named(prefetch: Lease) -> int:
    """Return the number of chunks that a prefetch counts as."""
    return max(_LEAST_PREFETCHED, len(prefetch.keys))


class Leases:
    """Leases and the promotions they wait for.

    A promotion serves all leases that wait when it ends. No waiting lease blocks another: the space
    for promotions is allocated before they are requested, or the lease is cut, and leased and
    promoting bytes together stay within `pin_limit`. Promotions stay within seven eighths of that
    limit, and those from shared tiers within half, because reads of a hanging tier hang as well and
    resident chunks must still find room. A longer prompt continues when its first chunks have been
    read.
    """

    def __init__(
        self,
        space: ResidentChunks[S],
        tiers: Tiers,
        sessions: Sessions,
        pin_limit: int,
        actions: list[Action],
        work: Work,
    ) -> None:
        self.pin_limit = pin_limit
        self.waiters: dict[Entry, dict[Lease, None]] = {}  # leases by promoting entry
        self.prefetches: set[Lease] = set()  # unfinished prefetches
        self.prefetched = Counter[SessionId]()  # chunks that they name
        self.loans = Loans(space, lambda: self.pin_limit)
        self.unpinning: set[Unpinning] = set()  # being unpinned
        self.leaving = Counter[Session]()  # number of `_look_through` jobs
        self.hits = 0
        self.awaited = 0
        self.misses = 0
        self.promoted = 0
        self.failed_promotions = 0
        self.foreign = 0
        self.unready = 0
        self._begun = 0  # promotions
        self._space = space
        self._tiers = tiers
        self._sessions = sessions
        self._actions = actions
        self._work = work
        self._lookups = TierLookups(space, tiers)
        self._choice = TierChoice(space, tiers)

    @property
    def promotion_limit(self) -> int:
        """Maximum number of bytes read concurrently from all tiers."""
        return self.pin_limit * 7 // 8

    def tier_limit(self, tier: TierState) -> int:
        """Return the maximum number of bytes read concurrently from a tier."""
        if tier.spec.shared:
            return self.pin_limit // 2 // len(self._tiers.shared)
        return self.promotion_limit // len(self._tiers.own)

    def acquire(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace: NamespaceState,
        keys: Sequence[ChunkKey],
        tail: ChunkKey | None = None,
        price: Price | None = None,
    ) -> Acquisition:
        """Lease and promote; see `Catalog.acquire`."""
        home = self._sessions.session(session)
        lease = home.leases.get(lease_id)
        if lease is None:
            now = self._space.now
            lease = Lease(session, lease_id, namespace, keys, tail=tail, since=now, price=price)
            if len(home.leases) < MOST_LEASES:
                self._grow(lease)
            if lease.slots or not lease.final:
                home.leases[lease_id] = lease
            self._note_final(lease)
            lease.expected = not lease.final
        return self._answer(lease)

    def prefetch(
        self,
        session: SessionId,
        namespace: NamespaceState,
        keys: Sequence[ChunkKey],
        tail: ChunkKey | None = None,
    ) -> int:
        """Promote chunks to places within a session's reach; return the promotions begun."""
        before = self._begun
        lease = Lease(session, LeaseId(0), namespace, keys, tail=tail, prefetch=True)
        lease.tried = not session  # for another node's prefill, or an operator
        self._grow(lease)
        if not lease.final:
            self._remember(lease)
        return self._begun - before

    def reading(self, session: SessionId, lease_id: LeaseId) -> Reading | None:
        """Return which chunks of a lease came from tiers, or will; see `Catalog.reading`."""
        home = self._sessions.sessions.get(session)
        lease = home.leases.get(lease_id) if home is not None else None
        if lease is None:
            return None
        first = len(lease.sources) - len(lease.sources.lstrip(b"\0"))
        more = bool(lease.lookups) or lease.growing
        return Reading(first, len(lease.slots), more, lease.judged > 0)

    def absent(self, namespace: NamespaceState, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the chunks that are neither in the arena nor known to be in a tier."""
        space, source = self._space, self._tiers.source
        return [key for key in keys if space.find(key) is None and source(key, namespace) is None]

    def looked_up(
        self, tier: TierName, number: int, found: Mapping[ChunkKey, int] | None, tail: int
    ) -> None:
        """Process a tier's answer; see `Catalog.tier_looked_up`."""
        self._work.start(self._tell(self._lookups.answered(tier, number, found, tail)))

    def arrived(self, tier: TierName, namespace: NamespaceState, key: ChunkKey, tail: int) -> None:
        """Record that a shared tier has a chunk now; see `Catalog.arrived`."""
        lookup = self._tiers.presence(tier).arrived(namespace, key, tail)
        if lookup is not None:
            self._work.start(self._tell(lookup))

    def withdraw(self, tier: TierName, number: int) -> None:
        """Drop a lookup that nobody will answer; see `Catalog.withdrawn`."""
        self._work.start(self._tell(self._tiers.presence(tier).withdraw(number)))

    def tier_offline(self, tier: TierName) -> None:
        """End the wait of all leases for lookups in a tier."""
        self._work.start(self._tell(*self._lookups.offline(tier)))

    def finalize(self, session: SessionId, lease_id: LeaseId) -> Acquisition:
        """End the wait of a lease; see `Catalog.finalize`."""
        home = self._sessions.sessions.get(session)
        lease = home.leases.get(lease_id) if home is not None else None
        if home is None or lease is None:
            return Acquisition(lease_id, Prefix(), 0)
        self._finalize(home, lease)
        return self._answer(lease)

    def release(self, session: SessionId, lease_id: LeaseId) -> None:
        """End a lease that was not handed to the ranks, or stop waiting for it."""
        home = self._sessions.sessions.get(session)
        if home is not None and lease_id in home.leases:
            self._end(home, home.leases[lease_id])

    def loaded(self, session: SessionId, lease_id: LeaseId, member: Member) -> int:
        """Record that a rank's copy from a lease has ended; return its chunks (again: 0).

        Raises `KVHavenError` for a member of another session, and for a scheduler.
        """
        if member.session != session or member.rank is None:
            raise KVHavenError(
                f"member {member.id} is not a rank of session {session}; it cannot end its leases"
            )
        home = self._sessions.sessions[session]
        lease = home.leases.get(lease_id)
        if lease is None:
            return 0
        chunks = 0 if lease.acked >> member.rank & 1 else len(lease.slots)
        lease.acked |= 1 << member.rank
        if home.ended(lease):
            self._end(home, lease)
        return chunks

    def gone(self, home: Session, member: Member) -> None:
        """End the leases that only waited for a member that is proven gone."""
        self.leaving[home] += 1
        self._work.start(self._look_through(home, scheduler=member.rank is None))

    def clear(self, scope: Scope, parts: Sequence[NamespaceState]) -> tuple[int, int]:
        """Drop the chunks in a scope from memory; return their number and bytes."""
        cleared = self._space.clear(scope, parts)
        self._work.start(self._cut_cleared())
        return cleared

    def read_done(
        self, tier: TierName, key: ChunkKey, extent: Extent, checksums: tuple[Checksum, ...] | None
    ) -> Entry | None:
        """End a promotion; return the entry if it is resident now."""
        space = self._space
        index = self._tiers.index(tier)
        entry = space.held_at(extent)
        if entry is None or entry.key != key or not entry.reading or key not in index.reads:
            raise KVHavenError(
                f"tier {tier}: no read of chunk {key.hex()} into {extent} is under way"
            )
        if checksums is not None and len(checksums) != entry.namespace.shards:
            checksums = None
        if checksums is None:
            self.failed_promotions += 1
            index.failed += 1
            index.forget(key)
            space.ghosts.left(key, Reason.EVICTED if index.spec.shared else Reason.DAMAGED)
        index.read_ended(key, extent.length)
        index.progress = space.now
        if entry.holding.cleared and entry.state is not State.RETIRED:
            space.retire(entry)
        if entry.state is State.RETIRED or checksums is None:
            if entry.state is not State.RETIRED:
                space.retire(entry)
            space.read_ended(entry)
            self._work.start(self._tell(entry))
            return None
        self.promoted += 1
        index.promoted += 1
        entry.checksums = list(checksums)
        entry.bitmap = entry.namespace.complete
        space.read_ended(entry)
        space.publish(entry)
        entry.fresh = entry not in self.waiters
        if not entry.fresh:
            space.end_retention(entry)
            self._work.start(self._hand_over(entry))
        return entry

    def _answer(self, lease: Lease) -> Acquisition:
        return lease.answer(corrupt=self._space.corrupt > 0)

    # Extending a lease

    def _grow(self, lease: Lease) -> None:
        """Extend a lease behind its present chunks, piece by piece."""
        if not lease.growing:
            lease.growing = True
            self._work.start(self._growing(lease), of=lease, idle=lease.prefetch)

    def _growing(self, lease: Lease) -> Job:
        # The lease may be ended or finalized between two pieces.
        while lease.growing:
            if self._extend(lease) is not End.PIECE:
                self._grown(lease)
                return
            if lease.prefetch:
                self._let_go(lease, 0)
            yield

    def _grown(self, lease: Lease) -> None:
        """Record that a lease does not grow further for now."""
        lease.growing = False
        if not lease.prefetch:
            self._tell_if_final(lease)
            return
        self._let_go(lease, 0)
        if not lease.lookups:
            self._end_prefetch(lease)

    def _halt(self, lease: Lease) -> None:
        """Stop extending a lease, even if more chunks were requested."""
        lease.growing = lease.limited = False
        self._work.drop(lease)

    def _remember(self, prefetch: Lease) -> None:
        """Keep a prefetch for later work, unless its session's prefetches name too many chunks."""
        chunks = self.prefetched[prefetch.session] + named(prefetch)
        if chunks > MOST_PREFETCHED:
            self._end_prefetch(prefetch)
        else:
            self.prefetched[prefetch.session] = chunks
            self.prefetches.add(prefetch)

    def _end_prefetch(self, prefetch: Lease) -> None:
        self._halt(prefetch)
        self._lookups.leave(prefetch)
        if prefetch in self.prefetches:
            self.prefetches.remove(prefetch)
            self.prefetched[prefetch.session] -= named(prefetch)
            if not self.prefetched[prefetch.session]:
                del self.prefetched[prefetch.session]

    def _extend(self, lease: Lease) -> End:
        """Lease or promote a piece of the chunks behind those that a lease has."""
        pace, keys = self._work.pace, lease.keys
        first = lease.passed + len(lease.slots)
        piece = keys[first : first + pace.leases]
        leased = self._lease_resident(lease, piece)
        end = End.OTHER
        if leased < len(piece):
            behind = first + leased
            rest = piece[leased:]
            if lease.price is not None:  # what is behind a slow tier decides, too
                rest = keys[behind : first + 2 * pace.leases]
            worth = self._worth(lease, behind, rest)
            end = self._promote(lease, behind, worth[: len(piece) - leased])
        got = lease.passed + len(lease.slots) - first
        if end is End.OTHER and got == len(piece) and first + got < len(keys):
            end = End.PIECE
        if lease.tail is not None and first + got == len(keys):
            end = self._add_tail(lease, lease.tail)
        # Chunks behind a gap are touched as well: a request is a use, even if it is not served.
        self._tiers.touch(piece[got - 1 :: -1] if end is End.PIECE else piece[::-1])
        lease.limited = end is End.LIMIT
        if not lease.prefetch:
            self._tiers.used(lease.slots[first:])
            self._count(lease)
        return end

    def _lease_resident(self, lease: Lease, keys: Sequence[ChunkKey]) -> int:
        """Lease resident chunks up to the first that is not resident; return their number."""
        space, namespace = self._space, lease.namespace
        size, holding = namespace.extent_bytes, space.place.find(namespace)
        room = before = self._room()
        stripes, resident = space.entries.stripes, State.RESIDENT
        reach = self._sessions.reach(lease.session)
        found: list[Entry] = []
        fresh = []
        for key in keys:
            entry = stripes[key[0]].get(key)
            if entry is None or entry.state is not resident or entry.holding is not holding:
                break
            if entry.tail:  # a lying node's: keys of tails and of full chunks never coincide
                break
            if reach is not None and not within(entry.extent, reach):
                break
            if not entry.leases:
                if room < size:
                    break
                room -= size
            entry.leases += 1
            if entry.fresh:
                fresh.append(len(found))
            found.append(entry)
        if not found:
            return 0
        space.leased_bytes += before - room
        sources = bytearray(len(found))
        for at in fresh:
            sources[at] = found[at].take_source()
        space.observe_reuse(found[-1])
        space.touch(found)
        self._arrange(lease, len(lease.slots))
        lease.slots += found
        lease.sources += sources
        return len(found)

    def _add_tail(self, lease: Lease, key: ChunkKey) -> End:
        """Lease the tail behind a complete chain, or wait for it; return why the lease ends."""
        space, namespace, entry = self._space, lease.namespace, self._space.find(key)
        if entry is None:
            entry, end = self._promote_tail(lease, key)
            if end is not End.OTHER:
                return end
        if entry is None:
            self._lookups.wait(lease, namespace, key)
            return End.NOWHERE
        reach = self._sessions.reach(lease.session)
        if (
            not entry.tail
            or entry.holding is not space.place.find(namespace)
            or not (reach is None or within(entry.extent, reach))
        ):
            return End.OTHER
        if entry.state is State.PROMOTING:
            self._await(lease, entry)
        elif entry.state is State.RESIDENT and (
            entry.leases or self._room() >= namespace.extent_bytes
        ):
            space.lease(entry)
            if not lease.prefetch:
                space.touch_tail(entry)
            lease.slots.append(entry)
            lease.sources.append(entry.take_source())
        return End.OTHER

    def _promote_tail(self, lease: Lease, key: ChunkKey) -> tuple[Entry | None, End]:
        """Promote a tail that another node has, if it is known and there is room.

        Otherwise returns None, with `End.LIMIT` if it can be promoted when other reads have ended.
        """
        space, namespace = self._space, lease.namespace
        size, reach = namespace.extent_bytes, self._sessions.reach(lease.session)
        for tier in self._tiers.shared.values():
            tokens = tier.tail_tokens(key, namespace) if tier.online else 0
            if not tokens or self._room() < size:
                continue
            end = self._budget().take(tier, size, self.tier_limit(tier))
            if end is not None:
                return None, end
            # A tail is of no use without its chain, whose last chunk would be evicted first.
            found = [space.find(last) for last in lease.keys[-1:]]
            pinned = [e for e in found if e is not None and e.state is State.RESIDENT]
            for last in pinned:
                space.lease(last)
            extents = space.allocate(namespace, 1, reach)
            for last in pinned:
                space.unlease(last)
            for extent in extents:
                entry = space.insert(namespace, key, None, extent, State.PROMOTING, tokens)
                self._tiers.read(tier, entry)
                self._begun += 1
                return entry, End.OTHER
        return None, End.OTHER

    def _room(self) -> int:
        """Return the bytes that may still be pinned."""
        return self.pin_limit - self._space.leased_bytes - self._space.promoting_bytes

    def _await(self, lease: Lease, entry: Entry) -> None:
        """Add a chunk that is being promoted to a lease."""
        lease.waiting[entry.key] = len(lease.slots)
        self.waiters.setdefault(entry, {})[lease] = None
        lease.sources.append(entry.origin)
        lease.slots.append(entry)

    def _promote(self, lease: Lease, first: int, keys: Sequence[ChunkKey]) -> End:
        """Continue with chunks that are not all resident; `first` is the index of the first one."""
        space, namespace = self._space, lease.namespace
        plan, end = self._plan(lease, namespace, keys)
        # Chunks in the arena are pinned before anything is evicted for the rest.
        for _, entry, _ in plan:
            if entry is not None and entry.state is State.RESIDENT:
                space.lease(entry)
        wanted = sum(entry is None for _, entry, _ in plan)
        reach = self._sessions.reach(lease.session)
        extents = space.allocate(namespace, wanted, reach) if wanted else []
        begun, had = 0, len(lease.slots)
        touched: list[Entry] = []
        for at, (key, found, tier) in enumerate(plan, first):
            entry = found
            if entry is None:
                if begun == len(extents):
                    self._give_back(plan[at - first :])
                    end = End.OTHER
                    break
                assert tier is not None, "planned without a source"
                parent = lease.keys[at - 1] if at else None
                entry = space.insert(namespace, key, parent, extents[begun], State.PROMOTING)
                self._tiers.read(tier, entry)
                begun += 1
            if entry.state is State.PROMOTING:
                self._await(lease, entry)
            else:
                lease.sources.append(entry.take_source())
                lease.slots.append(entry)
                touched.append(entry)
        self._begun += begun
        if touched:
            space.touch(touched)
            self._arrange(lease, had)
        if end is End.NOWHERE and self._tiers.shared:
            behind = first + len(plan)
            self._lookups.ask(lease, namespace, lease.keys[behind : behind + LOOKUP_SHARDS])
        return end

    def _worth(self, lease: Lease, first: int, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """Return the chunks that are to be read (see `TierChoice`); try some of the others."""
        if lease.prefetch and not lease.tried:
            return self._choice.not_skipped(lease.namespace, keys)
        if lease.price is None:
            return keys
        keys, trial = self._choice.worth(lease, lease.price, first, keys)
        if trial:
            self._try(lease, trial)
        return keys

    def _try(self, lease: Lease, keys: Sequence[ChunkKey]) -> None:
        """Read a few of the skipped chunks, for which no request waits, to measure their tier."""
        trial = Lease(lease.session, LeaseId(0), lease.namespace, keys, prefetch=True)
        trial.tried = True
        self._grow(trial)
        if not trial.final:
            self._remember(trial)

    def _arrange(self, lease: Lease, had: int) -> None:
        """Reorder a bounded number of a lease's earlier chunks after later ones were touched."""
        before = lease.slots[max(0, had - self._work.pace.light // 2) : had]
        self._space.arrange([entry for entry in before[::-1] if entry.listed])

    def _plan(
        self, lease: Lease, namespace: NamespaceState, keys: Sequence[ChunkKey]
    ) -> tuple[list[_Slot], End]:
        """Return the chunks that are in the arena or can be promoted, and why the plan ends."""
        plan: list[_Slot] = []
        seen: set[ChunkKey] = set()
        space = self._space
        size, holding = namespace.extent_bytes, space.place.find(namespace)
        reach = self._sessions.reach(lease.session)
        room = self._room()
        budget = self._budget()
        for key in keys:
            entry = space.find(key)
            tier = self._tiers.source(key, namespace) if entry is None else None
            again = key in seen or key in lease.waiting
            if entry is None:
                usable = tier is not None
            else:
                shared = entry.holding is holding and not entry.tail
                usable = shared and entry.state is not State.RESERVED
            if not usable or again:
                self.foreign += self._lookups.is_foreign(key, namespace)
                return plan, End.NOWHERE if entry is None and not again else End.OTHER
            if entry is not None and reach is not None and not within(entry.extent, reach):
                self.unready += 1
                break
            if entry is None or (entry.state is State.RESIDENT and not entry.leases):
                room -= size
            end = None if tier is None else budget.take(tier, size, self.tier_limit(tier))
            if end is not None:
                return plan, end
            if room < 0:
                break
            seen.add(key)
            plan.append((key, entry, tier))
        return plan, End.OTHER

    def _budget(self) -> PromotionBudget:
        """Return the promotions that a piece of work may begin."""
        most = MOST_PROMOTIONS - self._space.promoting
        reading = self._space.promoting_bytes
        return PromotionBudget(self._work.pace.promotions, most, reading, self.promotion_limit)

    def _give_back(self, plan: Sequence[_Slot]) -> None:
        for _, entry, _ in plan:
            if entry is not None and entry.state is State.RESIDENT:
                self._space.unlease(entry)

    # Waiting

    def _tell(self, *ends: Entry | Lookup) -> Job:
        """Continue all leases that wait for these reads and lookups, piece by piece.

        Until its turn a lease still waits, and may be finalized or ended like any waiting lease.
        """
        pace, spent = self._work.pace, 0
        for end in ends:
            for lease in consume(
                self.waiters.pop(end, {}) if isinstance(end, Entry) else end.waiting
            ):
                if spent >= pace.light:
                    yield
                    spent = 0
                begun, had = self._begun, len(lease.slots)
                if isinstance(end, Entry):
                    self._hear_of_read(lease, end)
                else:
                    self._hear_of_answer(lease, end)
                spent += pace.light // pace.lease_ids + max(0, len(lease.slots) - had)
                spent += (self._begun - begun) * (pace.light // pace.promotions)

    def _hear_of_answer(self, lease: Lease, lookup: Lookup) -> None:
        """Extend a lease for whose next chunk a lookup has ended."""
        if lookup in lease.lookups:
            self._lookups.leave(lease)
            self._grow(lease)

    def _hear_of_read(self, lease: Lease, entry: Entry) -> None:
        """Add a chunk that was promoted to a lease, or cut the lease before one that was not."""
        at = lease.waiting.get(entry.key)
        if at is None or lease.slots[at] is not entry:
            return
        cleared = entry.holding.cleared
        came = entry.state is State.RESIDENT and not cleared
        if came:
            del lease.waiting[entry.key]
            self._space.lease(entry)
        else:
            self._cut(lease, at)
        if self._is_over(lease):
            return
        # After a failed read another tier may have the chunk; this tier counts as without it.
        if lease.limited or not (came or cleared):
            self._grow(lease)
        elif lease.final:
            self._tell_if_final(lease)

    def _is_over(self, lease: Lease) -> bool:
        """Return whether a lease has ended, or its scheduler is gone."""
        if lease.prefetch:
            return lease not in self.prefetches
        home = self._sessions.sessions.get(lease.session)
        return home is None or home.leases.get(lease.lease_id) is not lease or lease.orphaned

    def _hand_over(self, entry: Entry) -> Job:
        """Lease a promoted chunk to all waiting leases; it stays pinned until then."""
        pin = Unpinning([entry], 0)
        self.unpinning.add(pin)
        self._space.lease(entry)
        try:
            yield from self._tell(entry)
        finally:
            self._space.unlease(entry)
            self.unpinning.remove(pin)

    def _cut_cleared(self) -> Job:
        """Cut all leases that wait for cleared chunks."""
        yield from self._tell(*[entry for entry in self.waiters if entry.holding.cleared])

    def _tell_if_final(self, lease: Lease) -> None:
        self._count(lease)
        # By now a new session may have the same id, and a new lease in it the same lease id.
        if lease.final and lease.expected and not self._is_over(lease):
            self._actions.append(Update(lease.session, self._answer(lease)))
            self._note_final(lease)
            home = self._sessions.sessions.get(lease.session)
            if home is not None and not lease.slots:
                del home.leases[lease.lease_id]

    @staticmethod
    def _note_final(lease: Lease) -> None:
        """Drop the requested keys of a final lease, which are not needed any more."""
        if lease.final:
            lease.keys, lease.tail = (), None
            lease.expected = False

    def _finalize(self, home: Session, lease: Lease) -> None:
        self._halt(lease)
        self._cut(lease, min(lease.waiting.values(), default=len(lease.slots)))
        self._count(lease)
        self._note_final(lease)
        if not lease.slots:
            del home.leases[lease.lease_id]

    def _count(self, lease: Lease) -> None:
        """Count each requested chunk once: when it is found, or known to be absent.

        A tail that is found counts as a chunk; an absent one is no miss, as few prompts repeat.
        """
        new = len(lease.slots) - lease.counted
        if new > 0:
            awaited = lease.waiting and lease.slots[lease.counted :]
            waiting = sum(entry.key in lease.waiting for entry in awaited or ())
            self.hits += new - waiting
            self.awaited += waiting
            lease.counted = len(lease.slots)
        asked = len(lease.keys)
        more = lease.growing or lease.lookups or (lease.limited and lease.waiting)
        if not more and lease.counted < asked:
            self.misses += asked - lease.counted
            lease.counted = asked

    # Ending a lease

    def _look_through(self, home: Session, *, scheduler: bool) -> Job:
        """End a session's leases that no member can be using, after a member has gone."""
        for done, lease in enumerate(consume(home.leases.values())):
            if done and done % self._work.pace.lease_ids == 0:
                yield
            if home.leases.get(lease.lease_id) is not lease:
                continue
            if scheduler:
                lease.orphaned = True
                self._finalize(home, lease)
            if not home.members or home.ended(lease):
                self._end(home, lease)
        self.leaving[home] -= 1
        if not self.leaving[home]:
            del self.leaving[home]

    def _end(self, home: Session, lease: Lease) -> None:
        if home.leases.pop(lease.lease_id, None) is not None:
            self._halt(lease)
            self._cut(lease, 0)

    def _cut(self, lease: Lease, index: int) -> None:
        """Unpin every chunk from `index` on, and stop waiting for lookups."""
        self._lookups.leave(lease)
        self._let_go(lease, index)

    def _let_go(self, lease: Lease, index: int) -> None:
        """Unpin the chunks from `index` on, and stop waiting for those that are promoting."""
        if lease.prefetch:
            lease.passed += len(lease.slots)
        waited = [key for key, at in lease.waiting.items() if at >= index]
        for key in waited:
            entry = lease.slots[lease.waiting.pop(key)]
            others = self.waiters.get(entry)
            if others is not None:  # None: the promotion has just ended
                del others[lease]
                if not others:
                    del self.waiters[entry]
        # The list is part of an answer, so it is copied instead of being cut in place.
        rest, lease.slots = lease.slots, lease.slots[:index]
        del lease.sources[index:]
        if waited:
            absent = set(waited)
            rest = [*lease.slots, *(e for e in rest[index:] if e.key not in absent)]
        if len(rest) > index:
            unpinning = Unpinning(rest, index)
            self.unpinning.add(unpinning)
            self._work.start(self._unpin(unpinning))

    def _unpin(self, rest: Unpinning) -> Job:
        unlease, light, entries = self._space.unlease, self._work.pace.light, rest.entries
        while len(entries) - rest.done > light:
            rest.done += light
            for entry in entries[rest.done - light : rest.done]:
                unlease(entry)
            yield
        for entry in entries[rest.done :]:
            unlease(entry)
        self.unpinning.discard(rest)
