# SPDX-License-Identifier: Apache-2.0
"""`ttft.*`: seconds from a prompt of 9,000 tokens to the first token, in real vLLM.

The model and the three prompts (on the same document) are the demo's. They are sent one at a time,
and vLLM's own prefix cache is emptied before each. The values are medians.

- `ttft.cold`: with KVHaven, emptied before each prompt.
- `ttft.memory`, `ttft.disk`: KV from the node service's memory, and from its disk tier (memory is
  emptied before each prompt). Limits: 1/15 and 1/12 of `ttft.cold`.
- `ttft.example_connector`: vLLM's own ExampleConnector on the same prompts, which it has stored
  before; its files are in the page cache. It matches only whole prompts, except for the last
  incomplete block; these three have all other blocks in common. The limit is `ttft.memory`, and
  the target is at least 1.00 of it: KVHaven is not slower.

Both engines prefill in one step (`max_num_batched_tokens` 16384), because ExampleConnector saves
wrong KV if a prefill is chunked. They alternate, prompt by prompt (see `turns`).
"""

import statistics
from collections.abc import Callable

from benchmarks.nodes import fresh_folder, fresh_node
from benchmarks.results import BENCH, Result, at_least, at_most
from benchmarks.turns import ask, warm_up
from examples.demo.demo import CHUNK, DOCUMENT_TOKENS, PATIENT, QUESTIONS
from examples.demo.model import make_model
from examples.demo.processes import (
    Answer,
    Engine,
    NodeService,
    ProcessError,
    engine,
    kvhaven,
)
from examples.demo.text import make_document, make_questions

_PASSES = 5
_ONE_STEP = 16384


def measure(say: Callable[[str], None]) -> list[Result]:
    """Send all prompts to two engines, alternating."""
    model = make_model(BENCH / "model")
    say("starting two vLLM engines")
    with (
        fresh_folder("example") as example,
        fresh_folder("ttft-disk") as disk,
        fresh_node("ttft", local_disk=disk) as service,
        engine(
            model,
            BENCH / "ttft-kvhaven.log",
            kv_transfer_config=kvhaven(service_address=str(service.socket), **PATIENT),
            max_num_batched_tokens=_ONE_STEP,
        ) as ours,
        engine(
            model,
            BENCH / "ttft-example.log",
            kv_transfer_config={
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(example)},
            },
            max_num_batched_tokens=_ONE_STEP,
        ) as theirs,
    ):
        warm_up(ours, theirs)
        return _Measurement(ours, theirs, service, say).run()


class _Measurement:
    """The passes over all prompts; the first one is cold, and its outputs are the reference."""

    def __init__(
        self, ours: Engine, theirs: Engine, service: NodeService, say: Callable[[str], None]
    ) -> None:
        self._ours, self._theirs, self._service, self._say = ours, theirs, service, say
        questions = make_questions(make_document(DOCUMENT_TOKENS), QUESTIONS)
        self._prompts = [question.prompt for question in questions]

    def run(self) -> list[Result]:
        """Return all results."""
        cold, memory, disk, example = [], [], [], []
        outputs = []
        for prompt in self._prompts:
            self._service.clear()
            answer = ask(self._ours, prompt)
            cold.append(answer.ttft)
            outputs.append(answer.tokens)
            ask(self._theirs, prompt)
        self._say(f"cold: {shown(cold)}")
        self._service.flush()
        for _ in range(_PASSES):
            for prompt, tokens in zip(self._prompts, outputs, strict=True):
                answer = ask(self._ours, prompt)
                memory.append(_checked(answer, "memory", tokens))
                answer = ask(self._theirs, prompt)
                example.append(_checked(answer, "elsewhere", tokens))
                self._service.clear("memory")
                answer = ask(self._ours, prompt)
                disk.append(_checked(answer, "disk", tokens))
        self._say(f"memory: {shown(memory)}; ExampleConnector: {shown(example)}")
        self._say(f"disk: {shown(disk)}")
        once = statistics.median(cold)
        fast = statistics.median(memory)
        return [
            Result("ttft.cold", once, "s", None, len(cold)),
            at_most("ttft.memory", fast, "s", once / 15, len(memory), "1/15 of ttft.cold"),
            at_most(
                "ttft.disk",
                statistics.median(disk),
                "s",
                once / 12,
                len(disk),
                "1/12 of ttft.cold",
            ),
            at_least("ttft.example_connector", example, "s", memory, 1.0, "ttft.memory"),
        ]


def _checked(answer: Answer, source: str, tokens: list[int]) -> float:
    """Return the time to the first token. Raises `ProcessError` if the answer is not valid.

    The output must equal the reference, with all full chunks from the cache and some from `source`.
    With KV on disk, KVHaven may count the first chunks as memory, because their promotion began
    when the request arrived, before the engine's lookup.
    """
    if answer.tokens != tokens:
        raise ProcessError(f"the output with KV from {source} differs from the cold one")
    cached = answer.prompt_tokens - answer.sources["computed"]
    if cached < answer.prompt_tokens - CHUNK or not answer.sources[source]:
        raise ProcessError(f"prompt tokens came from {answer.sources}, not from {source}")
    return answer.ttft


def shown(times: list[float]) -> str:
    """Return median and range as text."""
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
