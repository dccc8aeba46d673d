# SPDX-License-Identifier: Apache-2.0
"""What an engine's `kv_role` and `pd_role` permit together."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvhaven.config import Settings
from kvhaven.engine.requests import Permissions
from kvhaven.integrations.vllm import start


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
