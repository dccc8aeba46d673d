# SPDX-License-Identifier: Apache-2.0
"""A simulated node around the real catalog and allocator, driven event by event."""

from collections.abc import Callable

from kvhaven.catalog.actions import Update
from tests.simulation.catalog_engines import Engines
from tests.simulation.catalog_followers import Followers
from tests.simulation.catalog_model import ARENA_BYTES, Choose, World
from tests.simulation.catalog_peers import Peers
from tests.simulation.catalog_saving import Saving
from tests.simulation.catalog_tenants import TenantEvents
from tests.simulation.catalog_tiers import FakeTiers


class Node:
    """Engines and tiers around one catalog.

    `audit_every` is the number of events between two runs of `Catalog.check`; 0 is never,
    so that the model alone has to find what is wrong.
    """

    def __init__(self, choose: Choose, audit_every: int = 4, policy: str = "lru") -> None:
        self.world = World(choose, policy)
        self.engines = Engines(self.world)
        self.tiers = FakeTiers(self.world)
        self.saving = Saving(self.world, self.engines)
        self.tenants = TenantEvents(self.world, self.engines, self.tiers)
        self.peers = Peers(self.world)
        self.followers = Followers(self.world)
        engines, saving, tiers, tenants = self.engines, self.saving, self.tiers, self.tenants
        peers = self.peers
        self.events: list[tuple[int, Callable[[], None]]] = [
            (150, saving.write),
            (120, self.work),
            (60, saving.reserve),
            (60, engines.load),
            (60, tiers.read),
            (50, tiers.look_up),
            (60, tiers.write),
            (40, engines.acquire),
            (40, engines.dispatch),
            (25, saving.plan_save),
            (15, engines.notice),
            (15, engines.reconnect),
            (10, engines.start),
            (8, engines.finalize),
            (8, engines.release),
            (8, engines.prefetch),
            (6, tenants.acquire_as_another),
            (12, peers.borrow),
            (12, peers.read),
            (20, self.followers.hear),
            (2, tenants.limit),
            (1, tenants.clear),
            (8, tiers.others_write),
            (6, tiers.expect),
            (8, tiers.pass_time),
            (4, engines.disconnect),
            (4, saving.abort),
            (4, tiers.find),
            (2, tiers.scan),
            (4, tiers.lose),
            (4, tiers.switch),
            (2, saving.commit_nonsense),
            (2, tiers.damage_memory),
            (1, tiers.clear),
            (12, engines.prepare),
            (2, self.world.grow),
            (1, engines.kill),
            (1, engines.kill_engine),
            (1, engines.restart),
            (1, tenants.limit_during_a_scan),
            (4, tenants.drop_unused),
        ]
        self.rare: list[Callable[[], None]] = [engines.kill_all]
        self._audit_every = audit_every
        self._count = 0

    def step(self, event: Callable[[], None]) -> None:
        """Let one event happen, and let begin what the catalog wants done about it."""
        event()
        for action in self.world.catalog.take_actions():
            if isinstance(action, Update):
                self.engines.updated(action.session, action.acquisition)
            else:
                self.tiers.begin(action)
        self.tenants.check()
        self._count += 1
        if self._audit_every and self._count % self._audit_every == 0:
            self.world.catalog.check()
            assert self.world.allocator.used_bytes <= ARENA_BYTES
        for read, asked in self.engines.awaited():
            self.tiers.must_answer(read, asked)

    def work(self) -> None:
        """The catalog goes on with what events have begun."""
        self.world.counts["worked"] += self.world.catalog.busy
        self.world.catalog.work()

    def finish(self) -> None:
        """Everybody is gone and the tiers have answered: nothing but resident chunks is left."""
        self.step(self.engines.kill_all)
        while self.tiers.busy or self.world.catalog.busy or self.peers.busy:
            self.step(self.peers.read)
            self.step(self.tiers.read)
            self.step(self.tiers.write)
            self.step(self.tiers.look_up)
            self.step(self.work)
        stats = self.world.catalog.stats()
        resident = sum(n.memory.bytes for n in stats.namespaces.values())
        assert stats.used_bytes == resident, "bytes leaked"
        assert (stats.sessions, stats.members, stats.leases) == (0, 0, 0)
        assert (stats.leased_bytes, stats.promoting_bytes) == (0, 0)
        assert (stats.reserved_bytes, stats.retired_bytes, stats.quarantined_bytes) == (0, 0, 0)
        assert not any(self.world.memory.claims.values()), "the model itself leaks"
        self.followers.finish()
        self.world.catalog.check()
