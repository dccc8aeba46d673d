# SPDX-License-Identifier: Apache-2.0
"""Answers that follow from one snapshot."""

from collections import Counter
from collections.abc import Iterator, Sequence

from kvhaven.gateway.models import GB, Check, Chunks, Health, Memory, State, Stats, TierRow, Tokens
from kvhaven.gateway.observer import SILENT_S, Observer
from kvhaven.gateway.reuse import Curve
from kvhaven.service.snapshot import NamespaceRow, ServiceSnapshot

_READ_ONLY = "peer"
"""The tier that is other nodes' memory: nothing is written to it."""


def health_of(observer: Observer) -> tuple[Health, bool]:
    """Return the health, and whether the service answers."""
    seen = observer.seen
    if seen is None or observer.silent_s >= SILENT_S:
        detail = observer.error if seen is None else f"silent for {observer.silent_s:.0f} s"
        return Health("degraded", [Check("service", ok=False, detail=detail)]), False
    checks = [Check("service", ok=True), *checks_of(seen.snapshot)]
    return Health(state_of(seen.snapshot), checks), True


def state_of(snapshot: ServiceSnapshot) -> State:
    """Return the state of a service that answers."""
    if snapshot.stopping or snapshot.draining:
        return "stopping"
    return "ok" if all(check.ok for check in checks_of(snapshot)) else "degraded"


def checks_of(snapshot: ServiceSnapshot) -> Iterator[Check]:
    """Yield the conditions of health that a snapshot tells."""
    allocated, planned = snapshot.arena_allocated_bytes, snapshot.arena_planned_bytes
    complete = snapshot.arena_allocating or allocated >= planned
    detail = "" if complete else f"memory ran out: {allocated} of {planned} bytes are allocated"
    yield Check("memory", complete, detail)
    lost = snapshot.catalog.lost_members
    detail = f"{lost} processes are lost and may still access memory" if lost else ""
    yield Check("processes", not lost, detail)
    for name, tier in snapshot.tiers.items():
        writable = tier.writable or name == _READ_ONLY
        detail = "" if tier.online and writable else tier.last_error
        state = "" if tier.online and writable else "writes off" if tier.online else "offline"
        yield Check(
            f"tier {name}", tier.online and writable, ": ".join(filter(None, (state, detail)))
        )


def memory_of(snapshot: ServiceSnapshot) -> Memory:
    """Return the states of host memory."""
    totals = snapshot.catalog
    pinned = min(snapshot.pinned_bytes, totals.leased_bytes)
    quarantined = totals.quarantined_idle_bytes
    return Memory(
        capacity=totals.capacity_bytes,
        free=totals.capacity_bytes - totals.used_bytes - totals.waste_bytes,
        idle=totals.idle_bytes,
        leased=totals.leased_bytes - pinned,
        pinned=pinned,
        promoting=totals.promoting_bytes,
        reserved=totals.reserved_bytes,
        quarantined=quarantined,
        doomed=totals.retired_idle_bytes - quarantined,
        waste=totals.waste_bytes,
    )


def tokens_of(snapshot: ServiceSnapshot) -> Tokens:
    """Return the tokens of all namespaces."""
    sources, reasons = Counter[str](), Counter[str]()
    for counts in snapshot.tokens.values():
        sources.update(counts.by_source)
        reasons.update(counts.missed)
    asked = sum(counts.asked for counts in snapshot.tokens.values())
    return Tokens(asked, dict(sources), dict(reasons))


def tiers_of(snapshot: ServiceSnapshot) -> list[TierRow]:
    """Return all tiers, in ascending order of their names."""
    rows = []
    for name, stats in sorted(snapshot.catalog.tiers.items()):
        health = snapshot.tiers[name]
        rows.append(
            TierRow(
                id=name,
                shared=stats.shared,
                state=snapshot.switched.get(name, "on"),
                write_mode=stats.writes,
                online=health.online and snapshot.switched.get(name) != "off",
                writable=health.writable,
                used_bytes=None if stats.shared else stats.used_bytes,
                capacity_bytes=None if stats.shared else stats.capacity_bytes,
                chunks=None if stats.shared else stats.chunks,
                queued_writes=stats.queued_writes + stats.outstanding_writes,
                queued_write_bytes=stats.queued_write_bytes + stats.outstanding_write_bytes,
                written=stats.written,
                dropped_writes=stats.dropped_writes,
                reads=health.reads,
                writes=health.writes,
                misses=health.misses,
                errors=health.errors,
                rejected=health.rejected,
                last_error=health.last_error,
            )
        )
    return rows


def tier_state_of(row: TierRow) -> str:
    """Return the state of a tier in a word: as an operator has switched it, or what is wrong."""
    if row.state == "off":
        return "off"
    if not row.online:
        return "offline"
    if row.state == "on" and not row.writable and row.id != _READ_ONLY:
        return "writes off"
    return row.state


def stats_of(snapshot: ServiceSnapshot, cached_tokens: int | None, curve: Curve) -> Stats:
    """Return the statistics; `cached_tokens` is the result of `tokens_in_memory`."""
    totals, tiers = snapshot.catalog, tiers_of(snapshot)
    hits = totals.hit_chunks + totals.awaited_chunks
    asked = hits + totals.missed_chunks
    stored = totals.resident_bytes + sum(tier.used_bytes or 0 for tier in tiers)
    return Stats(
        cache_hits=hits,
        cache_misses=totals.missed_chunks,
        hit_rate=hits / asked if asked else None,
        total_cached_tokens=cached_tokens,
        storage_used_gb=stored / GB,
        avg_prefill_time_ms=None,
        avg_save_time_ms=None,
        avg_load_time_ms=None,
        chunks=Chunks(asked, totals.hit_chunks, totals.awaited_chunks, totals.missed_chunks),
        memory=memory_of(snapshot),
        tiers=tiers,
        tokens=tokens_of(snapshot),
        reuse=curve if curve.requests else None,
    )


def tokens_in_memory(namespaces: Sequence[NamespaceRow], tails: int) -> int | None:
    """Return the tokens of full chunks in memory; None if they cannot be known exactly.

    `tails` are incomplete chunks, which the namespaces count as chunks.
    """
    sizes = [(row.chunks["memory"], row.chunk_tokens) for row in namespaces if row.chunks["memory"]]
    known = {size for _, size in sizes}
    if None in known or (tails and len(known) > 1):
        return None
    tokens = sum(chunks * (size or 0) for chunks, size in sizes)
    return tokens - tails * max((size or 0 for size in known), default=0)
