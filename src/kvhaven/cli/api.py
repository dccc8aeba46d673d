# SPDX-License-Identifier: Apache-2.0
"""`kvhaven api`: HTTP API of a node service."""

from pathlib import Path
from typing import Annotated

import typer

from kvhaven.errors import ConfigError
from kvhaven.niceness import BACKGROUND, lower_priority


def register(app: typer.Typer) -> None:
    """Add `api` to the command line."""
    app.command()(api)


def api(
    listen: Annotated[
        str | None,
        typer.Option(help="host:port or unix:/path; default: api_listen, else 127.0.0.1:8888."),
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            "--service-address",
            help="Socket of the service; default: service_address, or one that is running.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="YAML file; default: KVHAVEN_CONFIG_FILE."),
    ] = None,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve health, statistics, metrics and lists of a service, and of its neighbours, over HTTP.

    The service need not be running yet. Those whose sockets are in the same directory are served
    below /services/NAME. `kvhaven serve --api-listen` starts this command itself.
    """
    lower_priority(BACKGROUND)
    import logging  # noqa: PLC0415 - keeps other commands quick

    from kvhaven.cli.address import find_socket  # noqa: PLC0415
    from kvhaven.config import load_settings  # noqa: PLC0415
    from kvhaven.gateway.access import access_of  # noqa: PLC0415

    try:
        from kvhaven.gateway.main import serve  # noqa: PLC0415
        from kvhaven.gateway.plugins import plugin_settings  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"kvhaven api needs the package {error.name}; install it with: "
            "pip install 'kvhaven[api]'"
        ) from error

    options = {} if listen is None else {"api_listen": listen}
    settings = load_settings(options, yaml_file=file).settings
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    address = find_socket(settings, socket, several=True)
    serve(address, access_of(settings), plugin_settings(settings), child=child)
