# SPDX-License-Identifier: Apache-2.0
"""`kvhaven top`: a service in the terminal, live."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `top` to the command line."""
    app.command()(top)


def top(
    socket: Annotated[
        Path | None,
        typer.Option(
            help="Socket of the service; default: service_address, or the only one running."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a snapshot a second as a line of JSON.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between frames.")
    ] = 1.0,
) -> None:
    """Show tokens by source, misses by reason, memory, tiers, engines and requests, live.

    Keys: q quits, t shows the next table, s sorts it by the next column, p pauses. Without a
    terminal, it prints a line a second.
    """
    import asyncio  # noqa: PLC0415 - keeps other commands quick

    from kvhaven.cli.address import find_socket  # noqa: PLC0415
    from kvhaven.cli.top_run import run  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415

    address = find_socket(load_settings().settings, socket)
    asyncio.run(run(address, interval_s=interval, once=once, as_json=as_json))
