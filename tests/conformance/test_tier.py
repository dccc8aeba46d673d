# SPDX-License-Identifier: Apache-2.0
"""The contract of `Tier`. A new tier joins by a line in `KITS` of `tests/tier_kits.py`."""

from pathlib import Path

import pytest

from kvhaven.testing.tier_suite import *  # noqa: F403 - its tests are collected here
from kvhaven.testing.tiers import Kit
from tests.tier_kits import KITS


@pytest.fixture(params=KITS)
def kit(request: pytest.FixtureRequest, tmp_path: Path) -> Kit:
    """Return every tier's kit in turn."""
    return KITS[request.param](request, tmp_path)
