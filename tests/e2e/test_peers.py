# SPDX-License-Identifier: Apache-2.0
"""Two nodes with real vLLM: one reads what is in the other's memory, and goes on without it."""

import signal
import time
from pathlib import Path

import pytest

from examples.demo.processes import free_port
from kvhaven.catalog.actions import TierName
from tests.e2e.conftest import Control
from tests.e2e.engines import (
    NodeService,
    assert_nothing_held,
    assert_same,
    engine,
    generate,
    peered_services,
    prompts,
)
from tests.e2e.test_portable import CHUNK, SETTINGS, assert_all_from_cache

pytestmark = pytest.mark.vllm

PATIENT_PEERS = {"pd_stall_ms": 20_000, "peer_deadline_ms": 20_000}
"""For nodes on a busy machine: silence for a second is no failure there."""


def test_an_engine_hits_what_an_unlike_one_computed_on_another_node(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked, more = prompts(51, 6, least=200), prompts(52, 2, least=200)
    ports = [free_port(), free_port()]
    with peered_services(short_dir, tmp_path, ports, **PATIENT_PEERS) as (a, b):
        with engine(
            model,
            tmp_path / "prefill.log",
            SETTINGS | {"service_address": str(a.socket)},
            in_process=True,
            block_size=32,
        ) as prefill:
            a.await_ranks()
            assert_same(prefill.generate(asked, max_tokens=8), control(asked, max_tokens=8))
        with engine(
            model,
            tmp_path / "decode.log",
            SETTINGS | {"service_address": str(b.socket)},
            in_process=True,
            block_size=64,
            num_gpu_blocks_override=256,
        ) as decode:
            b.await_ranks()
            wait_for_peer(b)
            assert_all_from_cache(decode.generate(asked, max_tokens=8), asked, control)
            shared = {tuple(one[:end]) for one in asked for end in range(CHUNK, len(one), CHUNK)}
            assert b.status().catalog.tiers[TierName("peer")].found >= len(shared)
            assert_nothing_held(a.settled())
            a.stop(signal.SIGKILL)
            assert_same(decode.generate(more, max_tokens=8), control(more, max_tokens=8))
            decode.ask("reset")
            assert_all_from_cache(decode.generate(asked, max_tokens=8), asked, control)
            assert decode.ask("metrics").get("vllm:kvhaven_failed_loads", 0) == 0
        assert_nothing_held(b.settled())


def test_chunks_reach_an_unlike_engine_while_another_node_prefills(
    model: Path, control: Control, tmp_path: Path, short_dir: Path
) -> None:
    asked, ports = prompts(53, 5, least=500), [free_port(), free_port()]
    with peered_services(short_dir, tmp_path, ports, **PATIENT_PEERS) as (p, d):
        with (
            engine(
                model,
                tmp_path / "prefill.log",
                SETTINGS | {"service_address": str(p.socket)},
                in_process=True,
                block_size=32,
            ) as prefill,
            engine(
                model,
                tmp_path / "decode.log",
                SETTINGS | {"service_address": str(d.socket)},
                block_size=128,
                tensor_parallel_size=2,
                num_gpu_blocks_override=128,
            ) as decode,
        ):
            p.await_ranks()
            d.await_ranks(2)
            wait_for_peer(p)
            wait_for_peer(d)
            for number, prompt in enumerate(asked):
                parameters = {"do_remote_decode": True, "kvhaven.to": f"127.0.0.1:{ports[1]}"}
                (first,) = generate(prefill, prompt, parameters, 1)
                assert first["handover"]["do_remote_prefill"] is True
                # The chunks come without a question of the engine that will need them.
                while (now := d.status().chains).expected - now.pulled <= number or now.open:
                    time.sleep(0.01)
                (second,) = generate(decode, prompt, first["handover"], 8)
                assert_same([second], control([prompt], max_tokens=8))
            full = sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in asked)
            # The usage of such a request says what the prefill node had cached: nothing.
            metrics = decode.ask("metrics")
            hits = metrics["vllm:external_prefix_cache_hits"] + metrics["vllm:prefix_cache_hits"]
            assert hits >= full
            # A chain that comes late, on a busy machine, is asked for as well.
            chains = d.status().chains
            assert chains.expected - chains.pulled == len(asked)
            assert d.status().catalog.tiers[TierName("peer")].looked_up == 0
            assert metrics.get("vllm:kvhaven_failed_loads", 0) == 0
        for node in (p, d):
            assert_nothing_held(node.settled())


def wait_for_peer(node: NodeService) -> None:
    """Wait until the other node answers."""
    while not node.status().tiers["peer"].online:
        time.sleep(0.05)
