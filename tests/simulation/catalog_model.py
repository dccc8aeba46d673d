# SPDX-License-Identifier: Apache-2.0
"""The plain model that the catalog is held against: memory, and who really touches it.

The model knows what the catalog cannot: which process lives and which pages it may be
touching. Every such use is a claim; an extent that is handed out over the claim of another,
or bytes that are offered and are not their key's, is a failure, whatever the catalog
believes. A page holds the name of the shard that was written there, `(key, bit)`.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvhaven.arena.allocator import SlabAllocator
from kvhaven.catalog import Catalog, StoreOn, TierSpec, WriteMode
from kvhaven.catalog.actions import Leased, TierName
from kvhaven.catalog.announcer import Announcer
from kvhaven.catalog.entries import State
from kvhaven.catalog.policies import POLICIES
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.catalog.work import Pace
from kvhaven.keys import tenant_id
from kvhaven.tenants import Quotas
from kvhaven.tiers.base import Namespace
from kvhaven.types import (
    NO_TENANT,
    PAGE_BYTES,
    Checksum,
    ChunkKey,
    Extent,
    NamespaceDigest,
    Shard,
    ShardId,
    ShardTable,
    TenantId,
)

T = TypeVar("T")
Choose = Callable[[int], int]
"""Returns a number from 0 to n - 1: from a seeded generator, or from hypothesis."""
Page = tuple[int, int]
Claim = tuple[object, ...]
WRITING = {"save", "TierRead"}
"""The first word of the claims of those who write."""

PACE = Pace(light=4, leases=3, heavy=2, promotions=2, lease_ids=1)
"""Pieces so small that whatever takes several chunks takes several events."""
ARENA_BYTES = 192 << 10
STEP_BYTES = 32 << 10
"""How much of the arena there is at first, by how much it grows, and what a rank prepares."""
CHAIN_CHUNKS = 6
CHAINS = 4
TIERS = (
    TierSpec(TierName("disk"), 768 << 10, 0.8),
    TierSpec(TierName("fs"), shared=True, lookup_ttl_s=4.0),
    TierSpec(
        TierName("s3"),
        shared=True,
        lookup_ttl_s=8.0,
        write=WriteMode.THROUGH,
        store_on=StoreOn.SECOND,
    ),
)
SHARED = {spec.name: spec for spec in TIERS if spec.shared}
OWN = [spec.name for spec in TIERS if not spec.shared]


def namespace_of(name: str, shards: int, payload_bytes: int) -> Namespace:
    """Return a namespace whose chunks have `shards` equal shards."""
    table = ShardTable(
        tuple(Shard(ShardId(0, (0, 1), (n, n + 1)), payload_bytes) for n in range(shards))
    )
    digest = NamespaceDigest(hashlib.sha256(name.encode()).digest())
    return Namespace(digest, {"model": name}, table)


Split = tuple[int, ...]
"""Which shards each rank of an engine holds, as bitmaps; equal ones are twins."""

NAMESPACES: Sequence[tuple[Namespace, Sequence[Split]]] = (
    (namespace_of("one", 1, 4096), [(1,), (1, 1)]),
    (namespace_of("two", 2, 4096), [(0b01, 0b10), (0b11,), (0b01, 0b01, 0b10, 0b10)]),
    (namespace_of("three", 1, 12000), [(1,)]),
    (namespace_of("four", 4, 4096), [(0b1111,), (0b0011, 0b1100), (1, 2, 4, 8)]),
)
"""With the ways in which engines divide their shards. Four extent sizes share the arena."""

BY_DIGEST = {namespace.digest: namespace for namespace, _ in NAMESPACES}


ALICE, BOB = tenant_id("alice"), tenant_id("bob")
TENANTS = (ALICE, BOB)
MEMORY_QUOTAS = Quotas({ALICE: 28 << 10}, others=40 << 10)
DISK_QUOTAS = Quotas({ALICE: 100 << 10}, others=200 << 10)
"""Chunks take 4 to 16 KiB of memory, and 8 to 32 of a tier: it is only ever a few of them."""


class Chain(NamedTuple):
    """Whose chunks, and their keys; `tails[n]` is a tail behind the first `n` of them."""

    tenant: TenantId
    keys: list[ChunkKey]
    tails: list[ChunkKey]


def chain_of(namespace: Namespace, number: int, tenant: TenantId) -> Chain:
    """Return a chain; it shares its first `number` chunks with the tenant's later ones."""
    keys, parent = [], namespace.digest + tenant
    tails = [ChunkKey(hashlib.sha256(b"tail" + parent).digest())]
    for index in range(CHAIN_CHUNKS):
        branch = 0 if index < number else number + 1
        parent = hashlib.sha256(parent + bytes([index, branch])).digest()
        keys.append(ChunkKey(parent))
        tails.append(ChunkKey(hashlib.sha256(b"tail" + parent).digest()))
    return Chain(tenant, keys, tails)


CHAIN_KEYS = {
    digest: [
        *(chain_of(namespace, number, NO_TENANT) for number in range(CHAINS)),
        *(chain_of(namespace, number, tenant) for tenant in TENANTS for number in range(2)),
    ]
    for digest, namespace in BY_DIGEST.items()
}
TENANT_OF = {
    k: chain.tenant
    for chains in CHAIN_KEYS.values()
    for chain in chains
    for k in (*chain.keys, *chain.tails)
}
TAILS = {k for chains in CHAIN_KEYS.values() for chain in chains for k in chain.tails}
TAIL_TOKENS = 5


def bits_of(bitmap: int) -> list[int]:
    """Return the shards of a bitmap."""
    return [bit for bit in range(bitmap.bit_length()) if bitmap >> bit & 1]


def checksum_of(key: ChunkKey, bit: int) -> Checksum:
    """Return the checksum of the only right content of a shard."""
    return Checksum(hashlib.sha256(key + bytes([bit])).digest()[:16])


@dataclass(eq=False)
class Copy:
    """Pages of one chunk that somebody writes or reads one by one."""

    namespace: Namespace
    key: ChunkKey
    extent: Extent
    bits: Sequence[int]
    claim: Claim
    done: int = 0

    def __post_init__(self) -> None:
        """List the pages with the shard each belongs to."""
        table, start = self.namespace.table, self.extent.offset
        ends = [*table.offsets, table.extent_bytes]
        self.pages: list[tuple[Page, int]] = [
            ((self.extent.segment, page), bit)
            for bit in self.bits
            for page in range(start + ends[bit], start + ends[bit + 1], PAGE_BYTES)
        ]

    @property
    def ended(self) -> bool:
        return self.done == len(self.pages)


@dataclass
class Memory:
    """The arena's pages: what is there, and who may be touching them."""

    content: dict[Page, tuple[ChunkKey, int]] = field(default_factory=dict)
    claims: dict[Page, dict[Claim, int]] = field(default_factory=dict)
    committed: dict[int, set[int]] = field(default_factory=dict)
    """By generation: the shards that are written, by a commit or a read that was accepted."""
    saves: dict[int, object] = field(default_factory=dict)
    """By generation: the save that writes there. There is one."""
    splits: dict[int, Split] = field(default_factory=dict)
    """By generation: how its engine divides the shards."""
    awaited: dict[int, set[int]] = field(default_factory=dict)
    """By generation: the ranks of that save that have not committed."""
    damaged: set[int] = field(default_factory=set)
    """Generations whose bytes were damaged after they were written."""
    cleared: set[int] = field(default_factory=set)
    """Generations that were cleared, and that no lease had then: none may get them."""
    usable: int = STEP_BYTES
    """Bytes of the arena that there are by now."""

    def claim(self, copy: Copy) -> None:
        """Note that somebody may touch these pages until `drop`, and nobody of another extent.

        Who writes is alone.
        """
        generation = copy.extent.generation
        assert end_of(copy.extent) <= self.usable, f"{copy.extent} is not allocated yet"
        for page, _ in copy.pages:
            claims = self.claims.setdefault(page, {})
            others = [
                c for c, g in claims.items() if g != generation or {c[0], copy.claim[0]} & WRITING
            ]
            assert not others, f"{copy.extent} was given to {copy.claim}, but {others} uses it"
            claims[copy.claim] = generation

    def drop(self, copy: Copy) -> None:
        """End a claim."""
        for page, _ in copy.pages:
            self.claims.get(page, {}).pop(copy.claim, None)

    def write(self, copy: Copy, *, good: bool = True) -> None:
        """Write the next page of a copy."""
        page, bit = copy.pages[copy.done]
        self.content[page] = copy.key, bit if good else -1
        copy.done += 1

    def read(self, copy: Copy) -> None:
        """Read the next page of a copy; it must be its key's, and be its own to read."""
        page, bit = copy.pages[copy.done]
        assert copy.claim in self.claims[page]
        if copy.extent.generation not in self.damaged:
            found = self.content.get(page)
            assert found == (copy.key, bit), f"{copy.claim} read {found}, not {copy.key.hex()}"
        copy.done += 1

    def is_whole(self, namespace: Namespace, extent: Extent) -> bool:
        """Whether every shard of an extent was committed, and by every rank of its save."""
        shards = len(namespace.table.shards)
        written = len(self.committed.get(extent.generation, ())) == shards
        return written and not self.awaited.get(extent.generation)

    def verify(self, namespace: Namespace, chunk: Leased) -> None:
        """Assert that what is offered is all there and all right."""
        extent = chunk.extent
        assert extent.generation not in self.cleared, f"{chunk} is offered after a clear"
        assert self.is_whole(namespace, extent), f"{chunk} is offered but not written"
        if extent.generation not in self.damaged:
            bits = range(len(namespace.table.shards))
            for page, bit in Copy(namespace, chunk.key, extent, bits, ()).pages:
                found = self.content.get(page)
                assert found == (chunk.key, bit), f"{chunk} is offered, but there is {found}"


@dataclass
class Heard:
    """When the catalog was last told what of a shared tier, by answers, reads and writes."""

    whole: dict[tuple[TierName, ChunkKey], float] = field(default_factory=dict)
    absent: dict[tuple[TierName, ChunkKey], float] = field(default_factory=dict)

    def tell(self, tier: TierName, key: ChunkKey, now: float, *, whole: bool) -> None:
        """Note that the catalog is being told that a chunk is there, or is not."""
        (self.whole if whole else self.absent)[tier, key] = now

    def miss(self, tier: TierName, key: ChunkKey, now: float) -> None:
        """Note that a read has missed a chunk, whatever was said before."""
        self.whole.pop((tier, key), None)
        self.absent[tier, key] = now

    def expect(self, tier: TierName, key: ChunkKey) -> None:
        """Note that the catalog was told that a chunk will come, whatever was said before."""
        self.whole.pop((tier, key), None)
        self.absent.pop((tier, key), None)


def end_of(extent: Extent) -> int:
    """Return where an extent ends."""
    return extent.offset + extent.length


class WatchedAllocator(SlabAllocator):
    """The real one; counts how often it had no room."""

    refused = 0

    def allocate(self, length: int, reach: Mapping[int, int] | None = None) -> Extent | None:
        """Allocate."""
        extent = super().allocate(length, reach)
        self.refused += extent is None
        return extent


class World:
    """What all parts of the simulation share. `choose` decides what is left to chance.

    `policy` is the name of the catalog's eviction policy.
    """

    def __init__(self, choose: Choose, policy: str = "lru") -> None:
        self.choose = choose
        self.allocator = WatchedAllocator(
            {0: ARENA_BYTES}, slab_bytes=16 << 10, usable={0: STEP_BYTES}
        )
        self.catalog = Catalog(
            self.allocator,
            POLICIES[policy](),
            tiers=TIERS,
            write_queue_bytes=64 << 10,
            memory_quotas=MEMORY_QUOTAS,
            disk_quotas=DISK_QUOTAS,
            pace=PACE,
            announcer=Announcer(most=30),
        )
        self.memory = Memory()
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self.grown = False
        self.heard = Heard()
        self.tail_used: dict[ChunkKey, float] = {}
        """When each tail was last used, or at least held by somebody when time went by."""
        self.used: dict[ChunkKey, float] = {}
        """When each chunk was last offered in an answer to an acquire, as it was asked for."""
        self.awaited: dict[int, int] = {}
        """Uses that a request or another node still wants of a tail, by the tail's generation."""
        self.online = {spec.name: True for spec in TIERS}
        for namespace in BY_DIGEST.values():
            self.catalog.add_namespace(namespace)

    def grow(self) -> None:
        """More of the arena has been allocated; at times it is the last of it."""
        if self.allocator.usable[0] < ARENA_BYTES and not self.grown:
            self.memory.usable += STEP_BYTES
            self.grown = self.one_in(12)
            self.catalog.grew(0, self.memory.usable, last=self.grown)
            self.counts["grown"] += 1

    def pick(self, items: Sequence[T]) -> T:
        """Return one of these."""
        return items[self.choose(len(items))]

    @contextlib.contextmanager
    def nobody_else_pays(self, tenant: TenantId) -> Iterator[None]:
        """Assert that meanwhile no other tenant's chunk goes, if the arena itself has room."""
        entries, refused = self.catalog._space.entries, self.allocator.refused
        before = [key for key in entries if TENANT_OF[key] != tenant]
        yield
        gone = [key for key in before if key not in entries]
        if self.allocator.refused == refused:
            assert not gone, f"{len(gone)} chunks of others went for tenant {tenant.hex()}"

    def pass_time(self, seconds: float) -> None:
        """Some seconds go by. What is in use then does not grow old."""
        self.now += seconds
        self.catalog.tick(self.now)
        entries = self.catalog._space.entries
        for key in TAILS:
            entry = entries.get(key)
            if entry is not None and entry.pinned:
                self.tail_used[key] = self.now

    def check_retained(self) -> None:
        """Assert that no tail is retained like a full chunk for nobody."""
        for key in TAILS:
            entry = self.catalog._space.entries.get(key)
            if entry is not None and entry.state is State.RESIDENT:
                wanted = self.awaited.get(entry.extent.generation, 0)
                assert entry.retained <= wanted, f"{key.hex()} is retained for nobody"

    @contextlib.contextmanager
    def tails_go_first(self, namespace: Namespace, tenant: TenantId) -> Iterator[None]:
        """Assert that no full chunk of this size is evicted meanwhile while a tail could go.

        Tails that somebody waits for count as full chunks.

        (A search may give up among tails in use, so there must be none. For its quota a tenant
        gives up its own alone.)
        """
        space, size = self.catalog._space, namespace.table.extent_bytes
        alike = [e for e in space.entries.values() if e.extent.length == size]
        alike = [e for e in alike if not e.holding.cleared]
        tails = [e for e in alike if e.key in TAILS and not e.retained]
        full = [e for e in alike if e not in tails and e.state is State.RESIDENT]
        full = [e for e in full if not space.tails.expired(e.key)]
        busy = any(e.pinned or not e.listed for e in tails)
        yield
        gone = [e for e in full if e.state is State.RETIRED and not e.corrupt]
        left = [e for e in tails if e.state is not State.RETIRED]
        for entry in gone if not busy else ():
            owner = TENANT_OF[entry.key]
            spared = [e for e in left if owner in {NO_TENANT, TENANT_OF[e.key]}]
            assert not spared, f"{entry.key.hex()} went for {tenant.hex()} before a tail did"

    def clear(
        self,
        namespace: NamespaceDigest | None = None,
        tier: TierName | None = None,
        tenant: TenantId | None = None,
    ) -> None:
        """Clear, and assert that what is cleared from memory is out of sight at this moment."""
        space = self.catalog._space
        before = {key: entry.extent.generation for key, entry in space.entries.items()}
        self.catalog.clear(namespace, tier, tenant)
        if tier not in {None, MEMORY}:
            return
        in_use = {
            entry.extent.generation
            for home in self.catalog._sessions.sessions.values()
            for lease in home.leases.values()
            for entry in lease.slots
            if entry.key not in lease.waiting
        }
        for digest, chains in CHAIN_KEYS.items():
            for chain in chains:
                if namespace not in {None, digest} or tenant not in {None, chain.tenant}:
                    continue
                for key in (*chain.keys, *chain.tails):
                    assert self.catalog.checksums(key) is None, "what was cleared can be seen"
                    if before.get(key) not in {None, *in_use}:
                        self.memory.cleared.add(before[key])

    def may_be_read(self, tier: TierName, key: ChunkKey) -> bool:
        """Whether the catalog was told, not too long ago, that a shared tier has a chunk whole."""
        heard = self.heard.whole.get((tier, key))
        return heard is not None and self.now - heard < SHARED[tier].lookup_ttl_s

    def may_be_missed(self, key: ChunkKey) -> bool:
        """Whether every shared tier said, not too long ago, that it has not got a chunk."""
        return all(
            self.now - self.heard.absent.get((tier, key), -1e9) < spec.lookup_ttl_s
            for tier, spec in SHARED.items()
            if self.online[tier]
        )

    def one_in(self, n: int) -> bool:
        """Whether something that happens once in n times happens now."""
        return self.choose(n) == n - 1
