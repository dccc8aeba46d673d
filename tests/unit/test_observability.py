# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard and the alert rules, against a real Prometheus that scrapes a real service.

Grafana itself is not run: it is in no package that is installed here.
"""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.demo.processes import free_port
from tests.crash.engine import Engine
from tests.crash.node import NodeThread, eventually

pytest.importorskip("aiohttp", reason="kvhaven[api] is not installed")

from kvhaven.gateway import tenants
from tests.browser import play_load
from tests.gateway_kit import GatewayThread
from tests.metrics_kit import samples_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
RULES = FOLDER / "prometheus-rules.yaml"
PANELS = [
    panel
    for panel in json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    if panel["type"] != "row"
]
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
EMPTY = {"KVHavenAbsent"}
"""Alerts whose whole expression has no data while all is well: others compare a value."""
COMPARED = re.compile(r" (?:==|<|>) (?:0\.5 \* )?(?:[\d.]+|\(kvhaven:\S+ offset 1d\))$")


def program(name: str) -> str:
    """Return the path of a program of Debian's package prometheus; skip the test without it."""
    unpacked = Path(sys.prefix) / "servers" / "usr" / "bin"
    found = shutil.which(name, path=os.pathsep.join((os.environ["PATH"], str(unpacked))))
    if found is None:
        pytest.skip(f"{name} is not installed; run `make servers`, or apt-get install prometheus")
    return found


# --- files ----------------------------------------------------------------------------------


def test_the_files_are_those_of_the_script() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "observability.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_alert_has_an_entry_in_the_runbook() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    entries = re.findall(r"^## (KVHaven\w+)$", text, re.MULTILINE)
    assert entries == list(ALERTS)
    for name in ALERTS:
        assert ALERTS[name]["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


# --- expressions ----------------------------------------------------------------------------


class Prometheus:
    """A real Prometheus that scrapes one API every half second."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        """Return the result of an expression now."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=30) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found

    def has_data(self, expression: str) -> bool:
        """Return whether an expression has a value that is a number."""
        return any(not math.isnan(float(one["value"][1])) for one in self.query(expression))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)


@contextlib.contextmanager
def prometheus(target: str, folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
                "rule_files": [str(RULES)],
                "scrape_configs": [
                    {"job_name": "kvhaven", "static_configs": [{"targets": [target]}]}
                ],
            }
        )
    )
    command = [program("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: _ready(running, process, folder / "log"))
        yield running
    finally:
        process.terminate()
        process.wait(30)


def _ready(running: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        return bool(running.query("up == 1"))
    except urllib.error.HTTPError as not_ready:
        not_ready.close()  # Python 3.14 warns of one that is open
        return False
    except OSError:
        return False


def panel_expressions() -> dict[str, str]:
    """Return each panel's expressions, as Grafana would send them, by a name."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$instance", ".*")
        .replace("$__rate_interval", "1m")
        for panel in PANELS
        for target in panel["targets"]
    }


def alert_values() -> dict[str, str]:
    """Return what each alert compares, and recorded expressions, by name."""
    rules = [rule for group in GROUPS for rule in group["rules"]]
    values = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
    for name, rule in ALERTS.items():
        if name in EMPTY:
            values[name] = re.sub(r"^absent\((.*)\)$", r"\1", rule["expr"])
            continue
        assert COMPARED.search(rule["expr"]), rule["expr"]
        values[name] = COMPARED.sub("", rule["expr"])
    return values


def test_every_panel_and_every_rule_has_data(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("prometheus")
    monkeypatch.setattr(tenants, "PAUSE_S", 0.1)
    share = short_dir / "share"
    share.mkdir()
    settings: dict[str, Any] = {
        "local_disk": str(short_dir / "disk"),
        "remote_url": f"file://{share}",
        "max_local_cpu_size": 256 << 10,  # so that chunks are evicted
    }
    with (
        NodeThread(short_dir / "s.sock", **settings) as node,
        GatewayThread(node.address) as api,
        Engine(node.address) as engine,
    ):
        eventually(lambda: api.health() == (200, "ok"))
        with prometheus(urllib.parse.urlsplit(api.url).netloc, tmp_path) as running:
            wanted = panel_expressions() | alert_values()
            play_load(node, engine)
            # A counter that appears with a value has no rate yet.
            eventually(lambda: running.query("kvhaven_asked_tokens_total"))
            play_load(node, engine)

            def absent() -> list[str]:
                return [name for name, one in wanted.items() if not running.has_data(one)]

            with contextlib.suppress(AssertionError):
                eventually(lambda: not absent())
            assert absent() == []
            rules = running.get("/api/v1/rules")["data"]["groups"]
            states = {rule["name"]: rule["health"] for one in rules for rule in one["rules"]}
            assert set(states.values()) <= {"ok", "unknown"}, states
            assert running.query('ALERTS{alertstate="firing"}') == []
            assert len(wanted) > 60
        scraped = {
            re.sub(r"_(bucket|sum|count)$", "", name)
            for name in samples_of(api.get("/metrics").body.decode())
            if name.startswith("kvhaven_")
        }
        shown = set(re.findall(r"kvhaven_\w+", " ".join(panel_expressions().values())))
        shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
        assert scraped <= shown, "metrics that no panel shows"
        documented = (ROOT / "docs" / "api.md").read_text()
        assert [name for name in scraped if f"`{name}`" not in documented] == []


# --- rules ----------------------------------------------------------------------------------

LABELS = 'job="kvhaven",instance="a"'
Series = Mapping[str, str]


def named(name: str, labels: str = "") -> str:
    return f"{name}{{{LABELS}{',' if labels else ''}{labels}}}"


def lookups(all_fast: str, all_slow: str, waited: str) -> Series:
    """Return series of lookups: within 5 ms, all, and those that waited for a tier, all slow."""
    return {
        named("kvhaven_lookup_seconds_bucket", 'le="0.005"'): all_fast,
        named("kvhaven_lookup_seconds_count"): all_slow,
        named("kvhaven_promotion_wait_seconds_bucket", 'le="0.005"'): "0x300",
        named("kvhaven_promotion_wait_seconds_count"): waited,
    }


def writes(dropped: str, reason: str = "overload") -> Series:
    return {
        named("kvhaven_tier_dropped_writes_total", f'tier="disk",reason="{reason}"'): dropped,
        named("kvhaven_tier_seconds_count", 'tier="disk",op="write"'): "0+100x300",
    }


def reuse(twice: str) -> Series:
    return {
        named("kvhaven_reuse_hit_ratio", 'memory="1x"'): "0.4x300",
        named("kvhaven_reuse_hit_ratio", 'memory="2x"'): twice,
    }


def tokens(computed: str) -> Series:
    return {
        named("kvhaven_lookup_tokens_total", 'source="none"'): computed,
        named("kvhaven_lookup_tokens_total", 'source="memory"'): "0+50x2000",
        named("kvhaven_asked_tokens_total"): "0+100x2000",
    }


UP = {named("up"): "1x300"}
DAMAGED = named("kvhaven_verified_chunks_total", 'result="damaged"')
REJECTED = named("kvhaven_tier_shards_total", 'tier="disk",op="read",result="rejected"')
QUARANTINED = named("kvhaven_memory_bytes", 'state="quarantined"')
PLANNED = {named("kvhaven_memory_planned_bytes"): "100x300"}
ALLOCATED = named("kvhaven_memory_allocated_bytes")
UP_TIER = named("kvhaven_tier_up", 'tier="disk"')
OLDEST = named("kvhaven_oldest_lease_seconds")

CASES: dict[str, tuple[Sequence[tuple[Series, int]], Sequence[tuple[Series, int]]]] = {
    "KVHavenDown": ([({named("up"): "1x5 0x20"}, 8)], [({named("up"): "1x5 0x20"}, 5), (UP, 20)]),
    "KVHavenAbsent": ([({"other": "1x20"}, 8)], [({"other": "1x20"}, 3), (UP, 20)]),
    "KVHavenTierOff": (
        [({UP_TIER: "1x5 0x20"}, 9)],
        [({UP_TIER: "1x5 0x20"}, 7), ({UP_TIER: "1x20"}, 9)],
    ),
    "KVHavenDamagedChunks": ([({DAMAGED: "0x5 1x20"}, 7)], [({DAMAGED: "1x60"}, 30)]),
    "KVHavenRejectedShards": ([({REJECTED: "0x5 2x20"}, 7)], [({REJECTED: "2x60"}, 30)]),
    "KVHavenQuarantine": (
        [({QUARANTINED: "4096x60"}, 12)],
        [({QUARANTINED: "4096x60"}, 8), ({QUARANTINED: "0x60"}, 20)],
    ),
    "KVHavenOldLease": (
        [({OLDEST: "0+60x60"}, 8)],
        [({OLDEST: "0+60x60"}, 4), ({OLDEST: "30x60"}, 20)],
    ),
    "KVHavenWritesDropped": (
        [(writes("0+3x300"), 25)],
        [(writes("0+0x300"), 25), (writes("0+30x300", "off"), 25), (writes("0+3x300"), 5)],
    ),
    "KVHavenSlowLookups": (
        [(lookups("0+95x300", "0+100x300", "0x300"), 20)],
        # All that is slow waited for a tier.
        [
            (lookups("0+60x300", "0+100x300", "0+40x300"), 20),
            (lookups("0x300", "0x300", "0x300"), 20),
        ],
    ),
    "KVHavenMemorySmaller": (
        [({ALLOCATED: "90x300"} | PLANNED, 20)],
        [({ALLOCATED: "100x300"} | PLANNED, 20), ({ALLOCATED: "90x10 100x99"} | PLANNED, 20)],
    ),
    "KVHavenHitRateHalved": (
        [(tokens("0+50x1500 75000+90x500"), 1600)],
        [(tokens("0+50x2000"), 1600), (tokens("0+50x1500 75000+70x500"), 1600)],
    ),
    "KVHavenMoreMemoryHelps": (
        [(reuse("0.55x300"), 90)],
        [(reuse("0.55x300"), 50), (reuse("0.45x300"), 90)],
    ),
}
"""Of each alert: series, one value a minute, with the minute at which it fires, and not."""


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    promtool = program("promtool")
    assert list(CASES) == list(ALERTS)
    cases = [
        _case(name, series, minute, fires=fires)
        for name, both in CASES.items()
        for fires, many in zip((True, False), both, strict=True)
        for series, minute in many
    ]
    commands = [["check", "rules", str(RULES)]]
    for step, long in (("1m", False), ("10m", True)):  # more than a day takes long
        part = [case for case in cases if ("HitRateHalved" in case["name"]) == long]
        path = tmp_path / f"{step}.yaml"
        # Without an order, an alert may see the records of the evaluation before.
        order = ["kvhaven-records", "kvhaven"]
        whole = {"rule_files": [str(RULES)], "evaluation_interval": step, "tests": part}
        path.write_text(json.dumps(whole | {"group_eval_order": order}))
        commands.append(["test", "rules", str(path)])
    for command in commands:
        done = subprocess.run(
            [promtool, *command], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _case(name: str, series: Series, minute: int, *, fires: bool) -> dict[str, Any]:
    rule = ALERTS[name]
    named_labels = {"job": "kvhaven", "instance": "a"}
    labels = {"severity": rule["labels"]["severity"]} | _labels_of(name, named_labels)
    summary = re.sub(
        r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], rule["annotations"]["summary"]
    )
    expected = {
        "exp_labels": labels,
        "exp_annotations": {"summary": summary, "runbook": rule["annotations"]["runbook"]},
    }
    return {
        "name": f"{name} at {minute} min",
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": name,
                "exp_alerts": [expected] if fires else [],
            }
        ],
    }


def _labels_of(name: str, both: dict[str, str]) -> dict[str, str]:
    """Return the labels that an alert gets from its expression."""
    summed, instance = {"instance": "a"}, both
    return {
        "KVHavenAbsent": {"job": "kvhaven"},
        "KVHavenTierOff": instance | {"tier": "disk"},
        "KVHavenDamagedChunks": summed,
        "KVHavenRejectedShards": summed | {"tier": "disk"},
        "KVHavenQuarantine": instance | {"state": "quarantined"},
        "KVHavenWritesDropped": summed | {"tier": "disk"},
        "KVHavenSlowLookups": summed,
        "KVHavenHitRateHalved": summed,
    }.get(name, instance)
