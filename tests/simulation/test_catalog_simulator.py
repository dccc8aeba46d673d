# SPDX-License-Identifier: Apache-2.0
"""Random histories of a whole node, from a seed.

`KVHAVEN_SEED` replays the seed of a failure, `KVHAVEN_EVENTS` sets the length. The nightly
form is one million events: `KVHAVEN_EVENTS=1000000 pytest -o timeout=0 tests/simulation`.
"""

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from kvhaven.catalog.actions import CommitResult
from kvhaven.catalog.entries import Entry
from kvhaven.catalog.leases import Leases
from kvhaven.catalog.reservations import Reservations
from kvhaven.catalog.sessions import Lease, Member, Session
from kvhaven.errors import KVHavenError
from kvhaven.types import Checksum, ChunkKey
from tests.simulation.catalog_node import Node

EVENTS = int(os.environ.get("KVHAVEN_EVENTS", "60000"))
SEED = int(os.environ.get("KVHAVEN_SEED") or random.SystemRandom().randrange(1 << 32))


def simulate(seed: int, events: int, audit_every: int) -> Counter[str]:
    """Run one history and return how often what happened."""
    rng = random.Random(seed)
    node = Node(lambda n: int(rng.random() * n), audit_every)
    weights = [weight for weight, _ in node.events]
    methods = [method for _, method in node.events]
    for number, event in enumerate(rng.choices(methods, weights, k=events)):
        node.step(event)
        if number % 2000 == 1999:
            node.step(rng.choice(node.rare))
    node.finish()
    node.world.counts["evictions"] = node.world.catalog.stats().evictions
    return node.world.counts


def test_no_history_breaks_a_promise() -> None:
    try:
        counts = simulate(SEED, EVENTS, audit_every=4)
    except BaseException:
        print(f"replay with KVHAVEN_SEED={SEED} KVHAVEN_EVENTS={EVENTS}")  # noqa: T201
        raise
    if EVENTS >= 10_000:
        wanted = (
            *("hits", "loaded", "promoted", "promotion failed", "written", "write failed"),
            *("resident", "waiting", "discarded", "cleared", "gone", "reconnected", "evictions"),
        )
        assert not [what for what in wanted if counts[what] < 5], f"seed {SEED}: {counts}"


def simulate_some() -> None:
    """Run the histories in which each breakage below must show; the model alone watches."""
    for seed in range(6):
        simulate(seed, 4000, audit_every=0)


def test_the_catalog_as_it_is_passes_where_broken_ones_fail() -> None:
    simulate_some()


def test_a_seed_replays() -> None:
    assert simulate(7, 1500, audit_every=0) == simulate(7, 1500, audit_every=0)


def _break_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = property(lambda e: bool(e.writes or e.reading or e.writers))
    monkeypatch.setattr(Entry, "pinned", pinned)


def _break_write_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = property(lambda e: bool(e.leases or e.reading or e.writers))
    monkeypatch.setattr(Entry, "pinned", pinned)


def _break_visibility(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Reservations.commit

    def early(
        self: Reservations, member: str, key: ChunkKey, generation: int, checksum: Checksum
    ) -> tuple[CommitResult, Entry | None]:
        entry = self._space.held.get(generation)
        if entry is not None:
            entry.bitmap = entry.namespace.complete
            entry.checksums = [checksum] * entry.namespace.shards
        return commit(self, member, key, generation, checksum)  # type: ignore[arg-type]

    monkeypatch.setattr(Reservations, "commit", early)


def _break_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "lost", Reservations.gone)


def _break_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_is_enough(_: Session, lease: Lease) -> bool:
        return bool(lease.acked)

    monkeypatch.setattr(Session, "ended", first_is_enough)


def _break_scheduler_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Reservations.lost

    def lose_all(self: Reservations, member: Member) -> None:
        lost(self, member)
        home = self._sessions.sessions[member.session]
        for lease in home.leases.values() if member.rank is None else ():
            for entry in lease.slots:
                if entry.key not in lease.waiting:
                    self._space.unlease(entry)
        home.leases.clear()

    monkeypatch.setattr(Reservations, "lost", lose_all)


def _break_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    read_done = Leases.read_done

    def trusting(self: Leases, *args: object) -> Entry | None:
        tier, key, extent, _ = args
        entry = self._space.held[extent.generation]  # type: ignore[attr-defined]
        checksums = (Checksum(b"?" * 16),) * entry.namespace.shards
        return read_done(self, tier, key, extent, checksums)  # type: ignore[arg-type]

    monkeypatch.setattr(Leases, "read_done", trusting)


def _break_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*_: object) -> None:
        """Keep what a member left behind."""

    monkeypatch.setattr(Reservations, "gone", forgetful)


BREAKAGES = [
    _break_leases,
    _break_write_pins,
    _break_visibility,
    _break_quarantine,
    _break_acknowledgements,
    _break_scheduler_loss,
    _break_verification,
    _break_leak,
]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_model_finds_a_broken_catalog(
    breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    # The model finds it, or the catalog or the allocator trips over its own mistake.
    with pytest.raises((AssertionError, KeyError, KVHavenError)):
        simulate_some()
