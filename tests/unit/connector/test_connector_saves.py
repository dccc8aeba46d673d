# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which chunks are saved, what is fenced, and what routers are told."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import StreamingUpdate

from kvhaven.keys import tenant_id
from kvhaven.types import ChunkKey
from tests.simulation.connector_kit import (
    BLOCK,
    Bench,
    admit,
    ask,
    make_request,
    run_new,
    saved_chunks,
    scheduled,
)

pytestmark = pytest.mark.slow


def test_a_chunk_is_saved_in_the_step_that_completes_it(bench: Bench) -> None:
    side, request = bench.side(), make_request(40)
    plan = run_new(side, request, 15)
    assert saved_chunks(plan) == 0
    plan = side.plan_step(scheduled(cached=[(request, None, 15, 1)]))
    (job,) = plan.saves
    assert job.keys == tuple(bench.keys(request)[:1])
    assert job.parent is None
    assert job.blocks == (((0, 1, 2, 3),),)
    plan = side.plan_step(scheduled(cached=[(request, None, 16, 24)]))
    assert plan.saves[0].parent == bench.keys(request)[0]


@pytest.mark.parametrize("decode", [False, True])
def test_generated_tokens_are_saved_only_when_that_is_asked_for(
    bench: Bench, *, decode: bool
) -> None:
    side, request = bench.side(save_decode_cache=decode), make_request(30)
    run_new(side, request, 30)
    request.append_output_token_ids([1, 2])
    plan = side.plan_step(scheduled(cached=[(request, None, 30, 2)]))
    assert saved_chunks(plan) == int(decode)


def test_speculative_and_unsampled_tokens_are_not_saved(bench: Bench) -> None:
    """Three drafts and a placeholder are scheduled beyond the 31 tokens that are known."""
    side, request = bench.side(save_decode_cache=True), make_request(30)
    run_new(side, request, 30)
    request.append_output_token_ids([1])
    assert saved_chunks(side.plan_step(scheduled(cached=[(request, None, 30, 4)]))) == 0
    request.append_output_token_ids([2])
    assert saved_chunks(side.plan_step(scheduled(cached=[(request, None, 34, 4)]))) == 1


def test_loaded_chunks_are_not_saved_again(bench: Bench) -> None:
    side, request = bench.side(), make_request(64)
    bench.fill(request, 2)
    tokens, _ = ask(side, request)
    assert tokens == 32
    admit(side, request, tokens, range(16))
    plan = side.plan_step(scheduled(new=[(request, range(16), 32, 32)]))
    assert [job.keys for job in plan.saves] == [tuple(bench.keys(request)[2:4])]


def test_two_requests_with_one_prefix_in_a_step_save_it_once(bench: Bench) -> None:
    side = bench.side()
    first, second = make_request(40, "a"), make_request(40, "b")
    for request in (first, second):
        ask(side, request)
        side.allocated(request, (list(range(10)),), 0)
    plan = side.plan_step(
        scheduled(new=[(first, range(10), 0, 40), (second, range(10, 20), 0, 40)])
    )
    assert saved_chunks(plan) == 2
    assert len({key for job in plan.saves for key in job.keys}) == 2


def test_a_preempted_request_goes_on_saving_where_it_stopped_with_its_new_blocks(
    bench: Bench,
) -> None:
    side, request = bench.side(), make_request(48)
    plan = run_new(side, request, 20)
    assert saved_chunks(plan) == 1
    ask(side, request)
    side.allocated(request, (list(range(50, 62)),), 0)
    plan = side.plan_step(
        scheduled(cached=[(request, range(50, 62), 0, 48)], resumed=[request.request_id])
    )
    (job,) = plan.saves
    assert job.keys == tuple(bench.keys(request)[1:3])
    assert job.blocks == (((54, 55, 56, 57), (58, 59, 60, 61)),)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"force_skip_save": True}, {}),
        ({"priority_limit": 5}, {"priority": 6}),
        ({}, {"params": {"lmcache.skip_save": True}}),
        ({}, {"params": {"kvhaven.skip_save": "true"}}),
        ({}, {"params": {"kvhaven.skip_save": True, "lmcache.skip_save": False}}),
    ],
)
def test_what_shall_not_be_saved_is_not_but_is_loaded(
    bench: Bench, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    side, request = bench.side(**settings), make_request(40, **more)
    bench.fill(request, 1)
    assert ask(side, request) == (16, False)
    assert saved_chunks(side.plan_step(scheduled(new=[(request, range(10), 16, 24)]))) == 0


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"priority_limit": 5}, {"priority": 5}),
        ({}, {"params": {"lmcache.skip_save": False}}),
        ({}, {"params": {"kvhaven.skip_save": "false"}}),
        ({}, {"params": {"other.skip_save": True}}),
    ],
)
def test_what_may_be_saved_is(bench: Bench, settings: dict[str, Any], more: dict[str, Any]) -> None:
    plan = run_new(bench.side(**settings), make_request(40, **more), 40)
    assert saved_chunks(plan) == 2


def test_tags_label_the_statistics(bench: Bench) -> None:
    side = bench.side()
    request = make_request(40, params={"lmcache.tags": ["team-a", "chat"]})
    bench.fill(request)
    ask(side, request)
    taken = side.stats.take()
    assert taken["tag:team-a:hit_tokens"] == 32
    assert taken["tag:chat:looked_up_tokens"] == 40


def test_salts_give_other_keys(bench: Bench) -> None:
    side = bench.side()
    keys: set[tuple[ChunkKey, ...]] = set()
    for salt in ("", "one", "two"):
        plan = run_new(side, make_request(40, f"r{salt}", cache_salt=salt), 40)
        assert saved_chunks(plan) == 2
        keys.update(job.keys for job in plan.saves)
        assert {job.tenant for job in plan.saves} == {tenant_id(salt)}
    assert len(keys) == 3


def test_a_request_is_asked_for_as_its_tenants(bench: Bench) -> None:
    side = bench.side()
    request, other = make_request(40, cache_salt="ann"), make_request(40, "b", cache_salt="ben")
    bench.fill(request)
    bench.fill(other, salt="ann")  # the right keys, but somebody else's
    assert ask(side, request)[0] == 32
    assert ask(side, other)[0] == 0
    assert bench.node.status().catalog.foreign == 1


def test_tokens_that_cannot_be_keyed_leave_a_request_uncached(bench: Bench) -> None:
    side = bench.side()
    assert saved_chunks(run_new(side, make_request([-1] * 40), 40)) == 0


def test_a_streaming_session_is_hashed_anew_when_it_drops_a_token(bench: Bench) -> None:
    """Token 31 was sampled and dropped; the next input puts another one in its place."""
    side, request = bench.side(save_decode_cache=True), make_request(30, resumable=True)
    run_new(side, request, 30)
    request.append_output_token_ids([5, 6])
    before = bench.keys(request)
    # What `_update_request_as_session` does: 31 tokens are computed, the last goes.
    del request._all_token_ids[31:]
    request._all_token_ids.extend(range(200, 217))
    request.num_prompt_tokens = request.num_tokens
    request.arrival_time += 1
    plan = side.plan_step(scheduled(new=[(request, range(12), 31, 17)]))
    (job,) = plan.saves
    assert job.keys == tuple(bench.keys(request)[1:3])
    assert before[1] not in job.keys


def test_kv_that_another_connector_loads_in_the_step_is_not_saved(bench: Bench) -> None:
    """If that load fails, only the step's output tells, when the copy of a save has begun."""
    side = bench.side()
    loads, shares, later = (make_request(40, name) for name in ("loads", "shares", "later"))
    ask(side, loads)
    side.matched_tokens(loads, 0)
    side.allocated(loads, (list(range(10)),), 0)
    side.matched_tokens(shares, 36)
    side.allocated(shares, ([*range(9), 10],), 0)
    plan = side.plan_step(
        scheduled(new=[(shares, [*range(9), 10], 36, 4), (loads, range(10), 16, 24)])
    )
    assert saved_chunks(plan) == 0
    assert saved_chunks(run_new(side, later, 8, blocks=range(10), computed=32)) == 0
    anew = make_request(40, "anew")
    assert saved_chunks(run_new(side, anew, 40, blocks=range(10))) == 2


def test_kv_that_another_connector_has_loaded_between_steps_is_saved(bench: Bench) -> None:
    side = bench.side()
    request = make_request(40)
    ask(side, request)
    side.matched_tokens(request, 0)
    side.allocated(request, (list(range(10)),), 0)
    assert saved_chunks(side.plan_step(scheduled())) == 0
    assert saved_chunks(side.plan_step(scheduled(new=[(request, range(10), 16, 24)]))) == 2


@pytest.mark.parametrize(("dropped", "saved"), [(0, 1), (2, 0)])
def test_kv_of_drafts_that_a_turn_dropped_is_not_saved(
    bench: Bench, dropped: int, saved: int
) -> None:
    """A step accepts all its drafts, and the first token that it samples ends the turn.

    Without asynchronous scheduling, vLLM goes on behind all accepted drafts: it takes their KV for
    that of the next turn's first tokens.
    """
    side = bench.side(counts_dropped=True)
    request = make_request(20, resumable=True)
    run_new(side, request, 20, blocks=range(6))
    request.append_output_token_ids([1])
    side.plan_step(scheduled(cached=[(request, None, 20, 1 + dropped)]))
    request.append_output_token_ids([2])
    request.num_computed_tokens = 21 + dropped
    more = StreamingUpdate(None, list(range(100, 120)), 8, 1.0, request.sampling_params)
    engine: Any = SimpleNamespace(hash_block_size=BLOCK, log_stats=False)
    Scheduler._update_request_as_session(engine, request, more)
    left = request.num_tokens - request.num_computed_tokens
    turn = [(request, range(11), request.num_computed_tokens, left)]
    assert saved_chunks(side.plan_step(scheduled(new=turn))) == saved
    other = make_request(list(request.all_token_ids), "other")
    found = run_new(side, other, 10, blocks=range(11), computed=32)
    assert not dropped or saved_chunks(found) == 0
