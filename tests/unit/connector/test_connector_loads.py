# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what it offers for loading, and when leases begin and end."""

import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.config import SpeculativeConfig

from kvhaven.devices.base import SKIP
from kvhaven.engine.jobs import StepReport
from kvhaven.errors import KVHavenError
from kvhaven.integrations.vllm.compat import drops_last_block
from kvhaven.integrations.vllm.requests import VllmRequest
from kvhaven.integrations.vllm.stats import hit_sources
from tests.simulation.connector_kit import (
    Bench,
    admit,
    ask,
    make_request,
    scheduled,
    wait_until,
)
from tests.simulation.node import Node, running_node
from tests.unit.test_catalog_cost import calls_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

pytestmark = pytest.mark.slow


def test_a_synchronous_full_hit_leaves_the_last_token(bench: Bench) -> None:
    request = make_request(32)
    bench.fill(request)
    assert ask(bench.side(asynchronous=False), request) == (31, False)


def test_an_asynchronous_full_hit_is_offered_whole(bench: Bench) -> None:
    request = make_request(32)
    bench.fill(request)
    assert ask(bench.side(asynchronous=True), request) == (32, True)


def test_a_synchronous_full_hit_is_loaded_but_for_the_last_block_of_one_token(
    bench: Bench,
) -> None:
    request = make_request(32)
    bench.fill(request)
    side = bench.side()
    tokens, _ = ask(side, request)
    job = admit(side, request, tokens, range(10, 18))
    assert job is not None
    assert job.blocks == (((10, 11, 12, 13), (14, 15, 16, 17)),)


def test_only_blocks_after_the_engines_own_hit_are_written(bench: Bench) -> None:
    """The engine's hit ends in the middle of chunk 1: its block of tokens 16 to 19 is shared."""
    request = make_request(50)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request, computed=20) == (28, False)
    job = admit(side, request, 28, range(100, 113))
    assert job is not None
    assert job.blocks == (((SKIP, 105, 106, 107), (108, 109, 110, 111)),)
    assert len(job.places) == 2


def test_a_lease_from_before_the_engine_had_more_is_used_from_where_it_is_needed(
    bench: Bench,
) -> None:
    request = make_request(50)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request, computed=0) == (48, False)
    assert ask(side, request, computed=32) == (16, False)
    job = admit(side, request, 16, range(13))
    assert job is not None
    assert job.blocks == (((8, 9, 10, 11),),)


def test_nothing_is_offered_when_the_engine_has_it_all(bench: Bench) -> None:
    request = make_request(33)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request, computed=32) == (0, False)
    assert bench.leases() == 0


def test_an_overruled_offer_ends_its_lease(bench: Bench) -> None:
    """MultiConnector gives 0 to a connector that it did not choose."""
    request = make_request(40)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request) == (32, False)
    assert bench.leases() == 1
    assert admit(side, request, 0, range(10)) is None
    wait_until(lambda: bench.leases() == 0)


def test_an_aborted_request_that_was_never_admitted_ends_its_lease(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = bench.side()
    ask(side, request)
    side.finished(request)
    wait_until(lambda: bench.leases() == 0)


def test_a_lease_outlives_an_abort_until_every_rank_has_loaded(node: Node) -> None:
    bench = Bench(node, world_size=2)
    request = make_request(40)
    bench.fill(request)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, request)
    job = admit(side, request, tokens, range(10))
    assert job is not None
    side.finished(request)
    bench.ranks[0].loaded([job.lease_id], job.service)
    time.sleep(0.1)
    assert bench.leases() == 1
    bench.ranks[1].loaded([job.lease_id], job.service)
    wait_until(lambda: bench.leases() == 0)
    bench.close()
    node.clear()


def test_the_answer_is_ask_again_until_the_deadline_and_then_a_miss(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = bench.side(lookup_deadline_ms=150)
    bench.node.stop()
    try:
        begin = time.monotonic()
        answers: list[int | None] = []
        while not answers or answers[-1] is None:
            answers.append(side.matched_tokens(request, 0)[0])
            side.plan_step(scheduled())
        assert answers[0] is None
        assert answers[-1] == 0
        assert time.monotonic() - begin > 0.14
    finally:
        bench.node.resume()
    # The late answer's lease goes back.
    wait_until(lambda: bench.leases() == 0)


def test_all_waiting_of_a_step_stays_within_its_budget(bench: Bench) -> None:
    side = bench.side(step_budget_ms=4)
    requests = [make_request(range(n, n + 40), f"r{n}") for n in range(0, 3000, 100)]
    bench.node.stop()
    try:
        waits = []
        for request in requests:
            assert side.matched_tokens(request, 0) == (None, False)
            waits.append(side._lookups._waited_s)
        assert waits[0] >= 0.004, "the first used up the budget"
        assert waits[-1] == waits[0], "and no other waited"
        side.plan_step(scheduled())
        assert side._lookups._waited_s == 0
    finally:
        bench.node.resume()


def test_a_miss_is_remembered_so_that_a_waiting_request_does_not_ask_each_step(
    bench: Bench,
) -> None:
    request = make_request(40)
    side = bench.side()
    assert ask(side, request) == (0, False)
    asked = bench.node.status().catalog.missed_chunks
    for _ in range(20):
        assert side.matched_tokens(request, 0) == (0, False)
    assert bench.node.status().catalog.missed_chunks == asked


def test_a_waiting_request_costs_little_in_each_step(bench: Bench) -> None:
    """VLLM asks for all of them in each step. A step with 2,000 took 16 ms with 72 calls each."""
    first, second = make_request(40, "a"), make_request(40, "b")
    bench.fill(first)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, first)
    admit(side, first, tokens, range(10))
    missed = make_request(range(100, 140), "missed")
    assert ask(side, missed) == (0, False)
    for waiting, answer in ((second, None), (missed, 0)):
        assert side.matched_tokens(waiting, 0) == (answer, False)
        asks = partial(side.side.matched_tokens, VllmRequest(waiting), 0)
        assert calls_of(asks) < 50


def test_a_request_counts_once_however_often_it_is_asked_for(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = bench.side()
    for _ in range(5):
        ask(side, request)
    taken = side.stats.take()
    assert taken == {"lookups": 1, "looked_up_tokens": 40, "hit_tokens": 32}


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": {"prompt_logprobs": 1}},
        {"sampling": {"skip_reading_prefix_cache": True}},
    ],
    ids=["prompt_logprobs", "skip_reading_prefix_cache"],
)
def test_what_must_be_computed_is_never_loaded_but_saved(
    bench: Bench, more: dict[str, Any]
) -> None:
    request = make_request(40, **more)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request) == (0, False)
    assert bench.leases() == 0
    plan = side.plan_step(scheduled(new=[(request, range(10), 0, 40)]))
    assert [len(job.keys) for job in plan.saves] == [2]


def test_prompt_embeddings_are_neither_loaded_nor_saved(bench: Bench) -> None:
    import torch

    request = make_request(40, prompt_embeds=torch.zeros(40, 4))
    side = bench.side()
    assert ask(side, request) == (0, False)
    plan = side.plan_step(scheduled(new=[(request, range(10), 0, 40)]))
    assert plan.saves == []


def test_pooling_requests_are_served_as_others(bench: Bench) -> None:
    request = make_request(40, pooling=True)
    bench.fill(request)
    side = bench.side()
    assert ask(side, request) == (32, False)
    plan = side.plan_step(scheduled(new=[(request, range(10), 32, 8)]))
    assert plan.saves == [] or all(job.keys for job in plan.saves)


def test_a_second_request_waits_for_the_first_ones_load_of_the_same_chunk(bench: Bench) -> None:
    first, second = make_request(40, "a"), make_request(40, "b")
    bench.fill(first)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, first)
    admit(side, first, tokens, range(10))
    assert side.matched_tokens(second, 0) == (None, False)
    side.reported(StepReport(), {"a"})
    assert ask(side, second) == (32, True)


def test_nobody_waits_for_a_load_that_was_aborted(bench: Bench) -> None:
    first, second = make_request(40, "a"), make_request(40, "b")
    bench.fill(first)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, first)
    admit(side, first, tokens, range(10))
    assert side.matched_tokens(second, 0) == (None, False)
    side.finished(first)
    assert ask(side, second) == (32, True)


def test_the_end_of_one_load_does_not_release_who_waits_for_another(bench: Bench) -> None:
    """Two loads of one chunk: the first was begun before the second's owner could know."""
    first, second, third = (make_request(40, name) for name in "abc")
    bench.fill(first)
    side = bench.side(asynchronous=True)
    ask(side, first)
    ask(side, second)
    admit(side, first, 32, range(10))
    admit(side, second, 32, range(10, 20))
    side.reported(StepReport(), {"a"})
    assert side.matched_tokens(third, 0) == (None, False)
    side.reported(StepReport(), {"b"})
    assert ask(side, third) == (32, True)


def test_waiting_for_another_load_ends_with_patience(bench: Bench) -> None:
    first, second = make_request(40, "a"), make_request(40, "b")
    bench.fill(first)
    side = bench.side(asynchronous=True, promote_deadline_ms=50)
    tokens, _ = ask(side, first)
    admit(side, first, tokens, range(10))
    assert side.matched_tokens(second, 0) == (None, False)
    time.sleep(0.06)
    assert ask(side, second) == (32, True)


def test_without_a_prefix_cache_of_the_engines_own_nobody_waits(bench: Bench) -> None:
    first, second = make_request(40, "a"), make_request(40, "b")
    bench.fill(first)
    side = bench.side(asynchronous=True, shared=False)
    tokens, _ = ask(side, first)
    admit(side, first, tokens, range(10))
    assert ask(side, second) == (32, True)


def test_sources_of_a_hit_add_up(bench: Bench) -> None:
    kinds = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource

    request = make_request(40)
    bench.fill(request)
    side = bench.side()
    tokens, _ = ask(side, request, computed=4)
    admit(side, request, tokens, range(10))
    offer = side.loaded_offer(request)
    assert hit_sources(offer, tokens) == {kinds.HOST: 28}
    assert hit_sources(offer, 0) == {}
    assert hit_sources(None, 5) == {}


def test_tokens_that_were_never_offered_become_a_load_that_failed(bench: Bench) -> None:
    request = make_request(40)
    side = bench.side(asynchronous=True)
    with pytest.raises(KVHavenError, match="16 tokens are to be loaded, but none were offered"):
        side.allocated(request, (list(range(10)),), 16)
    side.never_loaded(request, (list(range(10)),), 16)
    (job,) = side.plan_step(scheduled()).loads
    assert job.places == ()
    assert job.blocks == (((0, 1, 2, 3),),)
    assert job.asynchronous


def test_a_side_that_starts_without_a_service_begins_when_there_is_one(
    short_dir: Any,
) -> None:
    node = Node(short_dir)
    with running_node(short_dir) as started:
        bench = Bench(started)
        side = bench.side(start=False)
        request = make_request(40, "early")
        assert ask(side, request) == (0, False)
        assert side.plan_step(scheduled(new=[(request, range(10), 0, 40)])).saves == []
        side._client.start(10)
        bench.fill(request)
        assert ask(side, make_request(40, "later")) == (32, False)
        bench.close()
    assert node.address == started.address


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_a_drafter_that_looks_ahead_the_last_block_of_a_hit_is_left_to_the_engine(
    bench: Bench, *, asynchronous: bool
) -> None:
    """The drafter's KV of its last token comes from the token behind it, as in vLLM's own hits."""
    request = make_request(40)
    bench.fill(request)
    side = bench.side(drops_last_block=True, asynchronous=asynchronous)
    assert ask(side, request) == (28, asynchronous)
    job = admit(side, request, 28, range(10))
    assert job is not None
    assert job.written == set(range(7))
    assert ask(side, make_request(40, "whole"), computed=28) == (0, False)


@pytest.mark.parametrize(
    ("method", "off", "drops"),
    [
        ("eagle3", False, True),
        ("mtp", False, True),
        ("eagle", True, False),
        ("ngram", False, False),
    ],
)
def test_the_last_block_of_a_hit_is_left_where_vllm_leaves_it(
    method: str, *, off: bool, drops: bool
) -> None:
    if off and not hasattr(SpeculativeConfig, "use_eagle_block_drop"):
        pytest.skip("this vLLM always leaves it")
    speculative = object.__new__(SpeculativeConfig)
    speculative.method, speculative.disable_eagle_block_drop = cast("Any", method), off
    config = cast("VllmConfig", SimpleNamespace(speculative_config=speculative))
    assert drops_last_block(config) is drops
    assert not drops_last_block(cast("VllmConfig", SimpleNamespace(speculative_config=None)))
