# SPDX-License-Identifier: Apache-2.0
"""Texts as prompts, beside a tokenizer that hangs: every client is answered, and so are others."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.engine import Engine
from tests.crash.node import NodeThread, eventually

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway import engine_server
from kvhaven.gateway.plugins import PluginSettings
from tests.gateway_kit import GatewayThread, keys_of, post, steerable, tiered_node, tokens_of
from tests.tokenizer import Tokenizer

CLIENTS = 64
TEXT = "What is cached of this?"
TOKENS = tokens_of(1, 2, 3)


@pytest.fixture
def node(short_dir: Path) -> Iterator[NodeThread]:
    with tiered_node(short_dir) as node:
        yield node


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer({TEXT: TOKENS}) as tokenizer:
        yield tokenizer


@pytest.fixture
def api(node: NodeThread, tokenizer: Tokenizer, short_dir: Path) -> Iterator[GatewayThread]:
    with steerable(node, short_dir, plugins=PluginSettings(engine_url=tokenizer.url)) as api:
        yield api


def test_beside_a_tokenizer_that_hangs_all_are_answered_in_time_and_so_is_health(
    node: NodeThread, api: GatewayThread, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_server._TOKENIZE_S == 10.0
    limit_s = 5.0
    monkeypatch.setattr(engine_server, "_TOKENIZE_S", limit_s)
    with Engine(node.address) as engine, ThreadPoolExecutor(CLIENTS) as clients:
        engine.save(keys_of(engine, TOKENS))

        def ask(number: int) -> tuple[int, str, float]:
            began = time.monotonic()
            path = ("/v1/lookup", "/v1/prefetch")[number % 2]
            answer = post(api, path, {"engine": "engine#1", "text": f"{TEXT} {number}"})
            return answer.status, answer.json.get("error", ""), time.monotonic() - began

        tokenizer.hang()
        asked = [clients.submit(ask, number) for number in range(CLIENTS)]
        eventually(lambda: len(tokenizer.texts) >= engine_server._MOST_TEXTS)
        healthy = 0
        while not any(one.done() for one in asked):
            assert api.health() == (200, "ok")
            healthy += len(tokenizer.texts) == engine_server._MOST_TEXTS
        assert healthy >= 10
        for status, error, seconds in (one.result() for one in asked):
            assert status == 503
            assert "/tokenize (setting plugin_engine_url): no answer" in error
            assert seconds < 2 * limit_s, "the limit is that of all, with the wait for the others"
        tokenizer.go_on()
        answer = post(api, "/v1/lookup", {"engine": "engine#1", "text": TEXT})
        assert (answer.status, answer.json["cached_tokens"]) == (200, 20)


def test_no_more_texts_are_tokenized_at_a_time_than_the_limit(
    node: NodeThread, api: GatewayThread, tokenizer: Tokenizer
) -> None:
    with Engine(node.address), ThreadPoolExecutor(CLIENTS) as clients:
        tokenizer.hang()

        def ask(number: int) -> int:
            return post(api, "/v1/lookup", {"engine": "engine#1", "text": f"a {number}"}).status

        asked = [clients.submit(ask, number) for number in range(CLIENTS)]
        eventually(lambda: len(tokenizer.texts) >= engine_server._MOST_TEXTS)
        for _ in range(5):
            assert api.health() == (200, "ok")
        assert len(tokenizer.texts) == engine_server._MOST_TEXTS
        tokenizer.go_on()
        assert [one.result() for one in asked] == [200] * CLIENTS
        assert len(tokenizer.texts) == CLIENTS
