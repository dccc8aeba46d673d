# SPDX-License-Identifier: Apache-2.0
"""Other connectors beside ours in a MultiConnector: failed loads, and requests for other nodes."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the simulation drives vLLM's scheduler")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.simulation import engine_world
from tests.simulation.connector_kit import wait_until
from tests.simulation.engine_model import Model, Runner
from tests.simulation.engine_world import Engine
from tests.simulation.node import running_node
from tests.simulation.test_failed_sync_loads import LONG, SETUP, SHORT, fail_a_load, finish, run

pytestmark = pytest.mark.slow


class HostConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector whose loads are written from the host immediately, as by a network's hardware.

    It loads requests of that parameter, with bytes that nothing may read, and never ends a load.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._given: list[int] = []
        self._tensors: list[torch.Tensor] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        wanted = (request.kv_transfer_params or {}).get("host")
        return (request.num_tokens - num_computed_tokens, True) if wanted else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._given += blocks.get_block_ids()[0]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta = HostLoads()
        meta.blocks, self._given = self._given, []
        return meta

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._tensors = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, HostLoads)
        for tensor in self._tensors:
            tensor.view(torch.uint8)[loads.blocks] = 0xAB

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""


class HostLoads(KVConnectorMetadata):
    """The blocks that a step's loads write."""

    blocks: list[int]


@contextlib.contextmanager
def two_nodes(short_dir: Path) -> Iterator[tuple[Any, Any]]:
    """Run two nodes, each with a folder of its own."""
    folders = [short_dir / name for name in ("1", "2")]
    for folder in folders:
        folder.mkdir()
    with running_node(folders[0]) as first, running_node(folders[1]) as second:
        yield first, second


def test_kv_of_its_failed_load_is_not_saved(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both connectors are ours, each with a node of its own. The first one's load fails."""
    with two_nodes(short_dir) as (first, second):

        def engine_with(*addresses: str) -> Engine:
            setup = replace(SETUP, service_address=addresses[0], second_address=addresses[1])
            engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
            engine.wait_ready()
            return engine

        engine = engine_with(first.address, "")
        run(engine, "before", SHORT)
        wait_until(lambda: first.status().catalog.resident_chunks == 2)
        engine.close()
        engine = engine_with(first.address, second.address)
        for ours in engine.connector.sub_connectors:
            assert ours._scheduler._epoch._trusts_others, "KVHaven verifies what it keeps"
        engine.add("fails", LONG, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "_expect", lambda *_: None)  # vLLM drops what it computes
            fail_a_load(engine)
        engine.close()
        assert second.status().catalog.resident_chunks == 0
        engine = engine_with(second.address, "")
        run(engine, "short", SHORT)
        run(engine, "long", LONG)
        engine.close()


def test_two_connectors_do_not_both_answer_for_another_node(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's NIXL connector answers with the same names: the MultiConnector ended the engine."""
    with two_nodes(short_dir) as (first, second):
        setup = replace(SETUP, service_address=first.address, second_address=second.address)
        engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
        engine.wait_ready()
        engine.add("prefilled", LONG, 1, params={"kv_transfer_params": {"do_remote_decode": True}})
        finish(engine)
        assert not engine.handovers
        engine.close()


def test_writes_of_another_connector_from_the_host_wait_for_saves(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a request that has ended go to another one while their save still runs."""
    transfer_config = engine_world._transfer_config

    def both(setup: engine_world.Setup) -> KVTransferConfig:
        ours = transfer_config(replace(setup, second_address=setup.service_address))
        host = {
            "kv_connector": "HostConnector",
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
        }
        extra = ours.kv_connector_extra_config
        extra["connectors"] = [host, extra["connectors"][0]]
        return ours

    with running_node(short_dir) as node:
        setup = replace(SETUP, service_address=node.address, blocks=20, stores=(1e-9,))
        with monkeypatch.context() as patch:
            patch.setattr(engine_world, "_transfer_config", both)
            patch.setattr(
                engine_world, "_ours", lambda multi: getattr(multi, "_connectors", [0, multi])[1:]
            )
            engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
            engine.wait_ready()
        _, ours = engine.connector.sub_connectors
        assert not ours._scheduler._epoch._trusts_others
        engine.add("saves", LONG, 1)
        while engine.requests["saves"].status.name != "FINISHED_LENGTH_CAPPED":
            engine.step()
        other = [(token + 1) % 7 for token in LONG]
        engine.add("host", other, 1, params={"kv_transfer_params": {"host": True}})
        engine.step()
        for device in engine.devices:
            device.synchronize()
        wait_until(lambda: node.status().catalog.resident_chunks == 3)
        engine.close()
        setup = replace(setup, stores=(1.0,))
        engine = Engine(short_dir, setup, Model(), random.Random(0), monkeypatch)
        engine.wait_ready()
        run(engine, "long", LONG)
        assert engine.counters["hit_tokens"]
        engine.close()
