# SPDX-License-Identifier: Apache-2.0
"""A tiny model, and what an engine without KVHaven answers: the control."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo.model import Shape, make_model
from tests.e2e.engines import engine

Control = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers, 4 heads and 2 KV heads."""
    shape = Shape(layers=2, hidden=128, heads=4, kv_heads=2, max_length=1024)
    return make_model(tmp_path_factory.mktemp("model") / "tiny", shape)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape: other weights."""
    shape = Shape(layers=2, hidden=128, heads=4, kv_heads=2, max_length=1024, seed=1)
    return make_model(tmp_path_factory.mktemp("model") / "other", shape)


@pytest.fixture(scope="session")
def control(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    """Answers of an engine without KVHaven and without a prefix cache, computed once each."""
    known: dict[str, list[dict[str, Any]]] = {}
    log = tmp_path_factory.mktemp("control") / "engine.log"
    with engine(model, log, None, in_process=True, enable_prefix_caching=False) as started:

        def answers(prompts: list[list[int]], **arguments: Any) -> list[dict[str, Any]]:
            key = repr((prompts, sorted(arguments.items())))
            if key not in known:
                known[key] = started.generate(prompts, **arguments)
            return known[key]

        yield answers
