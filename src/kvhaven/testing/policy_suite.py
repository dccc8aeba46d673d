# SPDX-License-Identifier: Apache-2.0
"""Conformance suite of eviction policies: the contract of `kvhaven.catalog.policy` as tests.

To run the suite, a test module imports all names of this module and defines a fixture `make_policy`
that returns a function, which creates an empty policy.
"""

import hashlib
import random
import tracemalloc
from collections.abc import Callable, Iterable

from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.types import ChunkKey

MakePolicy = Callable[[], EvictionPolicy]


def keys_of(name: str, count: int) -> list[ChunkKey]:
    """Return `count` keys of the chain `name`."""
    return [ChunkKey(hashlib.sha256(f"{name}/{n}".encode()).digest()) for n in range(count)]


KEYS = keys_of("k", 12)


def filled(make_policy: MakePolicy, keys: Iterable[ChunkKey]) -> EvictionPolicy:
    """Return a policy to which `keys` were added."""
    policy = make_policy()
    for key in keys:
        policy.added(key)
    return policy


def test_it_proposes_exactly_what_it_was_given(make_policy: MakePolicy) -> None:
    policy, rng = make_policy(), random.Random(1)
    known = set[ChunkKey]()
    for _ in range(500):
        key = rng.choice(KEYS)
        if key not in known:
            policy.added(key)
            known.add(key)
        elif rng.random() < 0.6:
            policy.touched([key, *(known - {key})][: rng.randrange(1, 4)])
        else:
            rng.choice([policy.evicted, policy.removed])(key)
            known.discard(key)
        proposed = list(policy.candidates())
        assert len(proposed) == len(known)
        assert set(proposed) == known


def test_a_fresh_policy_is_empty_and_of_the_same_kind(make_policy: MakePolicy) -> None:
    policy = filled(make_policy, KEYS)
    fresh = policy.fresh()
    assert fresh.name == policy.name
    assert policy.name == policy.name.lower()
    assert type(fresh) is type(policy)
    assert list(fresh.candidates()) == []


def test_looking_changes_nothing(make_policy: MakePolicy) -> None:
    policy = filled(make_policy, KEYS)
    policy.touched(KEYS[3:7])
    assert list(policy.candidates()) == list(policy.candidates())


def test_a_chain_goes_from_its_tail(make_policy: MakePolicy) -> None:
    """Save a chain from its head, use all of it, then extend it."""
    policy = filled(make_policy, KEYS[:4])
    policy.arranged(KEYS[3::-1])
    assert list(policy.candidates()) == KEYS[3::-1]
    policy.touched(KEYS[3::-1])
    assert list(policy.candidates()) == KEYS[3::-1]
    for key in KEYS[4:6]:
        policy.added(key)
    policy.arranged(KEYS[5::-1])
    assert list(policy.candidates()) == KEYS[5::-1]


def test_what_was_passed_over_makes_way(make_policy: MakePolicy) -> None:
    """The policy proposes passed chunks again only after all others."""
    policy = filled(make_policy, KEYS)
    first = list(policy.candidates())
    policy.passed(first[:4])
    again = list(policy.candidates())
    assert again[:8] == first[4:]
    assert set(again[8:]) == set(first[:4])


def test_the_first_proposals_of_many_cost_next_to_nothing(make_policy: MakePolicy) -> None:
    policy = filled(make_policy, keys_of("many", 20_000))
    tracemalloc.start()
    try:
        found = next(policy.candidates())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found
    assert peak < 8000, "proposals were copied"
