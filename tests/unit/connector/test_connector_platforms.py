# SPDX-License-Identifier: Apache-2.0
"""What vLLM's platforms do not do for a connector: Gaudi's runner above all."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvhaven.engine.hooks import never_raises
from kvhaven.engine.jobs import LoadJob
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.engine.loader import Loader
from kvhaven.engine.stats import Stats
from kvhaven.errors import IncompatibleEngineError, UnreportedLoadError
from kvhaven.integrations.vllm.compat import (
    attention_backend,
    beside_stores,
    kv_form,
    own_layers,
    require_reuse,
    require_stable_kernels,
)
from kvhaven.integrations.vllm.platforms import platform_of, require_supported_platform
from kvhaven.integrations.vllm.requests import leaves_uncomputed_blocks
from tests.simulation.connector_kit import CHUNK, Bench, make_request, run_new, scheduled

pytestmark = pytest.mark.slow


def config_of(
    device: str,
    *,
    prefix_caching: bool = True,
    cache_dtype: str = "auto",
    layers: Mapping[str, Any] | None = None,
) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching, cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        model_config=SimpleNamespace(model="model"),
    )


def test_gaudi_without_prefix_caching_is_refused() -> None:
    with pytest.raises(
        IncompatibleEngineError, match=r"enable_prefix_caching is off.*switch it on"
    ):
        require_supported_platform(config_of("hpu", prefix_caching=False))
    require_supported_platform(config_of("hpu"))
    require_supported_platform(config_of("cpu", prefix_caching=False))


def test_gaudi_with_dynamic_kv_quantisation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = config_of("hpu", cache_dtype="fp8_inc")
    require_supported_platform(quantised)
    monkeypatch.setenv("QUANT_CONFIG", "quant.json")
    monkeypatch.setenv("VLLM_DYNAMIC_KV_QUANT", "1")
    with pytest.raises(IncompatibleEngineError, match="VLLM_DYNAMIC_KV_QUANT is set"):
        require_supported_platform(quantised)
    require_supported_platform(config_of("hpu"))


@pytest.mark.parametrize(
    ("device", "between_steps", "hears"),
    [("cpu", False, True), ("hpu", False, False), ("cuda", True, True), ("xpu", True, True)],
)
def test_loads_and_reports_are_as_the_runner_has_them(
    device: str, *, between_steps: bool, hears: bool
) -> None:
    platform = platform_of(config_of(device))
    assert (platform.loads_between_steps, platform.hears_workers) == (between_steps, hears)


def test_without_reports_a_save_is_over_with_its_step(bench: Bench) -> None:
    side = bench.side(hears_workers=False)
    assert len(run_new(side, make_request(32), 32).saves) == 1
    assert side.plan_step(scheduled()).fence == []
    assert side._saves.under_way == 0
    again = run_new(side, make_request(40, "again"), 40, blocks=range(10))
    assert again.fence == [], "its blocks are free: the copy ended within the step"


def test_a_load_that_fails_unheard_ends_the_engine() -> None:
    loads = Loader(
        None,  # type: ignore[arg-type]  # nothing is acknowledged for a job without a service
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        0,
        Stats(),
        LoadedModel(),
        CHUNK,
        heard=False,
    )
    job = LoadJob("r", 1, "", (), (), (((1,),),), False)
    with pytest.raises(UnreportedLoadError, match=r"request r: a load failed .why., and this"):
        loads.fail(job, "why")


def test_that_error_alone_passes_the_hooks() -> None:
    class Hooks:
        def __init__(self) -> None:
            self.reported_errors: set[str] = set()

        def in_doubt(self) -> None:
            """Leave nothing half done: there is nothing."""

        @never_raises(lambda: "default")
        def hook(self, error: Exception) -> str:
            raise error

    assert Hooks().hook(ValueError("any")) == "default"
    with pytest.raises(UnreportedLoadError):
        Hooks().hook(UnreportedLoadError("wrong KV"))


def layer(window: int | None, *, sinks: bool, shares: str | None = None) -> Any:
    kernel = SimpleNamespace(sliding_window=window, sinks=[0.0] if sinks else None)
    return SimpleNamespace(impl=kernel, kv_sharing_target_layer_name=shares)


@pytest.mark.parametrize(
    ("device", "windows", "sinks", "split", "refused"),
    [
        ("cpu", (64, -1), True, True, True),
        ("cpu", (64, -1), True, False, False),
        ("cpu", (64, 64), True, True, False),
        ("cpu", (64, -1), False, True, False),
        ("cuda", (64, None), True, True, False),
    ],
)
def test_sinks_beside_different_windows_are_refused_where_vllms_cpu_kernel_splits_kv(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    windows: Sequence[int | None],
    *,
    sinks: bool,
    split: bool,
    refused: bool,
) -> None:
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", str(int(split)))
    layers = {str(n): layer(window, sinks=sinks) for n, window in enumerate(windows)}
    config = config_of(device, layers=layers)
    if not refused:
        require_stable_kernels(config, layers)
        return
    with pytest.raises(IncompatibleEngineError, match=r"Set VLLM_CPU_ATTN_SPLIT_KV=0"):
        require_stable_kernels(config, layers)


def test_batch_invariance_is_refused_with_backends_that_vllm_does_not_reuse_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backend(name: str) -> type[Any]:
        return type("Backend", (), {"get_name": staticmethod(lambda: name)})

    require_reuse(backend("FLASHINFER"))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    require_reuse(backend("FLASH_ATTN"))
    require_reuse(type("OfAPlugIn", (), {}))
    for name in ("FLASHINFER", "TRITON_MLA"):
        with pytest.raises(IncompatibleEngineError, match=f"backend is {name}.*--attention-b"):
            require_reuse(backend(name))


def test_layers_that_read_the_kv_of_others_have_none_of_their_own() -> None:
    layers = {"a": layer(None, sinks=False), "b": layer(None, sinks=False, shares="a")}
    assert own_layers(config_of("cpu", layers=layers), ["a", "b", "c"]) == {"a", "c"}


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (lambda b, n, h, d: (2, b, n, h, d), "2BNHD"),
        (lambda b, n, h, d: (b, 2, n, h, d), "B2NHD"),
        (lambda b, n, h, d: (2, b, h, n, d), "2BHND"),
        (lambda b, n, h, d: (b, h, n, 2 * d), None),
        (lambda b, n, h, d, more: (b, n, h, d, more), None),
    ],
)
def test_the_form_of_kv_tensors_is_seen_in_the_shape_that_a_backend_asks_for(
    shape: Any, form: str | None
) -> None:
    assert kv_form(type("Backend", (), {"get_kv_cache_shape": staticmethod(shape)})) == form


def test_layers_of_several_backends_are_refused_unless_one_is_derived_from_the_other() -> None:
    one, two = type("One", (), {}), type("Two", (), {})
    local = type("ChunkedLocalAttention_64_One", (one,), {})
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        for name, backend in (("a", one), ("b", one), ("c", two), ("d", local))
    }
    config = config_of("cuda", layers=layers)
    assert attention_backend(config, ["a", "b"]) is one
    assert attention_backend(config, ["d", "a"]) is one
    assert attention_backend(config, ["unknown"]) is None
    with pytest.raises(IncompatibleEngineError, match=r"several attention backends .got One, Two."):
        attention_backend(config, ["a", "c"])


class Multi(MultiConnector):
    """A MultiConnector with these connectors, of which the first asks when it is made."""

    def __init__(self, connectors: Sequence[Mapping[str, Any]]) -> None:
        options = {"connectors": connectors}
        transfer = SimpleNamespace(kv_connector_extra_config=options)
        self._vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        first = connectors[0]
        nested = first.get("kv_connector_extra_config", {}).get("connectors")
        self.stores: bool = Multi(nested).stores if nested else beside_stores()


@pytest.mark.parametrize(
    ("other", "expected"), [("NixlConnector", False), ("OffloadingConnector", True)]
)
def test_other_connectors_that_keep_kv_are_found_by_name(other: str, *, expected: bool) -> None:
    ours, theirs = {"kv_connector": "KVHavenConnector"}, {"kv_connector": other}
    assert Multi([ours, theirs]).stores is expected
    for inside, outside in (([ours, theirs], []), ([ours], [theirs])):
        nested = {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": inside},
        }
        assert Multi([nested, *outside]).stores is expected
    assert not beside_stores()


@pytest.mark.parametrize("caching", [False, True])
def test_only_a_prefix_cache_keeps_blocks_that_were_not_computed(*, caching: bool) -> None:
    config = config_of("cpu", prefix_caching=caching)
    config.scheduler_config = SimpleNamespace(policy="priority")
    output: Any = SimpleNamespace(preempted_req_ids={"a"})
    assert leaves_uncomputed_blocks(config, output) is caching
