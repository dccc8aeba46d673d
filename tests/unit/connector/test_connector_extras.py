# SPDX-License-Identifier: Apache-2.0
"""What determines a request's KV besides tokens, and what happens while it is not known."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

import torch
from vllm.lora.request import LoRARequest

from kvhaven.engine.adapters import Adapters, CacheName
from kvhaven.engine.requests import MOST_TAG_LENGTH, MOST_TAGS, Permissions
from kvhaven.identity.digests import content_digest
from kvhaven.integrations.vllm.requests import cache_name, held_blocks
from kvhaven.keys import Extras, KeyInputError
from kvhaven.protocol import AdapterVersion, ModelState
from tests.simulation.connector_kit import (
    Bench,
    BrokenFeature,
    VllmSide,
    admit,
    ask,
    digest_of,
    keys_of,
    known,
    lora,
    make_request,
    run_new,
    saved_chunks,
    scheduled,
    wait_until,
)
from tests.simulation.node import Node, running_node

pytestmark = pytest.mark.slow


# --- nothing is permitted before all extras are known -------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": 12345},
        {"cache_salt": b"salt"},
        {"mm_features": [BrokenFeature()]},
        {"params": {"kvhaven.skip_save": False, 7: 8}, "cache_salt": 0.5},
        {"lora_request": SimpleNamespace(lora_int_id=1)},
    ],
    ids=["int-salt", "bytes-salt", "unreadable-media", "float-salt", "strange-adapter"],
)
def test_a_request_whose_extras_cannot_be_read_is_neither_offered_nor_saved(
    bench: Bench, more: dict[str, Any]
) -> None:
    """Whatever is raised: not even on the second question, and not under the plain keys."""
    side = bench.side()
    bench.fill(make_request(40, "plain"))
    request = make_request(40, "odd", **more)
    side.on_new_request(request)
    for _ in range(3):
        assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, (list(range(10)),), 0)
    assert saved_chunks(side.plan_step(scheduled(new=[(request, range(10), 0, 40)]))) == 0
    assert bench.leases() == 0


@pytest.mark.parametrize("later", [1.0, 0.0], ids=["a later input", "an input of the same time"])
def test_a_session_whose_next_input_cannot_be_keyed_is_not_saved_any_further(
    bench: Bench, later: float
) -> None:
    """Clients of `AsyncLLM` may give all inputs one arrival time."""
    side, request = bench.side(), make_request(30, resumable=True)
    assert saved_chunks(run_new(side, request, 30)) == 1
    request._all_token_ids.extend(range(200, 240))
    request.num_prompt_tokens = request.num_tokens
    request.arrival_time += later
    request.mm_features = [BrokenFeature()]
    for computed in (30, 48):
        plan = side.plan_step(scheduled(new=[(request, range(20), computed, 16)]))
        assert saved_chunks(plan) == 0


def test_after_an_error_in_a_hook_nothing_that_runs_is_saved_and_all_saves_are_fenced(
    bench: Bench,
) -> None:
    side, saving, leased = bench.side(), make_request(32, "saving"), make_request(40, "leased")
    (job,) = run_new(side, saving, 32).saves
    bench.fill(make_request(range(100, 140), "filled"))
    leased = make_request(range(100, 140), "leased")
    assert ask(side, leased) == (32, False)
    side.doubt()
    wait_until(lambda: bench.leases() == 0)
    plan = side.plan_step(scheduled(new=[(leased, range(20, 30), 0, 40)]))
    assert plan.fence == [job.id]
    assert saved_chunks(plan) == 0
    assert side.matched_tokens(leased, 0) == (0, False)
    assert len(keys_of(side, "next")) > 0 or side.matched_tokens(make_request(40, "n"), 0)


def test_the_blocks_before_a_load_that_could_not_be_planned_are_not_named(bench: Bench) -> None:
    """They are the engine's own, and may be shared with requests that are well."""
    request = make_request(40)
    bench.fill(request)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, request, computed=16)
    side.never_loaded(request, (list(range(10)),), tokens)
    (job,) = side.plan_step(scheduled()).loads
    assert job.written == {4, 5, 6, 7}
    wait_until(lambda: bench.leases() == 0)


# --- digests --------------------------------------------------------------------------------------


def test_a_digest_covers_dtype_shape_and_every_element() -> None:
    values: list[Any] = [
        None,
        False,
        0,
        0.0,
        "",
        b"",
        [],
        {},
        torch.zeros(0),
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(6, dtype=torch.bfloat16),
        torch.tensor([0.0] * 5 + [1.0]),
        [torch.zeros(3), torch.zeros(3)],
        [torch.zeros(6)],
        {"a": torch.zeros(6)},
        {"b": torch.zeros(6)},
        torch.zeros(6).numpy().astype("float64"),
    ]
    assert len({content_digest(value) for value in values}) == len(values)
    columns = torch.arange(6).reshape(2, 3).t()
    assert content_digest(columns) == content_digest(columns.contiguous())
    assert content_digest({"a": 1, "b": 2}) == content_digest({"b": 2, "a": 1})
    with pytest.raises(KeyInputError, match="cannot be identified by its content"):
        content_digest({"a": object()})
    with pytest.raises(KeyInputError, match="keys that are not texts"):
        content_digest({1: 2})


# --- adapters -----------------------------------------------------------------------------------


def test_an_adapter_is_named_by_what_the_ranks_have_loaded(bench: Bench) -> None:
    request = make_request(40, lora_request=lora())
    bench.fill(request, extras=Extras(lora=digest_of("v1").hex()))
    side = bench.side()
    bench.load_adapter(1, "v1")
    known(side)
    assert ask(side, request) == (32, False)
    job = admit(side, request, 32, range(10))
    assert job is not None
    assert job.adapter is not None
    assert job.adapter[:2] == (1, 1)


def test_an_adapter_that_no_rank_has_loaded_yet_is_a_miss_and_saved_once_it_is_known(
    bench: Bench,
) -> None:
    """vLLM loads it in the first step of its first request; all of it is computed with that."""
    side, request = bench.side(), make_request(40, lora_request=lora())
    assert ask(side, request) == (0, False)
    side.allocated(request, (list(range(10)),), 0)
    assert saved_chunks(side.plan_step(scheduled(new=[(request, range(10), 0, 20)]))) == 0
    bench.load_adapter(1, "v1")
    known(side)
    plan = side.plan_step(scheduled(cached=[(request, None, 20, 20)]))
    assert saved_chunks(plan) == 2
    assert plan.saves[0].keys == tuple(bench.keys(request, Extras(lora=digest_of("v1").hex())))


def test_kv_of_an_adapter_that_was_loaded_anew_under_its_name_is_not_saved(bench: Bench) -> None:
    """The engine's own prefix cache goes by the name: its blocks may be of either content."""
    side = bench.side()
    with_blocks(side, 10)
    bench.load_adapter(1, "v1")
    known(side)
    running = make_request(40, "running", lora_request=lora())
    assert saved_chunks(run_new(side, running, 20)) == 1
    bench.load_adapter(1, "v2", generation=2)
    known(side, generation=2)
    first = make_request(40, "first", lora_request=lora())
    assert saved_chunks(run_new(side, first, 40, blocks=range(20, 30))) == 0
    assert saved_chunks(side.plan_step(scheduled(cached=[(running, None, 20, 20)]))) == 0
    sharing = make_request(56, "sharing", lora_request=lora())
    ask(side, sharing, computed=32)
    side.allocated(sharing, ([*range(8), *range(30, 36)],), 0)
    plan = side.plan_step(scheduled(new=[(sharing, [*range(8), *range(30, 36)], 32, 24)]))
    assert saved_chunks(plan) == 0, "its first blocks may be of v1"
    fresh = keys_of(side, "fresh", lora_request=lora())
    request = make_request(40, "fresh", lora_request=lora())
    assert fresh == tuple(bench.keys(request, Extras(lora=digest_of("v2").hex())))


def test_another_adapter_under_a_known_name_is_not_trusted_with_the_engines_blocks(
    bench: Bench,
) -> None:
    side = bench.side()
    bench.load_adapter(1, "v1")
    known(side)
    assert len(keys_of(side, "one", lora_request=lora("a", 1))) == 2
    bench.load_adapter(2, "v2")
    known(side, adapter=2)
    assert keys_of(side, "two", lora_request=lora("a", 2)) == ()
    assert len(keys_of(side, "three", lora_request=lora("a", 2))) == 2


UNCACHED: dict[str, Any] = {
    "params": {"kvhaven.skip_save": True},
    "sampling": {"prompt_logprobs": 1},
}
"""What a request has that may neither load nor save."""


def test_an_adapter_is_noted_that_ran_only_in_requests_that_are_not_cached(bench: Bench) -> None:
    """Its blocks stay in the engine's cache, and its successor under the name gets them."""
    side = bench.side()
    with_blocks(side, 10)
    bench.load_adapter(1, "v1")
    known(side)
    run_new(side, make_request(40, "one", lora_request=lora("a", 1), **UNCACHED), 40)
    bench.load_adapter(2, "v2")
    known(side, adapter=2)
    two = make_request(40, "two", lora_request=lora("a", 2))
    blocks = [*range(8), 20, 21]
    assert saved_chunks(run_new(side, two, 8, blocks=blocks, computed=32)) == 0


@pytest.mark.parametrize("known_at_once", [True, False])
def test_a_request_that_waits_gets_no_blocks_of_another_adapter_of_its_name(
    bench: Bench, *, known_at_once: bool
) -> None:
    """It has its keys, and the other runs before it, once or again after a further request came."""
    side = bench.side()
    with_blocks(side, 10)
    bench.load_adapter(1, "v1")
    known(side)
    first, _, second = waiting = [
        make_request(48, name, lora_request=lora("a", 1)) for name in ("w1", "w2", "w3")
    ]
    other = make_request(40, "other", lora_request=lora("a", 2))
    ask(side, first)
    if known_at_once:
        bench.load_adapter(2, "v2")
        known(side, adapter=2)
    for request in (other, *waiting[1:]):
        ask(side, request)
    assert side._states["w3"].permissions.save
    run_new(side, other, 40)
    side.finished(other)
    blocks = [*range(8), 20, 21, 22, 23]
    for request in (first, second):
        assert saved_chunks(run_new(side, request, 16, blocks=blocks, computed=32)) == 0


def with_blocks(side: VllmSide, used: int) -> None:
    """Bind a pool of 40 blocks, the first of which are in use."""
    blocks = (
        SimpleNamespace(block_id=i, ref_cnt=int(i < used), block_hash=None) for i in range(40)
    )
    pool: Any = SimpleNamespace(blocks=list(blocks))
    side.held_blocks = lambda: held_blocks(pool)


def test_a_rolling_update_from_a_new_path_distrusts_nothing() -> None:
    """vLLM's prefix cache goes by the path too: no block of it is of both."""
    versions = (AdapterVersion(1, digest_of("v1"), 1), AdapterVersion(2, digest_of("v2"), 1))
    models = {0: ModelState(adapters=versions)}
    old, new = LoRARequest("a", 1, "/adapters/v1"), LoRARequest("a", 2, "/adapters/v2")
    if cache_name(old) == cache_name(new):
        pytest.skip("this vLLM goes by the name alone")
    distrusted: list[CacheName] = []
    adapters = Adapters(1, lambda: models, distrusted.append)
    for _ in range(3):
        for request in (old, new):
            assert adapters.use_of(cache_name(request), request.lora_int_id) is not None
    assert distrusted == []


class Shared:
    """Requests that share blocks 0 to 7 (`first` writes them) of an engine with a block pool."""

    def __init__(self, bench: Bench, **first: Any) -> None:
        self.bench, self.side = bench, bench.side()
        pool = [SimpleNamespace(block_id=i, ref_cnt=0, block_hash=b"h") for i in range(100)]
        bound: Any = SimpleNamespace(blocks=pool)
        self.side.held_blocks = lambda: held_blocks(bound)
        for adapter, name in enumerate("ab", 1):
            bench.load_adapter(adapter, name)
            known(self.side, adapter)
        assert saved_chunks(run_new(self.side, make_request(40, "first", **first), 40)) == 2
        self.run(20, lora_request=lora("a", 1))
        self.run(30, lora_request=lora("b", 2))

    def run(self, block: int, **more: Any) -> int:
        """Run a request in blocks of its own from `block` on; return how much is saved."""
        request = make_request(range(7 * block, 7 * block + 40), f"own{block}", **more)
        return saved_chunks(run_new(self.side, request, 40, blocks=range(block, block + 10)))

    def reload(self) -> None:
        """Have other content loaded under the name of adapter a, and be noticed."""
        self.bench.load_adapter(1, "other", generation=2)
        known(self.side, generation=2)
        assert self.run(40, lora_request=lora("a", 1)) == 0

    def share(self, **more: Any) -> int:
        """Run a request that shares the blocks; return how many chunks of it are saved."""
        request = make_request(56, "sharing", **more)
        blocks = [*range(8), *range(50, 56)]
        return saved_chunks(run_new(self.side, request, 24, blocks=blocks, computed=32))


@pytest.mark.parametrize("more", [{}, {"lora_request": lora("b", 2)}], ids=["base", "adapter-b"])
def test_what_is_not_of_a_reloaded_adapter_is_saved_on(bench: Bench, more: dict[str, Any]) -> None:
    """A prompt that all requests share stays in the engine's cache for as long as it is used."""
    shared = Shared(bench, **more)
    running = make_request(range(900, 940), "running", **more)
    assert saved_chunks(run_new(shared.side, running, 20, blocks=range(60, 70))) == 1
    shared.reload()
    assert shared.share(**more) == 1
    plan = shared.side.plan_step(scheduled(cached=[(running, None, 20, 20)]))
    assert saved_chunks(plan) == 1


def test_blocks_of_a_reloaded_adapter_are_not_trusted(bench: Bench) -> None:
    shared = Shared(bench, lora_request=lora("a", 1))
    shared.reload()
    assert shared.share(lora_request=lora("a", 1)) == 0


def test_blocks_of_which_nobody_knows_the_adapter_are_not_trusted(bench: Bench) -> None:
    """After an error in a hook: the engine may have given them to others."""
    shared = Shared(bench)
    shared.side.doubt()
    shared.side.plan_step(scheduled())
    shared.reload()
    assert shared.share() == 0


def test_ranks_that_loaded_different_contents_leave_an_adapter_unknown(node: Node) -> None:
    bench = Bench(node, world_size=2)
    side = bench.side()
    bench.load_adapter(1, "v1")
    known(side)
    known(side, rank=1)
    assert len(keys_of(side, "same", lora_request=lora())) == 2
    both = bench.ranks
    bench.ranks = both[:1]
    bench.load_adapter(1, "v2", generation=2)
    bench.ranks = both
    known(side, generation=2)
    assert keys_of(side, "half", lora_request=lora()) == ()
    bench.close()
    node.clear()


def test_what_a_model_holds_is_known_again_after_a_service_restart(short_dir: Any) -> None:
    with running_node(short_dir) as node:
        bench = Bench(node)
        side = bench.side()
        bench.load_adapter(1, "v1")
        known(side)
        node.kill()
        wait_until(lambda: not side._client.responsive)
        bench.load_adapter(1, "v2", generation=2)
        node.start()
        known(side, generation=2)
        wait_until(lambda: side._client.responsive)
        bench.close()


# --- weights ------------------------------------------------------------------------------------


def test_nothing_of_before_is_found_after_the_weights_were_changed(bench: Bench) -> None:
    side, request = bench.side(), make_request(40)
    bench.fill(request)
    assert ask(side, request) == (32, False)
    bench.change_weights(1)
    wait_until(lambda: side._client.models.get(0) == ModelState(weights=1))
    assert ask(side, make_request(40, "after")) == (0, False)
    plan = side.plan_step(scheduled())
    assert plan.weights == {0: 1}
    saved = keys_of(side, "saved")
    assert saved
    assert not set(saved) & set(bench.keys(request))


def test_a_load_that_was_promised_before_the_weights_changed_fails(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = bench.side(asynchronous=True)
    tokens, _ = ask(side, request)
    side.allocated(request, (list(range(10)),), tokens)
    bench.change_weights(1)
    wait_until(lambda: side._client.models.get(0) == ModelState(weights=1))
    (job,) = side.plan_step(scheduled()).loads
    assert job.places == ()
    assert job.lease_id > 0, "the ranks end its lease"


# --- roles and tags -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "offered", "saved"),
    [
        (Permissions(load=False, save=True), 0, 2),
        (Permissions(load=True, save=False), 16, 0),
        (Permissions(load=True, save=True), 16, 1),
    ],
    ids=["producer", "consumer", "both"],
)
def test_a_producer_saves_and_does_not_load_and_a_consumer_the_other_way_round(
    bench: Bench, role: Permissions, offered: int, saved: int
) -> None:
    request = make_request(40)
    bench.fill(request, 1)
    side = bench.side(role=role)
    assert ask(side, request) == (offered, False)
    admit(side, request, offered, range(10))
    plan = side.plan_step(scheduled(new=[(request, range(10), offered, 40 - offered)]))
    assert saved_chunks(plan) == saved


def test_tags_are_few_short_and_fit_for_a_line_of_a_log(bench: Bench) -> None:
    side = bench.side()
    tags = ["a\nERROR forged", "\x1b[31mred", "x" * 1000, *(f"t{n}" for n in range(100))]
    ask(side, make_request(40, params={"kvhaven.tags": tags}))
    taken = side.stats.take()
    named = {name for name in taken if name.startswith("tag:")}
    assert len(named) == 2 * MOST_TAGS
    assert all(name.isprintable() for name in named)
    assert "tag:a\\nERROR forged:hit_tokens" in named
    assert max(map(len, named)) < MOST_TAG_LENGTH + 40
    for number in range(2000):
        ask(side, make_request(1, f"r{number}", params={"kvhaven.tags": f"client {number}"}))
    taken = side.stats.take()
    assert len(taken) < 300


@pytest.mark.parametrize("tags", [7, {"a": 1}, object(), [["nested"]], None])
def test_tags_of_any_shape_do_no_harm(bench: Bench, tags: Any) -> None:
    side = bench.side()
    assert len(keys_of(side, "tagged", params={"kvhaven.tags": tags})) == 2
