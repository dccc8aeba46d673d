# SPDX-License-Identifier: Apache-2.0
"""The simulated node again, with hypothesis choosing: what it breaks, it makes short."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvhaven import maps
from kvhaven.catalog.policies import POLICIES
from tests.simulation.catalog_node import Node


class CatalogMachine(RuleBasedStateMachine):
    """Any event at any time; the catalog audits itself after each, and the model watches."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.data: st.DataObject | None = None
        self.node = Node(self.choose, audit_every=1, policy=self.policy)
        self.events = [event for _, event in self.node.events] + self.node.rare

    def choose(self, n: int) -> int:
        """Leave a choice to hypothesis; the end of a history has nothing left to choose."""
        return self.data.draw(st.integers(0, n - 1)) if self.data is not None else 0

    @rule(data=st.data(), number=st.integers(0, 34))
    def happen(self, data: st.DataObject, number: int) -> None:
        self.data = data
        self.node.step(self.events[number % len(self.events)])
        self.data = None

    @rule(data=st.data())
    def save_and_load(self, data: st.DataObject) -> None:
        """A path that random events alone rarely find in a short history."""
        self.data = data
        engines, saving = self.node.engines, self.node.saving
        ready = (engines.start, engines.prepare, engines.prepare)
        for event in (*ready, saving.plan_save, saving.reserve, saving.write):
            self.node.step(event)
        for event in (saving.write, engines.acquire, engines.dispatch):
            self.node.step(event)
        self.data = None

    def teardown(self) -> None:
        """Whatever happened: when everybody is gone, nothing is left."""
        self.node.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_happens_nothing_is_wrong(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "PAGE", 4)
    run_state_machine_as_test(
        type(policy, (CatalogMachine,), {"policy": policy}),
        settings=settings(
            max_examples=30 if policy == "lru" else 8,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
