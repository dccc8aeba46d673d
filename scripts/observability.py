# SPDX-License-Identifier: Apache-2.0
"""Write the Grafana dashboard and the alert rules in deploy/observability, from the lists below.

    python scripts/observability.py [--check]

`--check` writes nothing, and fails if a file is not what it would write.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import yaml

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "observability"
DASHBOARD = FOLDER / "grafana-dashboard.json"
RULES = FOLDER / "prometheus-rules.yaml"
JOB = "kvhaven"
"""Name of the job in Prometheus's configuration."""

_HERE = f'job="{JOB}",instance=~"$instance"'
_RATE = "$__rate_interval"
_COLUMNS = 24


class Panel(NamedTuple):
    """A panel: its queries with their legends, and a unit of Grafana."""

    title: str
    unit: str
    queries: list[tuple[str, str]]
    text: str
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8


class Alert(NamedTuple):
    """An alert: it fires if `value` compared as `fires` says is true for the duration `after`."""

    name: str
    value: str
    fires: str
    after: str
    severity: str
    summary: str

    @property
    def expression(self) -> str:
        """The whole expression; a `fires` with {} has the value inside."""
        if "{}" in self.fires:
            return self.fires.format(self.value)
        return f"{self.value} {self.fires}"


def metric(name: str, labels: str = "") -> str:
    """Return a selector of a metric of the chosen instances."""
    return f"kvhaven_{name}{{{_HERE}{',' if labels else ''}{labels}}}"


def rate(name: str, by: str, labels: str = "") -> str:
    """Return the rate of a counter, summed by a label."""
    return f"sum by ({by}) (rate({metric(name, labels)}[{_RATE}]))"


def quantile(part: float, name: str, by: str = "le", labels: str = "") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({part}, {rate(f'{name}_bucket', by, labels)})"


def gauge(name: str, by: str, labels: str = "") -> str:
    """Return a gauge, summed by a label."""
    return f"sum by ({by}) ({metric(name, labels)})"


_NONE = metric("lookup_tokens_total", 'source="none"')
_ASKED = metric("asked_tokens_total")
_UNUSED = metric("memory_bytes", 'state=~"free|waste"')
ROWS: dict[str, list[Panel]] = {
    "Does it work?": [
        Panel(
            "Prompt tokens not computed",
            "percentunit",
            [
                (
                    f"1 - sum(rate({_NONE}[{_RATE}])) / sum(rate({_ASKED}[{_RATE}]))",
                    "found",
                )
            ],
            "Share of prompt tokens that were found in an engine, in memory or in a tier.",
            "stat",
            width=6,
        ),
        Panel(
            "Engines",
            "short",
            [(gauge("engines", "job"), "engines")],
            "Attached engines.",
            "stat",
            width=3,
        ),
        Panel(
            "Tiers online",
            "short",
            [(f"sum({metric('tier_up')})", "up"), (f"count({metric('tier_up')})", "all")],
            "Tiers that serve reads, and all.",
            "stat",
            width=3,
        ),
        Panel(
            "Memory in use",
            "percentunit",
            [
                (
                    f"1 - sum({_UNUSED}) / sum({metric('memory_capacity_bytes')})",
                    "used",
                )
            ],
            "Full memory is usual: a cache fills up, then evicts.",
            "stat",
            width=6,
        ),
        Panel(
            "Versions",
            "short",
            [(gauge("build_info", "version"), "{{version}}")],
            "Services by version.",
            "stat",
            width=6,
        ),
        Panel(
            "Prompt tokens by source",
            "short",
            [(rate("lookup_tokens_total", "source"), "{{source}}")],
            "Where the KV of prompt tokens was when it was asked for.",
            stacked=True,
            width=12,
        ),
        Panel(
            "Missed tokens by reason",
            "short",
            [(rate("missed_tokens_total", "reason"), "{{reason}}")],
            "Why the tokens of the source none were found nowhere.",
            stacked=True,
            width=12,
        ),
        Panel(
            "Requests by result",
            "reqps",
            [(rate("lookups_total", "result"), "{{result}}")],
            "hit: nothing was missed but tokens behind the last full chunk.",
            stacked=True,
        ),
        Panel(
            "Share of a prompt that was found",
            "percentunit",
            [
                (
                    " / ".join(
                        rate(f"request_hit_ratio_{part}", "job") for part in ("sum", "count")
                    ),
                    "mean",
                ),
            ],
            "Mean over requests, long and short ones alike.",
        ),
        Panel(
            "Saved tokens",
            "short",
            [
                (rate("saved_tokens_total", "job"), "saved"),
                (rate("skipped_tokens_total", "reason"), "skipped: {{reason}}"),
            ],
            "Tokens of chunks that became resident, and of those that got no memory.",
        ),
    ],
    "Latency": [
        Panel(
            "Lookups",
            "s",
            [
                (quantile(0.5, "lookup_seconds"), "p50"),
                (quantile(0.99, "lookup_seconds"), "p99"),
            ],
            "From a lookup to its final answer, waits for tiers included.",
        ),
        Panel(
            "Waits for tiers",
            "s",
            [(quantile(0.99, "promotion_wait_seconds"), "p99")],
            "Lookups that waited for a tier.",
        ),
        Panel(
            "Event loop",
            "s",
            [(quantile(0.99, "loop_lag_seconds"), "lag, p99")],
            "Lag of the service's event loop.",
        ),
    ],
    "Memory": [
        Panel(
            "Memory by state",
            "bytes",
            [
                (gauge("memory_bytes", "state"), "{{state}}"),
                (gauge("memory_capacity_bytes", "job"), "capacity"),
            ],
            "The states sum to the capacity.",
            stacked=True,
        ),
        Panel(
            "Allocated and planned memory",
            "bytes",
            [
                (gauge("memory_planned_bytes", "instance"), "planned {{instance}}"),
                (gauge("memory_allocated_bytes", "instance"), "allocated {{instance}}"),
            ],
            "Less than planned: the machine or its control group has not enough.",
        ),
        Panel(
            "Chunks",
            "short",
            [(gauge("chunks", "place"), "{{place}}")],
            "Chunks in memory and in local tiers.",
        ),
        Panel(
            "Evictions",
            "short",
            [(rate("evicted_chunks_total", "place, reason"), "{{place}}: {{reason}}")],
            "Chunks that left a place, per second.",
        ),
        Panel(
            "Age",
            "s",
            [
                (quantile(0.5, "residence_seconds", "le, reason"), "when evicted: {{reason}}"),
                (quantile(0.5, "reuse_age_seconds"), "since last use, when used again"),
            ],
            "If chunks are evicted younger than they are used again, memory is too small.",
        ),
        Panel(
            "Leases and pins",
            "short",
            [(gauge("leases", "job"), "leases"), (gauge("pins", "job"), "pins")],
            "Leases of engines, and pins of operators.",
        ),
        Panel(
            "Oldest lease",
            "s",
            [(f"max by (instance) ({metric('oldest_lease_seconds')})", "{{instance}}")],
            "A lease of many minutes belongs to a request that hangs.",
        ),
        Panel(
            "Tenants",
            "bytes",
            [(gauge("tenant_bytes", "tenant, place"), "{{tenant}} {{place}}")],
            "The 20 largest tenants, and all others.",
            stacked=True,
        ),
        Panel(
            "Faults",
            "short",
            [
                (rate("verified_chunks_total", "result"), "verified: {{result}}"),
                (rate("refused_commits_total", "job"), "refused commits"),
                (rate("foreign_lookups_total", "job"), "foreign lookups"),
                (rate("protocol_errors_total", "job"), "protocol errors"),
            ],
            "Damaged chunks, and bugs of clients.",
        ),
    ],
    "More memory": [
        Panel(
            "Hit rate with other memory",
            "percentunit",
            [(f"avg by (memory) ({metric('reuse_hit_ratio')})", "{{memory}}")],
            "Estimate for the last hour, with less or more memory.",
        ),
        Panel(
            "Ceiling",
            "percentunit",
            [(f"avg by (window) ({metric('reuse_ceiling_ratio')})", "{{window}}")],
            "With unlimited memory that forgets chunks after this time.",
        ),
        Panel(
            "Error of the estimate",
            "percentunit",
            [(f"max by (instance) ({metric('reuse_error_ratio')})", "{{instance}}")],
            "Difference between the estimate for the present memory and what was found.",
        ),
    ],
    "Tiers": [
        Panel(
            "State",
            "short",
            [
                (f"min by (tier) ({metric('tier_up')})", "{{tier}} up"),
                (f"min by (tier) ({metric('tier_writable')})", "{{tier}} writable"),
            ],
            "1: all are online, or accept writes.",
        ),
        Panel(
            "Size",
            "bytes",
            [
                (gauge("tier_used_bytes", "tier"), "{{tier}} used"),
                (gauge("tier_capacity_bytes", "tier"), "{{tier}} capacity"),
            ],
            "Local tiers.",
        ),
        Panel(
            "Traffic",
            "Bps",
            [(rate("tier_bytes_total", "tier, op"), "{{tier}} {{op}}")],
            "Bytes of chunks.",
        ),
        Panel(
            "Time for a chunk",
            "s",
            [(quantile(0.99, "tier_seconds", "le, tier, op"), "{{tier}} {{op}}, p99")],
            "To read or write it.",
        ),
        Panel(
            "Shards",
            "short",
            [(rate("tier_shards_total", "tier, op, result"), "{{tier}} {{op}}: {{result}}")],
            "rejected: it failed a check.",
        ),
        Panel(
            "Promotions",
            "short",
            [(rate("promoted_chunks_total", "tier, result"), "{{tier}}: {{result}}")],
            "Chunks read into memory.",
        ),
        Panel(
            "Waiting writes",
            "bytes",
            [(gauge("tier_queue_bytes", "tier"), "{{tier}}")],
            "Chunks that wait to be written, or are being written.",
        ),
        Panel(
            "Dropped writes",
            "short",
            [(rate("tier_dropped_writes_total", "tier, reason"), "{{tier}}: {{reason}}")],
            "Chunks that were queued and not written.",
        ),
        Panel(
            "Other nodes",
            "short",
            [
                (gauge("peer_connections", "job"), "connections"),
                (rate("peer_refused_connections_total", "job"), "refused, per second"),
                (rate("peer_protocol_errors_total", "job"), "protocol errors, per second"),
            ],
            "Connections of other nodes to this one.",
        ),
        Panel(
            "Service and API",
            "short",
            [
                (
                    f"sum by (instance) (rate(process_cpu_seconds_total{{{_HERE}}}[{_RATE}]))",
                    "cores {{instance}}",
                ),
                (rate("http_requests_total", "code"), "requests/s: {{code}}"),
                (gauge("config_generation", "instance"), "changes of settings {{instance}}"),
                (f"count({metric('namespace_info')})", "namespaces"),
            ],
            "Of the service's process, and of this API.",
        ),
    ],
}

_ALL = f'job="{JOB}"'


def _all(name: str, labels: str = "") -> str:
    """Return a selector of a metric of all instances."""
    return f"kvhaven_{name}{{{_ALL}{',' if labels else ''}{labels}}}"


def _sum(function: str, name: str, span: str, labels: str = "", by: str = "instance") -> str:
    """Return a function of a counter over a time, summed by labels."""
    return f"sum by ({by}) ({function}({_all(name, labels)}[{span}]))"


def _quick(part: str, labels: str = "") -> str:
    """Return the rate of lookups that did not wait for a tier."""
    names = f"lookup_seconds_{part}", f"promotion_wait_seconds_{part}"
    return "(" + " - ".join(_sum("rate", name, "5m", labels) for name in names) + ")"


_TIER = "instance, tier"
_LOST = _sum("rate", "tier_dropped_writes_total", "10m", 'reason!="off"', _TIER)
_WRITTEN = _sum("rate", "tier_seconds_count", "10m", 'op="write"', _TIER)
_COMPUTED = _sum("rate", "lookup_tokens_total", "1h", 'source="none"')
_FOUND = "kvhaven:found_tokens:ratio_1h"
_FAST = 'le="0.005"'
_ONCE, _TWICE = (_all("reuse_hit_ratio", f'memory="{size}"') for size in ("1x", "2x"))
RECORDS = {_FOUND: f"1 - {_COMPUTED} / ({_sum('rate', 'asked_tokens_total', '1h')} > 0)"}
"""Recorded expressions by their names."""

ALERTS = (
    Alert(
        "KVHavenDown",
        f"up{{{_ALL}}}",
        "== 0",
        "1m",
        "critical",
        "KVHaven at {{ $labels.instance }} does not answer",
    ),
    Alert(
        "KVHavenAbsent",
        f"up{{{_ALL}}}",
        "absent({})",
        "5m",
        "critical",
        "Prometheus scrapes no KVHaven",
    ),
    Alert(
        "KVHavenTierOff",
        _all("tier_up"),
        "== 0",
        "2m",
        "warning",
        "Tier {{ $labels.tier }} of {{ $labels.instance }} is off",
    ),
    Alert(
        "KVHavenDamagedChunks",
        _sum("increase", "verified_chunks_total", "15m", 'result="damaged"'),
        "> 0",
        "0m",
        "critical",
        "Damaged chunks in the memory of {{ $labels.instance }}",
    ),
    Alert(
        "KVHavenRejectedShards",
        _sum("increase", "tier_shards_total", "15m", 'result="rejected"', _TIER),
        "> 0",
        "0m",
        "warning",
        "Shards of tier {{ $labels.tier }} failed a check at {{ $labels.instance }}",
    ),
    Alert(
        "KVHavenQuarantine",
        _all("memory_bytes", 'state="quarantined"'),
        "> 0",
        "10m",
        "warning",
        "Memory of {{ $labels.instance }} is held by processes that are lost",
    ),
    Alert(
        "KVHavenOldLease",
        _all("oldest_lease_seconds"),
        "> 300",
        "1m",
        "warning",
        "A request holds chunks of {{ $labels.instance }} for more than 5 minutes",
    ),
    Alert(
        "KVHavenWritesDropped",
        f"{_LOST} / ({_LOST} + {_WRITTEN})",
        "> 0.01",
        "10m",
        "warning",
        "More than 1% of writes to {{ $labels.tier }} of {{ $labels.instance }} are dropped",
    ),
    Alert(
        "KVHavenSlowLookups",
        f"1 - {_quick('bucket', _FAST)} / ({_quick('count')} > 0)",
        "> 0.01",
        "10m",
        "warning",
        "More than 1% of lookups at {{ $labels.instance }} that need no tier take over 5 ms",
    ),
    Alert(
        "KVHavenMemorySmaller",
        f"{_all('memory_allocated_bytes')} / {_all('memory_planned_bytes')}",
        "< 1",
        "15m",
        "warning",
        "{{ $labels.instance }} got less memory than it is configured for",
    ),
    Alert(
        "KVHavenHitRateHalved",
        _FOUND,
        f"< 0.5 * ({_FOUND} offset 1d)",
        "30m",
        "warning",
        "{{ $labels.instance }} finds less than half of what it found a day ago",
    ),
    Alert(
        "KVHavenMoreMemoryHelps",
        f"{_TWICE} - ignoring (memory) {_ONCE}",
        "> 0.1",
        "1h",
        "info",
        "Twice the memory would bring {{ $labels.instance }} 10% more of all prompt tokens",
    ),
)


def dashboard() -> str:
    """Return the dashboard as JSON."""
    panels, y, number, before = [], 0, 0, 0
    for title, row in ROWS.items():
        number += 1
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in row:
            number += 1
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > _COLUMNS:
                x, y = 0, y + before
            panels.append(_panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": height}))
            x, before = x + panel.width, height
        y += height
    source = {"type": "prometheus", "uid": "${datasource}"}
    instances = "label_values(kvhaven_build_info, instance)"
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Instance",
            "type": "query",
            "datasource": source,
            "query": {"query": instances, "refId": "instances"},
            "definition": instances,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]
    document = {
        "uid": "kvhaven",
        "title": "KVHaven",
        "tags": ["kvhaven", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.stacked else {}
    defaults = {"unit": panel.unit, "min": 0, "custom": custom}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {} if panel.kind == "stat" else {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": query,
                "legendFormat": legend,
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }


def rules() -> str:
    """Return the rules as YAML."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.after,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.summary,
                "runbook": f"docs/runbook.md#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    records = [{"record": name, "expr": expression} for name, expression in RECORDS.items()]
    groups = [{"name": "kvhaven-records", "rules": records}, {"name": "kvhaven", "rules": alerts}]
    head = "# SPDX-License-Identifier: Apache-2.0\n# Written by scripts/observability.py.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    for path, text in ((DASHBOARD, dashboard()), (RULES, rules())):
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is outdated; run python scripts/observability.py")


if __name__ == "__main__":
    main()
