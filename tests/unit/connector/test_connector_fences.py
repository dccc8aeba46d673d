# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: fences, resets, failed loads, and what routers are told."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.v1.request import Request

from kvhaven.config import Settings
from kvhaven.engine import save_planner as saves_module
from kvhaven.engine.jobs import SaveJob, StepPlan, StepReport
from kvhaven.engine.parts import KvPart
from kvhaven.engine.request_state import RequestState
from kvhaven.engine.requests import EVERYTHING, KnownExtras
from kvhaven.engine.save_planner import SavePlanner
from kvhaven.errors import KVHavenError
from kvhaven.integrations.vllm.requests import VllmRequest, held_blocks
from kvhaven.keys import Extras
from tests.simulation.connector_kit import (
    BLOCK,
    CHUNK,
    Bench,
    VllmSide,
    ask,
    make_request,
    report,
    run_new,
    saved_chunks,
    scheduled,
)
from tests.simulation.node import Node

pytestmark = pytest.mark.slow


# --- fences -------------------------------------------------------------------------------------


def test_a_save_is_fenced_when_one_of_its_blocks_is_given_away(bench: Bench) -> None:
    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    side.finished(request)
    assert run_new(side, make_request(8, "other"), 8, blocks=[90, 91]).fence == []
    assert run_new(side, make_request(4, "next"), 4, blocks=[5]).fence == [job.id]
    assert run_new(side, make_request(4, "last"), 4, blocks=[5]).fence == []


def test_blocks_that_are_shared_and_not_written_are_not_fenced(bench: Bench) -> None:
    side, request = bench.side(), make_request(32)
    run_new(side, request, 32)
    sharing = make_request(40, "sharing")
    plan = run_new(side, sharing, 8, computed=32, blocks=range(10))
    assert plan.fence == []


def test_a_block_that_returns_in_another_group_is_fenced() -> None:
    """The KV groups of an engine share one pool of block ids."""
    settings = Settings(chunk_size=CHUNK)
    saves = SavePlanner(settings, [BLOCK, BLOCK], 1)
    request = make_request(32)
    state = RequestState(VllmRequest(request), bytes(32), CHUNK)
    state.wanted = EVERYTHING
    state.key(KnownExtras(Extras()))
    state.replace_blocks([list(range(8)), list(range(20, 28))])
    jobs = saves.plan(state, 32)
    saves.take_fence(jobs)
    saves.note_new([[40], [5]])
    assert saves.take_fence([]) == [job.id for job in jobs]
    saves.note_new([[41], [6]])
    assert saves.take_fence([]) == [], "one fence is enough"


def test_a_plan_that_fails_midway_leaves_its_chunks_to_other_requests() -> None:
    """The blocks of one part are unknown: no rank will run, or report, the jobs of the others."""
    parts = (KvPart("full", (0,), BLOCK), KvPart("window:9", (1,), BLOCK, 8))
    saves = SavePlanner(Settings(chunk_size=CHUNK), [BLOCK, BLOCK], 1, parts=parts)

    def planned(windows: int) -> list[SaveJob]:
        request = make_request(32)
        state = RequestState(VllmRequest(request), bytes(32), CHUNK, [bytes([1]) * 32])
        state.wanted = EVERYTHING
        state.key(KnownExtras(Extras()))
        state.replace_blocks([list(range(1, 9)), list(range(20, 20 + windows))])
        return saves.plan(state, 32)

    with pytest.raises(KVHavenError, match="block ids of chunk"):
        planned(7)
    assert [(job.part, len(job.keys)) for job in planned(8)] == [(0, 32 // CHUNK), (1, 2)]


def test_blocks_of_requests_that_are_not_followed_are_fenced_too(bench: Bench) -> None:
    import torch

    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    embedded = make_request(8, "e", prompt_embeds=torch.zeros(8, 4))
    side._states.pop("e", None)
    assert side.plan_step(scheduled(new=[(embedded, [3, 40], 0, 8)])).fence == [job.id]


def test_blocks_that_another_connector_loads_into_are_fenced(bench: Bench) -> None:
    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    other = make_request(32, "other")
    ask(side, other)
    side.allocated(other, ([2, 60, 61, 62, 63, 64, 65, 66],), 0)
    assert side.plan_step(scheduled()).fence == [job.id]


def test_blocks_that_are_loaded_into_are_fenced_in_the_step_of_the_load(bench: Bench) -> None:
    side, request = bench.side(asynchronous=True), make_request(32)
    (job,) = run_new(side, request, 32).saves
    loading = make_request(range(100, 140), "loading")
    bench.fill(loading)
    tokens, _ = ask(side, loading)
    side.allocated(loading, ([50, 51, 52, 53, 54, 3, 55, 56, 57, 58],), tokens)
    plan = side.plan_step(scheduled())
    assert plan.fence == [job.id]
    assert len(plan.loads) == 1


def test_reported_saves_need_no_fence(bench: Bench) -> None:
    side, request = bench.side(), make_request(32)
    report(side, run_new(side, request, 32))
    assert run_new(side, make_request(4, "next"), 4, blocks=[5]).fence == []


def test_a_save_ends_when_all_ranks_have_reported_it(node: Node) -> None:
    bench = Bench(node, world_size=2)
    side, request = bench.side(), make_request(32)
    plan = run_new(side, request, 32)
    (job,) = plan.saves
    report(side, plan)
    assert side._saves.under_way == 1
    assert run_new(side, make_request(4, "next"), 4, blocks=[5]).fence == [job.id]
    report(side, plan)
    assert side._saves.under_way == 0
    bench.close()


def test_saves_that_nobody_reports_are_forgotten_but_stay_fenced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-gaudi's runner loses the ranks' reports."""
    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    monkeypatch.setattr(saves_module, "_REPORT_S", 0.0)
    time.sleep(0.01)
    side.plan_step(scheduled())
    assert side._saves.under_way == 0
    assert not side._saves._saving
    plan = run_new(side, make_request(32, "again"), 32, blocks=range(4, 12))
    assert plan.fence == [job.id]
    assert saved_chunks(plan) == 2


def test_a_step_that_cannot_be_planned_fences_everything_and_keeps_loads(bench: Bench) -> None:
    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    loading = make_request(range(100, 140), "loading")
    bench.fill(loading)
    tokens, _ = ask(side, loading)
    side.allocated(loading, (list(range(20, 30)),), tokens)
    plan = side.plan_in_doubt()
    assert plan.fence == [job.id]
    assert [load.request_id for load in plan.loads] == ["loading"]
    assert plan.saves == []


# --- resets and failures ------------------------------------------------------------------------


class Block:
    """One of the engine's blocks, as far as a reset looks at it."""

    def __init__(self, block_id: int, *, used: bool) -> None:
        self.block_id = block_id
        self.ref_cnt = int(used)
        self.block_hash = None


class Pool:
    def __init__(self, used: Sequence[int]) -> None:
        self.blocks = [Block(number, used=number in used) for number in range(100)]


def bind(side: VllmSide, pool: Any) -> None:
    side.held_blocks = lambda: held_blocks(pool)


def test_after_a_reset_nothing_cached_before_is_found(bench: Bench) -> None:
    side, request = bench.side(), make_request(40)
    bench.fill(request)
    assert ask(side, request) == (32, False)
    side.reset()
    assert ask(side, request) == (0, False)
    assert ask(side, make_request(40, "new")) == (0, False)
    assert bench.leases() == 0


BOUND = pytest.mark.parametrize("bound", [True, False], ids=["pool", "no-pool"])
"""A scheduler that does not give its block pool leaves all blocks in doubt, until written anew."""


@BOUND
def test_what_is_found_in_a_cache_in_doubt_is_not_saved(bench: Bench, *, bound: bool) -> None:
    side, running = bench.side(), make_request(48, "running")
    run_new(side, running, 20, blocks=range(12))
    if bound:
        bind(side, Pool(range(16)))
    # It was scheduled with a new block; another one was preempted in the same step.
    output = scheduled(cached=[(running, [12], 20, 28)])
    assert saved_chunks(side.plan_step(output, cache_in_doubt=True)) == 2
    hitting = make_request(range(100, 164), "hitting")
    plan = run_new(side, hitting, 32, computed=32, blocks=[*range(4, 12), *range(20, 28)])
    assert saved_chunks(plan) == 0
    fresh = make_request(range(300, 332), "fresh")
    assert saved_chunks(run_new(side, fresh, 32, blocks=range(8))) == 2
    again = make_request(range(300, 364), "again")
    plan = run_new(side, again, 32, computed=32, blocks=[*range(8), *range(30, 38)])
    assert saved_chunks(plan) == 2  # the others are being saved already


def test_where_all_blocks_are_in_doubt_kv_that_is_loaded_is_trusted(bench: Bench) -> None:
    side, before = bench.side(), make_request(40, "before")
    run_new(side, before, 40)
    side.reported(StepReport(failed_loads={0: 1}), ())
    loading = make_request(range(100, 140), "loading")
    bench.fill(loading)
    tokens, _ = ask(side, loading)
    assert tokens
    side.allocated(loading, ([*range(20, 30)],), tokens)
    side.plan_step(scheduled())
    side.reported(StepReport(), ("loading",))
    sharing = make_request([*range(100, 132), *range(300, 332)], "sharing")
    plan = run_new(side, sharing, 32, computed=32, blocks=[*range(20, 28), *range(40, 48)])
    assert saved_chunks(plan) >= 2
    found = make_request([*range(32), *range(400, 432)], "found")
    plan = run_new(side, found, 32, computed=32, blocks=[*range(8), *range(50, 58)])
    assert saved_chunks(plan) == 0


@pytest.mark.parametrize("found", [True, False])
def test_a_block_of_any_group_that_is_in_doubt_is_enough(bench: Bench, *, found: bool) -> None:
    """VLLM may find a block of one group that was never computed beside good ones of the others."""
    side = bench.side(groups=2)
    fresh, hitting = make_request(range(200, 264), "fresh"), make_request(64, "hitting")
    side.plan_step(scheduled(), cache_in_doubt=True)
    anew = [90 if found else 60, *range(61, 76)]
    for request, second, computed in ((fresh, anew, 0), (hitting, [*range(60, 76)], 32)):
        ask(side, request, computed)
        blocks = ([*range(16)], second)
        side.allocated(request, blocks, 0)
        output = scheduled(new=[(request, [], computed, 64 - computed)])
        output.scheduled_new_reqs[0].block_ids = blocks
        plan = side.plan_step(output)
    assert saved_chunks(plan) == (0 if found else 4)


def test_a_preemption_costs_no_walk_of_the_engines_blocks(bench: Bench) -> None:
    """A walk of 250,000 blocks took 26 ms, and such steps come often when memory is short."""
    side = bench.side()
    bind(side, object())  # has no blocks
    side.plan_step(scheduled(), cache_in_doubt=True)
    assert saved_chunks(run_new(side, make_request(40), 40)) == 2


def load_elsewhere(side: VllmSide, request: Request, blocks: Sequence[int]) -> StepPlan:
    """Have another connector load a request's first 32 tokens between steps; then it runs."""
    ask(side, request)
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, (list(blocks),), 0)
    side.plan_step(scheduled())
    side.reported(None, [request.request_id])
    return side.plan_step(scheduled(new=[(request, blocks, 32, request.num_tokens - 32)]))


def test_kv_that_another_connector_loads_is_saved_until_any_was_in_doubt(bench: Bench) -> None:
    """It may have stored that KV, and identifies adapters, for one, by their names alone."""
    side = bench.side()
    bind(side, Pool(range(16)))
    before, after = make_request(48, "before"), make_request(range(100, 148), "after")
    assert saved_chunks(load_elsewhere(side, before, range(20, 32))) == 3
    side.reported(StepReport(failed_loads={0: 1}), ())
    assert saved_chunks(load_elsewhere(side, after, range(40, 52))) == 0
    # Others find its blocks, or compute everything.
    hitting = make_request([*range(100, 132), *range(16)], "hitting")
    plan = run_new(side, hitting, 16, computed=32, blocks=[*range(40, 48), *range(60, 64)])
    assert saved_chunks(plan) == 0
    assert saved_chunks(run_new(side, make_request(range(300, 348)), 48)) == 3


def test_kv_from_another_store_is_not_saved(bench: Bench) -> None:
    side = bench.side(beside_stores=True)
    loads, computes = make_request(48, "loads"), make_request(range(100, 148), "computes")
    assert saved_chunks(load_elsewhere(side, loads, range(20, 32))) == 0
    assert saved_chunks(run_new(side, computes, 48, blocks=range(40, 52))) == 3


@BOUND
def test_what_is_computed_from_old_kv_is_not_saved_in_the_new_epoch(
    bench: Bench, *, bound: bool
) -> None:
    side, running = bench.side(), make_request(48, "running")
    run_new(side, running, 20, blocks=range(12))
    if bound:
        bind(side, Pool(range(12)))
    side.reset()
    # It goes on, with old KV and a new block.
    plan = side.plan_step(scheduled(cached=[(running, [12], 20, 28)]))
    assert saved_chunks(plan) == 0
    # Another hits its blocks in the engine's cache.
    hitting = make_request(64, "hitting")
    plan = run_new(side, hitting, 32, computed=32, blocks=[*range(8), *range(20, 28)])
    assert saved_chunks(plan) == 0
    # A block that is written anew is of the new epoch, also one of those.
    fresh = make_request(range(300, 332), "fresh")
    assert saved_chunks(run_new(side, fresh, 32, blocks=range(8))) == 2
    after = make_request([*range(300, 332), *range(16)], "after")
    plan = run_new(side, after, 16, computed=32, blocks=[*range(8), *range(30, 34)])
    assert saved_chunks(plan) == 1


@pytest.mark.parametrize("in_place", [True, False], ids=["state", "kv-of-tokens"])
def test_a_session_that_goes_on_from_a_state_is_not_saved_nor_what_finds_its_blocks(
    bench: Bench, *, in_place: bool
) -> None:
    """The token after the turn's last one was computed, and dropped; 31 tokens are left.

    KV of dropped tokens is written anew; a state that has them stays as it is.
    """
    part = KvPart("full", (0,), BLOCK, is_state=in_place)
    side = bench.side(save_decode_cache=True, parts=[part])
    session = make_request(31, "session", resumable=True)
    assert saved_chunks(run_new(side, session, 31, blocks=range(8))) == 1
    session._all_token_ids.extend(range(200, 217))
    session.num_prompt_tokens = session.num_tokens
    session.arrival_time += 1
    plan = side.plan_step(scheduled(new=[(session, range(12), 31, 17)]))
    assert saved_chunks(plan) == (0 if in_place else 2)
    more = side.plan_step(scheduled(cached=[(session, range(12, 16), 48, 1)]))
    assert saved_chunks(more) == 0
    # Others find all its blocks in the engine's cache, or those of its first turn only.
    ids = session._all_token_ids
    hitting = make_request([*ids[:48], *range(300, 316)], "hitting")
    plan = run_new(side, hitting, 16, computed=48, blocks=[*range(12), *range(20, 24)])
    assert saved_chunks(plan) == (0 if in_place else 1)
    beside = make_request([*ids[:16], *range(400, 416)], "beside")
    plan = run_new(side, beside, 16, computed=16, blocks=[*range(4), *range(30, 34)])
    assert saved_chunks(plan) == 1
    # Recomputed from what is right, the session is saved again.
    ask(side, session, 16)
    side.allocated(session, (list(range(4)) + list(range(40, 52)),), 0)
    blocks = [*range(4), *range(40, 52)]
    output = scheduled(new=[(session, blocks, 16, 32)], resumed=["session"])
    assert saved_chunks(side.plan_step(output)) == (2 if in_place else 0)


def test_a_failed_load_stops_the_saves_of_all_that_ran_then(bench: Bench) -> None:
    side = bench.side()
    before, later = make_request(40, "before"), make_request(range(100, 140), "later")
    ask(side, before)
    side.reported(StepReport(failed_loads={0: 1}), ())
    plan = side.plan_step(scheduled(new=[(before, range(10), 0, 40)]))
    assert plan.saves == []
    assert plan.failed_loads == {0: 1}
    side.reset()
    assert saved_chunks(run_new(side, before, 40)) == 0
    side.reported(StepReport(failed_loads={0: 1}), ())
    plan = run_new(side, later, 40, blocks=range(10, 20))
    assert saved_chunks(plan) == 2


def test_what_a_failed_load_left_in_the_engines_cache_is_not_saved(bench: Bench) -> None:
    """Its request is over: then vLLM does not drop the blocks."""
    side, failed = bench.side(), make_request(40, "failed")
    plan = run_new(side, failed, 40)
    side.finished(failed)
    bind(side, Pool(range(10)))
    (job,) = plan.saves
    side.reported(StepReport({job.id: 1}, {job.id: {0, 1}}, failed_loads={0: 1}), ())
    sharing = make_request(40, "sharing")
    plan = run_new(side, sharing, 8, computed=32, blocks=[*range(8), 20, 21])
    assert plan.failed_loads == {0: 1}
    assert saved_chunks(plan) == 0


def test_what_was_written_before_a_failed_load_was_planned_is_saved_on(bench: Bench) -> None:
    """A system prompt that is hit all the time is never evicted: its requests are cached on."""
    side, hot, loading = bench.side(), make_request(40, "hot"), make_request(range(100, 140), "l")
    run_new(side, hot, 40)
    side.finished(hot)
    bench.fill(loading)
    tokens, _ = ask(side, loading)
    assert tokens
    side.allocated(loading, ([*range(20, 30)],), tokens)
    side.plan_step(scheduled())
    beside = make_request(range(200, 240), "beside")
    run_new(side, beside, 40, blocks=range(40, 50))
    side.finished(beside)
    bind(side, Pool(range(50)))
    side.reported(StepReport(failed_loads={0: 1}), ("l",))
    doubtful = make_request(range(200, 264), "doubtful")
    blocks = [*range(40, 48), *range(60, 68)]
    assert saved_chunks(run_new(side, doubtful, 32, computed=32, blocks=blocks)) == 0
    for number in range(3):
        follows = make_request([*range(32), *range(300 + number, 332 + number)], f"{number}")
        blocks = [*range(8), *range(70 + 8 * number, 78 + 8 * number)]
        assert saved_chunks(run_new(side, follows, 32, computed=32, blocks=blocks)) >= 2


def test_after_an_error_in_planning_a_step_what_it_wrote_is_not_saved(bench: Bench) -> None:
    """A request with KV of the old epoch got new blocks in that step, which was not noted."""
    side, old = bench.side(), make_request(40, "old")
    run_new(side, old, 20, blocks=range(5))
    bind(side, Pool(range(5)))
    side.reset()
    bind(side, Pool(range(10)))
    side.doubt()  # as after an error in `plan_step`
    side.plan_in_doubt()
    side.finished(old)
    sharing = make_request(40, "sharing")
    plan = run_new(side, sharing, 8, computed=32, blocks=[20, 21, 22, 23, 5, 6, 7, 8, 24, 25])
    assert saved_chunks(plan) == 0


def test_where_the_engines_blocks_cannot_be_read_a_doubt_ends_caching(bench: Bench) -> None:
    side = bench.side()
    bind(side, object())
    side.doubt()
    side.plan_in_doubt()
    assert saved_chunks(run_new(side, make_request(40, "later"), 40)) == 0


# --- events -------------------------------------------------------------------------------------


def test_routers_hear_of_chunks_when_all_ranks_wrote_them(bench: Bench) -> None:
    side, request = bench.side(events=True), make_request(50, cache_salt="s")
    plan = run_new(side, request, 50)
    assert list(side.take_events()) == []
    report(side, plan)
    (event,) = side.take_events()
    keys = bench.keys(request)
    assert event.block_hashes == keys
    assert event.parent_block_hash is None
    assert event.token_ids == list(range(48))
    assert event.block_size == CHUNK
    assert event.medium == "CPU"
    assert event.extra_keys == [("s",), None, None]
    assert list(side.take_events()) == []


def test_routers_do_not_hear_of_chunks_that_a_rank_did_not_write(bench: Bench) -> None:
    side, request = bench.side(events=True), make_request(50)
    plan = run_new(side, request, 50)
    (job,) = plan.saves
    side.reported(StepReport({job.id: 1}, {job.id: {1}}), ())
    first, second = side.take_events()
    keys = bench.keys(request)
    assert (first.block_hashes, first.parent_block_hash) == ([keys[0]], None)
    assert (second.block_hashes, second.parent_block_hash) == ([keys[2]], keys[1])


def test_without_the_setting_there_are_no_events(bench: Bench) -> None:
    side, request = bench.side(events=False), make_request(50)
    report(side, run_new(side, request, 50))
    assert list(side.take_events()) == []


def test_events_can_be_published(bench: Bench) -> None:
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    side, request = bench.side(events=True), make_request(50)
    report(side, run_new(side, request, 50))
    batch = KVEventBatch(ts=1.0, events=list(side.take_events()))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
    assert decoded.events[0].block_hashes == bench.keys(request)
