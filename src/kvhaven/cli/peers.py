# SPDX-License-Identifier: Apache-2.0
"""`kvhaven peers`: other nodes whose memory a service reads: state, speed, differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvhaven.cli.text import size_text

if TYPE_CHECKING:
    from kvhaven.peers.addresses import Address
    from kvhaven.peers.certificates import Certificates
    from kvhaven.peers.wire import NamespaceFields
    from kvhaven.service.status import ServiceStatus

Socket = Annotated[Path | None, typer.Option(help="Socket of the service.")]
Host = Annotated[str, typer.Argument(help="The other node: host, host:port or [IPv6]:port.")]

_MOST_VALUE = 60
"""Characters of a field's value that are shown."""

commands = typer.Typer(
    invoke_without_command=True,
    help="Show the nodes in the setting peers; measure one; compare its namespaces.",
)


def register(app: typer.Typer) -> None:
    """Add `peers` to the command line."""
    app.add_typer(commands, name="peers")


@commands.callback()
def peers(context: typer.Context, socket: Socket = None) -> None:
    """Show the nodes in the setting peers: their state, and the shards that were read from them.

    Also shows the chains: prompts that one node computes while another reads their chunks. Exits
    with status 1 if a peer does not answer.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    status = _status(socket)
    known, chains = status.peers, status.chains
    if not known:
        typer.echo("this service has no peers: set peers to the addresses of other nodes")
        return
    heads = ("chunks there", "chunks found", "shards read", "damaged")
    table = Table("peer", "node", "state", "channel", *heads)
    for peer in known:
        state = "connected" if peer.up else peer.error
        there = str(peer.chunks_announced) if peer.followed else "?"
        counts = (peer.chunks_found, peer.shards_read, peer.shards_damaged)
        table.add_row(peer.address, peer.node[:8], state, peer.channel, there, *map(str, counts))
    Console().print(table)
    for reason in sorted({peer.channel_reason for peer in known if not peer.own} - {""}):
        typer.echo(f"TCP is used: {reason}")
    typer.echo(
        f"chains: {chains.open} open; offered {chains.offered}, refused {chains.refused}; "
        f"expected {chains.expected} (asked for {chains.pulled}), completed {chains.completed}, "
        f"stalled {chains.stalled}"
    )
    listener = status.listener
    if listener.refused or listener.protocol_errors:
        typer.echo(
            f"refused connections: {listener.refused}; protocol errors: "
            f"{listener.protocol_errors}; the last one: {listener.last_refusal}"
        )
    if listener.certificates:
        typer.echo(f"certificates: {listener.certificates}; those read before stay in use")
    if not all(peer.up or peer.own for peer in known):
        raise typer.Exit(1)


@commands.command("test")
def measure_peer(
    host: Host,
    *,
    size: Annotated[int, typer.Option(min=1, max=1024, help="MiB to receive.")] = 64,
) -> None:
    """Connect to a node as a peer does, and measure the connection; no service is needed here.

    Uses the settings of this machine (`peer_token_file`, `peer_cert`). With certificates, the
    connection that is measured is encrypted. Exits with status 1 if it fails.
    """
    from kvhaven.peers.visit import measure  # noqa: PLC0415 - keeps other commands quick

    address, token, certificates = _access(host)
    speed = measure(address, token, size << 20, certificates)
    typer.echo(
        f"peer {address}: node {speed.node[:8]}, round trip {speed.round_trip_s * 1e3:.2f} ms, "
        f"{size_text(int(speed.bytes_per_s))}/s over one connection"
    )


@commands.command()
def diff(host: Host, *, socket: Socket = None) -> None:
    """Show whether engines of this node and of another share KV, and what keeps them apart.

    Exits with status 1 if a namespace of this node is not on the other.
    """
    from kvhaven.peers.visit import namespaces  # noqa: PLC0415 - keeps other commands quick

    theirs = namespaces(*_access(host))
    ours = [one for one in _status(socket).namespaces if one.fields]
    if not (ours and theirs):
        typer.echo(f"no engine has attached {'there' if ours else 'here'} yet")
        raise typer.Exit(1)
    apart = [_compare(one.digest, one.fields, theirs) for one in ours]
    if any(apart):
        raise typer.Exit(1)


def _compare(digest: str, fields: Mapping[str, str], theirs: "Sequence[NamespaceFields]") -> bool:
    """Print how a namespace compares with the most similar one of theirs; return if it differs."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from kvhaven.keys import differing_fields  # noqa: PLC0415

    name = f"{digest[:12]} ({fields.get('model', 'no model')})"
    if any(one.digest.hex() == digest for one in theirs):
        typer.echo(f"{name}: shared")
        return False
    nearest = min(theirs, key=lambda one: len(differing_fields(fields, one.fields)))
    typer.echo(f"{name}: not there; the most similar is {nearest.digest.hex()[:12]}")
    table = Table("field", "here", "there")
    for field in differing_fields(fields, nearest.fields):
        values = (fields.get(field, "-"), nearest.fields.get(field, "-"))
        table.add_row(field, *(value[:_MOST_VALUE] for value in values))
    Console().print(table)
    return True


def _status(socket: Path | None) -> "ServiceStatus":
    from kvhaven.cli.address import find_socket  # noqa: PLC0415 - keeps other commands quick
    from kvhaven.client.control import connect  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.status import decode_status  # noqa: PLC0415

    with connect(find_socket(load_settings().settings, socket)) as control:
        return decode_status(control.status())


def _access(host: str) -> "tuple[Address, bytes, Certificates | None]":
    from kvhaven.config import load_settings  # noqa: PLC0415 - keeps other commands quick
    from kvhaven.peers.addresses import parse_address, read_token  # noqa: PLC0415
    from kvhaven.peers.certificates import read_certificates  # noqa: PLC0415

    settings = load_settings().settings
    token = read_token(settings.peer_token_file)
    return parse_address(host, "HOST"), token, read_certificates(settings)
