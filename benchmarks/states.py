# SPDX-License-Identifier: Apache-2.0
"""`state.*`: seconds to the first token with a model that has recurrent states (Qwen3-Next).

The model is tiny and random: five layers of linear attention, two of full attention. Its prompts,
of 12,000 tokens, have nothing in common. Each is sent three times, alone, and vLLM's own prefix
cache is emptied before.
The values are medians over the prompts.

- `state.cold`: with KVHaven, prompts that it does not know.
- `state.memory`, `state.disk`: the same prompts, with KV and the last state from the node
  service's memory, and from its disk tier (memory is emptied before each prompt). The limit is 1/5
  of `state.cold`.
- `state.cold.small`, `state.memory.small`, `state.disk.small`: the same with 1,500 tokens.
"""

import random
import shutil
import statistics
import string
from collections.abc import Callable

from benchmarks.nodes import fresh_folder, fresh_node
from benchmarks.results import BENCH, Result, at_most, plain
from benchmarks.turns import ask, warm_up
from examples.demo.demo import PATIENT
from examples.demo.model import make_model
from examples.demo.processes import (
    Answer,
    Engine,
    NodeService,
    ProcessError,
    engine,
    kvhaven,
)
from tests.e2e.zoo import make_zoo_model

_MODEL = "qwen3-next-long"
_LENGTHS = {"": 12_000, ".small": 1500}
_PROMPTS = 7
_FASTER = 5
_LEFT = 300
"""More tokens than a chunk, which the engine computes behind a hit."""


def measure(say: Callable[[str], None]) -> list[Result]:
    """Send all prompts cold, with KV from memory, and with KV from disk."""
    folder = BENCH / "state-model"
    shutil.rmtree(folder, ignore_errors=True)
    make_zoo_model(folder, _MODEL, weights=True)
    for file in make_model(BENCH / "model").glob("*token*"):
        shutil.copy(file, folder)
    say("starting a vLLM engine")
    with (
        fresh_folder("state-disk") as disk,
        fresh_node("state", local_disk=disk) as service,
        engine(
            folder,
            BENCH / "state-engine.log",
            kv_transfer_config=kvhaven(service_address=str(service.socket), **PATIENT),
        ) as started,
    ):
        warm_up(started)
        return [
            result
            for suffix, length in _LENGTHS.items()
            for result in _measure(started, service, suffix, length, say)
        ]


def _measure(
    started: Engine, service: NodeService, suffix: str, length: int, say: Callable[[str], None]
) -> list[Result]:
    chance = random.Random(length)
    prompts = ["".join(chance.choices(string.ascii_lowercase, k=length)) for _ in range(_PROMPTS)]
    cold, memory, disk = [], [], []
    for prompt in prompts:
        answer = ask(started, prompt)
        if answer.sources["computed"] != answer.prompt_tokens:
            raise ProcessError(f"a new prompt came from {answer.sources}, not from computation")
        cold.append(answer.ttft)
        service.flush()
        memory.append(_checked(ask(started, prompt), "memory"))
        service.clear("memory")
        disk.append(_checked(ask(started, prompt), "disk"))
    say(f"{length} tokens: cold {_shown(cold)}, memory {_shown(memory)}, disk {_shown(disk)}")
    once = statistics.median(cold)
    results = [plain(f"state.cold{suffix}", once, "s", len(cold))]
    for name, times in (("memory", memory), ("disk", disk)):
        value, full = statistics.median(times), f"state.{name}{suffix}"
        results.append(
            plain(full, value, "s", len(times))
            if suffix
            else at_most(full, value, "s", once / _FASTER, len(times), "1/5 of state.cold")
        )
    return results


def _checked(answer: Answer, source: str) -> float:
    """Return the time to the first token. Raises `ProcessError` if much was computed.

    Outputs are not compared: in bfloat16 the end of a step moves them (see
    `tests/e2e/test_state.py`, which compares them with those of equal steps).
    """
    if answer.sources["computed"] > _LEFT or not answer.sources[source]:
        raise ProcessError(f"prompt tokens came from {answer.sources}, not from {source}")
    return answer.ttft


def _shown(times: list[float]) -> str:
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"
