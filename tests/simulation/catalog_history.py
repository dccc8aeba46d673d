# SPDX-License-Identifier: Apache-2.0
"""A random history of a whole simulated node, from a seed."""

import random
from collections import Counter

import pytest

from kvhaven import maps
from kvhaven.catalog import local_index, tails
from tests.simulation.catalog_node import Node


def simulate(seed: int, events: int, audit_every: int, policy: str = "lru") -> Counter[str]:
    """Run one history and return how often what happened.

    Mappings part what is a few dozens of chunks here, as they do with thousands, and tails grow old
    within some hundred events.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "PAGE", 4)
        patch.setattr(tails, "KEEP_S", 4.0)
        patch.setattr(local_index, "DIVISION_S", 2.0)
        return _simulate(seed, events, audit_every, policy)


def _simulate(seed: int, events: int, audit_every: int, policy: str) -> Counter[str]:
    rng = random.Random(seed)
    node = Node(lambda n: int(rng.random() * n), audit_every, policy)
    weights = [weight for weight, _ in node.events]
    methods = [method for _, method in node.events]
    for number, event in enumerate(rng.choices(methods, weights, k=events)):
        node.step(event)
        if number % 2000 == 1999:
            node.step(rng.choice(node.rare))
    node.finish()
    stats = node.world.catalog.stats()
    node.world.counts["evictions"] = stats.evictions
    node.world.counts["quota evictions"] = stats.quota_evictions
    node.world.counts["quota refusals"] = stats.quota_refusals
    node.world.counts["foreign"] = stats.foreign
    return node.world.counts
