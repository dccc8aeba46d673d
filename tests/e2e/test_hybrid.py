# SPDX-License-Identifier: Apache-2.0
"""Models with full attention and limited attention, in KV groups of vLLM's hybrid KV manager.

Log-probabilities of every token are compared with an engine without KVHaven: wrong KV in a few
layers seldom changes the tokens.
"""

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import CHUNK, Engine, await_stored, difference, engine, stored_chunks
from tests.e2e.zoo import make_zoo_model

pytest.importorskip("vllm", reason="real engines")

from kvhaven.integrations.vllm.parts import REPORTS_FAILED_REQUESTS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not REPORTS_FAILED_REQUESTS, reason="refused before vLLM 0.30"),
]

TOLERANCE = 2e-4
"""In float32, right KV differs by rounding alone."""
OUTPUT = 12
WINDOWS = {"gemma3-hybrid": 160, "gpt-oss-hybrid": 32, "llama4-hybrid": 192}
"""Larger than a chunk, within one, and chunked local attention."""
OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "num_gpu_blocks_override": 700,
    "in_process": True,
}


LONG = pytest.mark.skipif(
    "KVHAVEN_EVENTS" not in os.environ, reason="of the long form (set KVHAVEN_EVENTS)"
)
"""The simulation covers chunked local attention in the short form, and `test_models` Llama 4."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=LONG if name == "llama4-hybrid" else ()) for name in WINDOWS],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_zoo_model(tmp_path_factory.mktemp("hybrid") / family, family, weights=True)


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Prompts within a chunk, within a window, at chunks' borders, and much longer than both."""
    chance = random.Random(12)
    base = [chance.randrange(2, 256) for _ in range(1400)]
    other = [chance.randrange(2, 256) for _ in range(900)]
    return [
        base[:40],
        other[: CHUNK + 1],
        other[: 2 * CHUNK],
        base[:1000],
        base[:1000] + other[:70],
        base[: 10 * CHUNK] + other[200:310],
        other,
    ]


@pytest.fixture(scope="module")
def control(
    hybrid: Path, asked: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Answers of an engine without KVHaven and without a prefix cache."""
    log = tmp_path_factory.mktemp("control") / "log"
    with engine(hybrid, log, None, enable_prefix_caching=False, **OPTIONS) as started:
        yield lambda prompts: answers(started, prompts)


def answers(started: Engine, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Answer one prompt after the other, so that each finds the one before."""
    return [started.generate([prompt], max_tokens=OUTPUT)[0] for prompt in prompts]


def assert_equal(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"]
        pairs = zip(one["logprobs"], other["logprobs"], strict=True)
        assert max(difference(a, b) for a, b in pairs) < TOLERANCE


def whole(prompt: Sequence[int], chunk: int = CHUNK) -> int:
    """Return the tokens of a hit on all of a prompt's chunks, which ends before the last token."""
    return (len(prompt) - 1) // chunk * chunk


def settings(short_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "runtime_dir": str(short_dir),
        "max_local_cpu_size": "128MiB",
        "local_disk": str(tmp_path / "disk"),
        "window_every": 256,
        "save_decode_cache": True,
    }


def test_hits_give_what_a_cold_engine_gives(
    hybrid: Path, control: Any, asked: list[list[int]], tmp_path: Path, short_dir: Path
) -> None:
    expected = control(asked)
    ours = settings(short_dir, tmp_path)
    with engine(hybrid, tmp_path / "a.log", ours, **OPTIONS) as started:
        assert_equal(answers(started, asked), expected)
        # With vLLM's own prefix cache, parts of hits and nothing to load.
        assert_equal(answers(started, asked), expected)
        started.ask("reset")
        warm = answers(started, asked)
        assert_equal(warm, expected)
        assert [one["cached"] for one in warm] == [whole(prompt) for prompt in asked]
        # A conversation goes on behind the output.
        started.ask("reset")
        longer = [
            [*prompt, *one["tokens"], *range(60, 130)]
            for prompt, one in zip(asked, expected, strict=True)
        ]
        follow = answers(started, longer)
        assert_equal(follow, control(longer))
        for prompt, more, one in zip(asked, longer, follow, strict=True):
            known = (len(prompt) + OUTPUT - 1) // CHUNK * CHUNK
            assert one["cached"] >= known, (len(prompt), len(more))
        metrics = started.ask("metrics")
        assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
        assert metrics.get("vllm:kvhaven_errors", 0) == 0
        stored = stored_chunks(short_dir)
    with engine(hybrid, tmp_path / "b.log", ours, **OPTIONS) as started:
        await_stored(short_dir, stored)
        again = answers(started, asked)
        assert_equal(again, expected)
        assert [one["cached"] for one in again] == [whole(prompt) for prompt in asked]
        # Together: asynchronous loads of several requests in a step.
        started.ask("reset")
        together = started.generate(asked, max_tokens=OUTPUT)
        assert_equal(together, expected)
        assert max(one["cached"] for one in together) >= whole(asked[3])


def test_ranks_that_share_the_heads_hit_what_they_saved(
    family: str,
    hybrid: Path,
    control: Any,
    asked: list[list[int]],
    tmp_path: Path,
    short_dir: Path,
) -> None:
    if family != "gemma3-hybrid" and "KVHAVEN_EVENTS" not in os.environ:
        pytest.skip("of the long form (set KVHAVEN_EVENTS)")
    chosen = asked[3:5]
    options = OPTIONS | {"in_process": False, "tensor_parallel_size": 2}
    log = tmp_path / "engine.log"
    with engine(hybrid, log, settings(short_dir, tmp_path), **options) as started:
        assert_equal(answers(started, chosen), control(chosen))
        started.ask("reset")
        warm = answers(started, chosen)
        assert_equal(warm, control(chosen))
        assert [one["cached"] for one in warm] == [whole(prompt) for prompt in chosen]
