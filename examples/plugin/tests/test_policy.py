# SPDX-License-Identifier: Apache-2.0
"""KVHaven's conformance suite on the second-chance policy."""

import functools

import pytest

from kvhaven.catalog import policies
from kvhaven.testing.policy_suite import *  # noqa: F403 - its tests are collected here
from kvhaven.testing.policy_suite import KEYS, MakePolicy, filled


@pytest.fixture
def make_policy() -> MakePolicy:
    """Return a function that makes the policy by the name that users set in `cache_policy`."""
    return functools.partial(policies.make_policy, "second-chance")


def test_a_used_chunk_outlives_one_that_came_later(make_policy: MakePolicy) -> None:
    """Test the policy's own guarantee, besides the contract's."""
    policy = filled(make_policy, KEYS)
    policy.touched(KEYS[:1])
    assert list(policy.candidates()) == [*KEYS[1:], KEYS[0]]
