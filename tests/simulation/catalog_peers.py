# SPDX-License-Identifier: Apache-2.0
"""Other nodes that borrow chunks from the simulated catalog, and read them page by page."""

from kvhaven.catalog.loans import Loan
from kvhaven.types import NO_TENANT
from tests.simulation.catalog_model import (
    BY_DIGEST,
    CHAIN_KEYS,
    TAIL_TOKENS,
    TAILS,
    TENANT_OF,
    TENANTS,
    Copy,
    World,
    checksum_of,
)


class Peers:
    """The threads that send chunks to other nodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._reads: list[tuple[Loan, Copy]] = []

    @property
    def busy(self) -> bool:
        """Whether a loan is open."""
        return bool(self._reads)

    def borrow(self) -> None:
        """Another node fetches a chunk, perhaps as another tenant or in another namespace."""
        world, catalog = self._world, self._world.catalog
        digest = world.pick(tuple(BY_DIGEST))
        tenant, keys, tails = world.pick(CHAIN_KEYS[digest])
        if world.one_in(3):
            keys = [key for key in tails if catalog.checksums(key) is not None] or keys
        key = world.pick(keys)
        if world.one_in(6):
            tenant = world.pick((NO_TENANT, *TENANTS))
        if world.one_in(12):
            digest = world.pick(tuple(BY_DIGEST))
        (has,) = catalog.has(digest, [key], tenant)
        if world.one_in(2) and (tokens := catalog.retain_tail(digest, key, tenant)):
            assert (tokens, key in TAILS, has) == (TAIL_TOKENS, True, True)
            entry = catalog._space.entries[key]
            shards = len(BY_DIGEST[digest].table.shards)
            assert entry.retained == shards, "a tail that another node will read is not retained"
            world.awaited[entry.extent.generation] = shards
            world.counts["tail retained"] += 1
            if world.one_in(2):
                return
        before = catalog.stats()
        loan = catalog.lend(digest, key, tenant)
        length = BY_DIGEST[digest].table.extent_bytes
        pinned = before.leased_bytes + before.promoting_bytes + length
        if loan is None:
            lent = {copy.extent.generation: copy.extent.length for _, copy in self._reads}
            full = max(pinned, 2 * (sum(lent.values()) + length)) > before.pin_limit_bytes
            assert full or not has, "a chunk that is here was not lent"
            return
        assert has, "a chunk was lent that is not here"
        assert loan.tail == (TAIL_TOKENS if key in TAILS else 0), "a tail was lent as a full chunk"
        assert TENANT_OF[key] == tenant, "a chunk was lent to another tenant"
        namespace = BY_DIGEST[digest]
        generation = loan.extent.generation
        assert generation not in world.memory.cleared, "a chunk was lent after a clear"
        assert world.memory.is_whole(namespace, loan.extent), "a part of a chunk was lent"
        bits = range(len(namespace.table.shards))
        assert loan.checksums == tuple(checksum_of(key, bit) for bit in bits)
        copy = Copy(namespace, key, loan.extent, bits, ("loan", loan.number))
        world.memory.claim(copy)
        self._reads.append((loan, copy))
        world.counts["lent"] += 1

    def read(self) -> None:
        """A thread reads pages of a loan, and returns it after the last, or when it gives up."""
        if not self._reads:
            return
        world = self._world
        loan, copy = pair = world.pick(self._reads)
        while not copy.ended:
            world.memory.read(copy)
            if world.one_in(4):
                return
            if world.one_in(12):
                break  # the other node is gone
        self._reads.remove(pair)
        world.memory.drop(copy)
        for _ in range(1 + world.one_in(4)):
            world.catalog.returned(loan.number)
        left = world.awaited.pop(loan.extent.generation, 1) - 1
        if left:
            world.awaited[loan.extent.generation] = left
            entry = world.catalog._space.held_at(loan.extent)
            assert entry is None or entry.retained == left, "the rest of a tail is not retained"
        world.check_retained()
        world.counts["returned"] += 1
