# SPDX-License-Identifier: Apache-2.0
"""What an engine's `kv_role` and `pd_role` permit together."""

from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from kvhaven.config import Settings
from kvhaven.engine.requests import Permissions
from kvhaven.integrations.vllm import start
from kvhaven.integrations.vllm.compat import drops_outputs_in_flight


@pytest.mark.parametrize(
    ("kv_role", "pd_role", "load", "save"),
    [
        ("kv_both", "both", True, True),
        ("kv_both", "sender", False, True),
        ("kv_both", "receiver", True, False),
        ("kv_producer", "both", False, True),
        ("kv_consumer", "sender", False, False),
    ],
)
def test_an_engine_does_what_both_of_its_roles_permit(
    kv_role: str, pd_role: Any, load: bool, save: bool
) -> None:
    transfer = SimpleNamespace(
        is_kv_consumer=kv_role != "kv_producer", is_kv_producer=kv_role != "kv_consumer"
    )
    config: Any = SimpleNamespace(kv_transfer_config=transfer)
    assert start._role(config, Settings(pd_role=pd_role)) == Permissions(load, save)


@pytest.mark.parametrize(
    ("asynchronous", "drafts", "drops", "expected"),
    [
        (True, False, True, False),
        (True, True, True, False),
        (True, False, False, True),
        (False, False, False, False),
        (False, True, True, True),
    ],
)
def test_which_versions_count_dropped_tokens(
    asynchronous: bool, drafts: bool, drops: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "drops_outputs_in_flight", lambda: drops)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        speculative_config=SimpleNamespace() if drafts else None,
    )
    assert start._counts_dropped(config) is expected


def test_what_this_version_drops_is_seen_in_its_source() -> None:
    newer = tuple(map(int, vllm.__version__.split(".")[:2])) >= (0, 32)
    assert drops_outputs_in_flight() or not newer
