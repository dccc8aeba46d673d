# SPDX-License-Identifier: Apache-2.0
"""Load or recompute on simulated tiers with a virtual clock: the real catalog, meter and limits.

The model is an 8B model on an accelerator: 256 tokens take 32 MiB and are computed in 17 ms, so
that a tier of 2 GB/s is as fast as the prefill.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvhaven.catalog.actions import LeaseId, TierRead, Update
from kvhaven.catalog.worth import Price
from kvhaven.service.loads import Wait
from kvhaven.service.tier_speed import Begun, SpeedMeter
from tests.unit.catalog_kit import DISK, PAGE, Node, checksums_of, keys_of, spec

MB = 1e6
CHUNK_BYTES = 32 << 20
COMPUTE = Price(0.017, 2e-5)
TODAY_S = 2.0
"""The default of `promote_deadline_ms`."""
AT_ONCE = 64
SPEEDS = [10 * MB, 500 * MB, 1700 * MB, 2100 * MB, 10_000 * MB]


@dataclass
class Store:
    """A store that sends `rate` bytes a second, to one read after another or to all together."""

    rate: float
    delay_s: float = 0.002
    noise: float = 0.0
    together: bool = False
    source: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.now = 0.0
        self._ready: list[tuple[float, int, float, TierRead]] = []  # waiting for the first byte
        self._active: deque[tuple[float, TierRead]] = deque()  # bytes left
        self._waiting: deque[TierRead] = deque()
        self._number = 0

    @property
    def busy(self) -> bool:
        return bool(self._ready or self._active or self._waiting)

    def add(self, read: TierRead) -> None:
        self._waiting.append(read)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._ready) + len(self._active) < AT_ONCE:
            self._number += 1
            bytes_ = CHUNK_BYTES * self.source.lognormvariate(0, self.noise)
            entry = self.now + self.delay_s, self._number, bytes_, self._waiting.popleft()
            heapq.heappush(self._ready, entry)

    def advance(self, until: float) -> TierRead | None:
        """Advance to the next read that ends by `until`, and return it; else to `until`."""
        while True:
            while self._ready and self._ready[0][0] <= self.now + 1e-12:
                _, _, bytes_, read = heapq.heappop(self._ready)
                self._active.append((bytes_, read))
            sharing = max(1, len(self._active)) if self.together else 1
            ends = float("inf")
            if self._active:
                least = min(left for left, _ in self._active)
                least = least if self.together else self._active[0][0]
                ends = self.now + max(0.0, least) * sharing / self.rate
            joins = self._ready[0][0] if self._ready else float("inf")
            at = min(ends, joins, until)
            sent = (at - self.now) * self.rate / sharing
            self._send(sent)
            self.now = at
            if at == ends:
                done = min(self._active, key=lambda one: one[0])
                if not self.together:
                    done = self._active[0]
                self._active.remove(done)
                self._admit()
                return done[1]
            if at == until and joins > until:
                return None

    def _send(self, sent: float) -> None:
        if self.together:
            self._active = deque((left - sent, read) for left, read in self._active)
        elif self._active:
            left, read = self._active[0]
            self._active[0] = left - sent, read


class Simulation:
    """One service with one tier, and requests whose chunks are all in it."""

    def __init__(self, store: Store, *, compares: bool, seed: int = 1) -> None:
        self.store = store
        self.compares = compares
        self.node = Node(pages=4096, tiers=[spec(chunks=1 << 14)])
        self.meter = SpeedMeter()
        self.source = random.Random(seed)
        self.begun: dict[int, Begun] = {}
        self.requests = self.switches = 0
        self.cost = self.never = self.oracle = 0.0

    @property
    def skipping(self) -> bool:
        tiers = self.node.catalog._tiers
        return tiers.index(DISK).judgements.skips(self.node.namespace.digest)

    def run(self, requests: int) -> None:
        """Serve requests one at a time, with pauses in which trials may go on."""
        for _ in range(requests):
            before = self.skipping
            self._serve(self.source.randint(8, 64))
            self.switches += before != self.skipping
            self._run_until(self.store.now + self.source.uniform(0, 1.0))

    def _serve(self, chunks: int) -> None:
        self.requests += 1
        keys = keys_of(f"request {self.requests}", chunks)
        self.node.store(keys)
        compute = COMPUTE.seconds(0, chunks)
        load = self.store.delay_s + chunks * CHUNK_BYTES / self.store.rate
        self.never += compute
        self.oracle += min(compute, load)
        began, lease_id = self.store.now, LeaseId(self.requests)
        session, price = self.node.session, COMPUTE if self.compares else None
        catalog = self.node.catalog
        catalog.tick(began)
        answer = catalog.acquire(session, lease_id, self.node.namespace.digest, keys, price=price)
        wait = Wait(session, lease_id, began, TODAY_S, chunks, price)
        if answer.promoting:
            while True:
                reading = catalog.reading(session, lease_id)
                left_s = wait.left_s(reading, self.store.now)
                if left_s <= 1e-9:
                    answer = catalog.finalize(session, lease_id)
                    break
                update = self._run_until(self.store.now + left_s, lease_id)
                if update is not None:
                    answer = update.acquisition
                    break
        ready = len(answer.chunks)
        self.cost += self.store.now - began + COMPUTE.seconds(ready, chunks)
        catalog.release(session, lease_id)

    def _run_until(self, until: float, lease_id: LeaseId | None = None) -> Update | None:
        """Let the store work until then, or until the answer of a lease."""
        catalog = self.node.catalog
        while True:
            while catalog.busy:
                catalog.work()
            actions = catalog.take_actions()
            for action in actions:
                if isinstance(action, TierRead):
                    self.begun[id(action)] = self.meter.begin(PAGE, self.store.now)
                    self.store.add(action)
            for action in actions:
                if isinstance(action, Update) and action.acquisition.lease_id == lease_id:
                    return action
            read = self.store.advance(until)
            if read is None:
                return None
            self.meter.end(PAGE, self.begun.pop(id(read)), self.store.now, ok=True)
            assert self.meter.speed is not None
            catalog.tick(self.store.now)
            catalog.tier_speed(DISK, self.meter.speed)
            catalog.tier_read_done(DISK, read.key, read.extent, checksums_of(read.key))


def both(store: Store, requests: int, speeds: Sequence[float] = ()) -> tuple[Simulation, float]:
    """Run with the comparison, and return also what today's waits cost for the same requests."""
    ours = Simulation(Store(store.rate, store.delay_s, store.noise, store.together), compares=True)
    always = Simulation(
        Store(store.rate, store.delay_s, store.noise, store.together), compares=False
    )
    for simulation in (ours, always):
        for speed in speeds or (store.rate,):
            simulation.store.rate = speed
            simulation.run(requests)
    return ours, always.cost


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rate", SPEEDS)
def test_a_steady_tier_costs_little_more_than_the_better_choice(
    rate: float, together: bool
) -> None:
    ours, always = both(Store(rate, noise=0.3, together=together), 100)
    assert ours.cost <= 1.10 * ours.oracle
    assert ours.cost <= 1.10 * min(always, ours.never)
    assert ours.switches <= 2


@pytest.mark.parametrize("together", [False, True])
def test_steps_of_the_speed_are_followed(together: bool) -> None:
    speeds = [4000 * MB, 10 * MB, 10_000 * MB, 500 * MB, 10_000 * MB, 1000 * MB]
    ours, always = both(Store(speeds[0], noise=0.3, together=together), 120, speeds)
    assert ours.cost <= 1.10 * ours.oracle
    assert ours.cost <= 1.10 * min(always, ours.never)
    assert ours.switches <= 2 * len(speeds)
