# SPDX-License-Identifier: Apache-2.0
"""Simulated tiers: slow, forgetful, damaged, and offline at times."""

from kvhaven.catalog.actions import TierDelete, TierName, TierRead, TierWrite
from kvhaven.types import ChunkKey, NamespaceDigest
from tests.simulation.catalog_model import (
    BY_DIGEST,
    CHAIN_KEYS,
    TIERS,
    Copy,
    World,
    checksum_of,
)


class FakeTiers:
    """Does what the catalog asks, a page at a time and in any order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reads: list[tuple[TierRead, Copy]] = []
        self._writes: list[tuple[TierWrite, Copy]] = []
        self._stores: dict[TierName, dict[ChunkKey, tuple[NamespaceDigest, bool]]] = {
            spec.name: {} for spec in TIERS
        }  # whether the bytes there are good
        self._online = {spec.name: True for spec in TIERS}

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._reads or self._writes)

    def begin(self, action: TierRead | TierWrite | TierDelete) -> None:
        """Begin an action of the catalog."""
        memory = self._world.memory
        if isinstance(action, TierDelete):
            for read, _ in self._reads:
                being_read = (read.tier, read.key) == (action.tier, action.key)
                assert not being_read, f"{action} while it is read"
            self._stores[action.tier].pop(action.key, None)
            return
        assert self._online[action.tier], f"{action} of a tier that is offline"
        namespace = BY_DIGEST[action.namespace]
        bits = range(len(namespace.table.shards))
        claim = (type(action).__name__, action.tier, action.extent.generation)
        copy = Copy(namespace, action.key, action.extent, bits, claim)
        memory.claim(copy)
        if isinstance(action, TierRead):
            assert action.extent.generation not in memory.committed, f"{action} over written bytes"
            self._reads.append((action, copy))
        else:
            assert memory.is_whole(namespace, action.extent), f"{action} of half a chunk"
            assert action.checksums == tuple(checksum_of(action.key, b) for b in bits)
            self._writes.append((action, copy))

    def read(self) -> None:
        """Go on with a read; verify at its end, and say how it went."""
        if not self._reads:
            return
        world, memory = self._world, self._world.memory
        action, copy = pair = world.pick(self._reads)
        good = self._stores[action.tier].get(action.key, (b"", False))[1]
        good = good and self._online[action.tier] and not world.one_in(12)
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
        world.counts["promoted" if checksums else "promotion failed"] += 1
        world.catalog.tier_read_done(action.tier, action.key, action.extent, checksums)

    def write(self) -> None:
        """Go on with a write, or end it."""
        if not self._writes:
            return
        world, memory = self._world, self._world.memory
        action, copy = pair = world.pick(self._writes)
        ok = self._online[action.tier] and not world.one_in(12)
        while ok and not copy.ended:
            memory.read(copy)
            if world.one_in(4):
                return
        self._writes.remove(pair)
        memory.drop(copy)
        if ok:
            intact = action.extent.generation not in memory.damaged
            self._stores[action.tier][action.key] = action.namespace, intact
        world.counts["written" if ok else "write failed"] += 1
        world.catalog.tier_write_done(action.tier, action.key, ok)

    def lose(self) -> None:
        """A tier loses a chunk, and may notice, or keeps it damaged."""
        tier = self._world.pick(TIERS).name
        store = self._stores[tier]
        if not store:
            return
        key = self._world.pick(tuple(store))
        how = self._world.choose(3)
        if how == 0:
            store[key] = store[key][0], False
            return
        del store[key]
        if how == 1:
            self._world.catalog.tier_forgot(tier, key)

    def find(self) -> None:
        """A scan comes upon a chunk, or upon a part of one."""
        tier = self._world.pick(TIERS).name
        store = self._stores[tier]
        if store:
            key = self._world.pick(tuple(store))
            namespace = BY_DIGEST[store[key][0]]
            shards = namespace.table.shards
            for bit in range(1 + self._world.choose(len(shards))):
                self._world.catalog.tier_found(
                    tier, namespace.digest, key, bit, shards[bit].payload_bytes
                )

    def switch(self) -> None:
        """A tier goes offline, or comes back."""
        tier = self._world.pick(TIERS).name
        if self._online[tier] and not self._world.one_in(4):
            return
        self._online[tier] = not self._online[tier]
        self._world.catalog.tier_online(tier, self._online[tier])

    def damage_memory(self) -> None:
        """A bit flips in a resident chunk, and verification finds it."""
        world = self._world
        keys = world.pick(world.pick(tuple(CHAIN_KEYS.values())))
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
        """Somebody clears a namespace, or a tier, or all."""
        world = self._world
        namespace = (None, *BY_DIGEST)[world.choose(1 + len(BY_DIGEST))]
        tier = (None, TierName("memory"), *(t.name for t in TIERS))[world.choose(2 + len(TIERS))]
        world.catalog.clear(namespace, tier)
        world.counts["cleared"] += 1
