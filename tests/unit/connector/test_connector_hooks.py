# SPDX-License-Identifier: Apache-2.0
"""`KVHavenConnector` as vLLM sees it: its scheduler, its metrics, its refusals."""

import dataclasses
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from kvhaven.engine.load_planner import LoadPlanner
from kvhaven.engine.scheduler import SchedulerSide
from kvhaven.errors import IncompatibleEngineError, LayoutError
from kvhaven.integrations.vllm import OLDEST_VLLM
from kvhaven.integrations.vllm.compat import require_supported_engine, require_supported_vllm
from kvhaven.integrations.vllm.connector import KVHavenConnector
from kvhaven.integrations.vllm.parts import (
    REPORTS_FAILED_REQUESTS,
    kv_parts,
    part_fields,
    require_supported_groups,
)
from tests.simulation.connector_kit import make_request, wait_until
from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_model import Model
from tests.simulation.engine_world import BLOCK, Engine, Setup, make_config, make_kv_cache_config
from tests.simulation.node import Node

pytestmark = pytest.mark.slow


def make_engine(folder: Path, setup: Setup, patch: pytest.MonkeyPatch) -> Engine:
    return Engine(folder, setup, Model(), random.Random(0), patch)


@pytest.fixture
def engine(tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = make_engine(tmp_path, Setup(service_address=node.address), monkeypatch)
    made.wait_ready()
    yield made
    made.close()
    node.clear()


def run(engine: Engine, name: str, prompt: list[int], length: int = 4) -> list[int]:
    """Run one request to its end, and everything that follows from it."""
    engine.add(name, prompt, length)
    while engine.busy:
        engine.tick()
        engine.step()
    for device in engine.devices:
        device.synchronize()
    return engine.outputs[name]


def report_idle(engine: Engine) -> None:
    """Have what ended while the engine was idle reported: that happens in its next steps."""
    workers = [runner.connector._worker for runner in engine.runners]
    saves = [one for worker in workers for one in worker._saves]
    wait_until(lambda: all(one._ended.qsize() == len(one._running) for one in saves))
    run(engine, "idle", [1, 2, 3])


PROMPT = [n % 5 for n in range(70)]


def expected(length: int = 4) -> list[int]:
    return Model().continuation(None, PROMPT, length)


# --- what vLLM asks for -------------------------------------------------------------------------


def test_a_prompt_is_computed_once_and_then_loaded(engine: Engine, node: Node) -> None:
    assert run(engine, "first", PROMPT) == expected()
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)
    assert engine.scheduler.reset_prefix_cache()
    assert run(engine, "second", PROMPT) == expected()
    assert engine.counters["hit_tokens"] == 64


def test_the_answers_that_do_not_depend_on_requests(engine: Engine) -> None:
    connector = engine.connector
    assert connector.requires_kv_delivery is False
    # Else vLLM lets its own hits end elsewhere in each group, and expects states from us.
    assert connector.supports_divergent_local_hybrid_hits is False
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): object()})
    assert connector.get_handshake_metadata() is None
    assert connector.get_finished_count() is None
    assert not KVHavenConnector.requires_piecewise_for_cudagraph({})
    assert connector.request_finished(make_request(4), []) == (False, None)
    assert connector.reset_cache() is True
    output = engine.scheduler.schedule()
    assert output.kv_connector_metadata.requests == []


def test_hit_sources_are_vllms_and_add_up(engine: Engine, node: Node) -> None:
    kinds = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource

    run(engine, "first", PROMPT)
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)
    engine.scheduler.reset_prefix_cache()
    seen = {}
    original = engine.connector.get_external_cache_hit_sources

    def watch(request: Any, tokens: int) -> Any:
        seen[tokens] = original(request, tokens)
        return seen[tokens]

    engine.connector.get_external_cache_hit_sources = watch
    run(engine, "second", PROMPT)
    assert seen == {64: {kinds.HOST: 64}}


def test_statistics_go_through_vllms_own_classes_found_by_name(engine: Engine, node: Node) -> None:
    from prometheus_client import REGISTRY
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorLogging,
        KVConnectorProm,
    )

    logged: list[str] = []
    logging = KVConnectorLogging(engine.config.kv_transfer_config)
    prometheus = KVConnectorProm(engine.config, ["model_name", "engine"], {0: ["tiny", "0"]})
    reports: list[dict[str, Any]] = []
    engine._count = reports.append  # type: ignore[method-assign,assignment]
    run(engine, "first", PROMPT)
    report_idle(engine)
    for report in reports:
        if report:
            logging.observe(report)
            prometheus.observe(report, 0)
    logging.log(lambda text, line: logged.append(text % line))
    assert "lookups=2" in logged[0]
    assert "saved_chunks=4" in logged[0]
    labels = {"model_name": "tiny", "engine": "0"}
    assert REGISTRY.get_sample_value("vllm:kvhaven_saved_chunks_total", labels) == 4
    assert REGISTRY.get_sample_value("vllm:kvhaven_lookups_total", labels) == 2


def test_events_go_out_with_the_engines_own(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    setup = Setup(service_address=node.address, events=events)
    engine = make_engine(tmp_path, setup, monkeypatch)
    engine.wait_ready()
    published: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    run(engine, "first", PROMPT)
    report_idle(engine)
    ours = [event for event in published if getattr(event, "medium", "") == "CPU"]
    assert sum(len(event.block_hashes) for event in ours) == 4
    assert [token for event in ours for token in event.token_ids] == PROMPT[:64]
    engine.close()


# --- what must never end an engine --------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["on_new_request", "matched_tokens", "allocated", "plan_step", "reported", "finished"],
)
def test_an_error_in_the_scheduler_side_is_a_miss_logged_once_and_counted(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(method)

    monkeypatch.setattr(SchedulerSide, method, fail)
    caplog.set_level("ERROR", "kvhaven")
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    assert run(engine, "first", PROMPT) == expected()
    assert run(engine, "second", PROMPT) == expected()
    assert len(engine.connector.reported_errors) == 1
    assert engine.counters["errors"] >= 2


@pytest.mark.parametrize("method", ["fence", "begin", "start_loads", "save", "report"])
def test_an_error_in_the_worker_side_is_no_more_than_a_cache_that_does_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from kvhaven.engine.worker import WorkerSide

    def fail(*_: object) -> None:
        raise ZeroDivisionError(method)

    monkeypatch.setattr(WorkerSide, method, fail)
    assert run(engine, "first", PROMPT) == expected()
    assert engine.counters["errors"] >= 1


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_a_load_that_could_not_be_planned_is_computed_instead(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch, load_mode: str
) -> None:
    """With vLLM's policy `recompute`; with its default the request fails, and only that one."""
    setup = Setup(
        service_address=node.address,
        load_mode=load_mode,
        on_failed_load="recompute",
        prefix_caching=load_mode == "async",  # with it, loads are asynchronous
    )
    engine = make_engine(tmp_path, setup, monkeypatch)
    engine.wait_ready()
    node.clear()
    run(engine, "first", PROMPT)
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)
    before = node.status().catalog.leases
    engine.scheduler.reset_prefix_cache()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("no plan")

    monkeypatch.setattr(LoadPlanner, "plan", fail)
    if load_mode == "sync":
        # The step that counts on it computes on what is not there; vLLM then drops its output.
        monkeypatch.setattr("tests.simulation.engine_model.Runner._expect", lambda *_: None)
    output = run(engine, "second", PROMPT)
    assert len(output) == 4
    if load_mode == "async":
        assert output == expected()
    assert engine.counters["failed_loads"] == 1
    wait_until(lambda: node.status().catalog.leases == before)
    engine.close()


def test_a_service_that_is_away_at_start_is_no_reason_to_stop(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhaven.engine.connect.ATTACH_S", 0.05)
    node = Node(short_dir)
    engine = make_engine(short_dir, Setup(service_address=node.address), monkeypatch)
    assert run(engine, "early", PROMPT) == expected()
    node.start()
    engine.wait_ready()
    engine.scheduler.reset_prefix_cache()
    run(engine, "later", PROMPT)
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)
    engine.close()
    node.kill()


def test_nothing_depends_on_how_long_a_device_takes_to_register_the_arena(
    tmp_path: Path, engine: Engine, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1 s a GB on hardware: 50 s for 500 GB, and no request may wait or fail for that."""
    run(engine, "first", PROMPT)
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)
    monkeypatch.setattr("kvhaven.engine.connect.ATTACH_S", 2.0)
    registers, go_on = threading.Event(), threading.Event()

    def register(_device: LateDevice, _address: int, size: int) -> None:
        if size > 1 << 16:  # not what the self-test copies
            registers.set()
            assert go_on.wait(60)

    monkeypatch.setattr(LateDevice, "register_host", register)
    setup = Setup(service_address=node.address, fingerprint=engine.setup.fingerprint)
    late = make_engine(tmp_path, setup, monkeypatch)
    try:
        assert registers.wait(120)
        assert late.connector._scheduler._client.responsive
        assert run(late, "early", PROMPT) == expected()
        assert late.counters.get("failed_loads", 0) == 0
        assert late.counters.get("hit_tokens", 0) == 0
    finally:
        go_on.set()
    late.wait_ready()
    late.scheduler.reset_prefix_cache()
    assert run(late, "later", PROMPT) == expected()
    assert late.counters["hit_tokens"] == 64
    assert late.counters.get("failed_loads", 0) == 0
    late.close()


def test_nothing_is_saved_of_a_forward_that_raised(engine: Engine, node: Node) -> None:
    """vLLM's V1 runner calls `wait_for_save` in a `finally`."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("out of memory")

    (runner,) = engine.runners
    connector = runner.connector
    save, launch = connector.wait_for_save, runner.launch
    before = node.status().catalog.resident_chunks

    def launch_and_fail(scheduled: Any, result: Any) -> None:
        launch(scheduled, result)
        try:
            fail()
        finally:
            save()

    runner.launch = launch_and_fail  # type: ignore[method-assign]
    engine.step()
    engine.add("first", PROMPT, 4)
    with pytest.raises(ZeroDivisionError):
        run(engine, "second", PROMPT)
    engine.devices[0].synchronize()
    wait_until(lambda: node.status().catalog.reserved_bytes == 0)
    assert node.status().catalog.resident_chunks == before


def test_an_engine_that_runs_while_its_caller_handles_an_error_is_served_as_ever(
    engine: Engine, node: Node
) -> None:
    node.clear()
    try:
        int("no number")
    except ValueError:
        assert run(engine, "first", PROMPT) == expected()
    wait_until(lambda: node.status().catalog.resident_chunks >= 4)


def test_kv_caches_of_another_layout_are_refused_the_second_time(engine: Engine) -> None:
    import torch

    (runner,) = engine.runners
    other = [torch.zeros(engine.setup.blocks, 1, BLOCK, 16, dtype=torch.float16)] * 2
    with pytest.raises(LayoutError, match=r"registered again with another layout"):
        runner.connector.register_kv_caches({f"layer.{n}": t for n, t in enumerate(other)})


# --- refusals -----------------------------------------------------------------------------------


def spec(kind: type[Any] = FullAttentionSpec, **more: Any) -> Any:
    import torch

    return kind(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, **more)


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], each) for i, each in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


before_0_30 = pytest.mark.skipif(not REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30")


@before_0_30
def test_full_attention_with_windows_is_two_parts(tmp_path: Path) -> None:
    window = spec(SlidingWindowSpec, sliding_window=9)
    groups = caches(window, window, spec())
    require_supported_engine(make_config(tmp_path, Setup(service_address="/nowhere")), groups)
    full, windows = kv_parts(groups)
    assert (full.name, full.groups, full.reach) == ("full", (2,), None)
    assert (windows.name, windows.groups, windows.reach) == ("window:9", (0, 1), 8)
    assert kv_parts(caches(spec()))[0].name == "full"
    assert part_fields(kv_parts(caches(spec())), full, groups) == {}, (
        "the digests of other models stay"
    )


def test_unlike_engines_have_the_same_portable_parts() -> None:
    """Other blocks and groups, and more tokens that are kept; but not another window."""

    def fields(window: int, block: int, groups: int, extra: int = 0) -> list[dict[str, str]]:
        full = dataclasses.replace(spec(), block_size=block)
        of_window = dataclasses.replace(
            spec(SlidingWindowSpec, sliding_window=window),
            block_size=block,
            extra_retained_tokens=extra,
        )
        kv_cache = caches(*[of_window] * groups, full)
        parts = kv_parts(kv_cache, portable=True)
        return [part_fields(parts, part, kv_cache, portable_chunk=512) for part in parts]

    alike = fields(100, 16, 5)
    assert alike[0] == {"part": "full", "parts": "full, window:100", "kv_tokens": "512"}
    assert alike[1] == alike[0] | {"part": "window:100", "kv_tokens": "128"}
    assert alike == fields(100, 32, 1) == fields(100, 128, 5) == fields(100, 64, 2, extra=2)
    assert fields(101, 16, 5) != alike
    # Whole blocks are stored: one of 256 tokens, and 256 for a window that more is kept of.
    assert fields(100, 256, 5)[1]["kv_tokens"] == "256"
    assert fields(128, 16, 5, extra=2)[1]["kv_tokens"] == "256"


@before_0_30
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("drafter", "speculation by eagle.*--disable-hybrid-kv-cache-manager"),
        ("platform", r"one on this platform \(hpu\)"),
        ("blocks", "different block sizes"),
        ("only windows", "expected one, or full attention with sliding windows"),
    ],
)
def test_windows_that_are_not_served_are_refused(tmp_path: Path, change: str, words: str) -> None:
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    window = spec(SlidingWindowSpec, sliding_window=9)
    groups = [window, window, spec()]
    if change == "drafter":
        object.__setattr__(config, "speculative_config", SimpleNamespace(method="eagle"))
    elif change == "platform":
        config.device_config.device_type = "hpu"
    elif change == "blocks":
        groups[0] = dataclasses.replace(window, block_size=2 * BLOCK)
    else:
        groups = [window, spec(SlidingWindowSpec, sliding_window=5)]
    with pytest.raises(IncompatibleEngineError, match=words):
        require_supported_groups(config, caches(*groups))


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([spec(), spec()], "2 KV groups .*disable-hybrid-kv-cache-manager"),
        (
            [spec(SlidingWindowSpec, sliding_window=8)],
            "SlidingWindowSpec, which drops blocks.*--disable-sliding-window.*--max-model-len 8",
        ),
        ([], "keeps no KV .*without KVHaven"),
        ([spec(non_causal=True)], "not causal"),
    ],
)
def test_kv_that_cannot_be_cached_is_refused_by_name(
    tmp_path: Path, specs: list[Any], words: str
) -> None:
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    require_supported_engine(config, caches(spec()))
    with pytest.raises(IncompatibleEngineError, match=words):
        require_supported_engine(config, caches(*specs))


@pytest.mark.parametrize(
    "setting", ["decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_context_parallelism_is_refused(tmp_path: Path, setting: str) -> None:
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    setattr(config.parallel_config, setting, 2)
    with pytest.raises(IncompatibleEngineError, match=f"{setting} is 2"):
        require_supported_engine(config, caches(spec()))


def test_going_on_after_a_fault_of_experts_is_refused(tmp_path: Path) -> None:
    """VLLM finds the fault in the step's output, after its KV was saved, and drops that output."""
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(IncompatibleEngineError, match="Leave --enable-fault-tolerance out"):
        require_supported_engine(config, caches(spec()))


def test_returning_the_experts_of_each_token_is_refused(tmp_path: Path) -> None:
    """VLLM has none of loaded tokens: it ends with "auxiliary output object does not exist"."""
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    require_supported_engine(config, caches(spec()))
    outputs = getattr(config, "aux_output_config", config.model_config)
    outputs.enable_return_routed_experts = True
    with pytest.raises(IncompatibleEngineError, match="Leave --enable-return-routed-experts out"):
        require_supported_engine(config, caches(spec()))


def test_a_model_that_needs_every_token_computed_is_refused(tmp_path: Path) -> None:
    from vllm.config import PoolerConfig

    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    config.model_config.pooler_config = PoolerConfig(seq_pooling_type="MEAN")
    with pytest.raises(IncompatibleEngineError, match="does not support prefix caching"):
        require_supported_engine(config, caches(spec()))


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("is_hybrid", True, "recurrent state.*LlamaForCausalLM.*leave --kv-transfer-config out"),
        ("is_attention_free", True, "has no attention"),
        ("is_prefix_caching_supported", False, "needs every token computed"),
        ("rswa_window", 128, "window of its generated tokens"),
        ("use_mla", True, "multi-head latent attention on a CPU.*AMX"),
    ],
)
def test_models_that_are_not_served_are_refused_before_vllm_divides_their_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, words: str
) -> None:
    """vLLM's own words for them, such as "Failed to promote local KV cache specs", help nobody."""
    setup = Setup(service_address="/nowhere", prefix_caching=attribute != "use_mla")
    config = make_config(tmp_path, setup)
    assert KVHavenConnector.get_required_kvcache_layout(config) is None
    monkeypatch.setattr(type(config.model_config), attribute, value)
    with pytest.raises(IncompatibleEngineError, match=words):
        KVHavenConnector.get_required_kvcache_layout(config)


def test_images_that_are_computed_in_several_steps_are_refused_where_that_changes_their_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM keeps them whole itself on CUDA and ROCm, where their tokens attend to later ones."""
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", True)
    KVHavenConnector.get_required_kvcache_layout(config)  # it takes no images
    config.scheduler_config.is_multimodal_model = True
    with pytest.raises(IncompatibleEngineError, match="--disable-chunked-mm-input"):
        KVHavenConnector.get_required_kvcache_layout(config)
    config.scheduler_config.disable_chunked_mm_input = True
    KVHavenConnector.get_required_kvcache_layout(config)


def test_risc_v_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, Setup(service_address="/nowhere"))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(IncompatibleEngineError, match="RISC-V"):
        require_supported_engine(config, caches(spec()))


TURNS_REUSE_OFF = {
    "benchmarks/forward/main.py": "it runs no engine for clients",
    "v1/engine/core.py": "attention that is not causal: refused by the KV's spec",
    "config/vllm.py": "an encoder alone: it has no KV",
    "engine/arg_utils.py": "RISC-V: require_supported_model",
    "model_executor/layers/attention/attention.py": "batch invariance: require_reuse",
    "model_executor/layers/attention/mla_attention.py": "batch invariance: require_reuse",
    "model_executor/models/config.py": "windows of what was generated: require_supported_model",
    "platforms/cpu.py": "MLA: require_supported_model",
}


def test_wherever_vllm_turns_prefix_caching_off_it_is_known_why() -> None:
    import vllm

    root = Path(vllm.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "enable_prefix_caching = False" in path.read_text()
    }
    assert found <= TURNS_REUSE_OFF.keys()


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(service_address="/nowhere")
    config = make_config(tmp_path, setup)
    odd = dataclasses.replace(spec(), block_size=24)
    with pytest.raises(IncompatibleEngineError, match=r"chunk_size is 16 .* block 24"):
        KVHavenConnector(config, KVConnectorRole.SCHEDULER, caches(odd))


@pytest.mark.parametrize("method", ["on_new_request", "handle_preemptions", "bind_gpu_block_pool"])
def test_a_vllm_without_a_hook_is_refused_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    require_supported_vllm()
    monkeypatch.delattr(KVConnectorBase_V1, method)
    with pytest.raises(IncompatibleEngineError, match=rf"\(it lacks {method}\); expected vLLM 0"):
        require_supported_vllm()


@pytest.mark.parametrize("version", ["0.28.0", "0.9.2", "0.28.1rc2.dev7+g12ab"])
def test_an_old_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    said = f"not supported; expected vLLM {OLDEST_VLLM} "
    with pytest.raises(IncompatibleEngineError, match=said):
        require_supported_vllm()


@pytest.mark.parametrize("version", ["0.29.0", "0.33.1.dev1+cpu", "1.0.0", "0.1.dev1+g12ab", "dev"])
def test_a_vllm_that_is_newer_or_tells_no_version_is_taken(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    require_supported_vllm()


def test_a_rank_that_is_there_already_is_refused(
    tmp_path: Path, node: Node, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhaven.errors import KVHavenError

    config = engine.config
    connector = KVHavenConnector(config, KVConnectorRole.WORKER, make_kv_cache_config(engine.setup))
    import torch

    tensor = torch.zeros(engine.setup.blocks, 1, BLOCK, 16, dtype=torch.bfloat16)
    tensors = {f"layer.{index}": tensor.clone() for index in range(2)}
    with pytest.raises(KVHavenError, match=r"rank 0 of engine .* is attached already"):
        connector.register_kv_caches(tensors)
