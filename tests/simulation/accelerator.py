# SPDX-License-Identifier: Apache-2.0
"""Engines on simulated accelerators: real devices of ours, KV tensors on `hpu`, `xpu` or `cuda`.

The model is that of `engine_model`; its steps are work on the device's current stream. What it
reads through the block tables goes to the host on that stream too, and is compared when the
step is taken.
"""

import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.outputs import KVConnectorOutput

from kvhaven.devices.detect import open_device
from kvhaven.devices.streams import StreamDevice
from tests.simulation.engine_model import (
    TOKEN_WORDS,
    VOCABULARY,
    Model,
    Runner,
    RunningRequest,
    Scheduled,
    StepResult,
)
from tests.simulators.simulation import Simulation

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Pending = list[tuple[str, RunningRequest, int, int, torch.Tensor]]
"""What a step reads: the request, its tokens, the layer, and where the words arrive."""

BACKENDS = {
    "hpu": "HPUAttentionBackendV1",
    "xpu": "FlashAttentionBackend",
    "cuda": "FlashAttentionBackend",
    "rocm": "TritonAttentionBackend",
}
"""The attention backends whose layouts the KV tensors have."""


class Accelerator:
    """One rank's simulated device, as the engine's harness drives it."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation = simulation
        self.rank = rank
        self.full_graphs = 0.2
        """How likely a step runs as a FULL CUDA graph, without hooks for layers."""
        self.silent: set[int] = set()
        """Layers without hooks, although the graph has them."""
        self.order = 1
        """-1: the last layer comes first."""
        self.fences = 0
        self.fail_loads = 0
        simulation.module.set_device(rank)
        device = open_device(simulation.kind, copy_threads=1)
        assert isinstance(device, StreamDevice)
        self._device = device
        fence = device.fence

        def counted(jobs: Sequence[Any]) -> None:
            self.fences += len(jobs)
            fence(jobs)

        device.fence = counted  # type: ignore[method-assign]  # counts, and does the same

    def select(self) -> None:
        """Make it the current device, as it is in a worker's process from the start."""
        self.simulation.module.set_device(self.rank)

    def open(self, *_: object, **__: object) -> StreamDevice:
        """Be what detection finds."""
        return self._device

    def tick(self) -> bool:
        """Run one piece of work of any device."""
        return self.simulation.tick()

    def synchronize(self) -> None:
        """Wait for everything."""
        self._device.synchronize()

    def abandon(self) -> None:
        """Do nothing: the simulation ends all its work by itself."""

    def mark_step(self) -> None:
        """Start what was recorded, as an engine does at the end of its forward."""
        self._device._make.flush()


class AcceleratorRunner(Runner):
    """A rank's model runner over a simulated accelerator.

    On GPUs it calls the connector as vLLM's own runner does. On Gaudi as vllm-gaudi's: no hook for
    preemptions, loads before every forward, and of all that the connector reports only finished
    transfers arrive.
    """

    def __init__(
        self,
        connector: Any,
        device: Accelerator,
        model: Model,
        pages: Sequence[Pages],
        block_size: int,
        rank: int,
        choice: random.Random,
    ) -> None:
        self.connector = connector
        self.device = device
        self._model = model
        self._rank = rank
        self._choice = choice
        self._requests = {}
        self._block_size = block_size
        self.use(pages)
        self._computations = 0
        self._hooks = False
        self._pending: dict[int, tuple[Any, Pending, list[torch.Tensor]]] = {}
        self.salts = {}

    def use(self, pages: Sequence[Pages]) -> None:
        """Compute with these KV tensors from now on."""
        self.pages = list(pages)
        self._words_l = [_as_words(layer) for layer in pages]

    def move(self) -> None:
        """Have the KV tensors lie elsewhere from now on, and register them again."""
        self.device.select()
        for copy in self.connector._worker._loads[0].copies:
            assert copy.wait(120), "a load has not ended"
        self.device.synchronize()
        super().move()
        self.device.synchronize()

    def execute(self, output: "SchedulerOutput") -> StepResult:
        """Launch a step."""
        self.device.select()
        if self.device.simulation.kind != "hpu":
            self._hooks = self._choice.random() >= self.device.full_graphs
            return super().execute(output)
        connector = self.connector
        scheduled = self._update_states(output)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        self._linger()
        connector.start_load_kv(None)
        self._linger()
        result = StepResult([name for name, *_ in scheduled], {}, None, KVConnectorOutput())
        if scheduled:
            self.launch(scheduled, result)
        self._linger()
        connector.wait_for_save()
        sending, receiving = connector.get_finished(output.finished_req_ids)
        result.connector.finished_sending = sending
        result.connector.finished_recving = receiving
        connector.clear_connector_metadata()
        return result

    def launch(self, scheduled: Sequence[Scheduled], result: StepResult) -> None:
        """Put a step's writes and reads on the current stream, layer by layer.

        As in vLLM, a layer writes its KV before the hook, and attends to all KV behind it.
        """
        keep: list[torch.Tensor] = []
        for name, request, begin, count in scheduled:
            request.extend_states()
            assert begin + count <= len(request.tokens), f"{name}: tokens that nobody sampled"
        noise = [self._noise(count) for *_, count in scheduled]
        pending: Pending = []
        for layer in range(len(self._words_l))[:: self.device.order]:
            for (_, request, begin, count), noise_t in zip(scheduled, noise, strict=True):
                self._put(request, begin, begin + count, layer, noise_t, keep)
            if self._hooks and layer not in self.device.silent:
                self.connector.wait_for_layer_load(f"layer.{layer}")
            for name, request, begin, count in scheduled:
                end = begin + count
                pending.append((name, request, end, layer, self._get(request, end, layer, keep)))
            # Sometimes the device is as far as the host.
            if self.device.simulation.kind != "hpu" and self._choice.random() < 0.3:
                self.device.simulation.module.current_stream().synchronize()
        for name, request, begin, count in scheduled:
            end = begin + count
            done = end == len(request.tokens)
            result.sampled[name] = [Model.sample(request.states[-1])] if done else []
            request.tokens.extend(result.sampled[name])
        self.device.mark_step()
        event = self.device.simulation.module.Event()
        event.record()
        self._pending[id(result)] = event, pending, keep

    def finish(self, result: StepResult) -> Any:
        """Wait for a step's compute, compare what it read, and return its output."""
        event, pending, _ = self._pending.pop(id(result), (None, [], []))
        if event is not None:
            event.synchronize()
        failed = self._undo_failed(pending, result)
        for name, request, end, layer, arrived in pending:
            if name not in failed:
                self._compare(name, request, end, layer, arrived.numpy().view(np.uint64))
        return super().finish(result)

    def _undo_failed(self, pending: Pending, result: StepResult) -> set[str]:
        """Return the requests that have computed from blocks of failed loads.

        vLLM must drop what they computed, so that shows: a token that is none, and wrong KV. (It
        does not with asynchronous scheduling.)
        """
        blocks = result.connector.invalid_block_ids
        failed = {}
        for name, request, end, *_ in pending:
            computed = request.blocks[: -(-end // self._block_size)]
            first = next((at for at, block in enumerate(computed) if block in blocks), None)
            if first is not None and name not in failed:
                failed[name] = request, first * self._block_size, end
        if not failed:
            return set()
        keep: list[torch.Tensor] = []
        for name, (request, begin, end) in failed.items():
            index = self._to_device(self._slots(request, begin, end), keep)
            for part in (part for parts in self._words_l for part in parts):
                wrong = np.full((end - begin, part.shape[1]), -1, np.int64)
                part.index_copy_(0, index, self._to_device(wrong, keep))
            del request.tokens[len(request.tokens) - len(result.sampled[name]) :]
            del request.states[len(request.tokens) :]
            request.seen.clear()
            result.sampled[name] = [VOCABULARY] * len(result.sampled[name])
        self.device.synchronize()
        return set(failed)

    def _context(self, scheduled: Sequence[Scheduled]) -> Any:
        mode = CUDAGraphMode.PIECEWISE if self._hooks else CUDAGraphMode.FULL
        names = [f"layer.{layer}" for layer in range(len(self._words_l))]
        metadata = dict.fromkeys(names) if scheduled else None
        return SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=mode)

    def _put(
        self,
        request: RunningRequest,
        begin: int,
        end: int,
        layer: int,
        noise_t: npt.NDArray[np.uint64],
        keep: list[torch.Tensor],
    ) -> None:
        index = self._to_device(self._slots(request, begin, end), keep)
        words_tw = self._words(request, begin, end, layer, noise_t).view(np.int64)
        start = 0
        for part in self._words_l[layer]:
            width = part.shape[1]
            values = np.ascontiguousarray(words_tw[:, start : start + width])
            part.index_copy_(0, index, self._to_device(values, keep))
            start += width

    def _get(
        self, request: RunningRequest, end: int, layer: int, keep: list[torch.Tensor]
    ) -> torch.Tensor:
        index = self._to_device(self._slots(request, 0, end), keep)
        arrived = torch.empty((end, TOKEN_WORDS), dtype=torch.int64)
        if self.device.simulation.kind != "hpu":
            arrived = arrived.pin_memory()
        words = torch.cat([part.index_select(0, index) for part in self._words_l[layer]], dim=1)
        arrived.copy_(words, non_blocking=True)
        return arrived

    def _slots(self, request: RunningRequest, begin: int, end: int) -> npt.NDArray[np.int64]:
        block_t, within_t = self._place(request, begin, end)
        return block_t * self._block_size + within_t

    def _to_device(self, values: npt.NDArray[np.int64], keep: list[torch.Tensor]) -> torch.Tensor:
        host = torch.from_numpy(values)
        if self.device.simulation.kind != "hpu":
            host = host.pin_memory()
        keep.append(host)
        return host.to(self.device.simulation.torch_type, non_blocking=True)


def make_pages(torch_type: str, layers: int, blocks: int, block_size: int) -> list[Pages]:
    """Return KV tensors as the platform has them: `[B, H, N, C]`, or K and V apart on Gaudi."""

    def noise(*shape: int) -> torch.Tensor:
        values = torch.randint(-100, 100, shape, dtype=torch.int16)
        return values.to(torch_type).view(torch.bfloat16)

    if torch_type == "hpu":
        shape = (blocks, block_size, 1, 8)
        return [(noise(*shape), noise(*shape)) for _ in range(layers)]
    return [noise(blocks, 1, block_size, 16) for _ in range(layers)]


def attention_layers(kind: str, layers: Iterable[str]) -> dict[str, Any]:
    """Return what vLLM keeps of attention layers, for the connector to ask for their backend."""
    backend = type(BACKENDS[kind], (), {})
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    return dict.fromkeys(layers, layer)


def _as_words(pages: Pages) -> list[torch.Tensor]:
    """View a layer's KV as rows of 8-byte words, one a token, in each of its tensors."""
    parts = pages if isinstance(pages, tuple) else (pages,)
    return [part.view(torch.int64).reshape(part.shape[0] * _tokens(part), -1) for part in parts]


def _tokens(part: torch.Tensor) -> int:
    """Return the tokens in a block: the larger of the two dimensions in the middle (heads: 1)."""
    return max(part.shape[1:3])
