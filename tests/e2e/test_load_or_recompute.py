# SPDX-License-Identifier: Apache-2.0
"""Load or recompute with real vLLM: chunks in a tier that is far too slow are computed instead."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvhaven.testing.throttled_tier import install, set_rate
from tests.e2e.conftest import Control
from tests.e2e.engines import (
    CHUNK,
    Engine,
    NodeService,
    assert_nothing_held,
    assert_same,
    engine,
    generate,
    prompts,
)

pytestmark = pytest.mark.vllm

SLOW = 100_000
"""Bytes a second: ten chunks take seconds, and are computed in a small part of one."""


def counted(started: Engine) -> dict[str, float]:
    """Return KVHaven's counters without their prefix."""
    prefix = "vllm:kvhaven_"
    metrics: dict[str, float] = started.ask("metrics")
    return {name.removeprefix(prefix): value for name, value in metrics.items() if prefix in name}


def test_chunks_in_a_tier_slower_than_the_prefill_are_computed_and_the_tier_is_skipped(
    model: Path,
    control: Control,
    tmp_path: Path,
    short_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(tmp_path / "plugin")
    path = os.pathsep.join([str(tmp_path / "plugin"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    tier = tmp_path / "store"
    tier.mkdir()
    service = NodeService(
        short_dir / "s",
        tmp_path / "service.log",
        max_local_cpu_size="128MiB",
        remote_url=f"throttled://{tier}",
    )
    service.start()
    asked = prompts(51, 80, least=600, most=700)[::2]
    settings = {"service_address": str(service.socket)}
    compare = {"load_or_recompute": "auto", "promote_deadline_ms": 60_000}
    common: dict[str, Any] = {"in_process": True, "enable_prefix_caching": False}
    try:
        with engine(model, tmp_path / "a.log", settings | compare, **common) as started:
            service.await_ranks()
            for prompt in asked:
                assert_same(
                    started.generate([prompt], max_tokens=4), control([prompt], max_tokens=4)
                )
            service.flush()
            set_rate(tier, SLOW)
            service.stop(signal.SIGKILL)
            service.start()
            service.await_ranks()
            # How many requests it takes until the tier counts as slow depends on the machine.
            asking = iter(asked)
            slow: list[list[int]] = []
            while len(slow) < 3:
                prompt, before = next(asking), counted(started).get("skipped_slow_tokens", 0)
                found = started.generate([prompt], max_tokens=4)
                assert_same(found, control([prompt], max_tokens=4))
                # The first ones wait as long as they take to compute, which reads few chunks.
                assert found[0]["cached"] < len(prompt) // 2
                counts = counted(started)
                whole = len(prompt) // CHUNK * CHUNK
                if counts.get("skipped_slow_tokens", 0) - before >= whole - CHUNK:
                    slow.append(prompt)
            assert counts["skipped_late_tokens"] >= CHUNK
            assert counts.get("errors", 0) == 0
            # Those that no read was begun for are saved again: now they come from memory.
            for prompt in slow[-2:]:
                found = started.generate([prompt], max_tokens=4)
                assert found[0]["cached"] >= len(prompt) // CHUNK * CHUNK - 1
            limited = {"kvhaven.max_load_tokens": 3 * CHUNK}
            found = generate(started, slow[-1], limited, 4)
            assert_same(found, control([slow[-1]], max_tokens=4))
            assert found[0]["cached"] == 3 * CHUNK
            assert (
                generate(started, slow[-1], {"kvhaven.max_load_tokens": "0"}, 4)[0]["cached"] == 0
            )
            limit = counted(started)["skipped_limit_tokens"]
            assert limit == 2 * len(slow[-1]) - 3 * CHUNK
        assert_nothing_held(service.settled(300))  # reads of the slow tier end late
    finally:
        service.stop()
