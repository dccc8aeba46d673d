# SPDX-License-Identifier: Apache-2.0
"""The router's choice of nodes, in the simulation of `benchmarks/affinity.py`."""

import json
from pathlib import Path

import pytest

from benchmarks import affinity, results


def test_the_router_finds_nearly_all_cached_tokens_and_more_than_round_robin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "BUILD", tmp_path)
    found = affinity.measure(lambda _: None, seconds=200, seeds=1)
    rows = {row["name"]: row for row in json.loads(results.write_json(found, "x").read_text())}
    assert set(rows) == {
        f"route.affinity{kind}{policy}"
        for kind in ("", ".apart")
        for policy in ("", ".informed", ".round_robin")
    }
    for kind in ("", ".apart"):
        router = rows[f"route.affinity{kind}"]["ratio"]
        assert router >= 0.9
        assert router > 1.2 * rows[f"route.affinity{kind}.round_robin"]["ratio"]
