# SPDX-License-Identifier: Apache-2.0
"""Metrics of the service and of the API, in Prometheus's text format."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvhaven.catalog.histograms import Buckets
from kvhaven.gateway.reuse import Curve
from kvhaven.gateway.tenants import TenantBytes
from kvhaven.gateway.views import memory_of, tiers_of
from kvhaven.service.snapshot import NamespaceRow, ServiceSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_DROPS: Final = ("overload", "evicted", "failed", "offline", "off", "room")
_MOST_LABEL: Final = 128
"""Most characters of a label's value that engines choose."""

Samples = Iterable[tuple[Mapping[str, str], float]]


class Requests:
    """Counter of the API's requests, by route and status, and of its open streams."""

    def __init__(self) -> None:
        self.streams = 0
        self._counts = Counter[tuple[str, int]]()

    def count(self, route: str, code: int) -> None:
        """Count an answer."""
        self._counts[route, code] += 1

    def samples(self) -> Samples:
        """Yield the counts with their labels."""
        for (route, code), count in sorted(self._counts.items()):
            yield {"route": route, "code": str(code)}, count


def text_of(
    snapshot: ServiceSnapshot,
    namespaces: Iterable[NamespaceRow],
    requests: Requests,
    curve: Curve,
    tenants: Sequence[TenantBytes],
    plugins: Samples = (),
) -> str:
    """Return all metrics."""
    families = [
        *_tokens(snapshot),
        *_memory(snapshot),
        *_chunks(snapshot),
        *_tiers(snapshot),
        *_reuse(curve),
        _family(
            "tenant_bytes",
            "gauge",
            "Bytes of the largest tenants by place, and of all others together.",
            [
                ({"tenant": tenant.id, "place": place}, size)
                for tenant in tenants
                for place, size in tenant.bytes.items()
            ],
        ),
        *_peers(snapshot),
        *_about(snapshot, namespaces),
        *_process(snapshot.pid),
        _family(
            "http_requests_total",
            "counter",
            "Requests to the HTTP API, by route and status.",
            requests.samples(),
        ),
        _family(
            "plugin_events_total",
            "counter",
            "Events of plugins, by hook and result.",
            plugins,
        ),
    ]
    return "".join(families)


def _tokens(snapshot: ServiceSnapshot) -> Iterator[str]:
    known = snapshot.tokens.items()
    yield _family(
        "lookups_total",
        "counter",
        "Requests that were looked up, by result.",
        [
            ({"namespace": name, "result": result}, count)
            for name, counts in known
            for result, count in counts.lookups.items()
        ],
    )
    yield _family(
        "asked_tokens_total",
        "counter",
        "Prompt tokens of requests that were looked up.",
        [({"namespace": name}, counts.asked) for name, counts in known],
    )
    yield _family(
        "lookup_tokens_total",
        "counter",
        "Prompt tokens by where their KV was; the sources sum to kvhaven_asked_tokens_total.",
        [
            ({"namespace": name, "source": source}, tokens)
            for name, counts in known
            for source, tokens in counts.by_source.items()
        ],
    )
    yield _family(
        "missed_tokens_total",
        "counter",
        "Prompt tokens of the source none, by reason; the reasons sum to it.",
        [
            ({"namespace": name, "reason": reason}, tokens)
            for name, counts in known
            for reason, tokens in counts.missed.items()
        ],
    )
    yield _family(
        "saved_tokens_total",
        "counter",
        "Tokens of full chunks that became resident.",
        [({"namespace": name}, counts.saved) for name, counts in known],
    )
    yield _family(
        "skipped_tokens_total",
        "counter",
        "Tokens that engines wanted to save and could not, by reason.",
        [({"reason": reason}, tokens) for reason, tokens in snapshot.skipped_tokens.items()],
    )
    lookups = snapshot.lookups
    yield _histogram(
        "lookup_seconds", "Time from a lookup to its final answer.", lookups.lookup_seconds
    )
    yield _histogram(
        "promotion_wait_seconds",
        "The same, of lookups that waited for a tier.",
        lookups.promotion_wait_seconds,
    )
    yield _histogram(
        "request_hit_ratio",
        "Tokens that were found, as a fraction of the prompt.",
        lookups.request_hit_ratio,
    )


def _memory(snapshot: ServiceSnapshot) -> Iterator[str]:
    memory = msgspec.structs.asdict(memory_of(snapshot))
    capacity = memory.pop("capacity")
    yield _family(
        "memory_bytes",
        "gauge",
        "Host memory for chunks, by state. The states sum to kvhaven_memory_capacity_bytes.",
        [({"state": state}, bytes_) for state, bytes_ in memory.items()],
    )
    yield _one("memory_capacity_bytes", "gauge", "Host memory that chunks can use.", capacity)
    for name, text, size in (
        ("planned", "Host memory that the settings ask for.", snapshot.arena_planned_bytes),
        ("allocated", "Host memory that is allocated of it.", snapshot.arena_allocated_bytes),
    ):
        yield _one(f"memory_{name}_bytes", "gauge", text, size)
    yield _one("leases", "gauge", "Leases that hold or await chunks.", snapshot.catalog.leases)
    oldest = snapshot.catalog.oldest_lease_s
    yield _one("oldest_lease_seconds", "gauge", "Age of the oldest lease.", oldest)
    generation = snapshot.config_generation
    yield _one("config_generation", "gauge", "Grows with each change of settings.", generation)
    yield _one("pins", "gauge", "Pins of this API.", snapshot.pins)
    yield _histogram(
        "loop_lag_seconds", "Lag of the service's event loop.", snapshot.loop_lag_seconds
    )
    yield _one("engines", "gauge", "Attached engines.", snapshot.engines)


def _chunks(snapshot: ServiceSnapshot) -> Iterator[str]:
    totals = snapshot.catalog
    own = {name: tier for name, tier in totals.tiers.items() if not tier.shared}
    chunks = {"memory": totals.resident_chunks} | {name: tier.chunks for name, tier in own.items()}
    yield _family(
        "chunks",
        "gauge",
        "Chunks in memory and in each local tier.",
        [({"place": place}, count) for place, count in chunks.items()],
    )
    evicted = {"memory": (totals.evictions, totals.quota_evictions)} | {
        name: (tier.evictions, tier.quota_evictions) for name, tier in own.items()
    }
    yield _family(
        "evicted_chunks_total",
        "counter",
        "Chunks that left a place: for space, a tenant's quota, their age (tails), or a clear.",
        [
            *(
                ({"place": place, "reason": reason}, count)
                for place, (total, quota) in evicted.items()
                for reason, count in (("space", total - quota), ("quota", quota))
            ),
            ({"place": "memory", "reason": "ttl"}, totals.expired_tails),
            ({"place": "memory", "reason": "clear"}, totals.cleared_chunks),
        ],
    )
    yield _histograms(
        "residence_seconds",
        "Time in memory of evicted chunks.",
        [
            ({"place": "memory", "reason": reason}, buckets)
            for reason, buckets in totals.residence.items()
        ],
    )
    if totals.reuse_age is not None:
        yield _histogram(
            "reuse_age_seconds",
            "Time since the last use of a leased chunk; one for each 512 chunks of a lease.",
            totals.reuse_age,
        )
    yield _family(
        "promoted_chunks_total",
        "counter",
        "Chunks read from a tier into memory, by result.",
        [
            ({"tier": name, "result": result}, count)
            for name, tier in totals.tiers.items()
            for result, count in (("ok", tier.promoted), ("failed", tier.failed_promotions))
        ],
    )
    yield _family(
        "verified_chunks_total",
        "counter",
        "Chunks whose checksums were verified again in memory, by result.",
        [
            (
                {"place": "memory", "result": "ok"},
                snapshot.verified_chunks - snapshot.damaged_chunks,
            ),
            ({"place": "memory", "result": "damaged"}, snapshot.damaged_chunks),
        ],
    )
    yield _one(
        "refused_commits_total", "counter", "Refused commits of shards.", totals.refused_commits
    )
    yield _one(
        "foreign_lookups_total",
        "counter",
        "Requests for a chunk that exists for another namespace or tenant: a client's bug.",
        totals.foreign,
    )


def _tiers(snapshot: ServiceSnapshot) -> Iterator[str]:
    tiers = tiers_of(snapshot)
    own = [tier for tier in tiers if not tier.shared]

    def gauge(name: str, text: str, values: Samples) -> str:
        return _family(f"tier_{name}", "gauge", text, values)

    yield gauge("up", "Whether the tier is online.", [({"tier": t.id}, t.online) for t in tiers])
    yield gauge(
        "writable",
        "Whether the tier accepts writes.",
        [({"tier": t.id}, t.writable) for t in tiers],
    )
    yield gauge(
        "used_bytes",
        "Bytes in a local tier, headers included.",
        [({"tier": t.id}, t.used_bytes or 0) for t in own],
    )
    yield gauge(
        "capacity_bytes",
        "Bytes that a local tier may use.",
        [({"tier": t.id}, t.capacity_bytes or 0) for t in own],
    )
    yield gauge(
        "queue_bytes",
        "Bytes of chunks that wait to be written to a tier, or are being written.",
        [({"tier": t.id, "op": "write"}, t.queued_write_bytes) for t in tiers],
    )
    yield _family(
        "tier_dropped_writes_total",
        "counter",
        "Chunks that were queued for a tier and not written, by reason.",
        [
            ({"tier": name, "reason": reason}, tier.dropped.get(reason, 0))
            for name, tier in snapshot.catalog.tiers.items()
            for reason in _DROPS
        ],
    )
    yield _family(
        "tier_shards_total",
        "counter",
        "Shards that were read or written, by result; errors of both operations are together.",
        [
            ({"tier": tier.id, "op": op, "result": result}, count)
            for tier in tiers
            for op, result, count in (
                ("read", "ok", tier.reads),
                ("read", "miss", tier.misses),
                ("read", "rejected", tier.rejected),
                ("write", "ok", tier.writes),
                ("any", "error", tier.errors),
            )
        ],
    )
    traffic = [
        ({"tier": name, "op": op}, known)
        for name, ops in snapshot.traffic.items()
        for op, known in ops.items()
    ]
    yield _family(
        "tier_bytes_total",
        "counter",
        "Bytes read from a tier into memory, and bytes written to it.",
        [(labels, known.bytes) for labels, known in traffic],
    )
    yield _histograms(
        "tier_seconds",
        "Time to read or write a chunk.",
        [(labels, known.seconds) for labels, known in traffic],
    )


def _reuse(curve: Curve) -> Iterator[str]:
    yield _family(
        "reuse_hit_ratio",
        "gauge",
        "Estimate for the last hour: prompt tokens in engines and memory, by size of the memory.",
        [
            ({"memory": f"{point.memory:g}x"}, point.hit_ratio)
            for point in curve.points
            if point.hit_ratio is not None
        ],
    )
    yield _family(
        "reuse_ceiling_ratio",
        "gauge",
        "The same, with unlimited memory that forgets chunks after a time.",
        [
            ({"window": window}, ratio)
            for window, ratio in curve.ceilings.items()
            if ratio is not None
        ],
    )
    error = curve.error_ratio
    yield _family(
        "reuse_error_ratio",
        "gauge",
        "Difference between the estimate for the present memory and what was found.",
        [({}, error)] if error is not None else [],
    )


def _peers(snapshot: ServiceSnapshot) -> Iterator[str]:
    listener = snapshot.listener
    yield _one(
        "protocol_errors_total",
        "counter",
        "Connections to the socket that were closed for a malformed or unexpected message.",
        snapshot.protocol_errors,
    )
    yield _family(
        "peer_connections",
        "gauge",
        "Connections of other nodes.",
        [({}, listener.connections)],
    )
    yield _family(
        "peer_refused_connections_total",
        "counter",
        "Connections that ended before the other side had proved to be a node of the cluster.",
        [({}, listener.refused)],
    )
    yield _family(
        "peer_protocol_errors_total",
        "counter",
        "Malformed frames and unexpected messages at the listener for other nodes.",
        [({}, listener.protocol_errors)],
    )


def _about(snapshot: ServiceSnapshot, namespaces: Iterable[NamespaceRow]) -> Iterator[str]:
    version = {"version": snapshot.version}
    yield _family("build_info", "gauge", "Version of the service; always 1.", [(version, 1)])
    yield _family(
        "namespace_info",
        "gauge",
        "Namespaces that the service knows, at most 100; always 1.",
        [
            (
                {
                    "namespace": row.id[:16],
                    "model": row.model or "",
                    "format": row.format or "",
                    "engine": row.engine or "",
                },
                1,
            )
            for row in namespaces
        ],
    )


def _process(pid: int) -> Iterator[str]:
    """Yield the usual metrics of the service's process, if it is visible from here."""
    try:
        folder = Path(f"/proc/{pid}")
        fields = (folder / "stat").read_text(encoding="ascii", errors="replace")
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        boot = float(
            next(
                line.split()[1]
                for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()
                if line.startswith("btime ")
            )
        )
    except (OSError, StopIteration):
        return
    values = fields.rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    for name, kind, text, value in (
        ("cpu_seconds_total", "counter", "CPU time.", (int(values[11]) + int(values[12])) / tick),
        ("start_time_seconds", "gauge", "Start, since 1970.", boot + int(values[19]) / tick),
        ("virtual_memory_bytes", "gauge", "Virtual memory.", int(values[20])),
        (
            "resident_memory_bytes",
            "gauge",
            "Resident memory, the touched part of the arena included.",
            int(values[21]) * os.sysconf("SC_PAGE_SIZE"),
        ),
        ("open_fds", "gauge", "Open file descriptors.", descriptors),
    ):
        yield _family(name, kind, f"{text} Process of the service.", [({}, value)], "process_")


def _histogram(name: str, text: str, buckets: Buckets) -> str:
    return _histograms(name, text, [({}, buckets)])


def _histograms(name: str, text: str, known: Iterable[tuple[Mapping[str, str], Buckets]]) -> str:
    """Return a metric of the type histogram with its samples."""
    full = f"kvhaven_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} histogram"]
    for labels, buckets in known:
        count = 0
        bounds = [*map(_number, buckets.bounds), "+Inf"]
        for bound, more in zip(bounds, buckets.counts, strict=True):
            count += more
            lines.append(f"{full}_bucket{_labels({**labels, 'le': bound})} {count}")
        lines.append(f"{full}_sum{_labels(labels)} {_number(buckets.sum)}")
        lines.append(f"{full}_count{_labels(labels)} {count}")
    return "\n".join(lines) + "\n"


def _one(name: str, kind: str, text: str, value: float) -> str:
    return _family(name, kind, text, [({}, value)])


def _family(name: str, kind: str, text: str, samples: Samples, prefix: str = "kvhaven_") -> str:
    """Return a metric with its samples."""
    full = prefix + name
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        lines.append(f"{full}{_labels(labels)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _escaped(value: str) -> str:
    short = value[:_MOST_LABEL]
    return short.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
