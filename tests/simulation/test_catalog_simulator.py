# SPDX-License-Identifier: Apache-2.0
"""Random histories of a whole node, from a seed.

`KVHAVEN_SEED` replays the seed of a failure, `KVHAVEN_EVENTS` sets the length. The nightly
form is one million events: `KVHAVEN_EVENTS=1000000 pytest -o timeout=0 tests/simulation`.
"""

import os
import random
from collections import Counter

import pytest

from kvhaven.catalog.policies import POLICIES
from tests.simulation.catalog_history import simulate

EVENTS = int(os.environ.get("KVHAVEN_EVENTS", "60000"))
SEED = int(os.environ.get("KVHAVEN_SEED") or random.SystemRandom().randrange(1 << 32))


WANTED = (
    "grown",
    *("hits", "loaded", "promotion done", "promotion failed", "written", "write failed"),
    *("shared promotion done", "shared promotion failed", "looked up", "lookup failed"),
    *("found", "missed", "written to disk", "written to fs", "written to s3"),
    *("resident", "waiting", "discarded", "cleared", "gone", "reconnected", "evictions"),
    *("twins", "shared", "at quota", "asked as another", "limited"),
    *("quota evictions", "quota refusals", "foreign", "prepared", "unready", "worked"),
    *("lent", "returned", "expected", "tail saved", "tail offered"),
    *("announced", "gap", "dropped unused", "unused in memory", "unused on disk"),
)
"""What the histories must have met, if they are long enough."""


def test_no_history_breaks_a_promise() -> None:
    counts = Counter[str]()
    missing: list[str] = []
    for seed in range(SEED, SEED + 5):  # a single one may miss something by chance
        try:
            counts += simulate(seed, EVENTS, audit_every=4)
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={EVENTS}")  # noqa: T201
            raise
        missing = [what for what in WANTED if not counts[what]]
        if EVENTS < 10_000 or not missing:
            return
    raise AssertionError(f"seed {SEED}: never {missing}; {counts}")


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"lru"}))
def test_no_policy_breaks_a_promise(policy: str) -> None:
    """What is kept is a policy's choice; what is promised is not."""
    events = max(1, EVENTS // 10)
    try:
        counts = simulate(SEED, events, audit_every=4, policy=policy)
    except BaseException:
        print(f"replay with KVHAVEN_SEED={SEED} KVHAVEN_EVENTS={EVENTS}")  # noqa: T201
        raise
    assert events < 5000 or counts["evictions"], f"seed {SEED}: {counts}"


def test_a_seed_replays() -> None:
    assert simulate(7, 1500, audit_every=0) == simulate(7, 1500, audit_every=0)
