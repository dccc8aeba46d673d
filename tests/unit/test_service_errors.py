# SPDX-License-Identifier: Apache-2.0
"""Errors of our own in what the service does piece by piece: each costs its own piece only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.catalog.actions import TierDelete, TierName
from kvhaven.testing.tiers import make_namespace
from kvhaven.types import ChunkKey
from tests.crash.engine import Engine, prompt
from tests.crash.node import NodeThread, eventually, settled


def failing() -> Iterator[None]:
    """Be a job of which the second piece is a bug."""
    yield
    raise RuntimeError("a bug in a job")


def test_an_error_in_a_job_or_an_action_ends_nothing_else(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with NodeThread(short_dir / "s.sock", local_disk=str(short_dir / "disk")) as node:
        service = node.service
        stranger = TierDelete(TierName("none"), make_namespace(), ChunkKey(b"?"))

        def fail() -> None:
            with service.driver.event() as catalog:
                catalog._work.start(failing())
                catalog._actions += [stranger]

        for _ in range(2):
            node.call(fail)
            eventually(lambda: node.call(lambda: service.driver.idle))
        assert caplog.text.count("a job of the catalog failed") == 2
        assert caplog.text.count("an action of the catalog failed") == 2
        assert "a bug in a job" in caplog.text
        with Engine(node.address, 1) as engine:
            keys = prompt("p", 4)
            assert engine.save(keys) == 4
            assert eventually(lambda: engine.load(keys)) == 4
            settled(node.address)
        settled(node.address, members=0)
