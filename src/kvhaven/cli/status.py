# SPDX-License-Identifier: Apache-2.0
"""`kvhaven status`: contents, attached engines and health of a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhaven.cli.text import size_text

if TYPE_CHECKING:
    from rich.console import Console

    from kvhaven.catalog.stats import TierStats
    from kvhaven.service.status import ServiceStatus
    from kvhaven.tiers.base import CompressionStatus, TierHealth

_MOST_COMPARED = 100
"""Namespaces that are compared in pairs."""

Socket = Annotated[
    Path | None,
    typer.Option(help="Socket of the service; default: service_address, or the only one running."),
]


def register(app: typer.Typer) -> None:
    """Add `status` to the command line."""
    app.command()(status)


def status(
    socket: Socket = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show namespaces, chunks, bytes by tier, hit rates, leases and queues."""
    import msgspec  # noqa: PLC0415 - keeps other commands quick
    from rich.console import Console  # noqa: PLC0415

    from kvhaven.cli.address import find_socket  # noqa: PLC0415
    from kvhaven.client.control import connect  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.status import decode_status  # noqa: PLC0415

    with connect(find_socket(load_settings().settings, socket)) as control:
        answer = control.status()
    if as_json:
        typer.echo(msgspec.json.format(answer, indent=2).decode())
        return
    _print(Console(), decode_status(answer))


def _print(console: "Console", status: "ServiceStatus") -> None:
    from rich.table import Table  # noqa: PLC0415

    catalog = status.catalog
    console.print(
        f"[bold]kvhaven {status.version}[/], service {status.service[:8]}, pid {status.pid}: "
        f"hit rate {status.hit_rate:.1%}, {catalog.leases} leases, "
        f"{status.verified_chunks} chunks verified in memory, {status.damaged_chunks} damaged"
    )
    places = Table("place", "used", "of", "chunks", "state")
    places.add_row(
        "memory",
        size_text(status.arena_used_bytes),
        size_text(status.arena_bytes),
        str(catalog.resident_chunks),
        f"leased {size_text(catalog.leased_bytes)}, reserved {size_text(catalog.reserved_bytes)}, "
        f"promoting {size_text(catalog.promoting_bytes)}, "
        f"quarantined {size_text(catalog.quarantined_bytes)}, evictions {catalog.evictions}"
        f"{_growth(status)}",
    )
    for name, health in status.tiers.items():
        tier = next((t for n, t in catalog.tiers.items() if n == name), None)
        state = _state(health, tier)
        queued = f"{tier.queued_writes + tier.outstanding_writes} queued" if tier else ""
        places.add_row(
            name,
            size_text(health.used_bytes),
            "shared" if health.capacity_bytes is None else size_text(health.capacity_bytes),
            "" if tier is None or tier.shared else str(tier.chunks),
            f"{state}, {queued}{_lookups(tier)}, misses {health.misses}, "
            f"rejected {health.rejected}, errors {health.errors}",
        )
    console.print(places)
    namespaces = (
        Table("namespace", "model", *status.namespaces[0].chunks) if (status.namespaces) else None
    )
    if namespaces is not None:
        for namespace in status.namespaces:
            cells = [
                f"{chunks} chunks, {size_text(namespace.bytes[place])}"
                for place, chunks in namespace.chunks.items()
            ]
            namespaces.add_row(namespace.digest[:16], namespace.model, *cells)
        console.print(namespaces)
        _print_differences(console, status)
    _print_tenants(console, status)
    members = Table("engine", "process", "state")
    for member in status.members:
        state = "connected" if member.connected else "[yellow]lost[/]"
        if member.role != "scheduler" and member.ready_bytes < status.arena_allocated_bytes:
            state += f", ready for {size_text(member.ready_bytes)} of the arena so far"
        if member.quarantined_bytes:
            state += f", {size_text(member.quarantined_bytes)} in quarantine"
        members.add_row(member.session, member.role, state)
    if status.members:
        console.print(members)


def _state(health: "TierHealth", tier: "TierStats | None") -> str:
    """Return the state of a tier: health, scan, lock holder, compression."""
    state = "online" if health.online else f"[red]offline[/]: {health.last_error}"
    if health.online and not health.writable:
        state += f", [yellow]writes off[/]: {health.last_error}"
    if health.online and tier is not None and not tier.scanned:
        state += ", scanning"
    if health.holder:
        state += f", held by {health.holder}"
    return state + _compression(health.compression)


def _print_differences(console: "Console", status: "ServiceStatus") -> None:
    """Print, for each namespace, how it differs from the most similar one of its model."""
    from kvhaven.keys import difference, differing_fields  # noqa: PLC0415

    compared = [one for one in status.namespaces if one.fields][-_MOST_COMPARED:]
    pairs = set()
    for one in compared:
        alike = [
            (len(differing_fields(one.fields, other.fields)), other.digest)
            for other in compared
            if other.model == one.model and other.digest != one.digest
        ]
        if alike:
            pairs.add(tuple(sorted((one.digest, min(alike)[1]))))
    fields = {namespace.digest: namespace.fields for namespace in compared}
    for one_digest, other_digest in sorted(pairs):
        differing = difference(fields[one_digest], fields[other_digest])
        console.print(
            f"{one_digest[:16]} and {other_digest[:16]} differ in {differing}",
            markup=False,
            soft_wrap=True,
        )


def _growth(status: "ServiceStatus") -> str:
    """Return how much of the arena is allocated, if not all of it is."""
    allocated, planned = status.arena_allocated_bytes, status.arena_planned_bytes
    if allocated == planned:
        return ""
    state = "allocating" if status.arena_allocating else "[red]memory ran out[/]"
    return f", arena: {size_text(allocated)} of {size_text(planned)}, {state}"


def _print_tenants(console: "Console", status: "ServiceStatus") -> None:
    from rich.table import Table  # noqa: PLC0415

    if not status.tenants:
        return
    table = Table("tenant", *status.tenants[0].chunks)
    for tenant in status.tenants:
        cells = []
        for place, chunks in tenant.chunks.items():
            quota = tenant.quotas.get(place)
            of = "" if quota is None else f" of {size_text(quota)}"
            cells.append(f"{chunks} chunks, {size_text(tenant.bytes[place])}{of}")
        table.add_row(tenant.tenant, *cells)
    if status.catalog.more_tenants:
        table.caption = f"and {status.catalog.more_tenants} tenants with less"
    console.print(table)


def _lookups(tier: "TierStats | None") -> str:
    """Return the results of the lookups in a shared tier."""
    if tier is None or not tier.shared:
        return ""
    return f", {tier.found} of {tier.looked_up} chunks found"


def _compression(chosen: "list[CompressionStatus] | None") -> str:
    """Return the choice for each namespace, with bytes stored and bytes written."""
    if chosen is None:
        return ""
    if not chosen:
        return ", zstd: nothing written yet"
    return "".join(
        f", zstd {'on' if one.on else '[yellow]off[/]'} for {one.namespace[:16]} ({one.why}; "
        f"{size_text(one.stored_bytes)} for {size_text(one.payload_bytes)} since the start)"
        for one in chosen
    )
