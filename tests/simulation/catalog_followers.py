# SPDX-License-Identifier: Apache-2.0
"""Other nodes that follow the simulated catalog's announcements; messages to them get lost."""

from kvhaven.catalog.announcer import START
from kvhaven.catalog.entries import State
from kvhaven.keys import announced_digest
from kvhaven.peers.view import PeerView
from kvhaven.types import ChunkKey
from tests.simulation.catalog_model import CHAIN_KEYS, TAILS, TENANT_OF, World


class Followers:
    """Two nodes, each of which hears of the catalog now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._views = [PeerView(), PeerView()]
        self._digests = {
            key: announced_digest(digest, key, TENANT_OF[key])
            for digest, chains in CHAIN_KEYS.items()
            for chain in chains
            for key in (*chain.keys, *chain.tails)
        }

    def hear(self) -> None:
        """A follower asks for what is new; the answer may get lost."""
        view = self._world.pick(self._views)
        self._hear(view, most=1 + self._world.choose(12))

    def finish(self) -> None:
        """All followers hear everything."""
        for view in self._views:
            while not self._hear(view, most=12):
                pass

    def _hear(self, view: PeerView, most: int) -> bool:
        world = self._world
        batch = world.catalog.announced(view.cursor, most)
        if world.one_in(5):
            return False
        gap = batch.fresh and view.cursor != START
        view.apply("node", batch)
        world.counts["gap"] += gap
        if batch.whole:
            world.counts["announced"] += 1
            self._verify(view)
        return batch.whole

    def _verify(self, view: PeerView) -> None:
        """Compare a view that has heard all; chunks that were cleared may still be in it."""
        there, cleared = set[ChunkKey](), set[ChunkKey]()
        for key, entry in self._world.catalog._space.entries.items():
            if entry.state is State.RESIDENT and key not in TAILS:
                (cleared if entry.holding.cleared else there).add(key)
        heard = {key for key, digest in self._digests.items() if view.has(digest)}
        assert there <= heard, "a chunk that is here was not announced"
        assert heard <= there | cleared, "a chunk that is gone was not taken back"
