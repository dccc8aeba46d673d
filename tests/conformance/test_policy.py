# SPDX-License-Identifier: Apache-2.0
"""The contract of eviction policies (`catalog/policy.py`), for every policy there is.

Each is compared with a reference that says the same in a sentence or two: lists that are sorted
or searched from end to end for every answer.
"""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvhaven.catalog.policies import POLICIES
from kvhaven.catalog.policy import EvictionPolicy
from kvhaven.testing.policy_suite import *  # noqa: F403 - its tests are collected here
from kvhaven.testing.policy_suite import KEYS, MakePolicy, filled, keys_of
from kvhaven.types import ChunkKey

EVERY_POLICY = pytest.mark.parametrize("name", POLICIES)


@pytest.fixture(params=POLICIES)
def make_policy(request: pytest.FixtureRequest) -> MakePolicy:
    """Return what makes each policy in turn."""
    return POLICIES[request.param]


class Reference:
    """What is here in the order of its last event, with its uses; subclasses sort."""

    most_uses = 1 << 30
    touch_is_an_event = True

    def __init__(self) -> None:
        self.order: list[ChunkKey] = []
        self.uses: dict[ChunkKey, int] = {}

    def added(self, key: ChunkKey) -> None:
        self.order.append(key)
        self.uses[key] = 0

    def touched(self, keys: Iterable[ChunkKey]) -> None:
        keys = list(keys)
        for key in keys:
            self.uses[key] = min(self.uses[key] + 1, self.most_uses)
        if self.touch_is_an_event:
            self.arranged(keys)

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.order.remove(key)
            self.order.append(key)

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        self.touched(keys)

    def evicted(self, key: ChunkKey) -> None:
        self.removed(key)

    def removed(self, key: ChunkKey) -> None:
        self.order.remove(key)
        del self.uses[key]

    def proposed(self) -> list[ChunkKey]:
        return self.order


class LRUReference(Reference):
    """The oldest event first."""


class LFUReference(Reference):
    """The fewest uses first, then the oldest event."""

    most_uses = 63

    def proposed(self) -> list[ChunkKey]:
        return sorted(self.order, key=lambda key: self.uses[key])


class FIFOReference(Reference):
    """The oldest event first; touches are none."""

    touch_is_an_event = False

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        self.arranged(keys)


class MRUReference(Reference):
    """The latest event first; a chain's tail counts as later than its head."""

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        super().arranged(list(keys)[::-1])

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self.order.remove(key)
            self.order.insert(0, key)

    def proposed(self) -> list[ChunkKey]:
        return self.order[::-1]


class S3FIFOReference(Reference):
    """Two lists and the ghosts; the algorithm of the paper, with our order of what comes last."""

    most_uses = 3
    touch_is_an_event = False

    def __init__(self) -> None:
        super().__init__()
        self.main: list[ChunkKey] = []
        self.ghosts: list[ChunkKey] = []

    def added(self, key: ChunkKey) -> None:
        self.uses[key] = 0
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.order.append(key)

    def arranged(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            queue = self.order if key in self.order else self.main
            queue.remove(key)
            queue.append(key)

    def passed(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            (self.order if key in self.order else self.main).remove(key)
            self.main.append(key)
            self.uses[key] = min(self.uses[key] + 1, self.most_uses)

    def evicted(self, key: ChunkKey) -> None:
        if key in self.order:
            self.ghosts.append(key)
        self.removed(key)
        while self.uses:
            queue = self.order if self.too_many() > 0 else self.main
            first = queue[0] if queue else None
            if first is None or not self.uses[first]:
                break
            del queue[0]
            self.uses[first] = 0 if queue is self.order else self.uses[first] - 1
            self.main.append(first)

    def removed(self, key: ChunkKey) -> None:
        (self.order if key in self.order else self.main).remove(key)
        del self.uses[key]
        self.drop_ghosts()

    def drop_ghosts(self) -> None:
        self.ghosts = self.ghosts[max(0, len(self.ghosts) - len(self.uses)) :]

    def too_many(self) -> int:
        return len(self.order) - len(self.uses) // 2

    def proposed(self) -> list[ChunkKey]:
        new = [key for key in self.order if not self.uses[key]]
        excess = max(0, self.too_many())
        main = [key for key in self.main if not self.uses[key]]
        used = [key for key in self.order + self.main if self.uses[key]]
        return new[:excess] + main + new[excess:] + used


REFERENCES: dict[str, Callable[[], Reference]] = {
    "lru": LRUReference,
    "lfu": LFUReference,
    "fifo": FIFOReference,
    "mru": MRUReference,
    "s3-fifo": S3FIFOReference,
}


class PolicyMachine(RuleBasedStateMachine):
    """Any calls that the contract allows; after each, the proposals are the reference's."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy: EvictionPolicy = POLICIES[self.name]()
        self.reference = REFERENCES[self.name]()

    @property
    def known(self) -> list[ChunkKey]:
        return sorted(self.reference.uses)

    @precondition(lambda self: len(self.known) < len(KEYS))
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(KEYS) - set(self.known))))
        self.policy.added(key)
        self.reference.added(key)

    @rule(data=st.data(), call=st.sampled_from(["touched", "arranged"]))
    def use(self, data: st.DataObject, call: str) -> None:
        keys = data.draw(st.permutations(self.known))
        keys = keys[: data.draw(st.integers(0, len(keys)))]
        getattr(self.policy, call)(iter(keys))
        getattr(self.reference, call)(keys)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def search(self, data: st.DataObject) -> None:
        """Take some of what is proposed and pass over the rest, as the catalog does."""
        taken: list[ChunkKey] = []
        passed: list[ChunkKey] = []
        for key in self.policy.candidates():
            (taken if data.draw(st.booleans()) else passed).append(key)
            if len(taken) == 2:
                break
        for key in taken:
            self.policy.evicted(key)
            self.reference.evicted(key)
        if taken:
            self.policy.passed(passed)
            self.reference.passed(passed)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.known))
        self.policy.removed(key)
        self.reference.removed(key)

    @invariant()
    def proposals_are_those_of_the_reference(self) -> None:
        assert list(self.policy.candidates()) == self.reference.proposed()


@EVERY_POLICY
def test_it_proposes_what_its_reference_does(name: str) -> None:
    machine = type(name, (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40))


def test_what_is_read_once_does_not_push_out_what_is_used() -> None:
    """The point of S3-FIFO: LRU would have nothing left."""
    used, scan = keys_of("used", 20), keys_of("scan", 1000)
    left = {}
    for name in ("lru", "s3-fifo"):
        policy = filled(POLICIES[name], used)
        policy.touched(used)
        known = set(used)
        for key in scan:
            if len(known) == 100:
                victim = next(policy.candidates())
                policy.evicted(victim)
                known.remove(victim)
            policy.added(key)
            known.add(key)
        left[name] = len(known & set(used))
    assert left == {"lru": 0, "s3-fifo": 20}


def test_a_ghost_that_comes_again_counts_as_used() -> None:
    policy = filled(POLICIES["s3-fifo"], KEYS)
    first = next(policy.candidates())
    policy.evicted(first)
    policy.added(first)
    assert list(policy.candidates())[5] == first, "it is behind what is too much in the first queue"


def test_every_policy_has_a_reference() -> None:
    assert REFERENCES.keys() == POLICIES.keys()
