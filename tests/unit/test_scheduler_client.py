# SPDX-License-Identifier: Apache-2.0
"""Answers to a scheduler's lookups that come too late, or twice."""

from pathlib import Path

import pytest

from kvhaven.catalog.actions import LeaseId, Update
from kvhaven.client.scheduler import Outcome, SchedulerClient, _Question
from kvhaven.protocol import Acquired, AttachScheduler
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeThread


def test_an_answer_that_comes_after_the_lease_was_released_is_no_offer() -> None:
    """The service may send it on the next connection, before it has handled the release."""
    attach = AttachScheduler(1, "engine", "member", 1, 1000)
    client = SchedulerClient("/nowhere", attach, lookup_deadline_s=1.0, promote_deadline_s=1.0)
    client._questions[7] = _Question(0.0, 1, 1.0)
    client.detached()
    client.received(Acquired(7, final=True, extents=[(0, 4096)], sources=b"\0"))
    assert client.look_up(7) is Outcome.MISS
    assert not client._questions


def test_a_lease_that_was_answered_at_its_deadline_is_not_answered_again(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's update may still wait for its turn when the deadline ends the wait."""
    sent: list[object] = []
    with NodeThread(short_dir / "s.sock") as node, Engine(node.address) as engine:
        keys = prompt("p", 3)
        engine.save(keys)
        lease = engine.scheduler.acquire(keys)
        assert lease is not None
        lease_id = LeaseId(lease.lease_id)

        def late() -> None:
            (engine,) = node.service.sessions
            session = engine.session
            again = node.service.catalog.finalize(session.id, lease_id)
            assert len(again.chunks) == len(keys)
            node.service.loads.updated(Update(session.id, again))

        monkeypatch.setattr(node.service.loads, "_send", lambda *answer: sent.append(answer))
        node.call(late)
        node.call(lambda: None)
        engine.scheduler.client.release([lease_id])
    assert not sent
