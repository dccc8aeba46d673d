# SPDX-License-Identifier: Apache-2.0
"""What the catalog costs, in work that can be counted: time is for the benchmark."""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator

import pytest

from kvhaven.catalog import StoreOn, TierSpec
from kvhaven.catalog.actions import (
    LeaseId,
    MemberId,
    TierLookup,
    TierName,
    TierRead,
    TierWrite,
)
from kvhaven.catalog.entries import Entry
from kvhaven.catalog.tier_spec import WriteMode
from kvhaven.catalog.worth import Price, TierSpeed
from kvhaven.keys import tenant_id
from kvhaven.protocol import batches
from kvhaven.tenants import Quotas
from kvhaven.types import NO_TENANT, ChunkKey, TenantId
from tests.unit.catalog_kit import (
    DISK,
    PAGE,
    STORED,
    Node,
    checksums_of,
    keys_of,
    namespace_of,
    spec,
)

ANN = tenant_id("ann")
FS = TierName("fs")


Event = Callable[[], object]


def calls_of(event: Event) -> int:
    """Count the functions that an event calls."""
    calls = 0

    def note(_: object, what: str, __: object) -> None:
        nonlocal calls
        calls += what in {"call", "c_call"}

    sys.setprofile(note)
    try:
        event()
    finally:
        sys.setprofile(None)
    return calls


class CountingDict(dict[ChunkKey, Entry]):
    """Counts look-ups."""

    lookups = 0

    def get(self, key: ChunkKey, default: object = None) -> object:  # type: ignore[override]
        type(self).lookups += 1
        return super().get(key, default)

    def __getitem__(self, key: ChunkKey) -> Entry:
        type(self).lookups += 1
        return super().__getitem__(key)


@contextlib.contextmanager
def lookups_counted(node: Node) -> Iterator[Callable[[], int]]:
    """Count from now on how often a chunk in the arena is looked up."""
    stripes = node.catalog._space.entries.stripes
    counting = {id(stripe): CountingDict(stripe) for stripe in stripes}
    stripes[:] = [counting[id(stripe)] for stripe in stripes]
    CountingDict.lookups = 0
    yield lambda: CountingDict.lookups


def test_an_acquire_looks_each_chunk_up_once() -> None:
    node, keys = Node(pages=2048, world_size=2), keys_of("a", 512)
    assert node.save(keys) == 512
    with lookups_counted(node) as lookups:
        assert len(node.acquire(keys).chunks) == 512
        assert lookups() == 512


def interleaved(count: int) -> tuple[Node, Event]:
    """Return an acquire with a price, of chunks of which each other one is in memory."""
    node, keys = Node(pages=4 * count, tiers=[spec(chunks=count)]), keys_of("a", count)
    for batch in batches(keys[::2], 512):
        assert node.save(batch) == len(batch)
    node.store(keys[1::2])
    node.catalog.tier_speed(DISK, TierSpeed(0.0, 0.001 / PAGE))
    node.catalog.take_actions()
    session, digest, price = node.session, node.namespace.digest, Price(0.01, 1e-6)
    return node, lambda: node.catalog.acquire(session, LeaseId(1), digest, keys, price=price)


def test_an_acquire_costs_the_same_for_each_place_that_its_chunks_alternate_between() -> None:
    """A piece judges up to 1024 chunks."""
    costs = [calls_of(interleaved(count)[1]) for count in (256, 1024)]
    assert costs[1] < 1.5 * 4 * costs[0], costs


def test_pieces_of_an_interleaved_prompt_cost_the_same_in_a_long_one() -> None:
    costs = []
    for count in (1024, 4096):
        node, acquire = interleaved(count)
        cost = calls_of(acquire)
        while node.catalog.busy:
            cost += calls_of(node.catalog.work)
        assert len(node.reads()) == count // 2
        costs.append(cost)
    assert costs[1] < 1.5 * 4 * costs[0], costs


def test_a_tenant_at_its_quota_costs_the_same_beside_many_others() -> None:
    lookups = []
    for others in (1, 500):
        node = Node(pages=2048, memory_quotas=Quotas(others=2 * PAGE))
        for number in range(others):
            node.save(keys_of(f"{number}", 2), tenant=tenant_id(f"user {number}"))
        node.save(keys_of("a", 2), tenant=tenant_id("ann"))
        with lookups_counted(node) as counted:
            node.reserve(keys_of("b", 2), tenant=tenant_id("ann"))
            lookups.append(counted())
        assert node.catalog.stats().quota_evictions == 2
    assert lookups[0] == lookups[1]


def test_no_garbage_is_left_for_a_collector_that_is_off() -> None:
    shared = TierSpec(TierName("fs"), shared=True, store_on=StoreOn.SECOND)
    tiers = [spec(), spec(TierName("remote"), chunks=20), shared]
    node = Node(pages=16, tiers=tiers, memory_quotas=Quotas(others=12 * PAGE))
    gc.collect()
    gc.disable()
    try:
        for number in range(30):
            keys = keys_of(f"c{number % 7}", 5)
            node.attach(f"t{number}")
            node.catalog.tick(number)
            tenant = tenant_id("ann") if number % 4 == 1 else NO_TENANT
            node.catalog.prefetch(node.namespace.digest, keys_of(f"d{number}", 5), tenant)
            answer = node.acquire(keys, tenant=tenant)
            while actions := node.catalog.take_actions():
                for action in actions:
                    if isinstance(action, TierRead):
                        node.finish(action, ok=number % 3 != 0)
                    elif isinstance(action, TierWrite):
                        node.catalog.tier_write_done(action.tier, action.key, ok=number % 4 != 0)
                    elif isinstance(action, TierLookup):
                        found = None if number % 5 == 0 else dict.fromkeys(action.keys[:3], 1)
                        node.catalog.tier_looked_up(action.tier, action.number, found)
            node.catalog.release(node.session, answer.lease_id)
            node.save(keys, tenant=tenant)
            for write in node.writes():
                node.catalog.tier_write_done(write.tier, write.key, ok=True)
            node.acquire(keys, f"t{number}")
            for member in (f"t{number}/0", f"t{number}/None"):
                node.catalog.lost(MemberId(member))
                node.catalog.gone(MemberId(member))
            node.catalog.finalize(node.session, LeaseId(0))
        node.catalog.clear(tenant=tenant_id("ann"))
        assert node.catalog.stats().tenants == {}
        assert node.catalog.stats().evictions > 20
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_totals_cost_the_same_with_any_number_of_chunks_tenants_and_namespaces() -> None:
    costs = []
    for count in (1, 200):
        node = Node(pages=2048, tiers=[spec()])
        for number in range(count):
            node.catalog.add_namespace(namespace_of(f"namespace {number}"))
            node.save(keys_of(f"{number}", 3), tenant=tenant_id(f"user {number}"))
        assert node.catalog.totals().resident_chunks == 3 * count
        costs.append(calls_of(node.catalog.totals))
    assert costs[0] == costs[1]


def full_node(chunks: int, tenant: TenantId = NO_TENANT) -> Node:
    """Return a node whose arena and disk are full of short chains, which are a tenant's."""
    disk = TierSpec(DISK, chunks * STORED, write=WriteMode.THROUGH)
    node = Node(pages=chunks, tiers=[disk], write_queue=chunks)
    for first in range(0, chunks, 16):
        keys = keys_of(f"{first}", 16)
        node.store(keys, tenant=tenant)
        for grant in node.reserve(keys, tenant=tenant):
            assert grant is not None
            node.commit(grant)
    finalize(node)
    return node


def finalize(node: Node) -> None:
    """Have a catalog do all that it has begun."""
    while node.catalog.work():
        pass
    node.catalog.take_actions()


def save_another_size(node: Node) -> Event:
    """Save a chunk of another size into a full arena."""
    large = namespace_of("large", payload_bytes=4 * PAGE)
    node.catalog.add_namespace(large)
    node.attach("t", large)

    def reserve() -> None:
        (grant,) = node.catalog.reserve(MemberId("t/0"), large.digest, None, keys_of("t", 1), 1)
        assert grant is not None

    return reserve


def write_to_a_full_disk(node: Node) -> Event:
    """Commit a chunk that is written to a full disk."""
    grant = node.grant(keys_of("new", 1)[0])
    return lambda: node.commit(grant)


def shrink_the_disk(node: Node) -> Event:
    """Learn that the disk has room for a tenth of what it holds."""
    return lambda: node.catalog.tier_capacity(DISK, node.pages * STORED // 10)


def clear_a_namespace(node: Node) -> Event:
    """Clear the only namespace."""
    return lambda: node.catalog.clear(node.namespace.digest)


def clear_a_tenant(node: Node) -> Event:
    """Clear the tenant to which everything belongs."""
    return lambda: node.catalog.clear(tenant=ANN)


def limit_memory(node: Node) -> Event:
    """Give a tenant that has everything its first quota."""
    return lambda: node.catalog.limit_memory(ANN, 100 * PAGE)


def limit_disk(node: Node) -> Event:
    """Give it one of the disk."""
    return lambda: node.catalog.limit_disk(ANN, 100 * STORED)


def lose_a_writer(node: Node) -> Event:
    """Lose a rank that writes as much as there is room for, and learn that it is gone."""
    node.catalog.clear()
    finalize(node)
    assert None not in node.reserve(keys_of("open", node.pages))

    def lose() -> None:
        node.catalog.lost(MemberId("s/0"))
        node.catalog.gone(MemberId("s/0"))

    return lose


def switch_a_tier_off(node: Node) -> Event:
    """Switch a tier off for which as much waits as there is room for."""
    node.catalog.clear(tier=DISK)
    finalize(node)
    for first in range(0, node.pages, 16):
        for key in keys_of(f"{first}", 16):
            entry = node.catalog._space.entries[key]
            node.catalog._tiers.writes[DISK].offer(entry)
    return lambda: node.catalog.tier_online(DISK, False)


@pytest.mark.parametrize(
    "prepare",
    [
        save_another_size,
        write_to_a_full_disk,
        shrink_the_disk,
        clear_a_namespace,
        clear_a_tenant,
        limit_memory,
        limit_disk,
        lose_a_writer,
        switch_a_tier_off,
    ],
)
def test_no_event_costs_more_where_there_are_more_chunks(prepare: Callable[[Node], Event]) -> None:
    costs = []
    for chunks in (1600, 4800):
        node = full_node(chunks, ANN)
        event = prepare(node)
        cost = calls_of(event)
        while node.catalog.busy:
            cost = max(cost, calls_of(node.catalog.work))
            node.catalog.take_actions()
        node.catalog.check()
        costs.append(cost)
    assert costs[1] < 1.5 * costs[0], costs


def end_a_read(node: Node, *, ok: bool) -> Event:
    """End the read that all wait for."""
    node.store(keys_of("t", 1))
    wait(node)
    (read,) = node.reads()
    checksums = checksums_of(read.key) if ok else None
    return lambda: node.catalog.tier_read_done(read.tier, read.key, read.extent, checksums)


def read_well(node: Node) -> Event:
    """Promote the chunk that all wait for."""
    return end_a_read(node, ok=True)


def read_badly(node: Node) -> Event:
    """Fail to read it."""
    return end_a_read(node, ok=False)


def clear_what_is_read(node: Node) -> Event:
    """Clear it."""
    end_a_read(node, ok=True)
    return node.catalog.clear


def answer(node: Node) -> Event:
    """Answer the question that all wait for."""
    wait(node)
    (lookup,) = (a for a in node.of_type(TierLookup) if isinstance(a, TierLookup))
    return lambda: node.catalog.tier_looked_up(lookup.tier, lookup.number, {})


def switch_off_what_is_asked(node: Node) -> Event:
    """Switch the tier off that was asked."""
    wait(node)
    return lambda: node.catalog.tier_online(FS, False)


def wait(node: Node) -> None:
    for _ in range(node.pages):
        assert node.acquire(keys_of("t", 1)).promoting == 1


@pytest.mark.parametrize(
    "prepare", [read_well, read_badly, clear_what_is_read, answer, switch_off_what_is_asked]
)
def test_no_event_costs_more_where_more_tickets_wait(prepare: Callable[[Node], Event]) -> None:
    costs: list[int] = []
    for lease_ids in (200, 1000):
        node = Node(pages=lease_ids, tiers=[spec(), TierSpec(FS, shared=True)])
        event = prepare(node)
        cost = calls_of(event)
        assert node.catalog.busy, "they are told piece by piece"
        node.catalog.check()
        while node.catalog.busy:
            cost = max(cost, calls_of(node.catalog.work))
            node.catalog.check()
        costs.append(cost)
        # They have the chunk, or wait for word of the other tier.
        left = lease_ids if prepare in {read_well, read_badly} else 0
        assert node.catalog.stats().leases == left
    assert costs[1] < 1.5 * costs[0], costs


def tenants(count: int) -> list[TenantId]:
    return [tenant_id(f"user {number}") for number in range(count)]


def find_after_clears(node: Node, count: int) -> Event:
    """Find a chunk in a scan after others' were cleared."""
    node.catalog.tier_scanned(DISK, ended=False)
    for tenant in tenants(count):
        node.catalog.clear(tenant=tenant)
    return lambda: node.store(keys_of("a", 1), tenant=ANN)


def prune_after_clears(node: Node, count: int) -> Event:
    """Go on dropping what waits to be written, after clears of tenants that had none of it."""
    node.save(keys_of("a", 1400))  # beyond what a tier is given at a time
    for tenant in tenants(count):
        node.catalog.clear(tenant=tenant)
    return node.catalog.work


@pytest.mark.parametrize("prepare", [find_after_clears, prune_after_clears])
def test_no_piece_costs_more_after_more_clears(prepare: Callable[[Node, int], Event]) -> None:
    costs = []
    for clears in (10, 300):
        node = Node(pages=2048, tiers=[spec()], write_queue=1024)
        costs.append(calls_of(prepare(node, clears)))
        finalize(node)
        node.catalog.check()
    assert costs[1] < 1.5 * costs[0], costs


def test_quotas_that_are_given_and_taken_leave_nothing_behind() -> None:
    """And none copies those of all others."""
    quotas = Quotas(dict.fromkeys(tenants(100), PAGE), others=2 * PAGE)
    node = Node(memory_quotas=quotas)
    limits = node.catalog._owners.memory
    for tenant in (ANN, *tenants(100)):
        node.catalog.limit_memory(tenant, 5 * PAGE)
        assert limits.of(tenant) == node.catalog.tenant_stats(tenant).memory_quota == 5 * PAGE
    for tenant in (ANN, *tenants(100)):
        node.catalog.limit_memory(tenant, quotas.of(tenant))
        assert limits.of(tenant) == quotas.of(tenant)
    assert not limits._changed
    assert limits._quotas is quotas
