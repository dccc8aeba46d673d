# SPDX-License-Identifier: Apache-2.0
"""`kvhaven serve`: node service shared by several engines."""

import logging
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `serve` to the command line."""
    app.command()(serve)


def serve(
    socket: Annotated[
        Path | None,
        typer.Option(help="Unix socket to listen on; default: service.sock in runtime_dir."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="YAML file; default: KVHAVEN_CONFIG_FILE."),
    ] = None,
    api_listen: Annotated[
        str | None,
        typer.Option(
            help="Address of the HTTP API, or off; default: api_listen, else 127.0.0.1:8888."
        ),
    ] = None,
) -> None:
    """Run a node service, with an HTTP API, until SIGTERM or Ctrl-C.

    Engines attach with the setting service_address.
    """
    from kvhaven.cli.address import service_socket  # noqa: PLC0415 - keeps other commands quick
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.service.main import serve as run  # noqa: PLC0415

    options = {} if api_listen is None else {"api_listen": api_listen}
    resolved = load_settings(options, yaml_file=file)
    settings = resolved.settings
    address = service_socket(settings, socket)
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for note in resolved.notes:
        logging.getLogger(__name__).warning("%s", note)
    origins = resolved.origins | dict.fromkeys(options, "--api-listen")
    run(settings, address, origins=origins, file=resolved.file, api_by_default=True)
