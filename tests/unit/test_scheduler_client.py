# SPDX-License-Identifier: Apache-2.0
"""Leases of a scheduler whose connection was lost."""

from kvhaven.client.scheduler import Outcome, SchedulerClient, _Question
from kvhaven.protocol import Acquired, AttachScheduler


def test_an_answer_that_comes_after_the_lease_was_released_is_no_offer() -> None:
    """The service may send it on the next connection, before it has handled the release."""
    attach = AttachScheduler(1, "engine", "member", 1, 1000)
    client = SchedulerClient("/nowhere", attach, lookup_deadline_s=1.0, promote_deadline_s=1.0)
    client._questions[7] = _Question(0.0, 1, 1.0)
    client.detached()
    client.received(Acquired(7, final=True, extents=[(0, 4096)], sources=b"\0"))
    assert client.look_up(7) is Outcome.MISS
    assert not client._questions
