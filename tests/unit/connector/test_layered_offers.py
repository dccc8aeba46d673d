# SPDX-License-Identifier: Apache-2.0
"""Which hits are offered as layered loads: short ones, whose blocks the step does not write."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.config.compilation import CUDAGraphMode

from kvhaven.config import Settings
from kvhaven.engine.jobs import LoadJob, StepReport
from kvhaven.integrations.vllm.compat import calls_layer_hooks
from kvhaven.integrations.vllm.start import _layered_tokens, _loads_asynchronously
from tests.simulation.connector_kit import BLOCK, Bench, VllmSide, ask, make_request, scheduled
from tests.simulation.engine_world import Setup, make_config, make_kv_cache_config

pytestmark = pytest.mark.slow

MOST = 40


def layered_side(bench: Bench, **more: Any) -> VllmSide:
    return bench.side(**({"asynchronous": True, "layered_tokens": MOST} | more))


def run(side: VllmSide, request: Any, tokens: int, blocks: range = range(20)) -> LoadJob:
    """Have a request's offer taken, and the request scheduled; return its load."""
    ids = list(blocks[: -(-request.num_tokens // BLOCK)])
    side.allocated(request, (ids,), tokens)
    step = scheduled(new=[(request, ids, tokens, request.num_tokens - tokens)])
    (job,) = side.plan_step(step).loads
    return job


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_short_hit_is_loaded_during_the_forward(bench: Bench, *, asynchronous: bool) -> None:
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench, asynchronous=asynchronous)
    assert ask(side, request) == (32, False)
    job = run(side, request, 32)
    assert (job.layered, job.asynchronous) == (True, False)


def test_it_is_off_by_default(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench, layered_tokens=0)
    assert ask(side, request) == (32, True)
    assert not run(side, request, 32).layered
    assert Settings().layered_load_ms == 0


def test_a_longer_hit_and_a_whole_prompt_are_loaded_between_steps(bench: Bench) -> None:
    longer, whole = make_request(60, "longer"), make_request(32, "whole")
    bench.fill(longer)
    side = layered_side(bench)
    assert ask(side, longer) == (48, True)
    assert ask(side, whole) == (32, True)


def test_all_loads_of_a_step_together_are_short(bench: Bench) -> None:
    one, other = make_request(40, "one"), make_request(40, "other")
    bench.fill(one)
    side = layered_side(bench)
    assert ask(side, one) == (32, False)
    assert ask(side, other) == (32, False)
    side.allocated(one, (list(range(10)),), 32)
    assert side.matched_tokens(other, 0) == (32, True)
    side.plan_step(scheduled(new=[(one, list(range(10)), 32, 8)]))
    assert side.matched_tokens(other, 0) == (32, False)


def test_none_is_layered_behind_a_load_that_runs(bench: Bench) -> None:
    """Copies run in the order of their calls, and the step would wait for that one."""
    long, short = make_request(60, "long"), make_request([9, *range(39)], "short")
    bench.fill(long)
    bench.fill(short)
    side = layered_side(bench)
    assert ask(side, long) == (48, True)
    assert ask(side, short) == (32, False)
    run(side, long, 48)
    assert ask(side, short) == (32, True)
    side.reported(StepReport(), {"long"})
    assert ask(side, short) == (32, False)


def test_nobody_waits_for_the_load_of_an_equal_prefix(bench: Bench) -> None:
    """vLLM's cache has the blocks from the step on, and its end is never reported."""
    one, other = make_request(40, "one"), make_request(40, "other")
    bench.fill(one)
    side = layered_side(bench, promote_deadline_ms=60_000, step_budget_ms=1000)
    assert ask(side, one) == (32, False)
    run(side, one, 32)
    assert side.matched_tokens(other, 0)[0] is not None


def test_the_blocks_of_a_request_that_does_not_run_are_loaded_before_the_forward(
    bench: Bench,
) -> None:
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench)
    assert ask(side, request) == (32, False)
    side.allocated(request, (list(range(10)),), 32)
    (job,) = side.plan_step(scheduled()).loads
    assert (job.layered, job.asynchronous) == (False, False)


def test_a_block_that_the_step_writes_too_is_loaded_before_the_forward(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench)
    assert ask(side, request) == (32, False)
    job = run(side, request, 30)
    assert (job.layered, job.asynchronous) == (False, False)


def test_after_an_error_loads_come_before_the_forward(bench: Bench) -> None:
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench)
    assert ask(side, request) == (32, False)
    side.allocated(request, (list(range(10)),), 32)
    (job,) = side.plan_in_doubt().loads
    assert (job.layered, job.asynchronous) == (False, False)


@pytest.mark.parametrize("answer", [True, False])
def test_a_load_that_cannot_be_planned_fails_as_it_was_offered(
    bench: Bench, *, answer: bool
) -> None:
    """Reporting a synchronous one as finished would end the engine."""
    request = make_request(40)
    bench.fill(request)
    side = layered_side(bench, layered_tokens=0 if answer else MOST)
    assert ask(side, request) == (32, answer)
    side.never_loaded(request, (list(range(10)),), 32)
    (job,) = side.plan_step(scheduled()).loads
    assert job.places == ()
    assert job.asynchronous is answer


# --- where it may be on --------------------------------------------------------------------------


def tokens_of(folder: Path, setup: Setup, **settings: Any) -> int:
    config = make_config(folder, setup)
    config.device_config.device_type = "cuda"
    chosen = Settings(**({"layered_load_ms": 4.0} | settings))
    return _layered_tokens(chosen, config, make_kv_cache_config(setup))


FIT = Setup(service_address="/nowhere", on_failed_load="fail")
UNCACHED = replace(FIT, on_failed_load="recompute", prefix_caching=False)


def test_it_is_a_number_of_tokens_at_the_assumed_rate(tmp_path: Path) -> None:
    token_bytes = 2 * 2 * 8 * 2  # layers, K and V, of 8 values of 2 bytes
    assert tokens_of(tmp_path, FIT) == 4e-3 * 25e9 // token_bytes
    assert tokens_of(tmp_path, FIT, layered_load_ms=0.0) == 0


@pytest.mark.parametrize(
    ("setup", "settings", "reason"),
    [
        (UNCACHED, {}, "with asynchronous scheduling"),
        (replace(FIT, on_failed_load="recompute"), {}, "with prefix caching"),
        (replace(FIT, window=16), {}, "several KV groups"),
        (FIT, {"format": "portable"}, "portable format"),
    ],
)
def test_where_it_would_be_wrong_it_is_off(
    tmp_path: Path,
    setup: Setup,
    settings: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert tokens_of(tmp_path, setup, **settings) == 0
    assert reason in caplog.text


def test_without_asynchronous_scheduling_failed_loads_may_be_recomputed(tmp_path: Path) -> None:
    setup = replace(UNCACHED, asynchronous_scheduling=False)
    assert tokens_of(tmp_path, setup) > 0


def test_with_pipeline_parallelism_failed_loads_may_not_be_recomputed(tmp_path: Path) -> None:
    setup = replace(UNCACHED, asynchronous_scheduling=False)
    config = make_config(tmp_path, setup)
    config.device_config.device_type = "cuda"
    config.parallel_config.pipeline_parallel_size = 2
    chosen = Settings(layered_load_ms=4.0)
    assert _layered_tokens(chosen, config, make_kv_cache_config(setup)) == 0


@pytest.mark.parametrize(
    ("changes", "device", "asynchronous"),
    [
        ({}, "cpu", True),
        ({"asynchronous_scheduling": True, "prefix_caching": False}, "cpu", True),
        ({"stages": 2, "prefix_caching": False}, "cpu", True),
        ({}, "hpu", False),  # a failure ends the engine
        ({"prefix_caching": False}, "cpu", False),
        ({"on_failed_load": "fail", "asynchronous_scheduling": True}, "cpu", False),
    ],
)
@pytest.mark.parametrize("load_mode", ["auto", "sync"])
def test_no_load_is_synchronous_where_vllm_recomputes_wrongly(
    tmp_path: Path,
    changes: dict[str, Any],
    device: str,
    load_mode: Literal["auto", "sync"],
    caplog: pytest.LogCaptureFixture,
    *,
    asynchronous: bool,
) -> None:
    recomputing: dict[str, Any] = {
        "on_failed_load": "recompute",
        "asynchronous_scheduling": False,
    } | changes
    stages = recomputing.pop("stages", 1)
    config = make_config(tmp_path, replace(FIT, **recomputing))
    config.device_config.device_type = device
    config.parallel_config.pipeline_parallel_size = stages
    assert _loads_asynchronously(Settings(load_mode=load_mode), config) is asynchronous
    warned = "load_mode=sync is ignored" in caplog.text
    assert warned is (asynchronous and load_mode == "sync")


@pytest.mark.parametrize("change", ["device", "graphs", "drafter"])
def test_other_devices_graphs_and_drafters(tmp_path: Path, change: str) -> None:
    config: Any = make_config(tmp_path, FIT)
    config.device_config.device_type = "hpu" if change == "device" else "cuda"
    if change == "graphs":
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    if change == "drafter":
        config.speculative_config = SimpleNamespace()
    chosen = Settings(layered_load_ms=4.0)
    assert _layered_tokens(chosen, config, make_kv_cache_config(FIT)) == 0


@pytest.mark.parametrize(
    ("metadata", "mode", "calls"),
    [
        ({"layer": 1}, CUDAGraphMode.NONE, True),
        ({"layer": 1}, CUDAGraphMode.PIECEWISE, True),
        ({"layer": 1}, CUDAGraphMode.FULL, False),
        ({}, CUDAGraphMode.NONE, False),
        (None, CUDAGraphMode.NONE, False),
        ([{"layer": 1}, {"layer": 1}], CUDAGraphMode.NONE, False),  # two microbatches
        ({"layer": 1}, None, False),
    ],
)
def test_forwards_that_call_the_hooks(metadata: Any, mode: Any, *, calls: bool) -> None:
    context: Any = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)
    assert calls_layer_hooks(context) is calls
    assert not calls_layer_hooks(None)
