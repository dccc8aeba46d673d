# SPDX-License-Identifier: Apache-2.0
"""Models with windows in the portable format: unlike engines read each other's KV.

Blocks, tensor-parallel degrees and with them the KV heads of a rank differ. Log-probabilities of
every token are compared with an engine without KVHaven.
"""

import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="real engines")

from tests.e2e import test_hybrid
from tests.e2e.engines import Engine, NodeService, assert_nothing_held, engine
from tests.e2e.test_hybrid import LONG, answers, assert_equal, whole
from tests.e2e.zoo import make_zoo_model

pytestmark = test_hybrid.pytestmark


class Pair(NamedTuple):
    """A model, and two engines that are unlike."""

    family: str
    chunk: int
    """Tokens in a chunk."""
    one: dict[str, Any]
    other: dict[str, Any]
    parts: str
    """What the engines' namespaces say."""


def options(block: int, ranks: int = 1) -> dict[str, Any]:
    chosen = {"max_model_len": 2048, "block_size": block, "num_gpu_blocks_override": 22400 // block}
    return chosen | ({"tensor_parallel_size": ranks} if ranks > 1 else {"in_process": True})


PAIRS = (
    # A window of 160 tokens is in two chunks.
    Pair("gemma3-hybrid", 128, options(32), options(64, ranks=2), "full, window:160"),
    # One of 100 is within a chunk, of which 128 tokens are stored.
    Pair("gpt-oss-uneven", 256, options(32), options(128, ranks=2), "full, window:100"),
    # Chunked local attention.
    Pair("llama4-hybrid", 128, options(32), options(64, ranks=2), "full, local:192"),
)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.family, marks=LONG if pair.family == "llama4-hybrid" else ())
        for pair in PAIRS
    ],
)
def test_unlike_engines_share_the_kv_of_models_with_windows(
    pair: Pair, tmp_path: Path, short_dir: Path
) -> None:
    model = make_zoo_model(tmp_path / pair.family, pair.family, weights=True)
    chance = random.Random(17)
    base, other = ([chance.randrange(2, 256) for _ in range(1400)] for _ in range(2))
    asked = [other[:40], base[:1000], base[:1000] + other[:70], base[:700] + other[:600]]
    more = [other[: 3 * pair.chunk + 1], other[:900]]
    with engine(
        model, tmp_path / "control.log", None, enable_prefix_caching=False, **pair.one
    ) as control:
        expected, expected_more = answers(control, asked), answers(control, more)
    service = NodeService(
        short_dir / "s",
        tmp_path / "service.log",
        max_local_cpu_size="128MiB",
        local_disk=tmp_path / "disk",
    )
    service.start()
    settings = {
        "format": "portable",
        "chunk_size": pair.chunk,
        "window_every": 256,
        "service_address": str(service.socket),
    }
    try:
        with engine(model, tmp_path / "one.log", settings, **pair.one) as one:
            service.await_ranks(2)  # one for each part
            assert_equal(answers(one, asked), expected)
        with engine(model, tmp_path / "other.log", settings, **pair.other) as two:
            service.await_ranks(4)
            assert_from_cache(two, asked, expected, pair.chunk)
            # What this one computes goes to disk, and through a killed service to the other.
            assert_equal(answers(two, more), expected_more)
        service.flush()
        service.stop(signal.SIGKILL)
        service.start()
        with engine(model, tmp_path / "again.log", settings, **pair.one) as one:
            service.await_ranks(2)
            assert_from_cache(one, more, expected_more, pair.chunk)
            assert_from_cache(one, asked, expected, pair.chunk)
            metrics = one.ask("metrics")
            assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
        status = service.settled()
        assert_nothing_held(status)
        assert [one.fields["parts"] for one in status.namespaces] == [pair.parts] * 2
    finally:
        service.stop(signal.SIGKILL)


def assert_from_cache(
    engine: Engine, asked: list[list[int]], expected: list[dict[str, Any]], chunk: int
) -> None:
    """Assert that outputs are the control's, and that no full chunk was computed again."""
    found = answers(engine, asked)
    assert_equal(found, expected)
    for prompt, one in zip(asked, found, strict=True):
        assert one["cached"] >= whole(prompt, chunk)
