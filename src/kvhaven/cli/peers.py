# SPDX-License-Identifier: Apache-2.0
"""`kvhaven peers`: state of the other nodes whose memory a running service reads."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `peers` to the command line."""
    app.command()(peers)


def peers(
    socket: Annotated[Path | None, typer.Option(help="Socket of the service.")] = None,
) -> None:
    """Show the nodes in the setting peers: their state, and the shards that were read from them.

    Also shows the chains: prompts that one node computes while another reads their chunks.

    Exits with status 1 if one of them does not answer.
    """
    import msgspec  # noqa: PLC0415 - keeps other commands quick
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from kvhaven.cli.address import find_socket  # noqa: PLC0415
    from kvhaven.client.control import connect  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.status import ServiceStatus  # noqa: PLC0415

    with connect(find_socket(load_settings().settings, socket)) as control:
        status = msgspec.json.decode(control.status(), type=ServiceStatus)
    known, chains = status.peers, status.chains
    if not known:
        typer.echo("this service has no peers: set peers to the addresses of other nodes")
        return
    table = Table("peer", "node", "state", "chunks found", "shards read", "damaged")
    for peer in known:
        state = "connected" if peer.up else peer.error
        counts = (peer.chunks_found, peer.shards_read, peer.shards_damaged)
        table.add_row(peer.address, peer.node[:8], state, *map(str, counts))
    Console().print(table)
    typer.echo(
        f"chains: {chains.open} open; offered {chains.offered}, refused {chains.refused}; "
        f"expected {chains.expected}, completed {chains.completed}, stalled {chains.stalled}"
    )
    if not all(peer.up or peer.own for peer in known):
        raise typer.Exit(1)
