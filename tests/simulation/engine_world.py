# SPDX-License-Identifier: Apache-2.0
"""An engine: vLLM's scheduler with our connector, and a rank's runner for each device."""

import copy
import json
import random
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhaven.integrations.vllm import register
from tests.simulation.accelerator import (
    Accelerator,
    AcceleratorRunner,
    attention_layers,
    make_pages,
)
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_device import LateDevice
from tests.simulation.engine_hybrid import ALTERNATING, Grouping, HybridRunner
from tests.simulation.engine_model import Model, Runner, StepResult
from tests.simulation.engine_state import GROUPS as STATE_GROUPS
from tests.simulation.engine_state import StateRunner, state_spec, with_states
from tests.simulation.uncomputed import UncomputedBlocks
from tests.simulators.simulation import Simulation as Simulated

LAYERS = 2
BLOCK = 4
CHUNK = 16
MODEL_LENGTH = 256

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": MODEL_LENGTH,
    "torch_dtype": "bfloat16",
}


PATIENT: tuple[tuple[str, Any], ...] = (("save_deadline_ms", 2000), ("lookup_deadline_ms", 2000))
"""Deadlines that a busy machine does not miss, so that a seed gives nearly the same run."""


@dataclass(frozen=True)
class Setup:
    """What varies between engines."""

    asynchronous_scheduling: bool = True
    load_mode: str = "async"
    world: int = 1
    blocks: int = 64
    prefix_caching: bool = True
    save_decode: bool = False
    tails: bool = False
    budget: int = 48
    sequences: int = 8
    policy: str = "fcfs"
    on_failed_load: str = ""
    """vLLM's policy; empty: `recompute` for asynchronous loads, else `fail`, its default."""
    long_prefill: int = 0
    """Tokens of a prompt that a step computes at most, if other requests are there; 0: no limit."""
    stores: tuple[float, ...] = (1.0, 0.2, 0.03)
    loads: tuple[float, ...] = (1.0, 0.2, 0.03)
    service_address: str = ""
    second_address: str = ""
    """With it, a MultiConnector has two connectors of ours, each with a node of its own."""
    fingerprint: str = field(default_factory=lambda: uuid.uuid4().hex)
    format: str = "paged"
    settings: tuple[tuple[str, Any], ...] = PATIENT
    events: KVEventsConfig | None = None
    window: int = 0
    """Tokens of the sliding window of two further KV groups; 0: there is one group, without."""
    local: bool = False
    """Whether they have chunked local attention instead, with chunks of `window` tokens."""
    grouping: Grouping = ALTERNATING
    """The KV groups, if there is a window."""
    block: int = BLOCK
    """Tokens in a block."""
    heads: int = 0
    """KV heads of the model, of which each rank has its share, or one; 0: one for each rank."""
    states: bool = False
    """Whether two further KV groups keep recurrent states."""
    checkpoints: bool = False
    """Whether kernels store states within a step, as those of Mamba 2."""
    retention: int | None = 0
    """vLLM's `prefix_cache_retention_interval`: which states it keeps."""

    @property
    def rank_heads(self) -> int:
        """KV heads of a rank."""
        return max(1, self.heads // self.world)

    @property
    def layers(self) -> list[str]:
        """The names of all layers."""
        if self.window:
            return [name for group in self.grouping.groups for name in group.names]
        return [f"layer.{index}" for index in range(LAYERS)]


def model_folder(folder: Path, heads: int = 2) -> Path:
    """Write the configuration of a tiny model, which is never loaded."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(_CONFIG | {"num_key_value_heads": heads})
    (folder / "config.json").write_text(text)
    return folder


def _model_folder_of(folder: Path, setup: Setup) -> Path:
    heads = setup.heads or setup.world
    return model_folder(folder / f"model{heads}", heads)


def make_config(folder: Path, setup: Setup, **more: Any) -> VllmConfig:
    """Return the configuration of an engine."""
    register()
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(_model_folder_of(folder, setup)),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MODEL_LENGTH,
        ),
        cache_config=CacheConfig(
            block_size=setup.block, enable_prefix_caching=setup.prefix_caching
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.sequences,
            max_num_batched_tokens=setup.budget,
            max_model_len=MODEL_LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=setup.policy,
            long_prefill_token_threshold=setup.long_prefill,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=setup.world),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=_transfer_config(setup),
        kv_events_config=setup.events,
        **more,
    )
    # The CPU platform switches it off; here it is the point.
    config.scheduler_config.async_scheduling = setup.asynchronous_scheduling
    config.cache_config.num_gpu_blocks = setup.blocks
    if setup.states:
        config.cache_config.mamba_cache_mode = "align"
    return config


def _transfer_config(setup: Setup) -> KVTransferConfig:
    def ours(address: str) -> dict[str, Any]:
        return {
            "kv_connector": "KVHavenConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "chunk_size": CHUNK,
                "model_fingerprint": setup.fingerprint,
                "load_mode": setup.load_mode,
                "save_decode_cache": setup.save_decode,
                "pd_tail": setup.tails,
                "format": setup.format,
                "service_address": address,
                "log_level": "ERROR",
            }
            | dict(setup.settings),
        }

    policy = setup.on_failed_load or ("recompute" if setup.load_mode == "async" else "fail")
    general = {"engine_id": uuid.uuid4().hex, "kv_load_failure_policy": policy}
    if not setup.second_address:
        return KVTransferConfig(**ours(setup.service_address), **general)
    children = [ours(setup.service_address), ours(setup.second_address)]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
        **general,
    )


def make_kv_cache_config(setup: Setup) -> KVCacheConfig:
    """Return the description of the KV caches: one group of full attention.

    With a window, there are those of the grouping, and the layers of all share their memory.
    """
    common: dict[str, Any] = {
        "block_size": setup.block,
        "num_kv_heads": setup.rank_heads,
        "head_size": 8,
        "dtype": torch.bfloat16,
    }
    spec = FullAttentionSpec(**common)
    groups = [KVCacheGroupSpec(setup.layers, spec)]
    if setup.states:
        state = state_spec(setup.block, spec.page_size_bytes, checkpoints=setup.checkpoints)
        groups += [
            KVCacheGroupSpec([f"{name}.state{group}" for name in setup.layers], state)
            for group in range(STATE_GROUPS)
        ]
        return KVCacheConfig(
            setup.blocks, [], groups, prefix_cache_retention_interval=setup.retention
        )
    if setup.window:
        size = "attention_chunk_size" if setup.local else "sliding_window"
        kind: Any = ChunkedLocalAttentionSpec if setup.local else SlidingWindowSpec
        window = kind(**common, **{size: setup.window})
        groups = [
            KVCacheGroupSpec(group.names, window if group.window else spec)
            for group in setup.grouping.groups
        ]
    return KVCacheConfig(num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int16).view(torch.bfloat16)


def _ours(connector: Any) -> list[Any]:
    """Return our connectors: a MultiConnector's children, or the one there is."""
    return getattr(connector, "_connectors", [connector])


class Engine:
    """vLLM's engine core in small: schedule, launch on all ranks, take the oldest output."""

    def __init__(
        self,
        folder: Path,
        setup: Setup,
        model: Model,
        choice: random.Random,
        monkeypatch: pytest.MonkeyPatch,
        simulation: Simulated | None = None,
    ) -> None:
        self.setup = setup
        self.model = model
        self._choice = choice
        self._simulation = simulation
        self.config = make_config(folder, setup)
        if simulation is not None:
            self.config.device_config.device_type = simulation.torch_type
        if simulation is not None or setup.format == "portable":
            known = attention_layers(simulation.kind if simulation else "cuda", setup.layers)
            self.config.compilation_config.static_forward_context = known
        kv_cache_config = make_kv_cache_config(setup)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(setup.block, sha256)
        self.devices: list[Any] = [self._make_device(rank) for rank in range(setup.world)]
        self.runners = [
            self._make_runner(rank, kv_cache_config, monkeypatch) for rank in range(setup.world)
        ]
        kind = AsyncScheduler if setup.asynchronous_scheduling else Scheduler
        self.scheduler = kind(
            self.config,
            kv_cache_config,
            StructuredOutputManager(self.config),
            block_size=setup.block,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.uncomputed = UncomputedBlocks(self.scheduler, setup.block)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.world)
        self._depth = 2 if setup.asynchronous_scheduling else 1
        self._queue: deque[tuple[Any, list[StepResult]]] = deque()
        self.counters: dict[str, float] = {}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.handovers: dict[str, dict[str, Any]] = {}
        """What ended requests answer for the node that decodes them."""
        self.before_update: Callable[[], None] = lambda: None
        """Called between a step's compute and its end, when vLLM processes aborts, too."""

    def add(
        self,
        name: str,
        prompt: list[int],
        length: int,
        *,
        salt: str | None = None,
        priority: int = 0,
        params: dict[str, Any] | None = None,
    ) -> None:
        """Add a request that generates `length` tokens."""
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, extra_args=params)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
        )
        for runner in self.runners:
            runner.salts[name] = salt
        self.requests[name] = request
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def wait_ready(self) -> None:
        """Wait until the service has taken the scheduler, and each rank is ready for its arena.

        An engine does not wait for that: what is asked before is a miss.
        """
        for runner in self.runners:
            for connector in _ours(runner.connector):
                assert connector._worker._client.wait_ready(60)
        clients = [connector._scheduler._client for connector in _ours(self.connector)]
        wait_until(lambda: all(client.responsive for client in clients), 60)

    def abort(self, name: str) -> None:
        """Abort a request, in whatever state it is."""
        status = self.requests[name].status
        self.counters[f"aborted {status.name}"] = self.counters.get(f"aborted {status.name}", 0) + 1
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._queue) or bool(self.scheduler.has_requests())

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not taken."""
        return len(self._queue)

    def step(self) -> None:
        """Do one round of the engine's loop."""
        launched = False
        if self.scheduler.has_requests() and len(self._queue) < self._depth:
            self.uncomputed.before()
            output = self.scheduler.schedule()
            self.uncomputed.after(output)
            for runner in self.runners:
                runner.misled = set(self.uncomputed.misled)
            self._queue.appendleft((output, [runner.execute(output) for runner in self.runners]))
            launched = bool(output.total_num_scheduled_tokens)
        if launched and len(self._queue) < self._depth:
            return
        if self._queue:
            self.take()

    def take(self) -> None:
        """Take the oldest output."""
        output, results = self._queue.pop()
        outputs = [
            runner.finish(result) for runner, result in zip(self.runners, results, strict=True)
        ]
        combined = self._aggregator.aggregate(outputs) if self.setup.world > 1 else outputs[0]
        self.before_update()
        for core in self.scheduler.update_from_output(output, combined).values():
            for result in core.outputs:
                self.outputs[result.request_id].extend(result.new_token_ids)
                if result.kv_transfer_params is not None:
                    self.handovers[result.request_id] = result.kv_transfer_params
            if core.scheduler_stats is not None:
                self._count(core.scheduler_stats.kv_connector_stats or {})

    def tick(self) -> None:
        """Let the devices work a little."""
        for device in self.devices:
            for _ in range(self._choice.choice((0, 0, 1, 4))):
                device.tick()

    def move(self) -> None:
        """Have all ranks' KV tensors lie elsewhere, as after a sleep; no step is in flight."""
        while self._queue:
            self.take()
        for runner in self.runners:
            runner.device.synchronize()
            runner.device.fail_loads = 0  # else the self-test would meet it
            runner.move()

    def close(self) -> None:
        """Shut down as vLLM does: the workers first."""
        for runner in self.runners:
            runner.connector.shutdown()
        self.scheduler.shutdown()

    def _make_device(self, rank: int) -> LateDevice | Accelerator:
        if self._simulation is not None:
            return Accelerator(self._simulation, rank)
        return LateDevice(self._choice, self.setup.stores, self.setup.loads)

    def _make_runner(
        self, rank: int, kv_cache_config: KVCacheConfig, monkeypatch: pytest.MonkeyPatch
    ) -> Runner:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        device = self.devices[rank]
        found = device.open if isinstance(device, Accelerator) else lambda *_, **__: device
        monkeypatch.setattr("kvhaven.engine.connect.open_device", found, raising=True)
        connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        if isinstance(device, Accelerator):
            device.select()
            pages = make_pages(device.simulation.torch_type, LAYERS, self.setup.blocks, BLOCK)
            connector.register_kv_caches({f"layer.{i}": layer for i, layer in enumerate(pages)})
            return AcceleratorRunner(
                connector, device, self.model, pages, BLOCK, rank, self._choice
            )
        setup = self.setup
        shape = (setup.blocks, setup.rank_heads, setup.block, 16)
        if setup.window:
            grouping = setup.grouping
            shared = [_noise(*shape) for _ in range(grouping.tensors)]
            connector.register_kv_caches(grouping.named(shared))
            return HybridRunner(
                connector,
                device,
                self.model,
                shared,
                rank,
                self._choice,
                setup.window,
                grouping,
                rank * (setup.heads or setup.world) // setup.world,
                local=setup.local,
            )
        tensors = {layer: _noise(*shape) for layer in setup.layers}
        if setup.states:
            shared = list(tensors.values())
            connector.register_kv_caches(with_states(shared))
            return StateRunner(
                connector,
                device,
                self.model,
                shared,
                rank,
                self._choice,
                checkpoints=setup.checkpoints,
            )
        connector.register_kv_caches(tensors)
        return Runner(connector, device, self.model, list(tensors.values()), rank, self._choice)

    def _count(self, data: dict[str, Any]) -> None:
        for name, amount in data.items():
            child = getattr(amount, "data", amount)  # MultiConnector has an object or a dictionary
            if isinstance(child, dict):
                self._count(child.get("data", child))
            else:
                self.counters[name] = self.counters.get(name, 0) + child
