# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side with tails: what is saved when, what is offered, and what is fenced."""

import ctypes
import time
from typing import Any

import pytest
import xxhash

pytest.importorskip("vllm", reason="the connector is vLLM's")

from kvhaven.devices.base import SKIP
from kvhaven.engine.jobs import SaveJob
from kvhaven.keys import Extras, KeyChain
from kvhaven.types import Checksum, ChunkKey
from tests.simulation.connector_kit import (
    BYTES,
    CHUNK,
    Bench,
    VllmSide,
    admit,
    ask,
    make_request,
    report,
    run_new,
    scheduled,
    wait_until,
)

pytestmark = pytest.mark.slow


def tail_of(bench: Bench, request: Any, salt: str = "") -> ChunkKey:
    chain = KeyChain(bench.namespace, CHUNK, Extras(salt=salt))
    tokens = list(request.all_token_ids)
    chain.extend(tokens)
    key = chain.tail_key(tokens, len(tokens))
    assert key is not None
    return key


def fill_tail(bench: Bench, request: Any) -> None:
    """Store a request's full chunks and its tail as the ranks do."""
    bench.fill(request)
    tokens = -(-(request.num_tokens % CHUNK) // 4) * 4
    for rank in bench.ranks:
        reservation = rank.reserve(None, [tail_of(bench, request)], 7_000_000, tail=tokens)
        assert reservation is not None
        (grant,) = rank.grants(reservation, time.monotonic() + 5)
        assert grant is not None
        stored = BYTES * tokens // CHUNK
        ctypes.memset(grant.address, 7, stored)
        sums = [Checksum(xxhash.xxh3_128_digest(bytes([7]) * stored))]
        rank.commit([(grant, sums)])
    wait_until(lambda: bench.node.status().catalog.tails > 0)


def tails(side: VllmSide, request: Any, count: int, **more: Any) -> list[SaveJob]:
    return [job for job in run_new(side, request, count, **more).saves if job.tail]


def test_without_the_setting_there_are_no_tails(bench: Bench) -> None:
    request = make_request(40)
    fill_tail(bench, request)
    side = bench.side(asynchronous=True)
    assert ask(side, request) == (32, True)
    assert tails(side, make_request(range(50, 90), "b"), 40) == []


@pytest.mark.parametrize(
    ("params", "saved"), [({"kvhaven.to": "127.0.0.1:1"}, [9]), ({"do_remote_prefill": True}, [])]
)
def test_prompts_of_two_nodes_have_tails_without_the_setting(
    bench: Bench, params: dict[str, Any], saved: list[int]
) -> None:
    """The node that computes a prompt saves its tail, the one that decodes it only asks for it."""
    side, request = bench.side(asynchronous=True), make_request(41, params=params)
    assert [job.tail for job in tails(side, request, 41)] == saved
    here = make_request(range(50, 91), "here", params=params)
    fill_tail(bench, here)
    assert ask(side, here) == (41, True)


def test_a_tail_is_saved_first_in_the_step_that_completes_the_prompt(bench: Bench) -> None:
    side, request = bench.side(pd_tail=True), make_request(41)
    assert tails(side, request, 40, blocks=range(11)) == []
    plan = side.plan_step(scheduled(cached=[(request, None, 40, 1)]))
    (job,) = plan.saves
    assert (job.tail, job.keys) == (9, (tail_of(bench, request),))
    assert job.parent == bench.keys(request)[-1]
    assert job.blocks == (((8, 9, 10),),)
    request.append_output_token_ids([1])
    assert side.plan_step(scheduled(cached=[(request, None, 41, 1)])).saves == []
    whole = run_new(side, make_request(range(50, 91), "b"), 41, blocks=range(20, 31))
    assert [bool(job.tail) for job in whole.saves] == [True, False]


@pytest.mark.parametrize("tokens", [32, 33])
def test_a_prompt_that_ends_with_a_chunk_has_no_tail(bench: Bench, tokens: int) -> None:
    """Nor has one with a single token behind it, which the engine computes in any case."""
    side = bench.side(pd_tail=True)
    assert tails(side, make_request(tokens), tokens) == []
    assert tails(side, make_request(34, "longer"), 34)


def test_a_prompt_shorter_than_a_chunk_is_a_tail(bench: Bench) -> None:
    side, request = bench.side(pd_tail=True), make_request(5)
    (job,) = tails(side, request, 5, blocks=[3, 4])
    assert (job.tail, job.parent, job.blocks) == (5, None, (((3, 4),),))


@pytest.mark.parametrize(
    "more",
    [
        {"params": {"kvhaven.skip_save": True}},
        {"resumable": True},
    ],
    ids=str,
)
def test_a_request_that_may_not_be_saved_or_is_not_complete_has_no_tail(
    bench: Bench, more: dict[str, Any]
) -> None:
    assert tails(bench.side(pd_tail=True), make_request(40, **more), 40) == []


def test_the_next_step_of_a_request_waits_for_the_copy_of_its_tail(bench: Bench) -> None:
    side, request = bench.side(pd_tail=True), make_request(41)
    plan = run_new(side, request, 41, blocks=range(11))
    job = next(job for job in plan.saves if job.tail)
    request.append_output_token_ids([1])
    assert side.plan_step(scheduled(cached=[(request, None, 41, 1)])).fence == [job.id]
    request.append_output_token_ids([1])
    assert side.plan_step(scheduled(cached=[(request, None, 42, 1)])).fence == []


def test_a_request_that_ended_after_its_tail_is_fenced_by_its_blocks_alone(bench: Bench) -> None:
    side, request = bench.side(pd_tail=True), make_request(5)
    (job,) = tails(side, request, 5, blocks=[3, 4])
    side.finished(request)
    assert side.plan_step(scheduled()).fence == []
    assert run_new(side, make_request(8, "b"), 8, blocks=[4, 5]).fence == [job.id]


def test_a_tail_that_was_saved_is_not_saved_again_by_a_request_that_loads_it(
    bench: Bench,
) -> None:
    request = make_request(40)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True)
    tokens, _ = ask(side, request)
    admit(side, request, tokens, range(10))
    plan = side.plan_step(scheduled(new=[(request, range(10), tokens, 40 - tokens)]))
    assert plan.saves == []


@pytest.mark.parametrize("count", range(1, CHUNK))
def test_all_but_one_token_is_loaded_before_the_forward(bench: Bench, count: int) -> None:
    request = make_request(32 + count)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True)
    assert ask(side, request) == (31 + count, False)
    blocks = range(20, 20 + 8 + -(-count // 4))
    job = admit(side, request, 31 + count, blocks)
    assert job is not None
    assert job.tail == (count if count > 1 else 0)
    *chunks, last = job.blocks[0]
    if count > 1:
        assert chunks == [(20, 21, 22, 23), (24, 25, 26, 27)]
        written = -(-(count - 1) // 4)
        needed = -(-count // 4)
        assert last == (*blocks[8 : 8 + written], *[SKIP] * (needed - written))


@pytest.mark.parametrize("count", range(2, CHUNK))
def test_the_whole_prompt_is_loaded_between_steps(bench: Bench, count: int) -> None:
    """The engine steps back by one token itself."""
    request = make_request(32 + count)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True, asynchronous=True)
    blocks = range(20, 20 + 8 + -(-count // 4))
    assert ask(side, request) == (32 + count, True)
    job = admit(side, request, 32 + count, blocks)
    assert job is not None
    assert (job.tail, job.blocks[0][-1]) == (count, tuple(blocks[8:]))


def test_with_a_part_in_the_engines_own_cache_its_blocks_are_never_written(bench: Bench) -> None:
    request = make_request(45)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True, asynchronous=True, shared=False)
    for computed in (0, 4, 16, 32, 36, 40):
        one = make_request(45, f"of {computed}")
        assert ask(side, one, computed) == (45 - computed, True)
        job = admit(side, one, 45 - computed, range(12))
        assert job is not None
        assert job.written == set(range(computed // 4, 12))
        assert len(job.places) == len(job.blocks[0]) == 3 - computed // 16


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_token_alone_is_not_loaded(bench: Bench, *, asynchronous: bool) -> None:
    """vLLM steps back from a hit of a prompt of one token to none, and asks again for ever."""
    one, many = make_request(1, "one"), make_request(41, "many")
    fill_tail(bench, one)
    side = bench.side(pd_tail=True, asynchronous=asynchronous)
    assert ask(side, one) == (0, False)
    assert ask(side, many, 40) == (0, False)


def test_a_missing_chunk_or_another_prompt_makes_the_tail_useless(bench: Bench) -> None:
    request = make_request(40)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True, asynchronous=True)
    for number, other in enumerate(
        (
            [*range(39), 99],  # another last token
            [*range(39)],  # a token fewer
            [*range(41)],  # a token more
        )
    ):
        assert ask(side, make_request(other, f"o{number}")) == (32, True)
    assert ask(side, make_request([99, *range(1, 40)], "another chain")) == (0, False)
    assert ask(side, make_request(40, "salt", cache_salt="x")) == (0, False)


def test_a_request_with_output_does_not_look_for_a_tail(bench: Bench) -> None:
    request = make_request(40)
    fill_tail(bench, request)
    resumed = make_request(39)
    resumed.append_output_token_ids([39])
    assert ask(bench.side(pd_tail=True, asynchronous=True), resumed) == (32, True)


def test_the_last_block_is_left_to_an_engine_that_recomputes_it(bench: Bench) -> None:
    request = make_request(42)
    fill_tail(bench, request)
    side = bench.side(pd_tail=True, asynchronous=True, drops_last_block=True)
    assert ask(side, request) == (38, True)
    job = admit(side, request, 38, range(11))
    assert job is not None
    assert job.blocks[0][-1] == (8, 9, SKIP)


def test_tails_make_no_events_and_leave_nothing_behind(bench: Bench) -> None:
    side, request = bench.side(pd_tail=True, events=True), make_request(5)
    plan = run_new(side, request, 5, blocks=[3, 4])
    report(side, plan)
    assert list(side.take_events()) == []
    assert side._saves._jobs == {}
    assert side._saves._saving == {}
