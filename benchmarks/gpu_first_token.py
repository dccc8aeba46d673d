# SPDX-License-Identifier: Apache-2.0
"""`gpu.ttft.*`: seconds from a prompt of 32,000 tokens to the first token, in real vLLM on a GPU.

`python -m benchmarks gpu-ttft` needs an NVIDIA or AMD GPU of 48 GB or more, a vLLM for it, 20 GB of
disk and 28 GiB of memory. The model is the demo's with 6.2 billion parameters, and attention of the
same shape as Llama 3.1 8B (128 KiB of KV a token). The three prompts, on the same document, are
sent one at a time, and vLLM's own prefix cache is emptied before each. The values are medians.

- `gpu.ttft.cold`: with KVHaven, emptied before each prompt (also two on other documents). The limit
  is 1.03 times the median with vLLM's OffloadingConnector, of the three prompts that are new to it.
- `gpu.ttft.memory`: KV from the node service's memory. The limit is 1/5 of `gpu.ttft.cold`.
- `gpu.ttft.disk`: KV from the disk tier, without the page cache (memory is emptied before each
  prompt). A GPU may compute KV sooner than a disk reads it, which KVHaven then lets it do; the
  limit is 1.05 times `gpu.ttft.cold`.
- `gpu.ttft.offloading`: the same prompts in an engine with vLLM's OffloadingConnector, which holds
  their KV in memory. The limit is `gpu.ttft.memory`; KVHaven is to be no slower.

Both engines have the same share of the GPU and alternate, prompt by prompt. Raises `ProcessError`
if an output differs from that of the cold prompt.
"""

import concurrent.futures
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.first_token import shown
from benchmarks.gpus import usable_gpu
from benchmarks.nodes import fresh_folder, fresh_node
from benchmarks.results import BENCH, Result, at_least, at_most
from examples.demo.demo import CHUNK, PATIENT, QUESTIONS, WARM_UP
from examples.demo.model import Shape, make_model
from examples.demo.processes import Engine, NodeService, ProcessError, engine, kvhaven
from examples.demo.text import make_document, make_questions

_SHAPE = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, max_length=65_536)
_DOCUMENT_TOKENS = 32_000
_OUTPUT_TOKENS = 8
_PASSES = 5
_STORED_S = 30.0
_ALONE = "1.03 times the time with OffloadingConnector"
_OPTIONS = {
    "gpu_memory_utilization": 0.42,
    "max_model_len": 40_960,
    "max_num_batched_tokens": 8192,
}


def measure(say: Callable[[str], None]) -> list[Result]:
    """Send all prompts to two engines, alternating; nothing without a GPU."""
    if not usable_gpu(say):
        return []
    model = _model(BENCH / "gpu-model")
    say("starting two vLLM engines")
    with (
        fresh_folder("gpu-ttft-disk") as disk,
        fresh_node("gpu-ttft", local_disk=disk, max_local_cpu_size="12GiB") as service,
        engine(
            model,
            BENCH / "gpu-ttft-kvhaven.log",
            kv_transfer_config=kvhaven(service_address=str(service.socket), **PATIENT),
            **_OPTIONS,
        ) as ours,
    ):
        ours.ready()  # two engines that start concurrently measure each other's memory
        with engine(
            model, BENCH / "gpu-ttft-offloading.log", kv_offloading_size=12, **_OPTIONS
        ) as theirs:
            for one in (ours, theirs):
                one.ask(WARM_UP, _OUTPUT_TOKENS)
            return _Measurement(ours, theirs, service, say).run()


def _model(folder: Path) -> Path:
    """Make the model on the GPU, in another process, whose memory there ends with it."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_make, folder).result()


def _make(folder: Path) -> Path:
    import torch  # noqa: PLC0415 - slow

    with torch.device("cuda"):
        return make_model(folder, _SHAPE)


@dataclass
class _Times:
    """Times to the first token, in seconds."""

    cold: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    offloading: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)


class _Measurement:
    """The passes over all prompts; the first one is cold, and its outputs are the reference."""

    def __init__(
        self, ours: Engine, theirs: Engine, service: NodeService, say: Callable[[str], None]
    ) -> None:
        self._ours, self._theirs, self._service, self._say = ours, theirs, service, say
        self._times = _Times()
        self._wrong: set[str] = set()
        self._loaded: list[int] = []

    def run(self) -> list[Result]:
        """Return all results."""
        first, *others = (make_document(_DOCUMENT_TOKENS, seed) for seed in range(1, 4))
        for document in others:  # new to both engines
            self._ask_cold(make_questions(document, 1)[0].prompt)
        prompts = [question.prompt for question in make_questions(first, QUESTIONS)]
        outputs = [self._ask_cold(prompt) for prompt in prompts]
        self._say(f"cold: {shown(self._times.cold)}; the other engine: {shown(self._times.alone)}")
        self._service.flush()
        for _ in range(_PASSES):
            for prompt, tokens in zip(prompts, outputs, strict=True):
                self._ask_again(prompt, tokens)
        for name in ("memory", "offloading", "disk"):
            self._say(f"{name}: {shown(getattr(self._times, name))}")
        self._say(f"disk: {min(self._loaded)} to {max(self._loaded)} tokens were loaded")
        if self._wrong:
            raise ProcessError("; ".join(sorted(self._wrong)))
        return self._results()

    def _ask_cold(self, prompt: str) -> list[int]:
        """Send a prompt to both engines, ours with nothing cached; return the output."""
        self._service.clear()
        answer = self._ours.ask(prompt, _OUTPUT_TOKENS)
        self._times.cold.append(answer.ttft)
        self._await_stored(answer.prompt_tokens // CHUNK)  # saves would slow the other engine
        theirs = self._theirs.ask(prompt, _OUTPUT_TOKENS)
        if theirs.sources["computed"] == theirs.prompt_tokens:
            self._times.alone.append(theirs.ttft)
        return answer.tokens

    def _await_stored(self, chunks: int) -> None:
        """Wait until so many chunks are in memory. Raises `ProcessError`."""
        end = time.monotonic() + _STORED_S
        while self._in_memory() < chunks:
            if time.monotonic() > end:
                raise ProcessError(f"fewer than {chunks} chunks were stored in {_STORED_S:.0f} s")
            time.sleep(0.05)

    def _in_memory(self) -> int:
        namespaces = self._service.status()["namespaces"]
        return sum(namespace["chunks"]["memory"] for namespace in namespaces)

    def _ask_again(self, prompt: str, tokens: list[int]) -> None:
        """Send a known prompt to both engines, and again with KV on disk only."""
        for name, asked in (
            ("memory", self._ours),
            ("offloading", self._theirs),
            ("disk", self._ours),
        ):
            if name == "disk":
                self._service.clear("memory")
            answer = asked.ask(prompt, _OUTPUT_TOKENS)
            getattr(self._times, name).append(answer.ttft)
            if answer.tokens != tokens:
                self._wrong.add(f"{name}: the output differs from the cold one")
            cached = answer.prompt_tokens - answer.sources["computed"]
            if name == "disk":
                self._loaded.append(cached)
                self._await_stored(answer.prompt_tokens // CHUNK)  # its computed KV, too
            elif cached < answer.prompt_tokens - CHUNK:
                self._wrong.add(f"{name}: only {cached} tokens of {answer.prompt_tokens} came")

    def _results(self) -> list[Result]:
        times = self._times
        cold = statistics.median(times.cold)
        alone = statistics.median(times.alone)
        return [
            at_most("gpu.ttft.cold", cold, "s", 1.03 * alone, len(times.cold), _ALONE),
            at_most(
                "gpu.ttft.memory",
                statistics.median(times.memory),
                "s",
                cold / 5,
                len(times.memory),
                "1/5 of gpu.ttft.cold",
            ),
            at_most(
                "gpu.ttft.disk",
                statistics.median(times.disk),
                "s",
                cold * 1.05,
                len(times.disk),
                "1.05 times gpu.ttft.cold",
            ),
            at_least(
                "gpu.ttft.offloading", times.offloading, "s", times.memory, 1.0, "gpu.ttft.memory"
            ),
        ]
