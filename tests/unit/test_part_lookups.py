# SPDX-License-Identifier: Apache-2.0
"""Lookups of engines whose KV has several parts, against a real service."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvhaven.client.scheduler import LeasedChunks, Outcome, SchedulerClient
from kvhaven.config import Settings
from kvhaven.engine.lookups import Lookups
from kvhaven.engine.part_lookups import PartLookups
from kvhaven.engine.parts import FULL, KvPart, state_part
from kvhaven.engine.request_state import PartSearch, PendingLoad, RequestState
from kvhaven.engine.requests import EVERYTHING, KnownExtras, Request
from kvhaven.keys import Extras
from tests.crash.engine import CHUNK_SIZE, Engine
from tests.crash.node import NodeThread, eventually

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


def state_of(name: str, tokens: list[int], clients: Sequence[SchedulerClient]) -> RequestState:
    """Return the state of a request whose keys are known."""
    roots = [client.namespace for client in clients]
    state = RequestState(Request(name, tokens, len(tokens)), roots[0], CHUNK_SIZE, roots[1:])
    state.wanted = EVERYTHING
    state.key(KnownExtras(Extras()))
    state.extend_keys(len(tokens))
    return state


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
        state = state_of("r", tokens, clients)
        assert full.save(state.chains[0].keys) == CHUNKS
        assert window.save(state.chains[1].keys[at - 1 : at]) == 1
        lease = settled(lookups, state)
        assert isinstance(lease, LeasedChunks)
        assert len(lease.extents) == at
        assert state.search is not None
        (other,) = state.search.others
        assert other.chunks == range(at - 1, at)
        lookups.drop(state)


def test_with_recurrent_states_only_loads_with_the_same_end_are_waited_for(
    node: NodeThread,
) -> None:
    parts = (KvPart(FULL, (0,), 5), state_part((1,), 5))
    common, size = list(range(CHUNK_SIZE)), 4 * CHUNK_SIZE + 1
    tokens = [*common, *range(1000, 1000 + size - CHUNK_SIZE)]
    fork = [*common, *range(2000, 2000 + size - CHUNK_SIZE)]
    with (
        Engine(node.address, engine="full") as full,
        Engine(node.address, engine="state", model="state") as states,
    ):
        clients = (full.scheduler.client, states.scheduler.client)
        settings = Settings(promote_deadline_ms=600_000)
        first = Lookups(settings, clients[0], asynchronous=True, shared=True)
        lookups = PartLookups(settings, parts, clients, first)
        one, same, other = (
            state_of(name, one, clients)
            for name, one in (("one", tokens), ("same", tokens), ("other", fork))
        )
        assert full.save(one.chains[0].keys) == 4
        assert states.save(one.chains[1].keys[3:]) == 1
        lease = settled(lookups, one)
        assert isinstance(lease, LeasedChunks)
        assert one.search is not None
        found = PendingLoad(lease, 0, 0, size - 1, CHUNK_SIZE, others=one.search.others)
        lookups.take(one, found)
        assert lookups.lease(same) is Outcome.PENDING
        assert settled(lookups, other) is Outcome.MISS  # it would wait for ten minutes
        lookups.load_ended("one")
        assert isinstance(settled(lookups, same), LeasedChunks)
        lookups.drop(same)


@pytest.mark.parametrize("wait_ms", [60_000, 0])
def test_the_windows_of_the_largest_hit_are_no_hit_without_the_prefix(
    node: NodeThread, wait_ms: float
) -> None:
    """A smaller hit in memory is found, also without waiting for tiers."""
    tokens = list(range(CHUNKS * CHUNK_SIZE + 1))
    with (
        Engine(node.address, engine="full") as full,
        Engine(node.address, engine="window", model="window") as window,
    ):
        clients = (full.scheduler.client, window.scheduler.client)
        settings = Settings(promote_deadline_ms=wait_ms, step_budget_ms=1000)
        first = Lookups(settings, clients[0], asynchronous=True, shared=True)
        lookups = PartLookups(settings, PARTS, clients, first)
        state = state_of("r", tokens, clients)
        assert full.save(state.chains[0].keys[:9]) == 9
        assert window.save(state.chains[1].keys[8:9]) == 1
        assert window.save(state.chains[1].keys[CHUNKS - 1 :]) == 1
        lease = settled(lookups, state)
        assert isinstance(lease, LeasedChunks)
        assert (len(lease.extents), state.junction) == (9, 9)
        lookups.drop(state)
        if not wait_ms:
            return  # the rest needs the wait
        assert full.save(state.chains[0].keys[9:]) == CHUNKS - 9
        again = state_of("s", tokens, clients)
        assert lookups.lease(again) is not Outcome.PENDING  # two round trips, within the step
        assert again.search is not None
        assert (again.search.end, again.junction, again.search.located) == (CHUNKS, CHUNKS, [])
        lookups.drop(again)
        counts = node.call(node.service.accounts.tokens).values()
        assert sum(count.asked for count in counts) == 2 * len(tokens), "each counts once"


def test_without_time_to_wait_the_largest_hit_is_not_asked_for_first(node: NodeThread) -> None:
    """Its answer would not be there, and its leases would be released at once."""
    tokens = list(range(CHUNKS * CHUNK_SIZE + 1))
    with (
        Engine(node.address, engine="full") as full,
        Engine(node.address, engine="window", model="window") as window,
    ):
        clients = (full.scheduler.client, window.scheduler.client)
        settings = Settings(promote_deadline_ms=60_000, step_budget_ms=0)
        first = Lookups(settings, clients[0], asynchronous=True, shared=True)
        lookups = PartLookups(settings, PARTS, clients, first)
        state = state_of("r", tokens, clients)
        assert full.save(state.chains[0].keys) == CHUNKS
        assert window.save(state.chains[1].keys[CHUNKS - 1 :]) == 1
        assert lookups.lease(state) is Outcome.PENDING
        assert state.search is not None
        assert state.search.leases == []
        lease = settled(lookups, state)
        assert isinstance(lease, LeasedChunks)
        assert len(lease.extents) == CHUNKS
        lookups.drop(state)


def test_a_lease_that_is_refused_does_not_say_where_the_prefix_ends(node: NodeThread) -> None:
    tokens = list(range(CHUNKS * CHUNK_SIZE + 1))
    with (
        Engine(node.address, engine="full") as full,
        Engine(node.address, engine="window", model="window") as window,
    ):
        clients = (full.scheduler.client, window.scheduler.client)
        settings = Settings(promote_deadline_ms=60_000, step_budget_ms=1000)
        first = Lookups(settings, clients[0], asynchronous=True, shared=True)
        lookups = PartLookups(settings, PARTS, clients, first)
        state = state_of("r", tokens, clients)
        assert full.save(state.chains[0].keys) == CHUNKS
        assert window.save(state.chains[1].keys[CHUNKS - 1 :]) == 1
        search = state.search = PartSearch(0, CHUNKS, time.monotonic())
        lookups._lease_largest(state, search)
        assert state.junction == CHUNKS
        asked = search.leases[0]
        assert asked is not None
        clients[0].release([asked])
        search.leases[0], search.began = None, 0.0  # refused, after all patience
        leases = eventually(lambda: lookups._leased(search))
        assert leases[0] is None
        assert lookups._complete(state, search, leases) is None
        assert state.junction == CHUNKS
        lease = settled(lookups, state)
        assert isinstance(lease, LeasedChunks), "without patience, what is in memory is found"
        assert len(lease.extents) == CHUNKS
        lookups.drop(state)
