# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with KVHaven gives what vLLM without it gives, and computes less."""

from pathlib import Path

import pytest

from kvhaven.client.control import connect
from kvhaven.keys import tenant_id
from tests.crash.node import eventually
from tests.e2e.conftest import Control
from tests.e2e.engines import (
    CHUNK,
    Engine,
    NodeService,
    assert_nothing_held,
    assert_same,
    engine,
    prompts,
)

pytestmark = pytest.mark.vllm


def full_chunks(prompt: list[int]) -> int:
    """Return the tokens that a hit on the whole prompt brings (the last one is computed)."""
    return min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1)


def test_an_embedded_engine_gets_everything_back_from_memory(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked = prompts(1, 12)
    expected = control(asked, max_tokens=8)
    settings = {"max_local_cpu_size": "128MiB", "runtime_dir": str(short_dir)}
    with engine(model, tmp_path / "log", settings) as started:
        assert_same(started.generate(asked, max_tokens=8), expected)
        for _ in range(2):
            assert started.ask("reset")
            again = started.generate(asked, max_tokens=8)
            assert_same(again, expected)
            for prompt, one in zip(asked, again, strict=True):
                assert one["cached"] >= full_chunks(prompt)
        # A new epoch finds nothing of before; and what it stores is found again.
        assert started.ask("reset", connector=True)
        anew = started.generate(asked[:1], max_tokens=8)
        assert_same(anew, expected[:1])
        assert anew[0]["cached"] == 0
        started.ask("reset")
        assert started.generate(asked[:1])[0]["cached"] >= full_chunks(asked[0])
        # Other tenants, and requests that need every position computed, get no hits.
        started.ask("reset")
        assert started.generate(asked[:1], salts=["tenant"])[0]["cached"] == 0
        started.ask("reset")
        probed = started.generate(asked[:1], sampling={"prompt_logprobs": 1})
        assert probed[0]["cached"] == 0
        metrics = started.ask("metrics")
        assert metrics["vllm:kvhaven_hit_tokens"] > 0
        assert metrics["vllm:kvhaven_loaded_bytes"] > 0
        assert metrics["vllm:kvhaven_saved_bytes"] > 0
        assert metrics.get("vllm:kvhaven_errors", 0) == 0
        assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
    assert eventually(lambda: not list(short_dir.iterdir()))


def test_preemption_aborts_and_no_prefix_cache_change_nothing(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """Few blocks, so that requests are preempted; then every request of a storm is aborted."""
    asked = prompts(2, 16, least=100, most=250)
    expected = control(asked, max_tokens=64)
    service = NodeService(short_dir / "s", tmp_path / "service.log", max_local_cpu_size="128MiB")
    service.start()
    settings = {"service_address": str(service.socket), "save_decode_cache": True, "chunk_size": 64}
    try:
        with engine(
            model,
            tmp_path / "log",
            settings,
            in_process=True,
            enable_prefix_caching=False,
            num_gpu_blocks_override=40,
            max_num_seqs=8,
        ) as started:
            for _ in range(2):
                assert_same(started.generate(asked, max_tokens=64), expected)
            metrics = started.ask("metrics")
            assert metrics["vllm:kvhaven_hit_tokens"] > 0
            assert metrics["vllm:num_preemptions"] > 0
            for seed in range(3):
                assert started.ask("abort_storm", prompts=asked, seed=seed) == 0
            assert_nothing_held(service.settled())
            assert_same(started.generate(asked, max_tokens=64), expected)
            assert_nothing_held(service.settled())
    finally:
        service.stop()


def test_tensor_parallel_ranks_share_their_chunks(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked = prompts(3, 4)
    expected = control(asked, max_tokens=4)
    service = NodeService(short_dir / "s", tmp_path / "service.log", max_local_cpu_size="128MiB")
    service.start()
    try:
        with engine(
            model,
            tmp_path / "log",
            {"service_address": str(service.socket)},
            tensor_parallel_size=2,
        ) as started:
            service.await_ranks(2)
            assert_same(started.generate(asked, max_tokens=4), expected)
            started.ask("reset")
            again = started.generate(asked, max_tokens=4)
            assert_same(again, expected)
            assert [one["cached"] for one in again] == [full_chunks(one) for one in asked]
            held = service.settled()
            assert_nothing_held(held)
            assert {member.role for member in held.members} == {"scheduler", "rank 0", "rank 1"}
    finally:
        service.stop()


def test_two_engines_and_another_model_on_one_small_service(
    model: Path, other_model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    """200 requests over 20 prompts; the arena holds a few of them, so evictions go on."""
    asked = prompts(4, 20, least=300, most=700)
    expected = control(asked, max_tokens=4)
    service = NodeService(
        short_dir / "s",
        tmp_path / "service.log",
        max_local_cpu_size="64MiB",
        local_disk=tmp_path / "disk",
        verify_memory="always",
    )
    service.start()
    settings = {"service_address": str(service.socket)}
    try:
        with (
            engine(model, tmp_path / "a.log", settings) as one,
            engine(model, tmp_path / "b.log", settings, in_process=True) as two,
        ):
            order = [index * 7 % 20 for index in range(200)]
            for begin in range(0, 200, 20):
                batch = order[begin : begin + 20]
                for started, half in ((one, batch[:10]), (two, batch[10:])):
                    started.ask("reset")
                    found = started.generate([asked[index] for index in half], max_tokens=4)
                    assert_same(found, [expected[index] for index in half])
            assert_nothing_held(service.settled())
            hits = [started.ask("metrics")["vllm:kvhaven_hit_tokens"] for started in (one, two)]
            assert min(hits) > 0
        with engine(other_model, tmp_path / "c.log", settings, in_process=True) as third:
            assert third.generate(asked[:1])[0]["cached"] == 0
            check_tenants(third, service, asked[0])
        assert len(service.settled().namespaces) == 2
    finally:
        service.stop()


def check_tenants(started: Engine, service: NodeService, prompt: list[int]) -> None:
    """Two salts, one prompt: neither sees the other's, each is counted, and one is cleared."""
    (plain,) = started.generate([prompt])
    names = {salt: tenant_id(salt).hex() for salt in ("ann", "ben")}
    for salt in names:
        (first,) = started.generate([prompt], salts=[salt])
        assert first["cached"] == 0
        assert_same([first], [plain])
    started.ask("reset")
    for salt in names:
        (again,) = started.generate([prompt], salts=[salt])
        assert again["cached"] == full_chunks(prompt)
        assert_same([again], [plain])
    held = {one.tenant: one.chunks["memory"] for one in service.settled().tenants}
    assert held == dict.fromkeys(names.values(), len(prompt) // CHUNK)
    with connect(str(service.socket)) as control:
        control.clear(tenant=tenant_id("ann"))
    started.ask("reset")
    cached = [started.generate([prompt], salts=[salt])[0]["cached"] for salt in names]
    assert cached == [0, full_chunks(prompt)]
