# SPDX-License-Identifier: Apache-2.0
"""Simulated tiers: slow, forgetful, damaged, offline at times; the shared ones others change."""

from collections import Counter
from dataclasses import dataclass

from kvhaven.catalog.actions import TierDelete, TierLookup, TierName, TierRead, TierWrite
from kvhaven.tiers.format.header import stored_bytes
from kvhaven.types import ChunkKey, NamespaceDigest, TenantId
from tests.simulation.catalog_model import (
    BY_DIGEST,
    CHAIN_KEYS,
    OWN,
    SHARED,
    TAIL_TOKENS,
    TAILS,
    TENANT_OF,
    TIERS,
    Copy,
    World,
    checksum_of,
)

Found = dict[ChunkKey, int]


@dataclass
class Stored:
    """A chunk in a tier: which of its shards are there, and whether their bytes are right."""

    namespace: NamespaceDigest
    shards: int
    good: bool = True
    cleared: bool = False
    """It is to be deleted, and must not be read any more."""

    @property
    def readable(self) -> bool:
        """Whether a read of it can succeed."""
        return self.good and self.shards == BY_DIGEST[self.namespace].table.complete


class FakeTiers:
    """Does what the catalog asks, a page at a time and in any order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reads: list[tuple[TierRead, Copy]] = []
        self._writes: list[tuple[TierWrite, Copy]] = []
        self._lookups: list[tuple[TierLookup, Found]] = []  # with what was there when asked
        self._expected: set[tuple[TierName, int]] = set()
        self._scanning = Counter[TierName]()  # scans; one may begin before another has ended
        self._stores: dict[TierName, dict[ChunkKey, Stored]] = {spec.name: {} for spec in TIERS}

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._reads or self._writes or self._lookups)

    def must_answer(self, read: set[ChunkKey], asked: ChunkKey | None) -> None:
        """Assert that what a lease waits for is under way, and not in a tier that is offline."""
        reads = {action.key for action, _ in self._reads}
        assert read <= reads, "a lease waits for a read that is not under way"
        online = (action for action, _ in self._lookups if self._world.online[action.tier])
        told = asked is None or any(asked in action.keys for action in online)
        assert told, "a lease waits for an answer that does not come"

    def begin(self, action: TierLookup | TierRead | TierWrite | TierDelete) -> None:
        """Begin an action of the catalog."""
        world, memory = self._world, self._world.memory
        keys = action.keys if isinstance(action, TierLookup) else (action.key,)
        if isinstance(action, TierRead):
            assert action.tail == (TAIL_TOKENS if action.key in TAILS else 0)
            assert action.key not in TAILS or action.tier in SHARED, f"{action} of a local tier"
        else:
            assert not TAILS & set(keys), f"{action}: tails are in memory alone"
        asked_as = {TENANT_OF[key] for key in keys}
        assert isinstance(action, TierLookup) or asked_as == {action.tenant}, f"{action} of another"
        if isinstance(action, TierDelete):
            for read, _ in self._reads:
                being_read = (read.tier, read.key) == (action.tier, action.key)
                assert action.tier in SHARED or not being_read, f"{action} while it is read"
            self._stores[action.tier].pop(action.key, None)
            world.heard.miss(action.tier, action.key, world.now)
            return
        assert world.online[action.tier], f"{action} of a tier that is offline"
        if isinstance(action, TierLookup):
            assert action.tier in SHARED, f"{action}: the catalog knows what is there"
            self._lookups.append((action, self._see(action)))
            return
        namespace = action.namespace
        bits = range(len(namespace.table.shards))
        claim = (type(action).__name__, action.tier, action.extent.generation)
        copy = Copy(namespace, action.key, action.extent, bits, claim)
        memory.claim(copy)
        if isinstance(action, TierRead):
            assert action.extent.generation not in memory.committed, f"{action} over written bytes"
            told = action.tier in OWN or world.may_be_read(action.tier, action.key)
            assert told, f"{action}, though nobody said that it is there"
            stored = self._stores[action.tier].get(action.key)
            assert stored is None or not stored.cleared, f"{action}, though it was cleared"
            self._reads.append((action, copy))
        else:
            assert memory.is_whole(namespace, action.extent), f"{action} of half a chunk"
            assert action.checksums == tuple(checksum_of(action.key, b) for b in bits)
            self._writes.append((action, copy))

    def look_up(self) -> None:
        """Answer a lookup: with what is there, or was when it was asked; or fail."""
        if not self._lookups:
            return
        world = self._world
        action, before = pair = world.pick(self._lookups)
        self._lookups.remove(pair)
        if (action.tier, action.number) in self._expected and world.one_in(4):
            world.counts["withdrawn"] += 1  # the catalog still believes what else it was told
            world.catalog.withdrawn(action.tier, action.number)
            return
        complete = action.namespace.table.complete
        failed = not world.online[action.tier] or world.one_in(8)
        found = before if world.one_in(3) else self._see(action)
        for key in action.keys:
            whole = not failed and found.get(key) == complete
            world.heard.tell(action.tier, key, world.now, whole=whole)
            world.counts["found"] += whole
        world.counts["lookup failed" if failed else "looked up"] += 1
        tail = TAIL_TOKENS if TAILS & set(action.keys) else 0
        world.catalog.tier_looked_up(action.tier, action.number, None if failed else found, tail)

    def expect(self) -> None:
        """Another node announces that it computes a chain; its answers come later, if at all."""
        world = self._world
        tier, digest = world.pick(tuple(SHARED)), world.pick(tuple(BY_DIGEST))
        tenant, keys, tails = world.pick(CHAIN_KEYS[digest])
        chain = tuple(keys[: world.choose(1 + len(keys))])
        tail = tails[len(chain)] if world.one_in(2) or not chain else None
        numbers = world.catalog.expected(tier, digest, chain, tenant, tail)
        announced = {*chain, tail}
        assert numbers.keys() <= announced, "a chunk is expected that was not announced"
        index = world.catalog._tiers.presence(tier)
        for key, number in numbers.items():
            part = index.lookups[number].namespace
            assert (part.namespace.digest, part.tenant.id) == (digest, tenant), "of somebody else"
            action = TierLookup(tier, number, BY_DIGEST[digest], (key,), tenant)
            self._lookups.append((action, {}))
            self._expected.add((tier, number))
            world.heard.expect(tier, key)
        world.counts["expected"] += bool(numbers)
        world.counts["tail expected"] += tail in numbers

    def pass_time(self) -> None:
        """Some seconds go by."""
        self._world.pass_time(self._world.choose(4))

    def read(self) -> None:
        """Go on with a read; verify at its end, and say how it went."""
        if not self._reads:
            return
        world, memory = self._world, self._world.memory
        action, copy = pair = world.pick(self._reads)
        stored = self._stores[action.tier].get(action.key)
        good = stored is not None and stored.readable
        good = good and world.online[action.tier] and not world.one_in(12)
        while not copy.ended:
            memory.write(copy, good=good)
            if not good or world.one_in(4):
                break
        if good and not copy.ended:
            return
        self._reads.remove(pair)
        memory.drop(copy)
        checksums = None
        # A page that was damaged on the way fails the checksum, though the last try was good.
        if good and all(memory.content[page] == (copy.key, bit) for page, bit in copy.pages):
            checksums = tuple(checksum_of(action.key, bit) for bit in copy.bits)
            memory.committed[action.extent.generation] = set(copy.bits)
            if action.key in TAILS:
                world.tail_used[action.key] = world.now
                world.counts["tail promoted"] += 1
                world.awaited[action.extent.generation] = 1
        else:
            world.heard.miss(action.tier, action.key, world.now)
        kind = "shared promotion" if action.tier in SHARED else "promotion"
        world.counts[f"{kind} {'done' if checksums else 'failed'}"] += 1
        world.catalog.tier_read_done(action.tier, action.key, action.extent, checksums)
        entry = world.catalog._space.entries.get(action.key)
        if action.key in TAILS and entry is not None and entry.fresh:
            assert entry.retained, "a tail that arrived before its request is not retained"

    def write(self) -> None:
        """Go on with a write, or end it."""
        if not self._writes:
            return
        world, memory = self._world, self._world.memory
        action, copy = pair = world.pick(self._writes)
        ok = world.online[action.tier] and not world.one_in(12)
        while ok and not copy.ended:
            memory.read(copy)
            if world.one_in(4):
                return
        self._writes.remove(pair)
        memory.drop(copy)
        if ok:
            intact = action.extent.generation not in memory.damaged
            complete = action.namespace.table.complete
            self._stores[action.tier][action.key] = Stored(
                action.namespace.digest, complete, intact
            )
            world.heard.tell(action.tier, action.key, world.now, whole=True)
        world.counts["written" if ok else "write failed"] += 1
        world.counts[f"written to {action.tier}"] += ok
        world.catalog.tier_write_done(action.tier, action.key, ok)

    def lose(self) -> None:
        """A tier loses a chunk, and may notice, or keeps it damaged."""
        world = self._world
        tier = world.pick(TIERS).name
        store = self._stores[tier]
        if not store:
            return
        key = world.pick(tuple(store))
        how = world.choose(3)
        if how == 0:
            store[key].good = False
            return
        del store[key]
        if how == 1:
            world.heard.miss(tier, key, world.now)
            world.catalog.tier_forgot(tier, key)

    def scan(self) -> None:
        """A scan begins, or ends."""
        tier, scans = self._world.pick(OWN), self._scanning
        ends = scans[tier] == 2 or (scans[tier] == 1 and not self._world.one_in(3))
        scans[tier] += -1 if ends else 1
        self._world.catalog.tier_scanned(tier, ended=ends)
        if not scans[tier]:
            self._bring_back(tier)

    def _bring_back(self, tier: TierName) -> None:
        """Count what the catalog does not know when all is scanned as written since."""
        for key, stored in self._stores[tier].items():
            if key not in self._world.catalog._tiers.own[tier].stored:
                stored.cleared = False

    def end_scans(self) -> None:
        """All scans end."""
        while self._scanning.total():
            self.scan()

    def find_from_before(self, tenant: TenantId) -> None:
        """A scan begins that finds what a tenant has from an earlier life of the service."""
        tier = self._world.pick(OWN)
        store, known = self._stores[tier], self._world.catalog._tiers.own[tier].stored
        writing = {action.key for action, _ in self._writes}
        for digest, chains in CHAIN_KEYS.items():
            for key in (key for chain in chains if chain.tenant == tenant for key in chain.keys):
                if key not in store and key not in known and key not in writing:
                    store[key] = Stored(digest, BY_DIGEST[digest].table.complete)
        self.scan()
        for _ in range(self._world.choose(30)):
            self.find()

    def find(self) -> None:
        """A scan comes upon a chunk, or upon a part of one."""
        tier = self._world.pick(OWN)
        store = self._stores[tier]
        if store and self._scanning[tier]:
            key = self._world.pick(tuple(store))
            namespace = BY_DIGEST[store[key].namespace]
            shards = namespace.table.shards
            for bit in range(1 + self._world.choose(len(shards))):
                size, tenant = stored_bytes(shards[bit].payload_bytes), TENANT_OF[key]
                self._world.catalog.tier_found(tier, namespace.digest, key, bit, size, tenant)

    def others_write(self) -> None:
        """Another node writes a part of a chain to a shared tier, and maybe not all shards."""
        world = self._world
        store = self._stores[world.pick(tuple(SHARED))]
        digest = world.pick(tuple(BY_DIGEST))
        complete = BY_DIGEST[digest].table.complete
        _, keys, tails = world.pick(CHAIN_KEYS[digest])
        chain = keys[: world.choose(1 + len(keys))]
        for key in (*chain, tails[len(chain)]):
            shards = complete & ~(1 << world.choose(4)) if world.one_in(8) else complete
            if key not in store or not store[key].readable:
                store[key] = Stored(digest, shards)

    def switch(self) -> None:
        """A tier goes offline, or comes back."""
        online, tier = self._world.online, self._world.pick(TIERS).name
        if online[tier] and not self._world.one_in(4):
            return
        online[tier] = not online[tier]
        self._world.catalog.tier_online(tier, online[tier])
        if tier in OWN and online[tier] and self._world.catalog._tiers.own[tier]._scanned:
            self._bring_back(tier)

    def damage_memory(self) -> None:
        """A bit flips in a resident chunk, and verification finds it."""
        world = self._world
        _, keys, tails = world.pick(world.pick(tuple(CHAIN_KEYS.values())))
        if world.one_in(4):
            keys = tails
        resident = [key for key in keys if world.catalog.checksums(key) is not None]
        if resident:
            key = world.pick(resident)
            entry = world.catalog._space.entries[key]
            world.memory.damaged.add(entry.extent.generation)
            page = (entry.extent.segment, entry.extent.offset)
            world.memory.content[page] = key, -1
            world.catalog.discard(key, entry.extent)
            assert world.catalog.checksums(key) is None
            world.counts["discarded"] += 1

    def clear(self) -> None:
        """Somebody clears a namespace, a tier, or all; a shared store only by its name."""
        world = self._world
        namespace = (None, *BY_DIGEST)[world.choose(1 + len(BY_DIGEST))]
        tier = (None, TierName("memory"), *(t.name for t in TIERS))[world.choose(2 + len(TIERS))]
        world.clear(namespace, tier)
        self.cleared(namespace, tier, None)
        if tier in SHARED:
            store = self._stores[tier]
            for key in [k for k, s in store.items() if namespace in (None, s.namespace)]:
                del store[key]
        world.counts["cleared"] += 1

    def cleared(
        self, namespace: NamespaceDigest | None, tier: TierName | None, tenant: TenantId | None
    ) -> None:
        """Note that what our own tiers have of something is to go: known, or found by a scan."""
        for name in OWN:
            for key, stored in self._stores[name].items():
                if tier in {None, name} and namespace in {None, stored.namespace}:
                    stored.cleared |= tenant in {None, TENANT_OF[key]}
            index = self._world.catalog._tiers.own[name]
            if index.online and index._scanned:
                self._bring_back(name)

    def _see(self, action: TierLookup) -> Found:
        """Return what a tier has of what is asked, now."""
        store = self._stores[action.tier]
        own = [key for key in action.keys if TENANT_OF[key] == action.tenant]
        return {key: store[key].shards for key in own if key in store}
