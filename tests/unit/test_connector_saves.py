# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: which chunks are saved, what is fenced, and what routers are told."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from kvhaven.integrations.vllm import saves as saves_module
from kvhaven.integrations.vllm.metadata import StepPlan, StepReport
from kvhaven.integrations.vllm.scheduler import SchedulerSide
from kvhaven.types import ChunkKey
from tests.simulation.connector_kit import (
    BLOCK,
    CHUNK,
    Bench,
    admit,
    ask,
    make_request,
    report,
    scheduled,
)
from tests.simulation.engine_world import Node, running_node

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n")) as started:
        yield started


@pytest.fixture
def bench(node: Node) -> Iterator[Bench]:
    made = Bench(node)
    yield made
    made.close()
    node.clear()


def run_new(
    side: SchedulerSide,
    request: Any,
    count: int,
    *,
    blocks: Sequence[int] | None = None,
    computed: int = 0,
) -> StepPlan:
    """Have a request asked for, admitted and scheduled for `count` tokens."""
    ask(side, request, computed)
    ids = list(blocks if blocks is not None else range(-(-request.num_tokens // BLOCK)))
    side.allocated(request, (ids,), 0)
    return side.plan_step(scheduled(new=[(request, ids, computed, count)]))


def saved_chunks(plan: StepPlan) -> int:
    return sum(len(job.keys) for job in plan.saves)


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
    assert taken is not None
    assert taken.data["tag:team-a:hit_tokens"] == 32
    assert taken.data["tag:chat:looked_up_tokens"] == 40


def test_adapters_salts_and_media_give_other_keys(bench: Bench) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    def media(identifier: str, offset: int) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=identifier,
            mm_position=PlaceholderRange(offset=offset, length=4),
        )

    variants: list[dict[str, Any]] = [
        {},
        {"cache_salt": "one"},
        {"cache_salt": "two"},
        {"lora_request": LoRARequest("a", 1, "/a")},
        {"lora_request": LoRARequest("a", 1, "/b")},
        {"mm_features": [media("cat", 2)]},
        {"mm_features": [media("dog", 2)]},
        {"mm_features": [media("cat", 3)]},
    ]
    side = bench.side()
    keys: set[tuple[ChunkKey, ...]] = set()
    for index, more in enumerate(variants):
        plan = run_new(side, make_request(40, f"r{index}", **more), 40)
        assert saved_chunks(plan) == 2
        keys.update(job.keys for job in plan.saves)
    assert len(keys) == len(variants)


def test_an_adapter_that_cannot_be_read_leaves_its_requests_uncached(bench: Bench) -> None:
    from vllm.lora.request import LoRARequest

    from kvhaven.errors import IncompatibleEngineError

    def refuse(path: str) -> str:
        raise IncompatibleEngineError(f"nothing to sample at {path}")

    side = bench.side()
    side._lora_fingerprint = refuse
    request = make_request(40, lora_request=LoRARequest("a", 1, "/gone"))
    assert saved_chunks(run_new(side, request, 40)) == 0
    assert saved_chunks(run_new(side, make_request(40, "plain"), 40)) == 2


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


def test_blocks_of_requests_that_are_not_followed_are_fenced_too(bench: Bench) -> None:
    import torch

    side, request = bench.side(), make_request(32)
    (job,) = run_new(side, request, 32).saves
    embedded = make_request(8, "e", prompt_embeds=torch.zeros(8, 4))
    side._trackers.pop("e", None)
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
    bench = Bench(node, world=2)
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


def test_after_a_reset_nothing_cached_before_is_found(bench: Bench) -> None:
    side, request = bench.side(), make_request(40)
    bench.fill(request)
    assert ask(side, request) == (32, False)
    side.reset()
    assert ask(side, request) == (0, False)
    assert ask(side, make_request(40, "new")) == (0, False)
    assert bench.leases() == 0


def test_what_is_computed_from_old_kv_is_not_saved_in_the_new_epoch(bench: Bench) -> None:
    side, running = bench.side(), make_request(48, "running")
    run_new(side, running, 20, blocks=range(12))
    side.block_pool = Pool(range(12))
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
