# SPDX-License-Identifier: Apache-2.0
"""`kvhaven clear`: drop cached chunks."""

from pathlib import Path
from typing import Annotated

import typer

from kvhaven.cli.tenant import Tenant, tenant_of
from kvhaven.errors import KVHavenError
from kvhaven.types import NO_TENANT

_WAIT_S = 3600.0
"""Deadline; a shared tier is listed and deleted page by page."""


def register(app: typer.Typer) -> None:
    """Add `clear` to the command line."""
    app.command()(clear)


def clear(
    namespace: Annotated[
        str,
        typer.Option(help="Digest of a namespace, or its first digits, as shown by `status`."),
    ] = "",
    tier: Annotated[
        str,
        typer.Option(
            help="Clear only this tier, as named in `status`: memory, disk, or a shared tier, "
            "which is cleared for all nodes."
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Clear all namespaces, in memory and on this node's disk.")
    ] = False,
    tenant: Tenant = "",
    socket: Annotated[Path | None, typer.Option(help="Socket of the service.")] = None,
) -> None:
    """Clear a namespace, a tenant, a tier, or all. Chunks in use are dropped when released."""
    from kvhaven.cli.address import find_socket  # noqa: PLC0415
    from kvhaven.client.control import connect  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.status import decode_status  # noqa: PLC0415

    if not (namespace or tenant or tier or everything):
        raise KVHavenError("specify what to clear: --namespace, --tenant, --tier, or --all")
    who = tenant_of(tenant) if tenant else NO_TENANT
    with connect(find_socket(load_settings().settings, socket)) as control:
        known = decode_status(control.status()).namespaces
        digests = [row.digest for row in known if row.digest.startswith(namespace.lower())]
        if namespace and len(digests) != 1:
            raise KVHavenError(
                f"{len(digests)} namespaces start with {namespace!r}; known: "
                f"{', '.join(row.digest[:16] for row in known) or 'none'}"
            )
        digest = bytes.fromhex(digests[0]) if namespace else b""
        cleared = control.clear(digest, tier, wait_s=_WAIT_S, tenant=who)
    typer.echo(f"cleared {cleared.chunks} chunks, {cleared.bytes} bytes")
