# SPDX-License-Identifier: Apache-2.0
"""Random requests with random features through real vLLM, with KVHaven and without: all equal.

`KVHAVEN_EVENTS` sets how many requests each test plays (short form: `SHORT`), `KVHAVEN_SEED` the
first seed. The short form plays text with adapters, and pictures; the long form n-gram
speculation with prompt embeddings and pooling too, and each in several episodes with other
engines. Then KVHaven is broken on purpose. `oracle.py` says what is asserted.
"""

import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.oracle import CHUNK, Oracle, World
from tests.e2e.oracle_models import make_vision_model
from tests.e2e.oracle_mutations import MUTATIONS

pytestmark = pytest.mark.vllm

LONG = "KVHAVEN_EVENTS" in os.environ
long_form = pytest.mark.skipif(not LONG, reason="of the long form (set KVHAVEN_EVENTS)")
EVENTS = int(os.environ.get("KVHAVEN_EVENTS", "0"))
SEED = int(os.environ.get("KVHAVEN_SEED") or 8)
SHORT = {"text": 200, "speculation": 60, "pictures": 80, "pooling": 40}
EPISODE = 2000
"""Requests until a long form starts new engines."""

Options = dict[str, Any]

_NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
_TEXT: Options = {
    # A slot more than there are adapters: on a CPU vLLM 0.32 computes requests without an adapter
    # with what is in the last slot, where others in their batch have one.
    "skip_tokenizer_init": False,
    "enable_lora": True,
    "max_loras": 4,
    "max_cpu_loras": 8,
    "max_lora_rank": 8,
}
_SPECULATION: Options = {
    "skip_tokenizer_init": False,
    "enable_prompt_embeds": True,
    "speculative_config": _NGRAMS,
}
_PICTURES: Options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 3}}


@contextlib.contextmanager
def oracle(
    world: World, seed: int, short_dir: Path, options: Options, own: Options
) -> Iterator[Oracle]:
    """Start both engines together; `own` are options of the engine with KVHaven alone."""
    chance = random.Random(seed)
    settings = {
        "chunk_size": CHUNK,
        "max_local_cpu_size": "64MiB",
        "runtime_dir": str(short_dir),
        "save_decode_cache": chance.random() < 0.7,
        "load_mode": chance.choice(("async", "sync")),
    }
    options = {"in_process": True, "threads": 1, "max_num_seqs": 8, **options}
    logs = [world.folder / f"{name}-{seed}.log" for name in ("control", "subject")]
    own = {"num_gpu_blocks_override": 96, "enable_prefix_caching": world.prefix_caching, **own}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        starting = [
            threads.submit(stack.enter_context, one)
            for one in (
                engine(
                    world.models[0],
                    logs[0],
                    None,
                    program="oracle_process.py",
                    **options | {"enable_prefix_caching": False},
                ),
                engine(
                    world.models[0],
                    logs[1],
                    settings,
                    program="oracle_process.py",
                    **options | own,
                ),
            )
        ]
        started = Oracle(seed, world, *(start.result() for start in starting))
        try:
            yield started
            assert "failed; further failures" not in logs[1].read_text(), "errors in hooks"
        finally:
            print(started.report(), flush=True)  # noqa: T201


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oracle")


@contextlib.contextmanager
def text_oracle(
    seed: int, folder: Path, short_dir: Path, models: list[Path], *, speculation: bool
) -> Iterator[Oracle]:
    """Llama with adapters; some engines have no prefix cache, some few blocks."""
    chance = random.Random(seed)
    place = folder / f"text-{seed}-{speculation}"
    place.mkdir()
    world = World(
        place,
        models,
        adapters=not speculation,
        embeds=speculation,  # in one batch with an adapter vLLM 0.32 ends on a CPU
        sessions=not speculation,
        structured=not speculation,
        speculation=speculation,
        prefix_caching=seed % 3 != 1,
    )
    options = _SPECULATION if speculation else _TEXT
    own = {"num_gpu_blocks_override": chance.choice((64, 96, 512))}
    with oracle(world, seed, short_dir, options, own) as started:
        yield started


@contextlib.contextmanager
def picture_oracle(
    seed: int, folder: Path, short_dir: Path, models: list[Path]
) -> Iterator[Oracle]:
    """Idefics 3, where vLLM names pictures by a counter or by their content."""
    place = folder / f"pictures-{seed}"
    place.mkdir()
    world = World(place, models, pictures=True, prefix_caching=seed % 2 == 1)
    own = {} if world.prefix_caching else {"mm_processor_cache_gb": 0}
    with oracle(world, seed, short_dir, _PICTURES, own) as started:
        yield started


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "vision")


@pytest.fixture(scope="module")
def text(model: Path, other_model: Path, folder: Path, module_dir: Path) -> Iterator[Oracle]:
    with text_oracle(SEED, folder, module_dir, [model, other_model], speculation=False) as started:
        yield started


@pytest.fixture(scope="module")
def pictures(vision_model: Path, folder: Path, module_dir: Path) -> Iterator[Oracle]:
    with picture_oracle(SEED, folder, module_dir, [vision_model]) as started:
        yield started


@pytest.fixture(scope="module")
def module_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    del tmp_path_factory  # its paths are too long for sockets
    path = Path(tempfile.mkdtemp(prefix="kvh-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def play_until_proven(oracle: Oracle, features: Sequence[str]) -> None:
    """Play on until an answer with hits was compared for each feature.

    Which requests hit also depends on the time that the engines take.
    """
    for _ in range(8):
        if all(oracle.proven[feature] for feature in features):
            break
        oracle.play(50)
    assert not [feature for feature in features if not oracle.proven[feature]], oracle.report()


def test_text_with_adapters_and_salts(
    text: Oracle, model: Path, other_model: Path, folder: Path, short_dir: Path
) -> None:
    text.play(min(EVENTS or SHORT["text"], EPISODE))
    for seed in episodes():
        models = [model, other_model]
        with text_oracle(seed, folder, short_dir, models, speculation=False) as more:
            more.play(EPISODE)
            assert not more.hits["int salt"]
            text.counts += more.counts
            text.proven += more.proven
    must_hit = ["text alone", "salt", "empty salt", "adapter", "adapter, loaded back"]
    must_hit += ["continued", "aborted", "resumed after an abort", "streaming session"]
    play_until_proven(text, must_hit)
    assert not text.hits["int salt"], text.report()
    happened = {"int salt", "reloads", "reloads that failed", "sleeps"}
    happened |= {"changes of weights", "resets of the connector", "resets in flight"}
    assert not [event for event in happened if not text.counts[event]], text.report()


@long_form
def test_text_with_speculation(
    model: Path, other_model: Path, folder: Path, short_dir: Path
) -> None:
    hits: Counter[str] = Counter()
    for seed in (SEED, *episodes()):
        models = [model, other_model]
        with text_oracle(seed, folder, short_dir, models, speculation=True) as started:
            started.play(min(EVENTS or SHORT["speculation"], EPISODE))
            hits += started.proven
            assert not started.hits["prompt embeddings"]
            found = started.mutated(OF_EMBEDDINGS, 400)
            print(found)  # noqa: T201
            assert found
    assert not [feature for feature in ("n-gram speculation", "continued") if not hits[feature]]


def test_pictures(pictures: Oracle, vision_model: Path, folder: Path, short_dir: Path) -> None:
    pictures.play(min(EVENTS or SHORT["pictures"], EPISODE))
    for seed in episodes():
        with picture_oracle(seed, folder, short_dir, [vision_model]) as more:
            more.play(EPISODE)
            pictures.proven += more.proven
    must_hit = ["pictures", "pictures with names", "pictures, processed otherwise"]
    play_until_proven(pictures, must_hit)


@long_form
def test_pooling(model: Path, folder: Path, short_dir: Path) -> None:
    world = World(folder, [model], pooling=True)
    options = {"skip_tokenizer_init": False, "runner": "pooling"}
    with oracle(world, SEED, short_dir, options, {}) as started:
        started.play(EVENTS or SHORT["pooling"])
        assert started.proven["pooling"], started.report()


def episodes() -> range:
    """Return the seeds of a long form's further episodes."""
    return range(SEED + 1, SEED + (EVENTS - 1) // EPISODE + 1)


OF_PICTURES = "media_are_left_out_of_the_keys"
OF_EMBEDDINGS = "embeddings_are_cached_by_their_tokens"
OF_TEXT = [name for name in MUTATIONS if name not in {OF_PICTURES, OF_EMBEDDINGS}]
BY_ANSWERS = {"adapters_are_left_out_of_the_keys"}
"""Answers alone must show these; of salts and epochs they show nothing."""
ATTEMPTS = 4
"""One shows a breakage nearly always, but that depends on what the engine reuses."""


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_breakage_is_found(name: str, text: Oracle) -> None:
    for _ in range(ATTEMPTS):
        if found := text.mutated(name, 1000, offers=name not in BY_ANSWERS):
            break
    print(found)  # noqa: T201
    assert found


def test_nothing_is_found_when_nothing_is_broken_any_more(text: Oracle) -> None:
    assert not text.mutated("", 40)


def test_media_left_out_of_the_keys_are_found(pictures: Oracle) -> None:
    found = pictures.mutated(OF_PICTURES, 400, offers=False)
    print(found)  # noqa: T201
    assert found
