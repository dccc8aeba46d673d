# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states (Qwen3-Next) on real vLLM.

Log-probabilities of every token are compared with an engine without KVHaven: a wrong state moves
them by less than it takes to change tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhaven.tiers.format.manifest import MANIFEST_NAME, unpack_manifest
from tests.e2e.engines import Engine, engine
from tests.e2e.test_hybrid import OUTPUT, answers, assert_equal
from tests.e2e.test_restart import damage
from tests.e2e.zoo import make_zoo_model

pytestmark = pytest.mark.vllm

OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "num_gpu_blocks_override": 250,
    "enable_prefix_caching": True,
    "in_process": True,
    "program": "state_process.py",
}


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "model"
    return make_zoo_model(folder, "qwen3-next-hybrid", weights=True)


@pytest.fixture(scope="module")
def control(stateful: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Answers of an engine without KVHaven and without a prefix cache."""
    log = tmp_path_factory.mktemp("control") / "log"
    with engine(stateful, log, None, **OPTIONS | {"enable_prefix_caching": False}) as started:
        yield lambda prompts: answers(started, prompts)


def settings(short_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "runtime_dir": str(short_dir),
        "max_local_cpu_size": "128MiB",
        "local_disk": str(tmp_path / "disk"),
        "chunk_size": None,
    }


def prompts(size: int) -> list[list[int]]:
    """Prompts within a block, at the ends of blocks, one behind them, and much longer."""
    chance = random.Random(12)
    tokens = [chance.randrange(2, 256) for _ in range(2000)]
    first, second, third = tokens[:900], tokens[900:1400], tokens[1400:]
    return [
        first[: size // 2],
        second[: size + 1],
        third[: 2 * size],
        first[: 8 * size + 21],
        second[: 5 * size],
    ]


def whole(prompt: list[int], size: int) -> int:
    """Return the tokens of a hit that ends at the last state before the prompt's last token."""
    return (len(prompt) - 1) // size * size


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in found]


def assert_no_errors(started: Engine) -> None:
    metrics = started.ask("metrics")
    assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
    assert metrics.get("vllm:kvhaven_errors", 0) == 0


def test_hits_give_what_a_cold_engine_gives(
    stateful: Path, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    ours = settings(short_dir, tmp_path)
    with engine(stateful, tmp_path / "a.log", ours, **OPTIONS) as started:
        size = started.ask("block_size")
        asked = prompts(size)
        hits = [whole(prompt, size) for prompt in asked]
        expected = control(asked)
        assert_equal(answers(started, asked), expected)
        # With vLLM's own prefix cache, there is nothing to load.
        assert_equal(answers(started, asked), expected)
        started.ask("reset")
        warm = answers(started, asked)
        assert_equal(warm, expected)
        assert cached(warm) == hits
        # A conversation goes on behind the output, from the last state of its prompt.
        started.ask("reset")
        longer = [
            [*prompt, *one["tokens"], *range(60, 60 + size)]
            for prompt, one in zip(asked, expected, strict=True)
        ]
        follow = answers(started, longer)
        assert_equal(follow, control(longer))
        assert all(at >= least for at, least in zip(cached(follow), hits, strict=True))
        # Prompts that part from another one: vLLM keeps the state there at the second one.
        forks = [asked[3][: 6 * size + 5] + [77 + fork] * (2 * size) for fork in range(2)]
        assert_equal(answers(started, forks[:1]), control(forks[:1]))
        started.ask("reset")
        fork = answers(started, forks[1:])
        assert_equal(fork, control(forks[1:]))
        assert_no_errors(started)
    with engine(stateful, tmp_path / "b.log", ours, **OPTIONS) as started:
        again = answers(started, asked)
        assert_equal(again, expected)
        assert cached(again) == hits
        # Together: asynchronous loads of several requests in a step.
        started.ask("reset")
        together = started.generate(asked, max_tokens=OUTPUT)
        assert_equal(together, expected)
        assert max(cached(together)) == max(hits)
        assert_no_errors(started)
    states = [
        file
        for folder in (tmp_path / "disk").rglob(MANIFEST_NAME)
        if unpack_manifest(folder.read_bytes(), folder.parent.name).fields.get("part") == "state"
        for file in folder.parent.rglob("*.kv")
    ]
    assert states
    for file in states:
        damage(file, 0)
    with engine(stateful, tmp_path / "c.log", ours, **OPTIONS) as started:
        missed = answers(started, asked)
        assert_equal(missed, expected)
        assert cached(missed) == [0] * len(asked)
        assert_no_errors(started)


def test_an_interval_keeps_states_for_prompts_that_begin_alike(
    stateful: Path, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    ours = settings(short_dir, tmp_path) | {"save_decode_cache": True}
    with engine(stateful, tmp_path / "probe.log", None, **OPTIONS) as started:
        size = started.ask("block_size")
    more = {"prefix_cache_retention_interval": 2 * size}
    with engine(stateful, tmp_path / "log", ours, **OPTIONS, **more) as started:
        long = prompts(size)[3]
        begins = [long[: count * size + 9] + [66] * 20 for count in (3, 5, 6)]
        (one,) = answers(started, [long])
        assert_equal([one], control([long]))
        started.ask("reset")
        found = answers(started, begins)
        assert_equal(found, control(begins))
        assert found[0]["cached"] == 2 * size
        assert_no_errors(started)


@pytest.mark.parametrize("mutation", ["store_states_of_the_chunk_after", "load_synchronously"])
def test_a_breakage_is_seen_in_the_log_probabilities(
    mutation: str, stateful: Path, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    ours = settings(short_dir, tmp_path)
    with engine(stateful, tmp_path / "log", ours, **OPTIONS) as started:
        started.ask(mutation)
        asked = prompts(started.ask("block_size"))[3:]
        expected = control(asked)
        assert_equal(answers(started, asked), expected)
        started.ask("reset")
        warm = answers(started, asked)
        assert min(cached(warm)) > 0
        with pytest.raises(AssertionError):
            assert_equal(warm, expected)
