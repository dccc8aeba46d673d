# SPDX-License-Identifier: Apache-2.0
"""A model with recurrent states (Qwen3-Next) on real vLLM.

Log-probabilities of every token are compared with an engine without KVHaven: a wrong state moves
them by less than it takes to change tokens. In bfloat16 the ends of steps move them, too, so the
other engine has a hit of as many tokens in vLLM's own prefix cache; then all bits are the same.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real engines")

from kvhaven.integrations.vllm.state import HANDS_STATES_OFF
from kvhaven.tiers.format.manifest import MANIFEST_NAME, unpack_manifest
from tests.e2e.engines import Engine, await_stored, difference, engine, stored_chunks
from tests.e2e.test_hybrid import OUTPUT, answers
from tests.e2e.test_restart import damage
from tests.e2e.zoo import make_zoo_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HANDS_STATES_OFF, reason="vLLM 0.32 and newer hand states off"),
]

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",  # vLLM's CPU kernel of linear attention has no other
    "max_model_len": 1024,
    "num_gpu_blocks_override": 250,
    "enable_prefix_caching": True,
    "in_process": True,
    "program": "state_process.py",
    "threads": 1,
}


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state") / "model"
    return make_zoo_model(folder, "qwen3-next-hybrid", weights=True)


@pytest.fixture(scope="module")
def plain(stateful: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without KVHaven."""
    log = tmp_path_factory.mktemp("control") / "log"
    with engine(stateful, log, None, **OPTIONS) as started:
        yield started


@pytest.fixture(scope="module")
def size(plain: Engine) -> int:
    """Tokens in a block, which vLLM derives from the model."""
    return int(plain.ask("block_size"))


@pytest.fixture(scope="module")
def control(plain: Engine) -> Callable[[list[int], int], dict[str, Any]]:
    """Answers of the engine without KVHaven, with some tokens in its own prefix cache."""

    def answer(prompt: list[int], cached: int) -> dict[str, Any]:
        """Answer a prompt whose first `cached` tokens were computed by another one."""
        plain.ask("reset")
        if cached:
            plain.generate([prompt[: cached + 1]])
        (one,) = answers(plain, [prompt])
        assert one["cached"] == cached
        return one

    return answer


def settings(short_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "runtime_dir": str(short_dir),
        "max_local_cpu_size": "128MiB",
        "local_disk": str(tmp_path / "disk"),
        "chunk_size": None,
    }


def prompts(size: int) -> list[list[int]]:
    """Prompts within a block, one behind its end, at ends, and longer; all begin differently."""
    chance = random.Random(12)
    tokens = [chance.randrange(2, 256) for _ in range(2000)]
    lengths = (size // 2, size + 1, 2 * size, 8 * size + 21, 5 * size)
    return [[2 + number, *tokens[:length]][:length] for number, length in enumerate(lengths)]


def whole(prompt: list[int], size: int) -> int:
    """Return the tokens of a hit that ends at the last state before the prompt's last token."""
    return (len(prompt) - 1) // size * size


def cached(found: list[dict[str, Any]]) -> list[int]:
    return [one["cached"] for one in found]


def worst(control: Any, asked: list[list[int]], found: list[dict[str, Any]]) -> float:
    """Return the largest difference of a log-probability; infinite if a token differs.

    The control continues after the same tokens: steps are then the same, and so is all rounding.
    """
    largest = 0.0
    for prompt, one in zip(asked, found, strict=True):
        right = control(prompt, one["cached"])
        if one["tokens"] != right["tokens"]:
            return math.inf
        pairs = zip(one["logprobs"], right["logprobs"], strict=True)
        largest = max(largest, *(difference(a, b) for a, b in pairs))
    return largest


def assert_no_errors(started: Engine) -> None:
    metrics = started.ask("metrics")
    assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
    assert metrics.get("vllm:kvhaven_errors", 0) == 0


def test_hits_give_what_vllms_own_hits_give(
    stateful: Path, size: int, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    ours = settings(short_dir, tmp_path)
    with engine(stateful, tmp_path / "a.log", ours, **OPTIONS) as started:
        asked = prompts(size)
        hits = [whole(prompt, size) for prompt in asked]
        cold = answers(started, asked)
        assert cached(cold) == [0] * len(asked)
        assert worst(control, asked, cold) == 0
        # With vLLM's own prefix cache, there is nothing to load.
        again = answers(started, asked)
        assert cached(again) == hits
        assert worst(control, asked, again) == 0
        started.ask("reset")
        warm = answers(started, asked)
        assert cached(warm) == hits
        assert worst(control, asked, warm) == 0
        # A conversation goes on behind the output, from the last state of its prompt.
        started.ask("reset")
        longer = [
            [*prompt, *one["tokens"], *range(60, 60 + size)]
            for prompt, one in zip(asked, cold, strict=True)
        ]
        follow = answers(started, longer)
        assert cached(follow) == hits
        assert worst(control, longer, follow) == 0
        # Prompts that part from another one: vLLM keeps the state there at the second one.
        forks = [asked[3][: 6 * size + 5] + [77 + fork] * (2 * size) for fork in range(2)]
        answers(started, forks[:1])
        started.ask("reset")
        fork = answers(started, forks[1:])
        assert cached(fork) == [6 * size]
        assert worst(control, forks[1:], fork) == 0
        assert_no_errors(started)
        stored = stored_chunks(short_dir)
    with engine(stateful, tmp_path / "b.log", ours, **OPTIONS) as started:
        await_stored(short_dir, stored)
        again = answers(started, asked)
        assert cached(again) == hits
        assert worst(control, asked, again) == 0
        # Together: asynchronous loads of several requests in a step.
        started.ask("reset")
        together = started.generate(asked, max_tokens=OUTPUT)
        assert cached(together) == hits
        assert_no_errors(started)
    files = states_on_disk(tmp_path / "disk")
    assert files
    for file in files:
        damage(file, 0)
    with engine(stateful, tmp_path / "c.log", ours, **OPTIONS) as started:
        missed = answers(started, asked)
        assert cached(missed) == [0] * len(asked)
        assert worst(control, asked, missed) == 0
        assert_no_errors(started)


def states_on_disk(disk: Path) -> list[Path]:
    """Return the files of states."""
    return [
        file
        for manifest in disk.rglob(MANIFEST_NAME)
        if unpack_manifest(manifest.read_bytes(), manifest.parent.name).fields["part"] == "state"
        for file in manifest.parent.rglob("*.kv")
    ]


def test_an_interval_keeps_states_for_prompts_that_begin_alike(
    stateful: Path, size: int, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    ours = settings(short_dir, tmp_path)
    options = OPTIONS | {"prefix_cache_retention_interval": 2 * size}
    with engine(stateful, tmp_path / "log", ours, **options) as started:
        long = prompts(size)[3]
        begins = [long[: count * size + 9] + [66 + count] * 20 for count in (3, 5)]
        answers(started, [long])
        for prompt, hit in zip(begins, (2 * size, 4 * size), strict=True):
            started.ask("reset")
            found = answers(started, [prompt])
            assert cached(found) == [hit]
            assert worst(control, [prompt], found) == 0
        assert_no_errors(started)


def test_a_session_whose_state_has_a_dropped_token_leaves_nothing_to_others(
    stateful: Path, size: int, control: Any, tmp_path: Path, short_dir: Path
) -> None:
    """With asynchronous scheduling, vLLM computes a token more than a turn keeps.

    Its KV is overwritten, but the state is that of all tokens, and the next turn goes on from it.
    """
    ours = settings(short_dir, tmp_path)
    with engine(stateful, tmp_path / "log", ours, async_scheduling=True, **OPTIONS) as started:
        first = [7, *prompts(size)[3][: 3 * size - 6]]
        tokens = answers(started, [first])[0]["tokens"]
        stop = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
        started.ask("reset")
        kept = started.ask("session", turns=[first, [*range(60, 66 + size)]], stop=tokens[stop])
        assert kept[: len(first) + stop] == [*first, *tokens[:stop]]
        after = kept[: len(first) + stop + size + 6]
        assert after[-1] == 65 + size, "the second turn's input follows"
        answers(started, prompts(size)[:1])  # which also ends the step that vLLM has begun
        assert started.ask("reset")
        found = answers(started, [after])
        assert cached(found) == [2 * size], "the states of the first turn's prompt alone"
        assert worst(control, [after], found) == 0
        assert_no_errors(started)


CONVOLUTION = 512 * 3 * 2
"""Bytes of the convolution's state, in bfloat16, before the recurrent one, in float32."""


@pytest.mark.parametrize(
    ("mutation", "more"),
    [
        ("store_states_of_the_chunk_after", {}),
        ("load_synchronously", {}),
        # The lowest bit of a number's exponent, and the highest one of another number's.
        ("flip_a_bit_of_each_state", {"byte": 0, "bit": 7}),
        ("flip_a_bit_of_each_state", {"byte": CONVOLUTION + 3, "bit": 6}),
    ],
)
def test_a_breakage_is_seen_in_the_log_probabilities(
    mutation: str,
    more: dict[str, int],
    stateful: Path,
    size: int,
    control: Any,
    tmp_path: Path,
    short_dir: Path,
) -> None:
    ours = settings(short_dir, tmp_path)
    with engine(stateful, tmp_path / "log", ours, **OPTIONS) as started:
        started.ask(mutation, **more)
        asked = prompts(size)[3:]
        answers(started, asked)
        started.ask("reset")
        warm = answers(started, asked)
        assert min(cached(warm)) > 0
        assert worst(control, asked, warm) > 0
