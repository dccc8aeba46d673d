# SPDX-License-Identifier: Apache-2.0
"""KVHaven's conformance suite on the SQLite tier."""

import sqlite3
from pathlib import Path

import pytest

from kvhaven.testing.tier_suite import *  # noqa: F403 - its tests are collected here
from kvhaven.testing.tiers import Change, Kit, online
from kvhaven.tiers.base import StoredShard
from kvhaven.tiers.registry import TierOptions, open_tier
from kvhaven.tiers.shared.store import blob_name


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """Return a private database; opening it by URL verifies that KVHaven finds the package."""
    path = tmp_path / "kv.db"

    def change(shard: StoredShard, change: Change) -> None:
        name = (blob_name(shard),)
        with sqlite3.connect(path) as database:
            rows = database.execute("SELECT content FROM blobs WHERE name = ?", name)
            new = change(rows.fetchone()[0])
            database.execute("UPDATE blobs SET content = ? WHERE name = ?", (new, *name))

    return Kit(lambda: online(open_tier(f"sqlite://{path}", TierOptions(retry_s=0.05))), change)
