# SPDX-License-Identifier: Apache-2.0
"""What befalls tenants in the simulation: other quotas, clearing, and being taken for others."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvhaven.catalog.actions import LeaseId
from kvhaven.catalog.tier_spec import MEMORY
from kvhaven.catalog.unused import Counting
from kvhaven.errors import KVHavenError
from kvhaven.types import NO_TENANT, PAGE_BYTES, ChunkKey, NamespaceDigest, TenantId
from tests.simulation.catalog_engines import Engines
from tests.simulation.catalog_model import (
    BY_DIGEST,
    CHAIN_KEYS,
    MEMORY_QUOTAS,
    OWN,
    TENANT_OF,
    TENANTS,
    World,
)
from tests.simulation.catalog_tiers import FakeTiers

PATIENCE = 500
"""Events after which a tenant must have given up what it has beyond its quota and nobody uses."""


class TenantEvents:
    """An event is a method, as with `Engines`; `check` is asked after each of all events."""

    def __init__(self, world: World, engines: Engines, tiers: FakeTiers) -> None:
        self._world = world
        self._engines = engines
        self._tiers = tiers
        self._late = dict.fromkeys(TENANTS, 0)  # events for which it had what it need not have
        self._quotas = {tenant: MEMORY_QUOTAS.of(tenant) for tenant in TENANTS}
        self._excess = dict.fromkeys(TENANTS, 0)  # what one had when its quota was lowered
        self._dropping: (
            tuple[Counting, float, NamespaceDigest | None, TenantId | None, Sequence[str]] | None
        ) = None
        self._dropped = 0
        self._lease_ids = 0  # counted down: engines count up

    def acquire_as_another(self) -> None:
        """A scheduler asks for a tenant's chain as somebody else: it has nothing of it."""
        process = self._engines.process(lambda p: p.rank is None and p.connected)
        if process is None:
            return
        engine, catalog = process.engine, self._world.catalog
        digest = engine.namespace.digest
        owner, keys, tails = self._world.pick(CHAIN_KEYS[digest])
        tenant = self._world.pick([t for t in (NO_TENANT, *TENANTS) if t != owner])
        self._lease_ids -= 1
        lease_id = LeaseId(self._lease_ids)
        if self._world.one_in(4):
            keys = []
        answer = catalog.acquire(engine.id, lease_id, digest, keys, tenant, tails[len(keys)])
        assert not answer.chunks, "a tenant's chunk was offered to another"
        catalog.release(engine.id, lease_id)
        self._world.counts["asked as another"] += 1

    def limit(self) -> None:
        """Somebody changes a tenant's quotas."""
        world = self._world
        tenant, quota = world.pick(TENANTS), world.pick((None, 0, 9000, 28 << 10, 60 << 10))
        world.catalog.limit_disk(tenant, None if quota is None else 4 * quota)
        held = world.catalog._space.held
        self._quotas[tenant] = quota
        self._excess[tenant] = sum(e.extent.length for e in held if TENANT_OF[e.key] == tenant)
        with world.nobody_else_pays(tenant):
            world.catalog.limit_memory(tenant, quota)
        world.counts["limited"] += 1

    def limit_during_a_scan(self) -> None:
        """A tenant gets its first quota of the disk while a scan finds what it has there."""
        world = self._world
        if not world.one_in(2):
            return
        tenant = world.pick(TENANTS)
        world.catalog.limit_disk(tenant, None)
        self._tiers.end_scans()
        self._clear(tenant)
        self._tiers.find_from_before(tenant)
        world.catalog.limit_disk(tenant, world.pick((0, 60 << 10, 200 << 10)))
        for _ in range(world.choose(30)):
            if world.one_in(3):
                world.catalog.work()
            else:
                self._tiers.find()
        world.counts["limited during a scan"] += 1

    def clear(self) -> None:
        """Somebody clears a tenant from memory and our own tiers: nobody else's chunks go."""
        self._clear(self._world.pick(TENANTS))

    def _clear(self, tenant: TenantId) -> None:
        world, entries = self._world, self._world.catalog._space.entries
        others = [key for key in entries if TENANT_OF[key] != tenant]
        seen = [key for key in others if world.catalog.checksums(key) is not None]
        begun = world.catalog._leases._begun
        world.clear(tenant=tenant)
        self._tiers.cleared(None, None, tenant)
        if world.catalog._leases._begun == begun:
            assert all(key in entries for key in others), f"others lost chunks with {tenant.hex()}"
            assert all(world.catalog.checksums(key) is not None for key in seen)
        # Else a lease that waited for what was cleared has gone on, and took space for the rest.
        world.counts["tenant cleared"] += 1

    def drop_unused(self) -> None:
        """Somebody drops, piece by piece, what was not used for some time: nothing else goes."""
        world = self._world
        if self._dropping is None:
            age = world.pick((1.0, 2.0, 4.0, 8.0))
            namespace = (None, *BY_DIGEST)[world.choose(1 + len(BY_DIGEST))]
            tenant = world.pick((None, None, *TENANTS))
            tier = world.pick((None, None, MEMORY, *OWN))
            until = world.now - age
            if not world.online.get(tier or MEMORY, True):
                with pytest.raises(KVHavenError, match="offline"):
                    world.catalog.drop_unused(age, namespace, tier, tenant)
                return
            expected = None
            if world.one_in(2):
                counting = world.catalog.drop_unused(age, namespace, tier, tenant, dry_run=True)
                expected = self._run(counting, until, None, None, ())
            job = world.catalog.drop_unused(age, namespace, tier, tenant)
            places = (MEMORY, *OWN) if tier is None else (tier,)
            if expected is not None:
                assert self._run(job, until, namespace, tenant, places) == expected
                return
            self._dropping = job, until, namespace, tenant, places
            self._dropped = 0
        done = self._piece(*self._dropping)
        if done is not None:
            assert done[0] == self._dropped
            self._dropping = None

    def _run(self, *job: Any) -> tuple[int, int]:
        """Run a job to its end within this event; return its result."""
        self._dropped = 0
        while (done := self._piece(*job)) is None:
            pass
        if job[-1]:
            assert done[0] == self._dropped
        return done

    def _piece(
        self,
        job: Counting,
        until: float,
        namespace: NamespaceDigest | None,
        tenant: TenantId | None,
        places: Sequence[str],
    ) -> tuple[int, int] | None:
        """Run a piece; return the result at the end."""
        world, done = self._world, None
        before = self._stored()
        in_use = {e.key for e in world.catalog._space.entries.values() if e.pinned}
        try:
            next(job)
        except StopIteration as end:
            done = end.value
        after = self._stored()
        for place, known in before.items():
            gone = known.keys() - after[place].keys()
            assert not gone or place in places, f"{place} was not meant"
            assert not gone & in_use, "what is in use went"
            for key in gone:
                used = world.used.get(key, float("-inf"))
                assert used <= until, f"{key.hex()} was used at {used}, after {until}"
                assert namespace in {None, known[key]}, "a chunk of another namespace went"
                assert tenant in {None, TENANT_OF[key]}, "a chunk of another tenant went"
            self._dropped += len(gone)
            world.counts["unused in memory" if place == MEMORY else "unused on disk"] += len(gone)
        world.counts["dropped unused"] += done is not None
        return done

    def _stored(self) -> dict[str, dict[ChunkKey, NamespaceDigest]]:
        """Return the chunks in memory and in each tier of our own, with their namespaces."""
        catalog = self._world.catalog
        entries = catalog._space.entries.items()
        places: dict[str, dict[ChunkKey, NamespaceDigest]] = {
            MEMORY: {key: entry.namespace.namespace.digest for key, entry in entries}
        }
        for name in OWN:
            stored = catalog._tiers.own[name].stored.items()
            places[name] = {key: s.namespace.namespace.digest for key, s in stored}
        return places

    def check(self) -> None:
        """Assert that no tenant has more than it may, but for what was there and cannot go yet."""
        space = self._world.catalog._space
        for tenant, quota in self._quotas.items():
            own = [e for e in space.held if TENANT_OF[e.key] == tenant]
            has = sum(entry.extent.length for entry in own)
            if quota is None:
                continue
            self._excess[tenant] = min(self._excess[tenant], has)
            most = max(quota, self._excess[tenant])
            assert has <= most, f"tenant {tenant.hex()} has {has} bytes, and may have {quota}"
            idle = [e for e in own if not e.pinned and e.listed and not e.children]
            self._late[tenant] = self._late[tenant] + 1 if has > quota and idle else 0
            late = self._late[tenant] > PATIENCE
            assert not late, f"tenant {tenant.hex()} keeps more than it may"
            self._world.counts["at quota"] += has + PAGE_BYTES > quota > 0
