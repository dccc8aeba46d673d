# SPDX-License-Identifier: Apache-2.0
"""Lookups of engines whose KV has several parts, against a real service."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhaven.client.scheduler import LeasedChunks, Outcome
from kvhaven.config import Settings
from kvhaven.engine.lookups import Lookups
from kvhaven.engine.part_lookups import PartLookups
from kvhaven.engine.parts import FULL, KvPart
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.requests import EVERYTHING, KnownExtras, Request
from kvhaven.keys import Extras
from tests.crash.engine import CHUNK_SIZE, Engine
from tests.crash.node import NodeThread

CHUNKS = 17
PARTS = (KvPart(FULL, (0,), 5), KvPart("window:5", (1,), 5, 4))


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    """A service with an empty shared tier, which might have any chunk."""
    (short_dir / "shared").mkdir()
    with NodeThread(short_dir / "s.sock", remote_url=f"file://{short_dir}/shared") as node:
        yield node


def settled(lookups: PartLookups, state: RequestState) -> LeasedChunks | Outcome:
    """Look up until there is an answer."""
    while True:
        lookups.new_step()
        found = lookups.lease(state)
        if found is not Outcome.PENDING:
            return found
        time.sleep(0.005)


@pytest.mark.parametrize("at", [16, 5, 2])
def test_the_last_number_of_chunks_with_a_window_is_found_though_a_tier_might_have_others(
    node: NodeThread, at: int
) -> None:
    tokens = list(range(CHUNKS * CHUNK_SIZE + 1))
    with (
        Engine(node.address, engine="full") as full,
        Engine(node.address, engine="window", model="window") as window,
    ):
        clients = (full.scheduler.client, window.scheduler.client)
        settings = Settings(promote_deadline_ms=60_000)
        first = Lookups(settings, clients[0], asynchronous=True, shared=True)
        lookups = PartLookups(settings, PARTS, clients, first)
        request = Request("r", tokens, len(tokens))
        roots = [client.namespace for client in clients]
        state = RequestState(request, roots[0], CHUNK_SIZE, roots[1:])
        state.wanted = EVERYTHING
        state.key(KnownExtras(Extras()))
        state.extend_keys(len(tokens))
        assert full.save(state.chains[0].keys) == CHUNKS
        assert window.save(state.chains[1].keys[at - 1 : at]) == 1
        lease = settled(lookups, state)
        assert isinstance(lease, LeasedChunks)
        assert len(lease.extents) == at
        assert state.search is not None
        (other,) = state.search.others
        assert other.chunks == range(at - 1, at)
        lookups.drop(state)
