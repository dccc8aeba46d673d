# SPDX-License-Identifier: Apache-2.0
"""Exact repeats with real vLLM: with tails only the last token of a prompt is computed again."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.demo.processes import free_port
from tests.e2e.conftest import Control
from tests.e2e.engines import (
    NodeService,
    assert_nothing_held,
    assert_same,
    engine,
    generate,
    peered_services,
)
from tests.e2e.test_peers import PATIENT_PEERS, wait_for_peer

pytestmark = pytest.mark.vllm

CHUNK = 256
LENGTHS = (2, 31, 32, 33, 255, 256, 257, 300, 511, 512, 513, 767, 768, 800)
"""Prompts shorter than a chunk, and N mod 256 of 0, 1, 255 and others."""
EVERY_LENGTH = range(CHUNK + 1, 2 * CHUNK + 1)
"""Of the long form (`KVHAVEN_EVENTS` is set)."""


def prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return a prompt of each length; every other one begins like the one before it."""
    chance = random.Random(seed)
    found: list[list[int]] = []
    for at, length in enumerate(lengths):
        shared = found[-1] if at % 2 else []
        found.append([*shared, *(chance.randrange(250) for _ in range(length - len(shared)))])
    return found


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


@pytest.mark.parametrize("kv_format", ["paged", "portable"])
def test_a_repeated_prompt_computes_one_token(
    kv_format: str, model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """Engines of one node share tails; portable ones also with other block sizes."""
    asked, more = prompts(41), prompts(42)
    service = NodeService(short_dir / "s", tmp_path / "service.log", max_local_cpu_size="128MiB")
    service.start()
    settings = {
        "service_address": str(service.socket),
        "chunk_size": CHUNK,
        "format": kv_format,
        "pd_tail": True,
    }
    other = 64 if kv_format == "portable" else 32
    # The engine's own prefix cache is off, so that every hit comes through KVHaven.
    common: dict[str, Any] = {"in_process": True, "enable_prefix_caching": False}
    try:
        with (
            engine(model, tmp_path / "one.log", settings, **common) as one,
            engine(model, tmp_path / "two.log", settings, block_size=other, **common) as two,
        ):
            service.await_ranks(2)
            expected = control(asked, max_tokens=8)
            assert_same(one.generate(asked, max_tokens=8), expected)
            again = one.generate(asked, max_tokens=8)
            assert_same(again, expected)
            assert cached(again) == [length - 1 for length in LENGTHS]
            elsewhere = two.generate(asked, max_tokens=8)
            assert_same(elsewhere, expected)
            assert cached(elsewhere) == [length - 1 for length in LENGTHS]
            metrics = two.ask("metrics")
            assert metrics["vllm:kvhaven_tail_hits"] > 0
            assert metrics.get("vllm:kvhaven_errors", 0) == 0
            # What the other one computes comes back, too, and with another ending nothing does.
            assert_same(two.generate(more, max_tokens=8), control(more, max_tokens=8))
            back = one.generate(more, max_tokens=8)
            assert_same(back, control(more, max_tokens=8))
            assert cached(back) == [length - 1 for length in LENGTHS]
            changed = [[*prompt[:-1], 251] for prompt in more]
            answers = one.generate(changed, max_tokens=8)
            assert_same(answers, control(changed, max_tokens=8))
            assert cached(answers) == [(length - 1) // CHUNK * CHUNK for length in LENGTHS]
        assert_nothing_held(service.settled())
    finally:
        service.stop()


def test_tails_and_the_engines_own_prefix_cache_agree(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """Blocks of the engine's own cache are not written, in the middle of a tail either."""
    asked = prompts(43)
    expected = control(asked, max_tokens=8)
    settings = {"runtime_dir": str(short_dir), "chunk_size": CHUNK, "pd_tail": True}
    settings["max_local_cpu_size"] = "128MiB"
    with engine(model, tmp_path / "log", settings, in_process=True) as started:
        assert_same(started.generate(asked, max_tokens=8), expected)
        for _ in range(2):
            again = started.generate(asked, max_tokens=8)
            assert_same(again, expected)
            assert cached(again) == [length - 1 for length in LENGTHS]
            assert started.ask("reset")


def test_without_the_setting_repeats_compute_what_is_behind_the_last_full_chunk(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked = prompts(44)
    expected = control(asked, max_tokens=4)
    settings = {"runtime_dir": str(short_dir), "chunk_size": CHUNK, "max_local_cpu_size": "128MiB"}
    with engine(
        model, tmp_path / "log", settings, in_process=True, enable_prefix_caching=False
    ) as started:
        assert_same(started.generate(asked, max_tokens=4), expected)
        again = started.generate(asked, max_tokens=4)
        assert_same(again, expected)
        assert cached(again) == [min(length // CHUNK * CHUNK, length - 1) for length in LENGTHS]
        assert started.ask("metrics").get("vllm:kvhaven_tail_hits", 0) == 0


@pytest.mark.parametrize("kv_format", ["paged", "portable"])
def test_the_decode_node_computes_one_token(
    kv_format: str, model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """Tails travel between two nodes, and nothing has to wait for a repeat.

    Portable ones also between engines with other block sizes.
    """
    lengths = EVERY_LENGTH if "KVHAVEN_EVENTS" in os.environ else LENGTHS
    asked, ports = prompts(45, lengths), [free_port(), free_port()]
    settings: dict[str, Any] = {"chunk_size": CHUNK, "format": kv_format}
    other = 64 if kv_format == "portable" else 32
    common: dict[str, Any] = {"in_process": True, "enable_prefix_caching": False}
    with peered_services(short_dir, tmp_path, ports, **PATIENT_PEERS) as (p, d):
        at_p = settings | {"service_address": str(p.socket)}
        at_d = settings | {"service_address": str(d.socket)}
        with (
            engine(model, tmp_path / "prefill.log", at_p, **common) as prefill,
            engine(model, tmp_path / "decode.log", at_d, block_size=other, **common) as decode,
        ):
            p.await_ranks()
            d.await_ranks()
            wait_for_peer(p)
            wait_for_peer(d)
            parameters = {"do_remote_decode": True, "kvhaven.to": f"127.0.0.1:{ports[1]}"}
            hits = 0
            for prompt, expected in zip(asked, control(asked, max_tokens=8), strict=True):
                (first,) = generate(prefill, prompt, parameters, 1)
                (second,) = generate(decode, prompt, first["handover"], 8)
                assert_same([second], [expected])
                # The usage of such a request says what the prefill node had cached.
                before, hits = hits, int(decode.ask("metrics")["vllm:external_prefix_cache_hits"])
                assert hits - before == len(prompt) - 1
            metrics = decode.ask("metrics")
            assert metrics.get("vllm:kvhaven_errors", 0) == 0
            assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
        for node in (p, d):
            assert_nothing_held(node.settled())
