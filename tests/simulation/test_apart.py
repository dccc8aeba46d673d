# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on two nodes with unlike devices: the decode device is a simulated Gaudi.

Two of vLLM's real schedulers with our connector, each with a service of its own. Chunks and tails
move between the services while the prefill runs; every byte that the decode engine reads is
compared. `KVHAVEN_SEED` replays a failure, `KVHAVEN_EVENTS` sets the length.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from examples.demo.processes import free_port
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_model import VOCABULARY, Model
from tests.simulation.engine_simulation import check_no_leaks
from tests.simulation.engine_world import PATIENT, Engine, Setup
from tests.simulation.node import Node, running_node
from tests.simulation.test_scheduler_simulator import EVENTS, SEED
from tests.simulators import simulated
from tests.simulators.simulation import Simulation as Simulated

pytestmark = pytest.mark.slow

REQUESTS = 12
RUNS = max(1, EVENTS // 1400)
_END_S = 120.0


@pytest.fixture
def nodes(short_dir: Path) -> Iterator[tuple[list[Node], str]]:
    """Two services that are each other's peers, and the address of the second."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        found: list[Node] = []
        for name, address in zip("pd", addresses, strict=True):
            (short_dir / name).mkdir()
            settings: dict[str, Any] = {"peer_listen": address, "peers": " ".join(addresses)}
            settings |= {"peer_deadline_ms": 20_000.0, "pd_stall_ms": 20_000.0}
            found.append(stack.enter_context(running_node(short_dir / name, **settings)))
        wait_until(lambda: all(one.status().tiers["peer"].online for one in found), 60)
        yield found, addresses[1]


class Apart:
    """A prefill engine and a decode engine, which are stepped at random."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        nodes: list[Node],
        to: str,
        patch: pytest.MonkeyPatch,
        device: Simulated,
    ) -> None:
        self._choice = choice = random.Random(seed)
        self._nodes, self._to = nodes, to
        self._model = Model()
        common: dict[str, Any] = {
            "world": choice.choice((1, 2)),
            "format": "portable",
            "fingerprint": f"{seed}",
            "settings": (*PATIENT, ("promote_deadline_ms", 20_000), ("pd_wait_ms", 60_000)),
        }
        here = Setup(
            service_address=nodes[0].address,
            asynchronous_scheduling=choice.random() < 0.7,
            load_mode=choice.choice(("async", "sync")),
            blocks=choice.choice((64, 100)),
            budget=choice.choice((16, 48)),
            prefix_caching=choice.random() < 0.7,
            **common,
        )
        there = Setup(
            service_address=nodes[1].address,
            asynchronous_scheduling=choice.random() < 0.7,
            load_mode="auto",
            blocks=choice.choice((64, 100)),
            budget=choice.choice((16, 48)),
            **common,
        )
        self.described = f"{here}, {there}"
        self.prefill = Engine(folder, here, self._model, choice, patch)
        self.decode = Engine(folder, there, self._model, choice, patch, device)
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self._waiting = [f"r{number}" for number in range(REQUESTS)]

    def run(self) -> Counter[str]:
        """Serve all requests, and compare every answer."""
        devices = [*self.prefill.devices, *self.decode.devices]
        try:
            self._serve()
            for device in devices:
                device.synchronize()
            for name, (prompt, length) in self._prompts.items():
                expected = self._model.continuation(None, prompt, length)
                assert self.decode.outputs[name] == expected, name
            for node in self._nodes:
                check_no_leaks(node)
        except BaseException:
            for device in devices:
                device.abandon()
            raise
        finally:
            self.prefill.close()
            self.decode.close()
        return Counter({name: int(count) for name, count in self.decode.counters.items()})

    def _serve(self) -> None:
        end = time.monotonic() + _END_S
        self.prefill.wait_ready()
        self.decode.wait_ready()
        while self._waiting or self.prefill.busy or self._undecoded() or self.decode.busy:
            assert time.monotonic() < end, "stuck"
            self._act()
            engine = self._choice.choice((self.prefill, self.decode))
            if self._choice.random() < 0.5:
                engine.tick()
            engine.step()

    def _undecoded(self) -> set[str]:
        return self.prefill.handovers.keys() - self.decode.outputs.keys()

    def _act(self) -> None:
        """Let a request begin, and those whose prefill has ended go to the decode engine."""
        if self._waiting and self._choice.random() < 0.1:
            name = self._waiting.pop()
            prompt = [
                self._choice.randrange(VOCABULARY) for _ in range(self._choice.choice(LENGTHS))
            ]
            self._prompts[name] = prompt, self._choice.randint(1, 8)
            params = {"do_remote_decode": True, "kvhaven.to": self._to}
            self.prefill.add(name, prompt, 1, params={"kv_transfer_params": params})
        for name in sorted(self._undecoded()):
            prompt, length = self._prompts[name]
            params = {"kv_transfer_params": self.prefill.handovers[name]}
            self.decode.add(name, prompt, length, params=params)


LENGTHS = (5, 15, 16, 17, 33, 63, 64, 100, 130)
"""Of prompts: chunks have 16 tokens, blocks 4."""


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_what_one_device_prefilled_another_decodes(
    mode: Any, short_dir: Path, nodes: tuple[list[Node], str]
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEED, SEED + RUNS):
        described = ""
        try:
            with (
                simulated(seed=seed, devices=2, kind="hpu", mode=mode) as device,
                pytest.MonkeyPatch.context() as patch,
            ):
                run = Apart(seed, short_dir, *nodes, patch, device)
                described = run.described
                counts += run.run()
        except BaseException:
            print(f"replay with KVHAVEN_SEED={seed} KVHAVEN_EVENTS={EVENTS}: {described}")  # noqa: T201
            raise
    assert counts["hit_tokens"], counts
    assert counts["tail_hits"], counts
