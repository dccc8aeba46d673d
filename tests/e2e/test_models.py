# SPDX-License-Identifier: Apache-2.0
"""The zoo: models and features that are served, with right answers, and models that are refused.

`zoo.py` has the tables. Log-probabilities of all output tokens are compared: with KV from memory,
and in another engine with another service, with KV from disk alone. They must be those of a cold
prompt. In bfloat16, and with KV in fp8, they also depend on where a hit ends, so there they must be
those of an engine without KVHaven that has as many tokens in vLLM's own prefix cache.

The names of `SHORT` are always tried, the others with `KVHAVEN_EVENTS` set, as every night. Then
an engine without KVHaven is the control of every name, and a table is printed, which is that of
docs/support.md:

    KVHAVEN_EVENTS=1 python -m pytest -s tests/e2e/test_models.py
"""

import contextlib
import math
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real engines")

from tests.e2e.engines import (
    CHUNK,
    PATIENT,
    Engine,
    await_stored,
    difference,
    engine,
    stored_chunks,
)
from tests.e2e.oracle_models import IMAGE_TOKEN, make_vision_model, write_adapter
from tests.e2e.test_hybrid import TOLERANCE
from tests.e2e.zoo import REFUSED, SERVED, SHORT, Served, make_eagle, make_zoo_model

pytestmark = pytest.mark.vllm

LONG = "KVHAVEN_EVENTS" in os.environ
Answers = list[dict[str, Any]]


def in_its_form(name: str, *values: object) -> Any:
    """Return parameters; those that are not of the short form are skipped there."""
    short = name in SHORT and 2 not in values
    skip = pytest.mark.skipif(not short and not LONG, reason="of the long form (KVHAVEN_EVENTS)")
    return pytest.param(name, *values, marks=skip)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, list[str]]]:
    """Cells of the table by name, which is printed at the end."""
    found: dict[str, list[str]] = {name: ["", "-", "-", "-", "-", "-"] for name in SERVED}
    yield found
    for name, (said, *cells) in found.items():
        if said or cells[-1] != "-":
            print("|", " | ".join([f"`{name}`", SERVED[name].what, said, *cells]), "|")  # noqa: T201


@pytest.fixture(scope="module")
def refusing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("zoo") / "log"
    with engine(model, log, None, in_process=True, program="zoo_process.py") as started:
        yield started


def has(flag: str) -> bool:
    """Return whether the CPU has a flag."""
    return f" {flag} " in Path("/proc/cpuinfo").read_text().replace("\n", " ")


class Trial:
    """A row of the zoo's table, with its model, its prompts and its engines."""

    def __init__(self, one: Served, ranks: int, llama: Path, folder: Path, runtime: Path) -> None:
        self.one = one
        self.folder, self.runtime, self.ranks = folder, runtime, ranks
        if one.model == "llama":
            self.model = llama
        elif one.model == "vision":
            self.model = make_vision_model(folder / "vision")
        else:
            self.model = make_zoo_model(folder / one.model, one.model, weights=True)
        if one.feature == "lora":
            write_adapter(folder / "adapter", 1)
        self.options = {**one.options}
        if one.drafter:
            self.options["speculative_config"] = self.speculation()
        chance = random.Random(9)
        base = [chance.randrange(2, 250) for _ in range(500)]
        other = [chance.randrange(2, 250) for _ in range(500)]
        self.prompts = [base[:150], base[50:461], other[:330], base[100:310]]
        """None ends with a chunk, and none begins like another: KV would be that of the first."""
        if one.feature == "pictures":
            self.prompts = [[IMAGE_TOKEN, *prompt] for prompt in self.prompts]

    @contextlib.contextmanager
    def engine(self, name: str, settings: Mapping[str, Any] | None) -> Iterator[Engine]:
        """Start an engine, with KVHaven if there are settings."""
        several = {"tensor_parallel_size": 2} if self.ranks == 2 else {"threads": 1}
        with engine(
            self.model,
            self.folder / f"{name}.log",
            dict(settings) if settings is not None else None,
            in_process=self.ranks == 1,
            program="zoo_engine.py",
            environment=self.one.environment,
            **{"dtype": self.one.dtype, **several, **self.options},
        ) as started:
            yield started

    def speculation(self) -> dict[str, Any]:
        """Return vLLM's settings of the drafter. A draft model is the model itself."""
        found: dict[str, Any] = {
            "method": self.one.drafter,
            "num_speculative_tokens": 1 if self.one.drafter == "mtp" else 3,
        }
        if self.one.drafter == "draft_model":
            found["model"] = str(self.model)
        elif self.one.drafter == "eagle":
            found["model"] = str(make_eagle(self.folder / "eagle", self.model))
        return found

    def serve(self, at: Engine, do: str = "serve", **more: Any) -> Answers:
        """Ask all prompts, one after the other."""
        asked = {
            "prompts": self.prompts,
            "feature": self.one.feature,
            "adapter": str(self.folder / "adapter"),
        }
        result: Answers = at.ask(do, **asked | more)
        return result

    def settings(self) -> dict[str, Any]:
        return {
            "runtime_dir": str(self.runtime),
            "max_local_cpu_size": "128MiB",
            "local_disk": str(self.folder / "disk"),
            "chunk_size": CHUNK if self.one.chunk else None,
            "model_fingerprint": "zoo",
        }


def worst(found: Answers, expected: Answers) -> float:
    """Return the largest difference of a log-probability, as far as the tokens are equal.

    Infinite if no answer's first token is.
    """
    differences = (
        difference(a, b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(*equal_part(one, other), strict=True)
    )
    return max(differences, default=math.inf)


def equal_part(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the log-probabilities up to the first token that differs."""
    before = len(one["logprobs"]) - len(one["tokens"])
    pairs = enumerate(zip(one["tokens"], other["tokens"], strict=True))
    count = next((at for at, (a, b) in pairs if a != b), len(one["tokens"]))
    return one["logprobs"][: before + count], other["logprobs"][: before + count]


def tokens(found: Answers) -> list[list[int]]:
    return [one["tokens"] for one in found]


def cached(found: Answers) -> list[int]:
    return [one["cached"] for one in found]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [in_its_form(name, ranks) for name, one in SERVED.items() for ranks in one.ranks],
)
def test_hits_give_what_a_cold_engine_gives(
    name: str,
    ranks: int,
    model: Path,
    rows: dict[str, list[str]],
    tmp_path: Path,
    short_dir: Path,
) -> None:
    one = SERVED[name]
    if one.needs and not has(one.needs):
        pytest.skip(f"the CPU has no {one.needs}")
    trial = Trial(one, ranks, model, tmp_path, short_dir)
    with trial.engine("first", trial.settings()) as started:
        block = started.ask("block_size")
        chunk = one.chunk or block
        cold = trial.serve(started, cold=True)
        assert cached(cold) == [0] * len(cold)
        warm = trial.serve(started)
        if one.feature == "prompt_logprobs":
            # What such requests saved is for others.
            later = trial.serve(started, feature="")
            assert cached(later) == [answer["length"] // chunk * chunk for answer in later]
        stored = stored_chunks(short_dir)
        no_errors(started)
    assert stored
    with trial.engine("second", trial.settings()) as started:
        await_stored(short_dir, stored)
        if one.feature == "lora":
            # The first request with an adapter is always a miss: nobody has loaded it yet.
            trial.serve(started, prompts=[[7, 8, 9]])
        restarted = trial.serve(started)
        no_errors(started)
    # A drafter's KV of a token comes from the token behind it, so vLLM computes the last block.
    left = block if one.drafter in {"eagle", "mtp"} else 0
    hits = [answer["length"] // chunk * chunk - left for answer in cold]
    if one.feature == "prompt_logprobs":
        hits = [0] * len(cold)
    assert cached(warm) == cached(restarted) == hits
    if one.feature != "pooling":
        assert len({answer["tokens"][0] for answer in cold}) > 1, "the model says one thing"
    own: Answers = []
    if one.exact or (LONG and ranks == 1):
        with trial.engine("control", None) as started:
            control = trial.serve(started, cold=True)
            own = trial.serve(started, "serve_from_own")
        assert tokens(cold) == tokens(control)
        assert worst(cold, control) == 0
        if one.feature != "pictures":  # whose prompts are not cut: vLLM's own hits end with a block
            assert cached(own) == hits
    note(rows, name, ranks, [cold, warm, restarted, own])
    for found in (warm, restarted):
        assert_right(one, found, own if one.exact else cold)


def assert_right(one: Served, found: Answers, expected: Answers) -> None:
    """Assert that answers are the expected ones.

    A drafter proposes the same tokens, too: the output does not depend on its KV. A step that
    computes a part of the prompt proposes as well, and a cold prompt has more of them.
    """
    assert tokens(found) == tokens(expected)
    assert worst(found, expected) <= (0 if one.exact else TOLERANCE)
    for answer, other in zip(found, expected, strict=True):
        proposed = answer.get("drafts", [])
        assert bool(proposed) == bool(one.drafter)
        assert proposed == other.get("drafts", [])[-len(proposed) :]


def no_errors(started: Engine) -> None:
    metrics = started.ask("metrics")
    assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
    assert metrics.get("vllm:kvhaven_errors", 0) == 0


def note(rows: dict[str, list[str]], name: str, ranks: int, answers: list[Answers]) -> None:
    """Write a row: hits, differences from a cold prompt, and with two ranks the larger one."""
    cold, *others = answers
    differences = [f"{worst(found, cold):.0e}" if found else "-" for found in others]
    if ranks == 2:
        rows[name][-1] = max(differences[:2], key=float)
        return
    hits = f"{sum(cached(others[0]))} of {sum(answer['length'] for answer in cold)}"
    rows[name][:-1] = [SERVED[name].dtype, hits, *differences]


@pytest.mark.parametrize("name", [in_its_form(name) for name in REFUSED])
def test_is_refused_with_advice(
    name: str, refusing: Engine, tmp_path: Path, short_dir: Path
) -> None:
    one = REFUSED[name]
    kvhaven = {
        "kv_connector": "KVHavenConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "max_local_cpu_size": "64MiB",
            "runtime_dir": str(short_dir),
            "model_fingerprint": "zoo",
        }
        | PATIENT,
    }
    options = {
        "model": str(make_zoo_model(tmp_path / one.model, one.model, weights=False)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 32,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 128,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "kv_transfer_config": kvhaven,
    } | dict(one.options)
    environment = {"VLLM_CPU_ATTN_SPLIT_KV": "1"}
    asked = {"environment": environment, "prompt": list(range(2, 200))}
    error = refusing.ask("start", options=options, **asked)["error"]
    assert ("IncompatibleEngineError" in error) == one.ours, error
    assert one.says in error, error
    message = error.strip().splitlines()[-1].replace(options["model"], "...")
    print(f"| `{name}` | {one.what} | {message.split(': ', 1)[1]} |")  # noqa: T201
    if not one.ours:
        del options["kv_transfer_config"]
        assert one.says in refusing.ask("start", options=options, **asked)["error"]
