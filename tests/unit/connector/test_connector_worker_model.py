# SPDX-License-Identifier: Apache-2.0
"""The worker's side: what its model holds, with speculation too, and where its tensors are."""

import contextlib
import ctypes
import dataclasses
import threading
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

pytest.importorskip("vllm", reason="the connector is vLLM's")

import torch
import vllm.v1.worker.kv_connector_model_runner_mixin as mixin

from kvhaven.devices import staging
from kvhaven.devices.streams import StreamDevice
from kvhaven.engine.adapters import AdapterUse
from kvhaven.engine.jobs import StepPlan
from kvhaven.engine.loaded_model import LoadedModel
from kvhaven.errors import DeviceCopyError
from kvhaven.integrations.vllm import loaded_model
from kvhaven.integrations.vllm.connector import KVHavenConnector
from kvhaven.integrations.vllm.loaded_model import adapter_digest
from kvhaven.integrations.vllm.requests import PlanMetadata
from kvhaven.layouts import describe_kv_caches
from kvhaven.protocol import ModelState
from tests.devices import opened
from tests.simulation.connector_kit import BLOCK, BYTES, wait_until
from tests.simulation.engine_device import LateCopy, LateDevice
from tests.simulation.node import Node
from tests.unit.connector.rank_kit import BLOCKS, Rank, save_job

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

pytestmark = pytest.mark.slow


# --- what the model holds now -------------------------------------------------------------------


def adapter_model(content: float) -> Any:
    """Return what stands for a loaded adapter: vLLM's `LoRAModel` has an id and tensors."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    layer = LoRALayerWeights("q_proj", 2, 4, torch.full((2, 8), content), torch.ones(8, 2))
    return LoRAModel(1, 2, {"q_proj": layer})


def load_adapter(rank: Rank, model: Any) -> None:
    rank.model.adapter_loaded(model.id, adapter_digest(model))


def use_of(rank: Rank, generation: int = 1) -> AdapterUse:
    return AdapterUse(1, generation, rank.model.state().adapters[0].digest)


def test_kv_of_an_adapter_is_saved_while_that_content_is_loaded(rank: Rank) -> None:
    load_adapter(rank, adapter_model(1.0))
    job = dataclasses.replace(save_job(), adapter=use_of(rank))
    rank.step(StepPlan(saves=[job]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)


def test_kv_that_was_planned_under_another_adapters_name_is_neither_saved_nor_loaded(
    rank: Rank,
) -> None:
    """The files were overwritten, and vLLM has loaded them since the step was planned."""
    load_adapter(rank, adapter_model(1.0))
    use = use_of(rank)
    load_adapter(rank, adapter_model(2.0))
    save, load = dataclasses.replace(save_job(), adapter=use), rank.load(adapter=use)
    report = rank.step(StepPlan(saves=[save]))[2]
    assert report is not None
    assert report.unwritten == {1: {0}}
    wait_until(lambda: rank.reserved == 0)
    assert rank.step(StepPlan(loads=[load]))[:2] == ({"r"}, set(range(4)))


def test_an_adapter_that_comes_back_is_another_generation(rank: Rank) -> None:
    for content in (1.0, 2.0, 1.0):
        load_adapter(rank, adapter_model(content))
    assert rank.model.holds(1, 3)
    load_adapter(rank, adapter_model(1.0))
    assert rank.model.holds(1, 3), "loaded again with the same content: nothing has changed"


def test_an_adapter_without_a_name_is_unknown_and_not_forgotten(rank: Rank) -> None:
    load_adapter(rank, adapter_model(1.0))
    odd = adapter_model(1.0)
    odd.loras["q_proj"].hook = object()
    load_adapter(rank, odd)
    assert rank.model.state().adapters == ()
    load_adapter(rank, adapter_model(1.0))
    assert rank.model.holds(1, 3)


def test_a_load_whose_adapter_changed_before_its_request_computes_is_reported(rank: Rank) -> None:
    load_adapter(rank, adapter_model(1.0))
    load = rank.load(adapter=use_of(rank))
    rank.step(StepPlan(loads=[load]))
    assert rank.settle()[:2] == ({"r"}, set())
    load_adapter(rank, adapter_model(2.0))
    assert rank.step(StepPlan(first_steps=[load]))[:2] == (set(), set(range(4)))


class Speculating:
    """A rank's connector in vLLM's V1 runner with speculation, which ends a step's saves later."""

    def __init__(self, rank: Rank, patch: pytest.MonkeyPatch, *, stages: int = 1) -> None:
        self.connector = connector = object.__new__(KVHavenConnector)
        connector._worker, connector._scheduler = rank.worker, None
        connector.reported_errors, connector._errors = set(), 0
        parallel = SimpleNamespace(rank=0, tensor_parallel_size=1, pipeline_parallel_size=stages)
        config = SimpleNamespace(speculative_config=SimpleNamespace(), parallel_config=parallel)
        connector._vllm_config = cast("VllmConfig", config)
        self.drafts = stages == 1
        patch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
        patch.setattr(mixin, "has_kv_transfer_group", lambda: True)
        patch.setattr(mixin, "get_forward_context", lambda: None)

    def step(self, plan: StepPlan, error: Exception | None = None) -> "KVConnectorOutput":
        """Do a step as the runner does; return what vLLM is told in it."""
        output = SimpleNamespace(
            kv_connector_metadata=PlanMetadata(plan),
            has_sync_kv_loads=any(not job.asynchronous for job in plan.loads),
            finished_req_ids=set(),
        )
        runner = mixin.KVConnectorModelRunnerMixin
        with runner._get_kv_connector_output(
            cast("SchedulerOutput", output), defer_finalize=True
        ) as told:
            if error is not None:
                raise error
        if self.drafts:
            runner.finalize_kv_connector()
        return told


def test_with_speculation_a_load_that_fails_late_is_known_in_its_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM asks for failures before it has drafted, and ends the step's saves after that."""
    rank.device.fail_loads = 1
    told = Speculating(rank, monkeypatch).step(StepPlan(loads=[rank.load(asynchronous=False)]))
    assert told.invalid_block_ids == set(range(4))


def test_with_speculation_a_change_of_an_adapter_is_known_in_the_first_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_adapter(rank, adapter_model(1.0))
    load = rank.load(adapter=use_of(rank))
    rank.step(StepPlan(loads=[load]))
    assert rank.settle()[:2] == ({"r"}, set())
    load_adapter(rank, adapter_model(2.0))
    engine = Speculating(rank, monkeypatch)
    assert engine.step(StepPlan(first_steps=[load])).invalid_block_ids == set(range(4))
    assert engine.step(StepPlan()).invalid_block_ids == set()


@pytest.mark.parametrize("stages", [1, 2], ids=["drafts", "does not draft"])
def test_with_speculation_every_stage_saves(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """Of a stage that is not the last, which has no drafter, vLLM's V1 runner ends no step."""
    engine = Speculating(rank, monkeypatch, stages=stages)
    engine.step(StepPlan(saves=[save_job(1)]))
    rank.settle()
    wait_until(lambda: rank.resident == 1)
    with pytest.raises(ValueError, match="forward"):
        engine.step(StepPlan(saves=[save_job(2)]), ValueError("forward"))
    rank.settle()
    wait_until(lambda: rank.reserved == 0)
    assert rank.resident == 1


def test_after_a_change_of_weights_nothing_is_loaded_or_saved_until_the_scheduler_knows(
    rank: Rank,
) -> None:
    rank.model.weights_changed()
    loads, blocks, report = rank.step(StepPlan(loads=[rank.load()], saves=[save_job(1)]))
    assert report is not None
    assert report.unwritten == {1: {0}}
    assert (loads, blocks) == ({"r"}, set(range(4)))
    known = StepPlan(weights={0: 1}, failed_loads={0: 1}, saves=[save_job(2, first_block=4)])
    rank.step(known)
    rank.settle(StepPlan(weights={0: 1}, failed_loads={0: 1}))
    wait_until(lambda: rank.resident == 1 and rank.reserved == 0)


def test_a_rank_says_what_its_model_holds_when_that_changes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[ModelState] = []
    monkeypatch.setattr(rank.client, "model_changed", said.append)
    load_adapter(rank, adapter_model(1.0))
    rank.model.weights_changed()
    assert [state.weights for state in said] == [0, 1]
    assert said[1].adapters[0].generation == 1


# --- tensors that move --------------------------------------------------------------------------


def test_other_tensors_take_the_place_of_the_old_ones_under_the_same_connection(
    rank: Rank,
) -> None:
    """Gaudi registers its KV caches again when it wakes up."""
    rank.step(StepPlan(saves=[save_job()]))
    saved = rank.tensor.clone()
    rank.tensor = torch.zeros_like(rank.tensor)
    layout = describe_kv_caches(
        {"layer": rank.tensor},
        layer_specs={"layer": (BYTES, BLOCK)},
        num_blocks=BLOCKS,
        kernel_tag="",
    )
    rank.worker.move(layout)
    wait_until(lambda: rank.resident == 1)
    rank.step(StepPlan(loads=[rank.load(places=(rank.place_of(save_job()),))]))
    assert rank.settle()[:2] == ({"r"}, set())
    assert torch.equal(rank.tensor[:4].view(torch.int16), saved[:4].view(torch.int16))
    assert [member.connected for member in rank.node.status().members] == [True]


# --- memory that goes ---------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["cuda-12.8", "cuda-12.8-unregistered", "rocm-7", "xpu"])
def test_nothing_is_put_on_the_device_after_sleep_has_begun(
    accelerator: str, fresh_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for the device and unmaps the KV tensors; our threads may have more for it."""
    from vllm.v1.worker.worker_base import WorkerBase

    asleep = threading.Event()
    late: list[str] = []

    class SleepingWorker(WorkerBase):
        def sleep(self, level: int = 1) -> None:
            found.simulation.module.synchronize()  # all that vLLM does before it unmaps the memory
            asleep.set()

    monkeypatch.setattr(loaded_model, "LOADED", LoadedModel())
    monkeypatch.setattr(staging, "PIECE_BYTES", 800)
    model = loaded_model.watch_model()
    with opened(accelerator) as found:
        assert isinstance(found.device, StreamDevice)
        rank = Rank(fresh_node, found.device, place=found.tensor)
        model.listen_for_memory(rank.worker.end_copies)
        copy = found.device._make.copy

        def slow_copy(*arguments: Any, **options: Any) -> None:
            late.extend(["a copy"] if asleep.wait(0.02) else [])
            copy(*arguments, **options)

        with contextlib.closing(rank.worker):
            rank.step(StepPlan(saves=[save_job()]))
            wait_until(lambda: rank.resident == 1)
            load = rank.load(places=(rank.place_of(save_job()),))
            monkeypatch.setattr(found.device._make, "copy", slow_copy)
            rank.step(StepPlan(loads=[load], saves=[save_job(2, 2, first_block=8)]))
            SleepingWorker.__new__(SleepingWorker).sleep()
            rank.worker.end_copies()
            assert late == []
            assert rank.worker.finished_loads() == {"r"}


def test_memory_is_not_given_back_while_a_copy_has_no_end(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the load was reported as failed long ago: the device may write to its blocks."""
    monkeypatch.setattr("kvhaven.engine.worker.COPY_DEADLINE_S", 0.01)
    rank.step(StepPlan(loads=[rank.load()]))
    with monkeypatch.context() as stuck:
        stuck.setattr(LateCopy, "wait", lambda copy, _: copy.done())
        with pytest.raises(DeviceCopyError, match="rank 0: copies have not ended within"):
            rank.model.memory_goes()
        rank.device.jobs[0].error = "the device is lost"
        stuck.setattr("kvhaven.engine.loader.LOST_S", -1.0)
        assert rank.step(StepPlan())[:2] == ({"r"}, set(range(4)))
        with pytest.raises(DeviceCopyError, match="rank 0: copies have not ended within"):
            rank.model.memory_goes()
    rank.device.synchronize()
    rank.model.memory_goes()


def test_an_arena_that_a_copy_may_still_touch_is_not_unmapped(
    fresh_node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not while the process lives: its lock keeps the service from giving the memory away."""
    rank = Rank(fresh_node, LateDevice(Random(0)))
    monkeypatch.setattr("kvhaven.engine.worker.COPY_DEADLINE_S", 0.01)
    rank.step(StepPlan(saves=[save_job()]))
    arena = rank.client.arena(rank.client.service)
    assert arena is not None
    with monkeypatch.context() as stuck:
        stuck.setattr(LateCopy, "wait", lambda copy, _: copy.done())
        rank.worker.close()
    assert "copies have not ended, so the arena stays mapped" in caplog.text
    wait_until(lambda: fresh_node.status().catalog.quarantined_bytes > 0)
    rank.device.synchronize()
    assert bytes(memoryview((ctypes.c_char * 1).from_address(arena.address_of(0, 0, 1))))
    assert fresh_node.status().catalog.quarantined_bytes > 0
