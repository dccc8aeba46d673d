# SPDX-License-Identifier: Apache-2.0
"""KVHaven's suite for devices, on the example's device."""

import pytest
from kvhaven_sqlite.device import PLAIN

from kvhaven.devices.base import Device
from kvhaven.testing.device_suite import *  # noqa: F403 - its tests are collected here


@pytest.fixture
def device() -> Device:
    """Return the example's device."""
    assert PLAIN.unavailable() == ""
    return PLAIN.open(1)


@pytest.fixture
def torch_type() -> str:
    """Return the type of its tensors in torch."""
    return PLAIN.torch_type
