# SPDX-License-Identifier: Apache-2.0
"""The engine-neutral interface, by the toy engine of `docs/integrating.md`."""

import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the toy engine computes with torch")

from examples.toy_engine.engine import Engine, Sequence
from kvhaven.engine import EngineIdentity
from kvhaven.errors import IncompatibleEngineError
from tests.crash.node import NodeThread

CHUNK = 256
LIMIT = 150
"""Lines that the toy engine may have: what an engine must do for KVHaven is little."""

_numbers = itertools.count()


@pytest.fixture
def engine(node: NodeThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = make_engine(node, monkeypatch)
    yield made
    made.close()


def make_engine(node: NodeThread, patch: pytest.MonkeyPatch, seed: int = 0) -> Engine:
    patch.setenv("KVHAVEN_SERVICE_ADDRESS", node.address)
    patch.setenv("KVHAVEN_LOOKUP_DEADLINE_MS", "10000")
    patch.setenv("KVHAVEN_SAVE_DEADLINE_MS", "10000")
    patch.setenv("KVHAVEN_STEP_BUDGET_MS", "1000")
    return Engine(f"toy-{next(_numbers)}", seed)


def prompts(seed: int, count: int = 3) -> list[list[int]]:
    dice = random.Random(seed)
    shared = [dice.randrange(101) for _ in range(600)]
    return [shared + [dice.randrange(101) for _ in range(200)] for _ in range(count)]


def run(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
    requests: list[Sequence] = [
        engine.add(f"request {next(_numbers)}", prompt, 6) for prompt in asked
    ]
    engine.computed_tokens = 0
    engine.run()
    return [request.output for request in requests]


def wait_until_cached(node: NodeThread, chunks: int) -> None:
    end = time.monotonic() + 30
    while node.status().catalog.resident_chunks < chunks:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_prompts_that_were_computed_are_loaded(engine: Engine, node: NodeThread) -> None:
    asked = prompts(0)
    expected = run(engine, asked)
    cold = engine.computed_tokens
    wait_until_cached(node, 5)  # two chunks that all share, and one of each
    assert run(engine, asked) == expected
    assert cold - engine.computed_tokens == 3 * 3 * CHUNK


def test_another_engine_finds_what_the_first_one_computed(
    engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(1)
    expected = run(engine, asked)
    wait_until_cached(node, 5)
    other = make_engine(node, monkeypatch)
    assert run(other, asked) == expected
    assert other.scheduler.stats.take()["hit_tokens"] == 3 * 3 * CHUNK
    other.close()


def test_an_engine_of_other_weights_finds_nothing(
    engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(2)
    run(engine, asked)
    wait_until_cached(node, 5)
    other = make_engine(node, monkeypatch, seed=1)
    run(other, asked)
    assert other.scheduler.stats.take()["hit_tokens"] == 0
    other.close()


def test_a_load_that_fails_is_computed(
    engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(3)
    expected = run(engine, asked)
    wait_until_cached(node, 5)

    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker.device, "load", fails)
        assert run(engine, asked) == expected
    assert engine.worker.stats.take()["failed_loads"] == 3
    assert run(engine, asked) == expected


def test_a_forward_that_fails_reaches_the_engine_and_saves_nothing(
    engine: Engine, node: NodeThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("out of memory")

    engine.add("fails", prompts(4)[0], 4)
    monkeypatch.setattr(engine.model, "forward", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run()
    end = time.monotonic() + 30
    while node.status().catalog.reserved_bytes:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert node.status().catalog.resident_chunks == 0


def test_an_identity_without_weights_is_refused() -> None:
    with pytest.raises(IncompatibleEngineError, match="'weights' is missing"):
        EngineIdentity("toy", {"model": "toy"})


def test_the_toy_engine_is_short() -> None:
    source = Path(__file__).parents[2] / "examples" / "toy_engine" / "engine.py"
    assert len(source.read_text().splitlines()) < LIMIT


def test_an_engine_tells_the_service_of_each_request_once(engine: Engine, node: NodeThread) -> None:
    asked = [*prompts(7), [1, 2, 3]]  # the last one is too short to be looked up

    def tokens() -> dict[str, int]:
        (counts,) = node.service.accounts.tokens().values()
        assert sum(counts.missed.values()) == counts.by_source["none"]
        assert counts.asked == sum(counts.by_source.values())
        return counts.by_source | {"lookups": sum(counts.lookups.values())}

    run(engine, asked)
    wait_until_cached(node, 5)
    cold = node.call(tokens)
    assert cold["lookups"] == 4
    assert cold["memory"] + cold["none"] == 3 * 800 + 3
    run(engine, asked)
    warm = node.call(tokens)
    assert warm["lookups"] == 8
    assert warm["memory"] - cold["memory"] == 3 * 3 * CHUNK
    last = node.call(lambda: next(node.service.accounts.requests_before("", 0.0)))
    assert last.request.startswith("request ")


def test_a_request_that_is_looked_up_again_counts_once(engine: Engine, node: NodeThread) -> None:
    asked = prompts(9, 1)
    run(engine, asked)
    wait_until_cached(node, 3)
    request = engine.add("again", asked[0], 1)
    for computed in (CHUNK, 0):  # a lease that begins behind the first chunk cannot serve it
        end = time.monotonic() + 30
        while engine.scheduler.matched_tokens(request, computed)[0] is None:
            assert time.monotonic() < end
    engine.run()
    (counts,) = node.call(node.service.accounts.tokens).values()
    assert sum(counts.lookups.values()) == 2
    assert counts.asked == 2 * len(asked[0])


def test_settings_that_the_service_changes_apply_to_the_next_request(
    engine: Engine, node: NodeThread
) -> None:
    def change(**values: object) -> None:
        node.call(lambda: node.service.settings.change(values, dry_run=False, version=None))
        end = time.monotonic() + 30
        while not _changed(engine, values):
            assert time.monotonic() < end
            time.sleep(0.01)

    change(force_skip_save=True, step_budget_ms=500.0)
    run(engine, prompts(8))
    assert node.status().catalog.commits == 0
    change(force_skip_save=False)
    run(engine, prompts(8))
    wait_until_cached(node, 5)
    (row,) = [r for r in node.call(node.service.settings.rows) if r.name == "force_skip_save"]
    assert list(row.by_engine.values()) == [False]


def _changed(engine: Engine, values: Mapping[str, object]) -> bool:
    changed = engine.scheduler._client.changed
    return changed is not None and values.items() <= json.loads(changed.values).items()
